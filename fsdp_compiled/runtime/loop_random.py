"""Random numbers of programs in a loop of the user's, under tensor parallelism.

    draws of what all ranks along tp have    PyTorch's default generator: the numbers of FSDP2 with the same plan. Ranks
                                             along tp are to be seeded alike, which is compared
    draws of parts                           a generator of the call's own, seeded with 128 bits of the default one and
                                             the rank: other numbers on each

FSDP2 draws both from the default generator: ranks along tp that are seeded alike, as they must be for the first kind,
have the same mask on each of their parts, so that heads or hidden units that lie on two ranks are dropped together.
Without a tp axis, programs of a loop draw from the default generator, and nothing of this is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.ir.nodes import is_random
from fsdp_compiled.ir.program import SAME_PARTS, Program
from fsdp_compiled.runtime.rng import DefaultState, default_generator, given_generator, start


class LoopRandom:
    """Where the programs of one module draw from, on this rank."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._parts: torch.Generator | None = None
        self._now: torch.Generator | None = None  # while a program runs that draws for parts
        self.drawn = torch.zeros(SAME_PARTS, dtype=torch.float64, device=device)  # numbers below 2**20, to compare

    @contextmanager
    def drawing(self, shared: bool, parts: bool) -> Iterator[None]:
        """Around the run of a program; ``shared``, ``parts``: which of the two it draws."""
        if shared:
            state = default_generator(self._device).get_state()
            digest = hashlib.sha256(state.numpy().tobytes()).digest()
            for place in range(SAME_PARTS):
                self.drawn[place].fill_(float(int.from_bytes(digest[4 * place : 4 * place + 4], "little") & 0xFFFFF))
        if not parts:
            yield
            return
        self._parts = self._parts or torch.Generator(self._device)
        start(self._parts, self._rank, DefaultState(self._device))
        self._now = self._parts
        try:
            yield
        finally:
            self._now = None

    def bound(self, operator: Callable[..., Any], shared: bool = False) -> Callable[..., Any]:
        """The random operator as a program calls it; ``shared``: it draws the same on all ranks along tp."""
        if shared:
            return operator
        given = given_generator(operator)
        assert given is not None  # `check_random`

        def call(*args: Any, **kwargs: Any) -> Any:
            assert self._now is not None
            return given(*args, **kwargs, generator=self._now)

        call.__name__ = call.__qualname__ = f"drawn_{str(operator).replace('.', '_')}"
        return call


def check_random(program: Program, device: torch.device) -> None:
    """Raises `CaptureError` for draws, of a program that was just captured and marked, that could be wrong."""
    for node in program.graph.nodes:
        if node.op != "call_function" or not is_random(node):
            continue
        if node.meta["phase"] == "backward":
            raise CaptureError(
                f"Backward draws random numbers ({node.target}), which is not supported under tensor parallelism in a "
                "loop of your own. Draw in forward, or use compile_sharded."
            )
        if node.meta.get("shared"):
            continue
        if device.type != "cpu" or given_generator(node.target) is None:  # type: ignore[arg-type]
            raise CaptureError(
                f"The model draws random numbers ({node.target}, dropout for one) for what each rank along the tp axis "
                f"has a part of, which needs a generator of its own, and on {device.type} that operator takes none. "
                "Set dropout to 0 inside of attention and feed-forward, or use compile_sharded."
            )
