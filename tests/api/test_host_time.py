"""What the host does in a step beside the program: the same for any number of layers, but for what C compares.

Times are measured by `bench/host_time.py`; what a test can hold on to is how many calls there are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from bench.host_time import batch, unlaunched
from fsdp_compiled import Policy, compile_sharded
from tests.parts import parts
from tests.standin import Seen
from tests.toys import build, mse, sgd

CALLS = 130  # of Python functions, five of them only beside models of `fully_shard`; those of C are as many again


def calls(run: Callable[[], Any]) -> int:
    """How many Python functions are called, at least: the interpreter has some of its own to call now and then."""
    count, counts = 0, []

    def called(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(5):
        count = 0
        sys.setprofile(called)
        try:
            run()
        finally:
            sys.setprofile(None)
        counts.append(count)
    return min(counts)


def test_a_step_calls_no_more_functions_for_more_layers() -> None:
    found = []
    for layers in (2, 6):
        sharded, data = unlaunched(layers), batch()
        found.append(calls(lambda sharded=sharded, data=data: sharded.step(*data)))
    assert found[1] <= found[0] < CALLS


def test_a_walk_over_the_modules_would_be_noticed() -> None:
    """The control."""
    sharded, data = unlaunched(2), batch()
    before = calls(lambda: sharded.step(*data))
    assert calls(lambda: [*sharded.model.modules(), sharded.step(*data)]) > before + 10


def test_in_a_world_of_one_a_new_rate_writes_nothing_for_ranks_to_compare() -> None:
    model = build()
    optimizer = sgd(model)
    with parts() as of:
        sharded = compile_sharded(model, optimizer, loss=mse, policy=Policy(lower="eager"))
    x, y = torch.randn(4, 6), torch.randn(4, 2)
    sharded.step(x, y)
    (compiled,) = of(sharded).programs.cached
    runner, results = compiled.runner, []

    def run(*given: Any) -> Any:
        results[:] = runner(*given)
        return results

    compiled.runner = run
    sharded.step(x, y)
    compiled.runner = lambda *_: results
    fills = []
    for compared in (False, True):  # the second is the control
        compiled.compared, seen = compared, Seen()
        optimizer.param_groups[0]["lr"] /= 2
        with seen:
            sharded.step(x, y)
        fills.append(sum("fill_" in name for name in seen.names))
    assert fills[0] == 0 < fills[1]
