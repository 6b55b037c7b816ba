"""The code that Inductor made of a piece, called without what AOTAutograd wraps around it.

    artifact(*inputs) -> AOTAutograd's wrappers -> CompiledFxGraph -> generated code         the first call
    generated code(inputs)                                                                  from then on

The wrappers are for aliases, subclasses and autograd. A piece has none of these, and the wrappers cost more than a
small kernel. The first call shows whether they pass everything through: for that one call, the compiled graph notes
what it is given and returns. The graph is found among what the artifact's functions close over
(`torch._inductor.output_code.CompiledFxGraph`, on torch 2.11 to 2.14). Nothing else in the process is changed. Where no
single graph is found, or the wrappers do change something, they stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch

from fsdp_compiled.torch_private.inductor import CompiledFxGraph

Call = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class CompiledPiece:
    """Calls compiled code with a list of inputs, which it empties. ``source``: where the code came from."""

    def __init__(self, artifact: Callable[..., Any], key: str, source: str) -> None:
        self.__name__ = f"piece_{key[:16]}"
        self.source = source
        self._artifact = artifact
        self._first_call = threading.Lock()  # equal pieces of several programs are one object
        self._call: Call | None = None  # no bound method: a piece goes with the last program that holds it

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._first(inputs) if self._call is None else self._call(inputs)

    @property
    def unwrapped(self) -> bool:
        """Whether AOTAutograd's wrappers were seen to pass everything through, and are left out."""
        return self._call is not None and not isinstance(self._call, _Wrapped)

    def _first(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs with the wrappers, and drops them from now on if they pass everything through."""
        with self._first_call:
            if self._call is not None:  # another thread did it meanwhile
                return self._call(inputs)
            wrapped = _Wrapped(self._artifact)
            graphs = compiled_graphs(self._artifact)
            code = graphs[0].current_callable if len(graphs) == 1 else None
            if code is None:
                self._call = wrapped
                return wrapped(inputs)
            seen: list[tuple[list[Any], Sequence[Any]]] = []

            def noting(given: Any) -> Any:
                before = list(given)
                seen.append((before, code(given)))
                return seen[-1][1]

            graphs[0].current_callable = noting
            try:
                results: Sequence[torch.Tensor] = self._artifact(*inputs)
            finally:
                graphs[0].current_callable = code
            plain = len(seen) == 1 and _same(seen[0][0], inputs) and _same(seen[0][1], results)
            self._call = code if plain else wrapped
            inputs.clear()
            return results


class _Wrapped:
    """An artifact with its wrappers, called like the code inside."""

    def __init__(self, artifact: Callable[..., Any]) -> None:
        self._artifact = artifact

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = tuple(inputs)
        inputs.clear()
        return self._artifact(*given)  # type: ignore[no-any-return]


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))


def compiled_graphs(artifact: Callable[..., Any]) -> list[CompiledFxGraph]:
    """The compiled graphs that a function calls, found in its closure and in the closures of functions there."""
    found: list[CompiledFxGraph] = []
    seen: set[int] = set()
    stack: list[Any] = [artifact]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, CompiledFxGraph):
            found.append(value)
        else:
            stack += _inside(value)
    return found


def _inside(value: Any) -> Iterator[Any]:
    """The objects in a callable object that it may call."""
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield cell.cell_contents
    if callable(value) and not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).values()
