"""A piece of a program: compute that is compiled as one, with the views that it reads repeated inside, so that it takes
and returns whole tensors and no aliases. Pieces that compute the same have the same key.

`CompiledPiece` calls the code that Inductor made of a piece, without what AOTAutograd wraps around it.

    artifact(*inputs) -> AOTAutograd's wrappers -> CompiledFxGraph -> generated code         the first call
    generated code(inputs)                                                                  from then on

The wrappers are for aliases, subclasses and autograd. A piece has none of these, and the wrappers cost more than a
small kernel. The first call shows whether they pass everything through: for that one call, the compiled graph notes
what it is given and returns. The graph is found among what the artifact's functions close over
(`torch._inductor.output_code.CompiledFxGraph`, on torch 2.11 to 2.14). Nothing else in the process is changed. Where no
single graph is found, or the wrappers do change something, they stay.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn

from fsdp_compiled.ir.nodes import Bare, is_view, mutated, origin, role_of
from fsdp_compiled.torch_private.inductor import CompiledFxGraph

aten = torch.ops.aten
FEW = 64  # numbers; arithmetic on this many or fewer is not compiled
Call = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class Piece:
    """Compute that is compiled as one: nodes of a program in order, with the views that they read."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        own = set(nodes)
        self.nodes = _with_borrowed(nodes, own)
        body = set(self.nodes)
        sources = (origin(source, body) for node in self.nodes for source in node.all_input_nodes)
        inputs = dict.fromkeys(source for source in sources if source not in body)
        self.inputs = list(dict.fromkeys([*_sizes_of(inputs), *inputs]))
        self.outputs = [node for node in nodes if not mutated(node) and any(_outside(node, own))]

    @property
    def writes(self) -> bool:
        return any(mutated(node) for node in self.nodes)

    def graph_module(self, prepare: Callable[[fx.Node], None] = lambda node: None) -> fx.GraphModule:
        """The piece as a module of its own; ``prepare`` may change its nodes."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(self.inputs):
            mapping[node] = graph.placeholder(f"input_{index}")
            mapping[node].meta["val"] = node.meta["val"]
        for node in self.nodes:
            copy = mapping[node] = graph.node_copy(node, lambda source: mapping[origin(source, mapping)])
            copy.meta = {"val": node.meta["val"], "example_value": node.meta["val"]}
            prepare(copy)
        graph.output(tuple(mapping[node] for node in self.outputs))
        return fx.GraphModule(nn.Module(), graph)

    def key(self) -> str:
        """Equal for pieces that compute the same from inputs of the same shapes, strides and dtypes."""
        names: dict[fx.Node, str] = {node: f"i{index}" for index, node in enumerate(self.inputs)}
        names |= {node: f"n{index}" for index, node in enumerate(self.nodes)}
        lines = [_layout(node.meta["val"]) for node in self.inputs]
        for node in self.nodes:
            args = fx.node.map_arg((node.args, node.kwargs), lambda source: Bare(names[origin(source, names)]))
            lines.append(f"{node.target} {args}")
        lines.append(" ".join(names[node] for node in self.outputs))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def is_borrowed(node: fx.Node) -> bool:
    """Whether pieces repeat the node instead of passing its value on.

    Pieces repeat all views, except a block's slice of a gathered buffer, which is at another place in every block. They
    also repeat the scaling of a gradient by the clip factor, which is better done where the gradient is read.
    """
    return (is_view(node) and role_of(node) not in ("block", "part", "stored", "restored")) or (
        role_of(node) == "norm" and node.target is aten.mul.Tensor and numel(node) > FEW
    )


def is_size(node: fx.Node) -> bool:
    """Whether the node is a number made only of sizes of the batch, which Python computes."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat) and all(
        source.op == "placeholder" or is_size(source) for source in node.all_input_nodes
    )


def _sizes_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The program's inputs that hold the sizes in these nodes' shapes, such as the ``rows`` of ``7 * rows``."""
    wanted = {
        symbol
        for node in nodes
        if isinstance(value := node.meta["val"], torch.Tensor)
        for size in (*value.shape, *value.stride())
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }
    if not wanted:
        return []
    places = next(iter(nodes)).graph.find_nodes(op="placeholder")
    return [
        node for node in places if isinstance(value := node.meta["val"], torch.SymInt) and value.node.expr in wanted
    ]


def _with_borrowed(nodes: list[fx.Node], own: Collection[fx.Node]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in found and source not in own and is_borrowed(source):
                add(source)
                found[source] = None

    for node in nodes:
        add(node)
        found[node] = None
    return list(found)


def _outside(node: fx.Node, own: Collection[fx.Node]) -> Iterator[fx.Node]:
    """The nodes outside of ``own`` that read the node, directly or through views."""
    for user in node.users:
        if user.op == "call_function" and is_borrowed(user):
            yield from _outside(user, own)
        elif user not in own:
            yield user


def numel(node: fx.Node) -> int:
    """The number of elements of the node's largest result; more than `FEW` where it is not known before the run."""
    value = node.meta["val"]
    sizes = [leaf.numel() for leaf in (value if isinstance(value, tuple | list) else [value]) if is_tensor(leaf)]
    return max((size if isinstance(size, int) else FEW + 1 for size in sizes), default=0)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _layout(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    return repr(value)


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
