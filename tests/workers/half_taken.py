"""What fails on some ranks while a model is taken over, or its state is collected; see ``ranks.py``, whose ``main``
runs the cases.

torchrun --nproc-per-node 2 half_taken.py RESULT CASE [CASE ...]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.runtime import shard_model, sharded_checkpoints
from fsdp_compiled.runtime.checkpoint import whole
from tests.toys import squares
from tests.workers.ranks import RANK, main

X = torch.arange(12.0).reshape(3, 4) / 7 + RANK


class Blocks(nn.Module):
    """On the meta device; a table without parameters, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
            self.register_buffer("table", torch.empty(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.table


def fill(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view_as(tensor))


def build(init: Callable[[nn.Module], None] = fill) -> Sharded:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return compile_sharded(model, optimizer, loss=squares, policy=Policy(lower="eager"), init=init)


def caught(call: Callable[[], Any]) -> dict[str, Any]:
    since = time.monotonic()
    try:
        call()
        found = {"error": "", "message": "", "notes": ""}
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        found = {"error": type(error).__name__, "message": str(error), "notes": notes}
    return {**found, "seconds": time.monotonic() - since}


def weights(sharded: Sharded) -> list[list[float]]:
    return [value.tolist() for value in sharded.full_state_dict().values()]


def failing_init(ranks: tuple[int, ...], at: int) -> dict[str, Any]:
    """``init`` raises at its call number ``at`` on these ranks; then the model is built again."""
    calls = 0

    def init(module: nn.Module) -> None:
        nonlocal calls
        calls += 1
        if calls == at and RANK in ranks:
            raise LookupError(f"no weights for rank {RANK}")
        fill(module)

    found = caught(lambda: build(init))
    sharded = build()
    sharded.step(X)
    return {**found, "weights": weights(sharded)}


def no_memory(name: str, at: int) -> dict[str, Any]:
    """Something that rank 1 does between two broadcasts finds no memory."""
    calls, real = 0, getattr(shard_model, name)

    def fails(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise torch.OutOfMemoryError("tried to allocate more than there is")
        return real(*given)

    patched: AbstractContextManager[Any] = mock.patch.object(shard_model, name, fails) if RANK else nullcontext()
    with patched:
        found = caught(build)
    sharded = build()
    sharded.step(X)
    return {**found, "weights": weights(sharded)}


def brought() -> dict[str, Any]:
    """An optimizer that has stepped on rank 1 alone brings state along that the other has not."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if RANK:
        squares(model, X).backward()
        optimizer.step()
    found = caught(lambda: compile_sharded(model, optimizer, loss=squares, policy=Policy(lower="eager")))
    return {**found, "untouched": all(type(parameter) is nn.Parameter for parameter in model.parameters())}


def collected(where: str) -> dict[str, Any]:
    """A hook of rank 0's model raises, or rank 0 finds no memory after a gather, or rank 1 before one."""
    sharded = build()
    sharded.step(X)
    before = weights(sharded)
    if where == "hook":

        def refuse(*_: Any) -> None:
            raise LookupError("the hook's own reason")

        handle = sharded.model.register_state_dict_post_hook(refuse)
        found = caught(sharded.full_state_dict)
        handle.remove()
    else:
        wrong = mock.Mock(side_effect=torch.OutOfMemoryError("tried to allocate more than there is"))
        owner, name, rank = {
            "copy": (whole, "whole_value", 0),
            "first": (sharded_checkpoints, "wait_for_host_memory", 1),
        }[where]
        patched: AbstractContextManager[Any] = mock.patch.object(owner, name, wrong)
        with patched if rank == RANK else nullcontext():
            found = caught(sharded.full_state_dict)
    same = before == weights(sharded)
    return {**found, "same": same, "finite": bool(sharded.step(X).isfinite())}


CASES = {
    "control": partial(failing_init, (), 1),
    "init_1": partial(failing_init, (1,), 2),
    "init_0": partial(failing_init, (0,), 1),
    "init_both": partial(failing_init, (0, 1), 2),
    "init_of_buffers": partial(failing_init, (1,), 3),
    "shards": partial(no_memory, "_own_slice", 1),
    "taken": partial(no_memory, "ManagedModel", 1),
    "brought": brought,
    **{f"collected_{where}": partial(collected, where) for where in ("hook", "copy", "first")},
}

if __name__ == "__main__":
    main(CASES)
