"""For a model that is sharded along the tp axis, traces what each rank computes on its own shards.

    given to the trace                            inside the traced function

    weight: float32[4, 16], this rank's part      weight = DTensor.from_local(part, tp, [Shard(0)])
    loss(model, tokens)                           the user's code, on DTensors where the plan has them
    all_reduce(y, "sum", "group 7")               all_reduce(y, "sum", "tp")

Shards are passed in as plain tensors, so their gradients are plain too. For a weight that all ranks hold whole,
``from_local``'s backward sums the ranks' gradients; if AOTAutograd gets DTensors, it silently leaves such gradients
partial. The names of process groups differ from rank to rank, so the axis replaces them. A returned DTensor becomes the
full tensor. In the user's own training loop it stays a DTensor, and its shard is the program's result (`Layout`).

`loss_parallel` is cross-entropy on logits whose classes are sharded along the tp axis: no tensor of the size of the
vocabulary is gathered.

    logits: float32[8, 16], a part of [8, 32]      max = all_reduce(max of the part, "max")
                                                   sum = all_reduce(sum of exp(part - max), "sum")
    loss = cross_entropy(logits, targets)          chosen = all_reduce(the part's logit at the target, or 0, "sum")

PyTorch's `loss_parallel` does this only while its block is open, also for backward; a loss that is traced whole cannot
keep it open. So its handlers are active for the whole trace, wherever the class dim is sharded. The user's own
``with loss_parallel():`` is as it is in eager PyTorch. PyTorch's backward assumes that only ``nll_loss`` reads a
log-softmax, and is silently wrong if anything else does. Here both derivatives are exact, for one more all-reduce of
one number a row.

The table of handlers, and PyTorch's own handlers for these operators, are private. Without them DTensor gathers the
logits for the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.side_effects import WRAPPED
from fsdp_compiled.plan.leaf import TensorParallel, contiguous_stride
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.torch_private.dtensor import handlers, losses
from fsdp_compiled.torch_private.names import uses


@dataclass(frozen=True)
class Parts:
    """Which tensors of the trace are shards of DTensors, tied ones under all their names, and the placement of each."""

    mesh: DeviceMesh | None = None
    placements: tuple[tuple[tuple[str, ...], TensorParallel], ...] = ()

    @property
    def hint(self) -> str:
        """A likely cause of an error in the model's code, for its message."""
        if self.mesh is None or self.mesh.size() == 1:
            return ""
        ranks = self.mesh.size()
        return (
            f"\n  Under tensor parallelism each of {ranks} ranks runs this on its part: a size that the code takes for "
            f"the whole, such as a number of heads, is 1 / {ranks} of it here. Let {ranks} divide the number of heads, "
            f"and write -1 for it in view and reshape. From a layer whose size {ranks} does not divide, let a DTensor "
            "go on, ColwiseParallel(use_local_output=False): of a plain part nobody knows the whole size. Under "
            f"sequence parallelism {ranks} must divide the length of sequences."
        )

    def joined(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors, with a DTensor in the place of each shard. Dynamo traces this function."""
        found = dict(named)
        if self.mesh is not None:
            for names, tp in self.placements:
                here = [name for name in names if name in named]
                if here:
                    whole = joined(named[here[0]], tp, self.mesh)
                    for name in here:
                        found[name] = whole
        return found


def joined(part: torch.Tensor, tp: TensorParallel, mesh: DeviceMesh) -> DTensor:
    """The DTensor that has this shard on this rank. Its gradient goes to the shard, summed where it is partial."""
    placement = Replicate() if tp.dim is None else Shard(tp.dim)
    if not tp.uneven:
        return DTensor.from_local(part, mesh, (placement,), run_check=False)
    assert tp.dim is not None
    own = part.narrow(tp.dim, 0, tp.own(mesh.get_local_rank()))  # without the zeros behind it
    return DTensor.from_local(
        own, mesh, (placement,), run_check=False, shape=torch.Size(tp.shape), stride=contiguous_stride(tp.shape)
    )


def whole(value: torch.Tensor) -> torch.Tensor:
    """The full plain tensor of a DTensor; other tensors as they are. Dynamo traces this function."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class Layout(NamedTuple):
    """The layout of a result along the tp axis: ``dim`` is sharded (None: each rank has the whole); and its full shape.

    With it the call returns the result as a DTensor, as the model did.
    """

    mesh: DeviceMesh
    dim: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def filled(self, part: torch.Tensor) -> DTensor:
        """The DTensor that has this shard on this rank. Its gradient goes to the shard."""
        placement = Replicate() if self.dim is None else Shard(self.dim)
        return DTensor.from_local(
            part, self.mesh, (placement,), run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )


def layout_of(value: Any) -> Any:
    """The contents of a DTensor's `Layout` as plain numbers, which a traced function can return; None for others."""
    if not isinstance(value, DTensor):
        return None
    (placement,) = value.placements
    dim = -2 if placement.is_partial() else -1 if placement.is_replicate() else placement.dim
    return dim, tuple(value.shape), tuple(value.stride())


def layouts(found: Sequence[Any], mesh: DeviceMesh | None) -> list[Layout | None]:
    """A `Layout` for each result, None for plain tensors. Raises `CaptureError` for a result that is Partial."""
    made: list[Layout | None] = []
    for one in found:
        if one is not None and one[0] == -2:
            raise CaptureError(
                "The model returns a DTensor that is Partial: each rank along the tp axis has a summand of it. Give "
                "the module that makes it output_layouts=Replicate() or Shard(dim) in the plan."
            )
        made.append(None if one is None or mesh is None else Layout(mesh, None if one[0] == -1 else one[0], *one[1:]))
    return made


def own_part(value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, with its derivative; other tensors as they are. Dynamo traces this function."""
    return value.to_local() if isinstance(value, DTensor) else value


def parts_of(plan: Plan, mesh: DeviceMesh | None) -> Parts:
    """The parts of the plan's parameters, by their names in the objective, without the wrappers that `unwrapped` takes
    off."""
    leaves = [slot.leaf for buffer in plan.buffers for slot in buffer.slots]
    named = ((tuple(f"model.{WRAPPED.sub('', name)}" for name in leaf.names), leaf.tp) for leaf in leaves)
    return Parts(mesh, tuple((names, tp) for names, tp in named if tp is not None))


def is_mesh(value: Any) -> bool:
    """Whether it is a ``DeviceMesh``, or what stands for one in a trace of torch 2.13."""
    return isinstance(value, DeviceMesh) or type(value).__name__ == "FakeScriptObject"


aten = torch.ops.aten
Handler = Callable[[Any, Any, Any], Any]


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, cross-entropy and log-softmax work on parts where their class dim is cut."""
    if not uses("loss on parts of the logits"):
        yield
        return
    table: dict[Any, Handler] = handlers()
    cut = {operator: _where_cut(operator, handler, table) for operator, handler in _handlers().items()}
    off = mock.patch.multiple(losses, _enable_custom_loss_ops=lambda: None, _disable_custom_loss_ops=lambda: None)
    with off, mock.patch.dict(table, cut):
        yield


def _handlers() -> dict[Any, Handler]:
    found = dict(losses.customized_loss_ops)
    found[aten._log_softmax_backward_data.default] = _log_softmax_backward
    for operator in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default):
        found[operator] = _nll_loss_backward
    return found


def _where_cut(operator: Any, handler: Handler, table: dict[Any, Handler]) -> Handler:
    """A handler that calls the given one if the class dim is sharded, and otherwise lets DTensor do what it does
    without it."""

    def run(call: Any, args: Any, kwargs: Any) -> Any:
        value, dim = _class_dim(operator, args)
        if isinstance(value, DTensor) and any(placement.is_shard(dim) for placement in value.placements):
            return handler(call, args, kwargs)
        own = table.pop(operator)
        try:
            return call(*args, **kwargs)
        finally:
            table[operator] = own

    return run


def _class_dim(operator: Any, args: Any) -> tuple[Any, int]:
    """The tensor over classes that the operator reads, and the dim of classes."""
    if operator is aten._log_softmax.default:
        return args[0], args[1] % max(args[0].dim(), 1)
    if operator is aten._log_softmax_backward_data.default:
        return args[1], args[2] % max(args[1].dim(), 1)
    value = args[1] if "backward" in str(operator) else args[0]
    return value, 1 if value.dim() > 1 else 0


def _log_softmax_backward(_call: Any, args: Any, _kwargs: Any) -> Any:
    """``d_x = d_y - exp(y) * sum(d_y)``, the sum over all classes."""
    gradient, output, dim, dtype = args
    total = gradient.sum(dim, keepdim=True).redistribute(placements=[Replicate()])  # else parts are gathered
    return (gradient - torch.exp(output) * total).to(dtype)


def _nll_loss_backward(call: Any, args: Any, kwargs: Any) -> Any:
    """PyTorch's handler gives ``(one_hot * -1 + exp(y)) * d_loss``; with ``y`` = -inf, it is nll_loss's derivative."""
    gradient, output, *rest = args
    return losses._nll_loss_backward_handler(call, (gradient, torch.full_like(output, -torch.inf), *rest), kwargs)
