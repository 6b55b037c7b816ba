"""What DTensors are made of without communication, in torch 2.11 to 2.13, as FSDP2 and torchrec make them; and the
operators that DTensor has handlers for, as ``torch.distributed.tensor.parallel.loss_parallel`` gives it some."""

from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard


def handlers() -> dict[Any, Any]:
    """DTensor's table: by operator, what is called with operator, arguments and keywords in the place of its rules.

    In a version that has none, an empty one that nobody reads.
    """
    return getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", {})


__all__ = ["DTensorSpec", "LocalShardsWrapper", "StridedShard", "TensorMeta", "handlers"]
