"""Refuses, while a program is traced, random numbers that it cannot draw. The error names the user's line.

A program draws with PyTorch's operators from PyTorch's default generator. Dynamo would trace more: it makes constants
of the numbers that `random` draws, turns NumPy's functions into PyTorch's, with a different random stream, and leaves
out calls of `torch.seed`. In each case the numbers would differ from eager PyTorch's, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from fsdp_compiled.torch_private.dynamo import UserError, UserErrorType, config
from fsdp_compiled.torch_private.names import TABLE, has, replaced

SEEDING = ("torch.random", "torch.cuda.random")


@contextmanager
def refused() -> Iterator[None]:
    """Inside, Dynamo raises for a call of a random function of `random`, a ``random.Random`` or NumPy."""
    others = [(name, _refuse) for name in filter(has, TABLE["random calls"].names[0].split("|"))]
    with config.patch(use_numpy_random_stream=True), replaced("random calls", *others):
        yield


def _refuse(_draw: Any, _tx: Any, function: Callable[..., Any], *_: Any) -> Any:
    name = getattr(function, "__name__", "")
    called = "a random.Random" if name == "call_random_meth" else f"random.{name}"
    raise UserError(
        UserErrorType.ANTI_PATTERN,
        f"{called} draws from a generator of Python's; a program would repeat what it drew when it was traced.",
    )


def seeding(graph: fx.Graph) -> fx.Node | None:
    """The first call that seeds a generator or saves its state, which a program would leave out."""
    return next((node for node in graph.nodes if getattr(node.target, "__module__", None) in SEEDING), None)
