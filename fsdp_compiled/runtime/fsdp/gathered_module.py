"""Many calls of a model of `fully_shard` with a single gather before them: ``with model.gathered(): ...``.

Inside, modules hold whole, plain parameters and run their own code, without gradients, programs and communication, so
ranks may make different calls. A write to a whole parameter would be lost: it is an error at the end. A call after a
write to a sharded parameter would read the old weights: it is an error too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from fsdp_compiled.runtime.fsdp.module_call import shared_calls
from fsdp_compiled.runtime.fsdp.module_state import ModuleState, lay_out, states_in
from fsdp_compiled.runtime.fsdp.parameter_group import ParameterGroup


@contextmanager
def gathered(module: nn.Module) -> Iterator[nn.Module]:
    """The context for calls of this module and of those inside it. Collective at its beginning."""
    name = type(module).__name__
    states = states_in(module)
    groups = list(dict.fromkeys(state.group for state in states))
    calls = shared_calls(groups[0].mesh)
    with calls.refusing():
        if any(state.gathered is not None for state in states):
            raise RuntimeError(f"gathered() was called on this {name}, or a part of it, inside of gathered().")
        before = [group.version for group in groups]
        for group in groups:
            group.reshard()
            group.follow()
            if any(flat.tensor.is_meta for flat in group.flats):
                raise ValueError(f"Parameters of this {name} are on the meta device: call to_empty before gathered().")
        if [group.version for group in groups] != before:
            lay_out(module)
    failed = True
    try:
        with calls.meeting(f"gathered {name}"):
            for group in groups:
                group.unshard()
        now = [flat.written for group in groups for flat in group.flats]
        for state in states:
            state.gathered = lambda: _check(name, groups, now)
        with torch.no_grad():
            yield module
        failed = False
    finally:
        with suppress(RuntimeError) if failed else calls.refusing():
            _release(states, groups)


def _check(name: str, groups: list[ParameterGroup], before: list[tuple[int, ...]]) -> None:
    """Raises ``RuntimeError`` for a call with gradients, or after parameters were resharded, moved or written."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} was called with gradients inside of gathered(), where nothing is trained. Train outside of it."
        )
    if any(not group.unsharded for group in groups if group.flats):
        raise RuntimeError(f"Parameters of {name} were resharded or moved inside of gathered(). Do so outside of it.")
    if [flat.written for group in groups for flat in group.flats] != before:
        raise RuntimeError(
            f"Parameters of {name} were written since they were gathered, as optimizer.step() does: this call would "
            "compute with the old ones. End the block before, and begin another after it."
        )


def _release(states: list[ModuleState], groups: list[ParameterGroup]) -> None:
    for state in states:
        state.gathered = None
    errors: list[RuntimeError] = []
    for group in groups:
        try:
            group.reshard()
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
