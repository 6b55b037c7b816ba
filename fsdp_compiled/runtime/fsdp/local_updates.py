"""A fused optimizer updates sharded parameters by one call of its kernel, on the local tensors.

    torch._fused_adamw_([146 DTensors], gradients, states)    DTensor unwraps, compares and wraps 730 arguments, each
    torch._fused_adamw_([146 local tensors], ...)             by itself, and comes to this

A fused update is element-wise: each element depends only on the elements at the same place of the other lists. So where
DTensors at the same place of the lists are sharded alike, the update needs only their local parts: the same kernel runs
on the same tensors as under DTensor's own dispatch, bit for bit. The optimizer's code runs as it is: this file does not
touch its state, groups, hooks, schedules and checkpoints.

During a step of an optimizer that holds parameters of `fully_shard`, DTensor has a handler of ours for these operators.
Arguments that do not fit (different placements at the same place, partial sums, tensors that are no DTensors) still
take DTensor's way. Lists stay lists: over one flat tensor, a kernel's vector loops would end in other places, which
changes the last bits of an update. DTensor runs foreach operators as fast by itself.

Hooks on all optimizers do this, and also count an update as a write, from the first model of `fully_shard` on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_compiled.torch_private.dtensor import handlers

FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
MOST_KNOWN = 16  # how many argument lists known to be sharded alike are remembered, for each optimizer

log = logging.getLogger("fsdp_compiled")
specs_of, local_of = attrgetter("_spec"), attrgetter("_local_tensor")
_updates: weakref.WeakKeyDictionary[Optimizer, LocalUpdates] = weakref.WeakKeyDictionary()


def _begin(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if any(OURS in parameter.__dict__ for group in optimizer.param_groups for parameter in group["params"]):
        if (updates := _updates.get(optimizer)) is None:
            updates = _updates[optimizer] = LocalUpdates(type(optimizer).__name__)
        handlers().update(dict.fromkeys(_operators(), updates))


def _end(*_: Any) -> None:
    """Removes the handlers after a step. A step that raised leaves them until the next; they are right for every
    optimizer."""
    if torch.compiler.is_compiling():
        return
    known = handlers()
    for operator in _operators():
        if isinstance(known.get(operator), LocalUpdates):
            del known[operator]


@cache
def _operators() -> tuple[Any, ...]:
    packets = [getattr(torch.ops.aten, name) for name in FUSED]
    return tuple(getattr(packet, name) for packet in packets for name in packet.overloads() if not name.endswith("out"))


class LocalUpdates:
    """The handler for one optimizer, with the calls that it knows."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: list[list[list[Any]]] = []  # for each known call, the DTensor specs of its lists

    def __call__(self, operator: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What the operator gives for these arguments, some of which hold DTensors."""
        given = [*args, *named.values()]
        lists = [one for one in given if isinstance(one, list | tuple) and one and isinstance(one[0], Tensor)]
        single = [one for one in given if isinstance(one, Tensor)]
        if any(isinstance(one, DTensor) or one.numel() != 1 for one in single) or not self._alike(lists):
            return _usual(operator, args, named)
        return operator(*map(_local, args), **{name: _local(one) for name, one in named.items()})

    def _alike(self, lists: Sequence[Sequence[Tensor]]) -> bool:
        """Whether each list holds plain numbers alone, or DTensors alone that are sharded like those at the same place
        of the other lists."""
        specs = []
        for one in lists:
            kinds = set(map(type, one))
            if kinds == {DTensor}:
                specs.append(list(map(specs_of, one)))
            elif DTensor in kinds or any(isinstance(tensor, DTensor) or tensor.dim() for tensor in one):
                return False
        for known in self._known:
            if len(known) == len(specs) and all(map(_same, known, specs)):
                return True
        if len(set(map(len, lists))) != 1 or not all(map(_cut_alike, zip(*specs, strict=True))):
            return False
        if not self._known:
            log.info("%s: sharded parameters are updated by one call of its kernel, on local tensors.", self._name)
        if len(self._known) == MOST_KNOWN:
            self._known.clear()
        self._known.append(specs)
        return True


def _same(known: list[Any], now: list[Any]) -> bool:
    return len(known) == len(now) and all(map(is_, known, now))


def _cut_alike(specs: Sequence[Any]) -> bool:
    """Whether these specs have the same mesh, placements and shape, with no partial sum."""
    if any(isinstance(one, Partial) for one in specs[0].placements):
        return False
    cuts = [(spec.mesh, spec.placements, spec.shape, getattr(spec, "shard_order", None)) for spec in specs]
    return all(cut == cuts[0] for cut in cuts[1:])


def _local(value: Any) -> Any:
    if isinstance(value, list | tuple) and value and isinstance(value[0], DTensor):
        return list(map(local_of, value))
    return value


def _usual(operator: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Runs the operator through DTensor's own dispatch."""
    known = handlers()
    own = known.pop(operator, None)
    try:
        return operator(*args, **named)
    finally:
        if own is not None:
            known[operator] = own


OURS = "_fsdp_compiled_sharded"  # the attribute that marks parameters of `fully_shard`


@cache
def register_hooks() -> None:
    """Registers hooks on all optimizers' steps, for the rest of the process. They do nothing for one that holds no
    parameter of `fully_shard`."""
    register_optimizer_step_post_hook(_count_updates)
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)


def _count_updates(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Counts an update as a write: foreach and fused updates of DTensors leave autograd's versions as they are.

    So a backward raises an error if it would read weights that were updated since its forward, as for plain tensors.
    """
    if torch.compiler.is_compiling():
        return
    increment_version(
        [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if OURS in parameter.__dict__ and parameter.grad is not None
        ]
    )
