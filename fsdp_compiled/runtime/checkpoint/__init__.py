"""A whole training run on disk. Any number of ranks can continue from it.

    folder/step-1200/manifest.json                         what everything is, and where its bytes are
                     shard-00000-of-00004.safetensors      what rank 0 wrote
                     ...
    folder/.step-1300.5c1d09aa/                            being written, or left by a run that was killed: never read
    folder/.lock                                           held by the process that saves here

Terms: a *tensor* of a checkpoint has the model's own name. Many ranks write it, in *chunks*: rectangles of the tensor,
as in `torch.distributed.checkpoint`. A *value* is small and written whole (`values`). It is written once if it is the
same on all ranks.
"""
