"""The code of a lowered program with a clock around each call, which runs while a step is profiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from fsdp_compiled.lower.lowering import Runner
from fsdp_compiled.lower.program_code import Code, function_for

Mark = tuple[fx.Node, float, float]  # what was called, when, and until when, in seconds


class Timed:
    """``runner``: the same program; ``marks`` reads what its last run took. On a GPU events tell, on its own stream,
    so that a wait is as long as that stream stands still."""

    def __init__(self, code: Code, device: torch.device) -> None:
        self._now: Callable[[], Any] = _event if device.type == "cuda" else time.perf_counter
        self._noted: list[tuple[fx.Node, Any, Any]] = []
        self._runner: Runner = Code(code.graph, cache(lambda node: self._clocked(code, node))).run

    def runner(self, *given: Any) -> Sequence[torch.Tensor]:
        self._noted.clear()
        return self._runner(*given)

    @property
    def code(self) -> Runner:
        return self._runner

    def marks(self) -> list[Mark]:
        if not self._noted or isinstance(first := self._noted[0][1], float):
            return list(self._noted)
        torch.cuda.synchronize()
        return [(node, *(first.elapsed_time(one) / 1e3 for one in both)) for node, *both in self._noted]  # type: ignore[misc]

    def _clocked(self, code: Code, node: fx.Node) -> tuple[Callable[..., Any], Sequence[Any]]:
        target, args = code.call(node)
        function = function_for(target, args, node.kwargs)

        def clocked(*given: Any, **named: Any) -> Any:
            begun = self._now()
            made = function(*given, **named)
            self._noted.append((node, begun, self._now()))
            return made

        return clocked, args


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
