"""A whole training run on disk, for any number of ranks to go on from.

    folder/step-1200/manifest.json                         what everything is, and where its bytes are
                     shard-00000-of-00004.safetensors      what rank 0 wrote
                     ...
    folder/.step-1300.5c1d09aa/                            being written, or left by a run that was killed: never read
    folder/.lock                                           held by the process that saves here

Terms: a *tensor* of a checkpoint goes by the model's own names and is written by many ranks, in *chunks*, which are
rectangles of it, as `torch.distributed.checkpoint` has them; a *value* is small and written whole (`values`), once
where it is the same on all ranks.
"""
