"""Program: one training step as a value, and the only place where a graph is copied or edited.

A program is an ATen graph with *ports*, which say what each placeholder and each output is. Passes find their work by
ports and by the marks below, never by shapes or node names:

- ``node.meta["val"]``: a fake tensor of the node's shape, stride, dtype and device; true after every edit.
- ``node.meta["phase"]``: ``"forward"``, ``"backward"`` or ``"update"``.
- ``node.meta["mark"]``: a `Mark` on nodes that passes inserted: the role they play, and for which unit and buffer.
- ``node.meta["idle"]``, on a shard's placeholder: the names of its parameters that the loss does not reach.
- ``node.meta["seed"]``, set on one node: the derivative of the loss by itself, from which backward starts.
- ``node.meta["effect"]``: the node is run for what it does, such as a check, even where nothing reads its result.
- ``node.meta["path"]``: the submodule that the node came from, for people to read.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

Phase = Literal["forward", "backward", "update"]
Role = Literal[
    "cast",
    "gather",
    "part",
    "wait",
    "block",
    "view",
    "flatten",
    "reduce",
    "norm",
    "agree",
    "weigh",
    "scale",
    "sum",
    "update",
    "fetch",
    "return",
]


@dataclass(frozen=True)
class Port:
    """What one placeholder or output is.

    ``side`` is ``"in"`` or ``"out"``. ``kind``, for inputs: ``"parameter"`` (full; before `gather`), ``"shard"`` (a
    buffer's slice), ``"copy"`` (the same in the compute dtype), ``"buffer"`` (a module buffer), ``"batch"``,
    ``"constant"`` (a tensor the model or loss closes over), ``"state"`` (optimizer), ``"hyper"`` (a scheduled
    hyperparameter), ``"sum"`` (over microbatches), ``"scale"`` (of the loss), ``"rank"``, ``"call"``. For outputs:
    ``"loss"``, ``"aux"``, ``"result"`` (forward alone), ``"gradient"``, ``"norm"``, ``"overflow"``, ``"buffer"`` or
    ``"constant"`` (the updated value of the input of that name).
    """

    side: Literal["in", "out"]
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


LOSS = Port("out", "loss", "0")
NORM = Port("out", "norm", "gradient")
FACTOR = Port("out", "factor", "gradient")  # what all gradients are still to be multiplied by; leaves no program
SQUARES = Port("out", "squares", "gradient")  # the sum over this rank's gradients, float64; inside the pipeline alone
OVERFLOW = Port("out", "overflow", "gradient")  # how many buffers' gradients are not finite; in the end, whether any
WEIGHT = Port("out", "weight", "rows")  # how much this rank's batch counts, float64; inside the pipeline alone
CALL = Port("in", "call", "number")  # which program this rank runs with which rates, float64

c10d = torch.ops._c10d_functional
ASSERT = torch.ops.aten._assert_async.msg
DISAGREE = "the ranks run different programs"


@dataclass(frozen=True)
class Mark:
    """The role of an inserted node."""

    role: Role
    unit: str = ""
    buffer: str = ""


@dataclass(frozen=True)
class Program:
    """A step as a value: a graph, what its ends are, and the passes that made it."""

    graph: fx.Graph
    ports: tuple[Port, ...]  # inputs in the order of the placeholders, then outputs in the order of the output node
    history: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what passes chose, and why
    needs: tuple[str, ...] = ()  # what it takes of a rank's memory, for people

    @property
    def inputs(self) -> dict[Port, fx.Node]:
        ports = [port for port in self.ports if port.side == "in"]
        return dict(zip(ports, self.graph.find_nodes(op="placeholder"), strict=True))

    @property
    def outputs(self) -> dict[Port, fx.Node]:
        ports = [port for port in self.ports if port.side == "out"]
        return dict(zip(ports, self.graph.output_node().args[0], strict=True))  # type: ignore[arg-type]

    def marked(self, role: Role) -> list[fx.Node]:
        """The nodes that passes inserted in this role, in the order they run."""
        return [node for node in self.graph.nodes if role_of(node) == role]

    def after(self, name: str) -> Program:
        """The same program after a pass that had nothing to do."""
        return replace(self, history=(*self.history, name))

    @property
    def random(self) -> bool:
        """Whether running the program draws random numbers."""
        return any(is_random(node) for node in self.graph.nodes)

    @property
    def hash(self) -> str:
        """Equal exactly for programs that run the same operations, in the same order, on the same ports."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    @property
    def wire(self) -> str:
        """Equal for programs whose collectives pair up, one by one; empty where there are none."""
        found = [node for node in self.graph.nodes if is_collective(node)]
        calls = [(str(node.target), describe(node), fx.node.map_arg(node.args, lambda _: None)) for node in found]
        return hashlib.sha256(repr(calls).encode()).hexdigest()[:8] if calls else ""

    def text(self) -> str:
        """Every node on a line: what ranks compare, and what `dump` writes."""
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        ports = {node: port for port, node in self.inputs.items()}
        unit, phase = None, None
        for node in self.graph.nodes:
            mark: Mark | None = node.meta.get("mark")
            if node.op == "call_function" and node.meta["phase"] != phase:
                phase = node.meta["phase"]
                yield f"# {phase}"
            where = mark.unit if mark else node.meta.get("path", "")
            if node.op == "call_function" and where != unit:
                unit = where
                yield f"  # {unit or '(loss)'}"
            if node.op == "placeholder":
                yield f"{node.name}: {describe(node)}  # {ports[node]}"
            elif node.op == "output":
                for port, value in self.outputs.items():
                    yield f"return {port}: {value}"
            else:
                yield f"    {node.name}: {describe(node)} = {call_text(node)}" + (f"  # {mark.role}" if mark else "")

    def __str__(self) -> str:
        from fsdp_compiled.dump import summary  # dump reads programs; this one call shows one

        return summary(self)


def role_of(node: fx.Node) -> str | None:
    mark = node.meta.get("mark")
    return mark.role if mark else None


def owner(node: fx.Node) -> str:
    """The unit or submodule that the node belongs to, for people; empty where it is of none, or of all."""
    mark: Mark | None = node.meta.get("mark")
    if mark is not None:
        return mark.unit
    # layers.0.attention.query -> layers.0: up to the first index, which is where a block begins
    parts: list[str] = node.meta.get("path", "").split(".")
    return ".".join(parts[: next((index + 1 for index, part in enumerate(parts) if part.isdigit()), 1)])


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers, and so gives other ones when it is run again.

    Attention may, says its operator; where its ``dropout_p`` is 0 it does not.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for index, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[index] if index < len(node.args) else argument.default_value
            return node.kwargs.get("dropout_p", given) != 0
    return True


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective; waiting for one does not."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "_c10d_functional"
        and not is_wait(node)
    )


def is_wait(node: fx.Node) -> bool:
    return node.target is c10d.wait_tensor.default


def is_view(node: fx.Node) -> bool:
    """Whether the node's result shares memory with one of its inputs, which it leaves as it is."""
    if node.target is operator.getitem:
        return bool(node.args) and is_view(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    infos = [argument.alias_info for argument in node.target._schema.arguments if argument.alias_info is not None]
    return bool(infos) and not any(info.is_write for info in infos)


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that the node writes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[fx.Node] = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.kwargs.get(argument.name, node.args[index] if index < len(node.args) else None)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node)]
    return found


def origin(node: fx.Node, known: Collection[fx.Node] = ()) -> fx.Node:
    """The node that holds the value: an operator that writes in place returns what it wrote, if its schema says so.

    Nodes that are ``known`` are taken for holders.
    """
    while node not in known and (targets := written(node)) and _returns_its_own(node):
        node = targets[0]
    return node


def _returns_its_own(node: fx.Node) -> bool:
    returns = node.target._schema.returns  # type: ignore[union-attr]
    return not returns or returns[0].alias_info is not None


def versions(node: fx.Node) -> list[fx.Node]:
    """The node and the results of in-place operators on it, one after the other: one memory."""
    chain = [node]
    for version in chain:
        chain += [user for user in version.users if version in written(user) and user not in chain]
    return chain


def call_text(node: fx.Node) -> str:
    """``aten.mm(a, b)``, with the overload left out where it is the default."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target).removesuffix(".default")
    else:
        name = getattr(target, "__name__", str(target))
    arguments = [_value_text(value) for value in node.args]
    arguments += [f"{key}={_value_text(value)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(arguments)})"


class Bare(str):
    """Prints without quotes, so that a node's name never looks like a string argument."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _value_text(value: Any) -> str:
    """Devices without their index, in which the ranks of one machine differ."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return Bare(leaf.name)
        return torch.device(leaf.type) if isinstance(leaf, torch.device) else leaf

    return repr(fx.node.map_aggregate(value, one))


def describe(node: fx.Node) -> str:
    """``float32[4, 8]``."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype)[6:]}{list(value.shape)}"
        return "-" if value is None else str(value)

    value = node.meta.get("val")
    return f"({', '.join(map(one, value))})" if isinstance(value, tuple | list) else one(value)


def as_traced(value: Any) -> Any:
    """A node's ``val`` with the sizes that move (`Policy.dynamic`) as they were when it was traced, to be counted with.

    Sizes that are in the data (``x[mask]``) nobody knows before the step: they count as nothing. Asking a moving size
    itself, ``int(size)`` or ``size > 8``, would tie the program to the answer.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return leaf.node.hint if leaf.node.has_hint() else 0
        if isinstance(leaf, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in (*leaf.shape, *leaf.stride())):
            shape, stride = pytree.tree_map(one, (tuple(leaf.shape), leaf.stride()))
            return torch.empty_strided(shape, stride, dtype=leaf.dtype, device="meta")
        return leaf

    return one(value) if isinstance(value, torch.Tensor) else pytree.tree_map(one, value)


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The mode that the graph's fake tensors belong to."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch._subclasses.FakeTensor):
                return value.fake_mode
    raise ValueError("The graph has no fake tensors; a Program's nodes carry one each in meta['val'].")


def fake_tensor(
    mode: FakeTensorMode,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A fake tensor of this description; no memory is taken."""
    with mode:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def copied(graph: fx.Graph, mapping: dict[fx.Node, fx.Node]) -> fx.Graph:
    """A copy of all but the output node; ``mapping`` is filled with each node's copy."""
    result = fx.Graph()
    for node in graph.nodes:
        if node.op != "output":
            # Its arguments follow: `create_node` looks through those it is given, longer than all the rest takes.
            copy = mapping[node] = result.create_node(node.op, node.target, (), {}, node.name, node.type)
            copy.args = fx.node.map_arg(node.args, mapping.__getitem__)  # type: ignore[assignment]
            if node.kwargs:
                copy.kwargs = fx.node.map_arg(node.kwargs, mapping.__getitem__)  # type: ignore[assignment]
            copy.meta.update(node.meta)
    return result


class Edit:
    """A copy of a program that may be changed; `done` turns it into the next program.

    Lives inside one pass. ``self.map`` leads from the old program's nodes to the copy's.
    """

    def __init__(self, program: Program) -> None:
        self.map: dict[fx.Node, fx.Node] = {}
        self.graph = copied(program.graph, self.map)
        outputs = fx.node.map_arg(program.graph.output_node().args[0], self.map.__getitem__)
        self.mode = fake_mode(program.graph)
        self._before = program
        self._inputs = {port: self.map[node] for port, node in program.inputs.items()}
        old = program.graph.output_node()
        self._end = self.graph.output(outputs)
        self._end.meta = dict(old.meta)
        self._outputs: dict[Port, fx.Node | None] = dict(
            zip((port for port in program.ports if port.side == "out"), outputs, strict=True)  # type: ignore[arg-type]
        )
        self._phase: Phase = "forward"
        self._mark: Mark | None = None

    @property
    def inputs(self) -> dict[Port, fx.Node]:
        return dict(self._inputs)

    @property
    def outputs(self) -> dict[Port, fx.Node | None]:
        return dict(self._outputs)

    @property
    def end(self) -> fx.Node:
        """The output node: insert before it to append to the program."""
        return self._end

    @contextmanager
    def at(self, before: fx.Node, phase: Phase) -> Iterator[None]:
        """Calls inside go before this node, in this phase."""
        previous = self._phase
        self._phase = phase
        with self.graph.inserting_before(before):
            yield
        self._phase = previous

    def call(self, target: Callable[..., Any], *args: Any, mark: Mark | None = None, **kwargs: Any) -> fx.Node:
        """Inserts a call and works out its ``val`` by running it on fake tensors."""
        name = _identifier(f"{mark.buffer or mark.unit}_{mark.role}".lstrip("_")) if mark is not None else None
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta["phase"] = self._phase
        if mark is not None:
            node.meta["mark"] = mark
        self.infer(node)
        return node

    def infer(self, node: fx.Node) -> None:
        args, kwargs = pytree.tree_map_only(fx.Node, lambda source: source.meta["val"], (node.args, node.kwargs))
        with self.mode, torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]

    def clone(self, node: fx.Node, mapping: dict[fx.Node, fx.Node]) -> fx.Node:
        """Repeats a node on other inputs at the point and in the phase that `at` set."""
        copy = self.graph.node_copy(node, lambda source: mapping.get(source, source))
        copy.meta["phase"] = self._phase
        return copy

    def add_input(self, port: Port, value: torch.Tensor) -> fx.Node:
        """A new placeholder, after those there are; ``value`` is a fake tensor."""
        last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(_identifier(f"{port.kind}_{port.name}"))
        node.meta["val"] = value
        self._inputs[port] = node
        return node

    def fake(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with self.mode:
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def remove_input(self, port: Port) -> None:
        self.graph.erase_node(self._inputs.pop(port))

    def set_output(self, port: Port, node: fx.Node | None) -> None:
        self._outputs[port] = node
        self._sync()

    def remove_output(self, port: Port) -> None:
        del self._outputs[port]
        self._sync()

    def _sync(self) -> None:
        self._end.args = (list(self._outputs.values()),)

    def sweep(self) -> None:
        """Erases calls whose results nothing uses; writes in place and collectives' waits stay if used."""
        for node in reversed(list(self.graph.nodes)):
            kept = node.users or written(node) or node.target is ASSERT or node.meta.get("effect")
            if node.op == "call_function" and not kept:
                self.graph.erase_node(node)

    def rebuild(self, nodes: Collection[fx.Node]) -> None:
        """Makes backward read clones of these forward nodes, made just before the first node that needs them."""
        order = positions(self.graph)
        clones: dict[fx.Node, fx.Node] = {}
        for node in list(self.graph.nodes):
            if node.op != "call_function" or node.meta["phase"] != "backward":
                continue
            needed = [source for source in node.all_input_nodes if source in nodes]
            if not needed:
                continue
            with self.at(node, "backward"):
                for source in sorted(_missing(needed, nodes, clones), key=order.__getitem__):
                    clones[source] = self.clone(source, clones)
            for source in needed:
                node.replace_input_with(source, clones[source])

    def drop_unused_parts(self) -> None:
        """Makes collectives of several buffers carry only those that are used: what is sent is awaited."""
        self.sweep()
        for node in self.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor_coalesced.default):
            parts = {part.args[1]: part for part in node.users}
            buffers, world, axis = node.args
            if len(parts) == len(buffers):  # type: ignore[arg-type]
                continue
            used = [buffers[index] for index in sorted(parts)]  # type: ignore[index, type-var]
            with self.at(node, node.meta["phase"]):
                mark = node.meta["mark"]
                if len(used) == 1:
                    (part,) = parts.values()
                    single = replace(part.meta["mark"], role="gather")
                    full = self.call(c10d.all_gather_into_tensor.default, used[0], world, axis, mark=single)
                    part.replace_all_uses_with(full)
                else:
                    fewer = self.call(c10d.all_gather_into_tensor_coalesced.default, used, world, axis, mark=mark)
                    for place, index in enumerate(sorted(parts)):  # type: ignore[type-var]
                        parts[index].args = (fewer, place)
        self.sweep()

    def move(self, nodes: Iterable[fx.Node], before: fx.Node) -> None:
        """Moves nodes, in this order, to just before another."""
        for node in nodes:
            before.prepend(node)

    def done(self, name: str, *notes: str) -> Program:
        """The next program: swept, checked for form, with this pass in its history and what it chose in its notes."""
        self.sweep()
        self.graph.lint()
        ports = (*self._inputs, *self._outputs)
        return Program(self.graph, ports, (*self._before.history, name), (*self._before.notes, *notes))


def _missing(wanted: list[fx.Node], nodes: Collection[fx.Node], made: Collection[fx.Node]) -> set[fx.Node]:
    """The wanted nodes and all that they are made of, as far as it is among these nodes and not yet made."""
    found: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in nodes and node not in made and node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _identifier(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Each node's place in the order of execution."""
    return {node: index for index, node in enumerate(graph.nodes)}


def first(nodes: Iterable[fx.Node], order: dict[fx.Node, int]) -> fx.Node:
    return min(nodes, key=order.__getitem__)


def last(nodes: Iterable[fx.Node], order: dict[fx.Node, int]) -> fx.Node:
    return max(nodes, key=order.__getitem__)


def reduction(gradient: fx.Node) -> fx.Node | None:
    """The first collective that this gradient went through, if any."""
    found, node = None, gradient
    while role_of(node) in ("cast", "scale", "wait", "reduce"):
        found = node if is_collective(node) else found
        node = node.all_input_nodes[0]
    return found


def weighed(edit: Edit, value: fx.Node, weight: fx.Node, mark: Mark) -> fx.Node:
    """``value * weight``, and zero where the weight is, even if the value is not finite."""
    counts = edit.call(torch.ops.aten.gt.Scalar, weight, 0, mark=mark)
    product = edit.call(torch.ops.aten.mul.Tensor, value, weight, mark=mark)
    return edit.call(torch.ops.aten.where.ScalarOther, counts, product, 0.0, mark=mark)


GATHERED = ("fetch", "cast", "gather", "part", "wait", "block", "view")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default)


def gathered(graph: fx.Graph) -> dict[str, set[fx.Node]]:
    """By unit, the forward nodes that hold its gathered parameters: gathers, views of them, casts and copies."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.meta["phase"] != "forward":
            continue
        if role_of(node) in GATHERED:
            found[node] = node.meta["mark"].unit
        elif (is_view(node) or node.target in COPIES) and node.all_input_nodes:
            units = {found.get(source) for source in node.all_input_nodes}
            unit = units.pop()
            if unit is not None and not units:
                found[node] = unit
    chains: dict[str, set[fx.Node]] = {}
    for node, unit in found.items():
        chains.setdefault(unit, set()).add(node)
    return chains
