"""What DTensors are made of without communication, in torch 2.11 to 2.13, as FSDP2 and torchrec make them."""

from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["DTensorSpec", "LocalShardsWrapper", "StridedShard", "TensorMeta"]
