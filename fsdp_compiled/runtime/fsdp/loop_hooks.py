"""Hooks of all optimizers, for as long as there are models of `fully_shard`, or backwards through them to come.

One counts an update as a write; others have fused updates run on local tensors (`local_updates`). They go with the last
model: they would cost each step of every optimizer a call, and of `compile_sharded` five.

What is noted of parameters shares one mark, whose end is noticed, and the next who passes by outside of a step removes
the hooks: garbage collection may come while an optimizer walks through them.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_compiled.runtime.fsdp.local_updates import run_on_local_tensors

OURS = "_fsdp_compiled_sharded"  # on parameters that stand here


class Mark:
    """Alive where hooks are needed."""


_living: list[weakref.ref[Mark]] = []
_handles: list[Any] = []
idle: list[bool] = []  # not empty: there are hooks that nobody needs


def mark() -> Mark:
    """To be held as long as the hooks are needed, which are there from now on."""
    known = _living[0]() if _living else None
    if known is None:
        known = Mark()
        _living[:] = [weakref.ref(known, lambda _: idle.append(True))]
        if not _handles:
            _handles.append(register_optimizer_step_post_hook(_count_updates))
            _handles.extend(run_on_local_tensors(lambda one: OURS in one.__dict__))
    return known


def remove_idle() -> None:
    """Outside of a step of an optimizer: takes the hooks off, unless there are models again."""
    idle.clear()
    if _living and _living[0]() is None:
        for handle in _handles:
            handle.remove()
        _handles.clear()
        _living.clear()


def _count_updates(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Counts an update as a write: foreach and fused updates of DTensors leave autograd's versions as they are.

    So a backward that would read weights which were updated since its forward is told, as for plain tensors.
    """
    increment_version(
        [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if OURS in parameter.__dict__ and parameter.grad is not None
        ]
    )
