"""What DTensors are made of without communication, in torch 2.11 to 2.14, as FSDP2 and torchrec make them; the
operators that DTensor has handlers for, as ``torch.distributed.tensor.parallel.loss_parallel`` gives it some; and
whether it is PyTorch's dispatcher that asks whether something is a DTensor."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_compiled.torch_private.names import find, has, there

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
else:
    DTensorSpec = find("torch.distributed.tensor._dtensor_spec.DTensorSpec")
    TensorMeta = find("torch.distributed.tensor._dtensor_spec.TensorMeta")
    LocalShardsWrapper = find("torch.distributed.tensor._shards_wrapper.LocalShardsWrapper")
    StridedShard = find("torch.distributed.tensor.placement_types._StridedShard")


DISPATCHER = "torch.distributed.tensor.DTensor._op_dispatcher"
_dispatcher: Any = find(DISPATCHER)
losses: Any = find("torch.distributed.tensor.parallel.loss")


def handlers() -> dict[Any, Any]:
    """DTensor's table: by operator, what is called with operator, arguments and keywords in the place of its rules.

    In a version that has none, an empty one that nobody reads.
    """
    return getattr(_dispatcher, "_custom_op_handlers", {}) if has(DISPATCHER) else {}


if there("operators on parameters in shards"):
    _is_excluded: Any = find("torch._C._dispatch_tls_is_dispatch_key_excluded")
    _snapshot: Any = find("torch._C.DispatchKey").PythonTLSSnapshot

    def is_dispatching() -> bool:
        """Whether PyTorch hands an operator to a class of tensors now, this thread.

        Meanwhile it leaves out all dispatch keys before the one that does so. The key that is asked for here has no
        other use.
        """
        return _is_excluded(_snapshot)  # type: ignore[no-any-return]
else:

    def is_dispatching() -> bool:
        return False


def over_slices(locals_of: Iterable[tuple[torch.Tensor, DTensorSpec]]) -> Iterator[DTensor]:
    """DTensors over slices of other tensors.

    A DTensor takes the offset of what it is made of for its own, beside memory that it has none of: then
    ``copy.deepcopy`` takes it for a tensor with memory, and fails. So it is made of what has no offset. By ``__new__``:
    ``__init__`` does nothing, at the price of two guards of Dynamo's.
    """
    blank: torch.Tensor | None = None
    for local, spec in locals_of:
        if blank is None or blank.dtype != local.dtype:
            blank = local.new_empty(0)
        made = DTensor.__new__(DTensor, blank, spec, requires_grad=False)
        made._local_tensor = local
        yield made


__all__ = [
    "DTensorSpec", "LocalShardsWrapper", "StridedShard", "TensorMeta", "handlers", "is_dispatching", "losses",
    "over_slices",
]  # fmt: skip
