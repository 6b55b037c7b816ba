"""Cross-entropy on logits whose classes are cut along the tp axis: nothing of the size of the vocabulary is gathered.

    logits: float32[8, 16], a part of [8, 32]      max = all_reduce(max of the part, "max")
                                                   sum = all_reduce(sum of exp(part - max), "sum")
    loss = cross_entropy(logits, targets)          chosen = all_reduce(the part's logit at the target, or 0, "sum")

PyTorch's `loss_parallel` does this while its block is open, backward included, which a loss that is traced whole cannot
keep open. So its handlers are there for the whole trace, and act where the class dim is cut; the user's own
``with loss_parallel():`` is as it is in eager PyTorch. Its backward takes for granted that a log-softmax goes into
``nll_loss`` and nowhere else, and is wrong in silence where it does not. Here both derivatives are the true ones, for
one all-reduce of a number a row more.

The table of handlers, and PyTorch's own for these operators, are private. Without them logits are gathered for the
loss, as DTensor does by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp_compiled.torch_private.dtensor import handlers, losses
from fsdp_compiled.torch_private.names import uses

aten = torch.ops.aten
Handler = Callable[[Any, Any, Any], Any]


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, cross-entropy and log-softmax work on parts where their class dim is cut."""
    if not uses("loss on parts of the logits"):
        yield
        return
    table: dict[Any, Handler] = handlers()
    before = dict(table)
    switches = losses._enable_custom_loss_ops, losses._disable_custom_loss_ops
    losses._enable_custom_loss_ops = losses._disable_custom_loss_ops = _nothing
    table.update({operator: _where_cut(operator, handler, table) for operator, handler in _handlers().items()})
    try:
        yield
    finally:
        losses._enable_custom_loss_ops, losses._disable_custom_loss_ops = switches
        table.clear()
        table.update(before)


def _nothing() -> None:
    pass


def _handlers() -> dict[Any, Handler]:
    found = dict(losses.customized_loss_ops)
    found[aten._log_softmax_backward_data.default] = _log_softmax_backward
    for operator in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default):
        found[operator] = _nll_loss_backward
    return found


def _where_cut(operator: Any, handler: Handler, table: dict[Any, Handler]) -> Handler:
    """The handler where the class dim is cut, and what DTensor does without it elsewhere."""

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
    total = gradient.sum(dim, keepdim=True).redistribute(placements=[Replicate()])  # not the parts gathered instead
    return (gradient - torch.exp(output) * total).to(dtype)


def _nll_loss_backward(call: Any, args: Any, kwargs: Any) -> Any:
    """PyTorch's own is ``(one_hot * -1 + exp(y)) * d_loss``; with minus infinity for ``y``, it is that of nll_loss."""
    gradient, output, *rest = args
    return losses._nll_loss_backward_handler(call, (gradient, torch.full_like(output, -torch.inf), *rest), kwargs)
