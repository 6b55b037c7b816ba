"""Piece -> compiled function.

This is the only file that touches private surfaces of Inductor.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch._inductor.codecache import cache_dir
from torch._inductor.output_code import CompiledFxGraph

from fsdp_compiled.kernels.scaled import TENSOR_FORMS
from fsdp_compiled.pieces import Piece
from fsdp_compiled.program import fake_mode

Call = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class CompiledPiece:
    """Calls compiled code with a list of inputs, which it empties."""

    def __init__(self, artifact: Callable[..., Any], key: str) -> None:
        self.__name__ = f"piece_{key[:16]}"
        self._artifact = artifact
        self._call: Call = self._first

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._call(inputs)

    def _first(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs with AOTAutograd's wrappers around the compiled code, and drops them if they pass everything through.

        They are for aliases, subclasses and autograd, none of which a piece has, and cost more than a small kernel.
        """
        seen: list[tuple[Any, list[Any], Sequence[Any]]] = []
        run = CompiledFxGraph.__call__

        def watch(graph: Any, given: Any) -> Any:
            before = list(given)
            results = run(graph, given)
            seen.append((graph, before, results))
            return results

        CompiledFxGraph.__call__ = watch  # type: ignore[method-assign, assignment]
        try:
            results = self._artifact(*inputs)
        finally:
            CompiledFxGraph.__call__ = run  # type: ignore[method-assign]
        self._call = self._wrapped
        if len(seen) == 1:
            graph, before, inner = seen[0]
            if _same(before, inputs) and _same(inner, results):
                self._call = graph.current_callable
        inputs.clear()
        return results

    def _wrapped(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = tuple(inputs)
        inputs.clear()
        return self._artifact(*given)


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))


_compiled: WeakValueDictionary[str, CompiledPiece] = WeakValueDictionary()  # as long as a program uses them


def compile_all(pieces: Mapping[str, Piece]) -> dict[str, Call]:
    """Each piece, by its key: from this process, from Inductor's cache on disk, or compiled now."""
    found: dict[str, Call] = {}
    for key, piece in pieces.items():
        made = _compiled.get(key)
        if made is None:
            made = CompiledPiece(_artifact(piece), key)
            if all(isinstance(node.meta["val"], torch.Tensor) for node in piece.inputs):
                _compiled[key] = made  # else a size moves, and compiling it asked about this program's sizes
        found[key] = made
    return found


def cache_place() -> tuple[str, str]:
    """Equal on ranks that share Inductor's cache on disk."""
    return socket.gethostname(), cache_dir()


def share(pieces: Mapping[str, Piece], count: int) -> list[dict[str, Piece]]:
    """The pieces dealt out to so many ranks, each to one, the largest first."""
    parts: list[dict[str, Piece]] = [{} for _ in range(count)]
    load = [0] * count
    for key in sorted(pieces, key=lambda key: -len(pieces[key].nodes)):
        least = load.index(min(load))
        parts[least][key] = pieces[key]
        load[least] += len(pieces[key].nodes)
    return parts


def _artifact(piece: Piece) -> Callable[..., Any]:
    module = _expand(piece.graph_module(_without_host_reads))
    return torch._inductor.standalone_compile(module, examples(piece), dynamic_shapes="from_graph")


def examples(piece: Piece) -> list[Any]:
    """Inputs like the piece's, but for their place in memory, which equal pieces do not share."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with fake_mode(piece.nodes[0].graph):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    return [fresh(node.meta["val"]) for node in piece.inputs]


def _without_host_reads(node: fx.Node) -> None:
    """Replaces operators that read a scalar on the host by their tensor forms."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "fsdp_compiled":
        node.target = TENSOR_FORMS.get(target._schema.name.removeprefix("fsdp_compiled::"), target)


def _expand(module: fx.GraphModule) -> fx.GraphModule:
    """Traces through the Python functions that `_without_host_reads` put in."""
    if not any(node.target in TENSOR_FORMS.values() for node in module.graph.nodes):
        return module
    from torch.fx.experimental.proxy_tensor import make_fx

    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with fake_mode(module.graph):
        return make_fx(module)(*examples)
