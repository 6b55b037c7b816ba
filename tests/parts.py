"""What the Shardeds that are made inside of a block are made of: the arguments of their constructor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from fsdp_compiled import Sharded, api
from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.optim.hyperparameters import Hyperparameters
from fsdp_compiled.runtime.programs.program_cache import Programs
from fsdp_compiled.runtime.state import Copies


@dataclass(frozen=True)
class Parts:
    programs: Programs
    hyperparameters: Hyperparameters
    copies: Copies


@dataclass
class Seen:
    """The parts, by whose they are."""

    _found: WeakKeyDictionary[Sharded, Parts] = field(default_factory=WeakKeyDictionary)

    def __call__(self, sharded: Sharded) -> Parts:
        return self._found[sharded]


@contextmanager
def parts(seen: Seen | None = None, calls: Calls | None = None) -> Iterator[Seen]:
    """``with parts() as of: sharded = compile_sharded(...)``; then ``of(sharded).programs``.

    ``calls``: the log that they are to write, in the place of their own.
    """
    seen = Seen() if seen is None else seen

    def make(taken: Any, optimizer: Any, *given: Any) -> Sharded:
        if calls is not None:
            given[0].calls = calls
        sharded = Sharded(taken, optimizer, *given)
        seen._found[sharded] = Parts(*given[:3])
        return sharded

    with mock.patch.object(api, "Sharded", make):
        yield seen
