"""What a node of a program is and does, asked of its operator and its marks; nothing here changes a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from fsdp_compiled.torch_private.modes import no_dispatch

c10d = torch.ops._c10d_functional
Phase = Literal["forward", "backward", "update"]
Role = Literal[
    "cast",
    "pack",
    "gather",
    "part",
    "wait",
    "kept",
    "unpack",
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
    "combine",
    "fetch",
    "return",
    "store",
    "stored",
    "restore",
    "restored",
]
ASSERT = torch.ops.aten._assert_async.msg
DISAGREE = "the ranks run different programs"
OTHER_BATCHES = "ranks along the tp axis were given different batches"
AGAIN = "again"  # the purpose of a gather that `limit` repeats


@dataclass(frozen=True)
class Mark:
    """The role of an inserted node, and its purpose where fusions or the check need it: for fusions, ``"factor"`` on a
    multiplication of a whole gradient by one number, for instance; for the check, `AGAIN`."""

    role: Role
    unit: str = ""
    buffer: str = ""
    purpose: str = ""

    def __str__(self) -> str:
        return f"{self.role}: {self.purpose}" if self.purpose else self.role


def purpose_of(node: fx.Node) -> str:
    mark: Mark | None = node.meta.get("mark")
    return mark.purpose if mark else ""


def role_of(node: fx.Node) -> str | None:
    mark = node.meta.get("mark")
    return mark.role if mark else None


def owner(node: fx.Node) -> str:
    """The unit or submodule that the node belongs to, for people; empty where it is of none, or of all."""
    mark: Mark | None = node.meta.get("mark")
    return mark.unit if mark is not None else _block(node.meta.get("path", ""))


@lru_cache(maxsize=1 << 12)
def _block(path: str) -> str:
    """``layers.0.attention.query`` -> ``layers.0``: up to the first index, which is where a block begins."""
    parts = path.split(".")
    return ".".join(parts[: next((index + 1 for index, part in enumerate(parts) if part.isdigit()), 1)])


@dataclass(frozen=True)
class _Schema:
    """What passes need to know about an operator; cached, since asking PyTorch takes longer than the rest of a node."""

    namespace: str
    writes: tuple[tuple[int, str], ...]  # the arguments that it writes in place, by place and name
    views: bool  # whether its result shares memory with an input, and it writes none
    returns_own: bool  # whether its first result is an argument, or it has none
    random: bool
    dropout: tuple[int, Any] | None  # the place of ``dropout_p`` among the arguments, and what it is by default


_SCHEMAS: dict[int, tuple[torch._ops.OpOverload, _Schema]] = {}  # by identity: to hash an operator takes longer


def _schema(target: torch._ops.OpOverload) -> _Schema:
    if (found := _SCHEMAS.get(id(target))) is None:
        found = _SCHEMAS[id(target)] = target, _read(target)
    return found[1]


def _read(target: torch._ops.OpOverload) -> _Schema:
    schema = target._schema
    aliases = [argument.alias_info for argument in schema.arguments]
    writes = [(place, schema.arguments[place].name) for place, one in enumerate(aliases) if one and one.is_write]
    dropout = [(place, one.default_value) for place, one in enumerate(schema.arguments) if one.name == "dropout_p"]
    return _Schema(
        target.namespace,
        tuple(writes),
        views=any(aliases) and not writes,
        returns_own=not schema.returns or schema.returns[0].alias_info is not None,
        random=torch.Tag.nondeterministic_seeded in target.tags,
        dropout=dropout[0] if dropout else None,
    )


def may_be_random(node: fx.Node) -> bool:
    """Whether the node's operator can draw random numbers, perhaps with other arguments than these."""
    return isinstance(node.target, torch._ops.OpOverload) and _schema(node.target).random


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers, and so gives different results when it is run again.

    The operators of attention can draw; with a ``dropout_p`` of 0 they do not.
    """
    if not may_be_random(node):
        return False
    if (dropout := _schema(node.target).dropout) is not None:  # type: ignore[arg-type]
        place, default = dropout
        given = node.args[place] if place < len(node.args) else default
        return node.kwargs.get("dropout_p", given) != 0
    return True


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective; waiting for one does not."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and _schema(node.target).namespace == "_c10d_functional"
        and not is_wait(node)
    )


def is_wait(node: fx.Node) -> bool:
    return node.target is c10d.wait_tensor.default


def computes(node: fx.Node) -> bool:
    """Whether the node is a kernel of the device's: no view, and neither a collective nor a wait for one."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    schema = _schema(node.target)
    return not schema.views and schema.namespace != "_c10d_functional"


def carried(collective: fx.Node) -> tuple[int, int]:
    """Bytes that a rank puts into the collective, and bytes that it gets out, its own included."""
    made = [leaf for leaf in pytree.tree_leaves(collective.meta["val"]) if isinstance(leaf, torch.Tensor)]
    return sum(source.meta["val"].nbytes for source in collective.all_input_nodes), sum(one.nbytes for one in made)


def waited_for(wait: fx.Node) -> fx.Node:
    """The collective, or the copy, whose end a wait waits for."""
    source = wait.all_input_nodes[0]
    return source.all_input_nodes[0] if role_of(source) == "part" else source


def waits_for(gather: fx.Node) -> list[fx.Node]:
    """The waits for what a gather brings: one, or one for each of the buffers that it carries, in their order."""
    several = isinstance(gather.args[0], list | tuple)
    parts = sorted(gather.users, key=lambda part: part.args[1]) if several else [gather]  # type: ignore[arg-type, return-value]
    return [next(user for user in part.users if is_wait(user)) for part in parts]


def is_view(node: fx.Node) -> bool:
    """Whether the node's result shares memory with one of its inputs, and the node does not write that input."""
    if node.target is operator.getitem:
        return bool(node.args) and is_view(node.args[0])  # type: ignore[arg-type]
    return isinstance(node.target, torch._ops.OpOverload) and _schema(node.target).views


def is_alias(node: fx.Node) -> bool:
    """Whether the node's result is in its argument's memory, or is one of its argument's results."""
    return is_view(node) or node.target in (operator.getitem, torch.ops.aten._unsafe_view.default)


def base_of(node: fx.Node, apart: Container[fx.Node] = ()) -> fx.Node:
    """The node that made this value's memory; a node in ``apart`` counts as the maker of its own."""
    while node.op == "call_function" and is_alias(node) and node not in apart:
        node = node.all_input_nodes[0]
    return node


def writes(node: fx.Node) -> bool:
    """Whether the node's operator writes arguments in place."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(_schema(node.target).writes)


def mutated(node: fx.Node) -> list[fx.Node]:
    """The arguments that the node writes in place."""
    if not writes(node):
        return []
    found: list[fx.Node] = []
    for place, name in _schema(node.target).writes:
        value = node.args[place] if place < len(node.args) else node.kwargs.get(name)
        values = value if isinstance(value, list | tuple) else (value,)
        found += [one for one in values if isinstance(one, fx.Node)]
    return found


def origin(node: fx.Node, known: Collection[fx.Node] = ()) -> fx.Node:
    """The node that made the value: an operator that writes in place returns what it wrote, if its schema says so.

    The search stops at ``known`` nodes.
    """
    while node not in known and (targets := mutated(node)) and _schema(node.target).returns_own:  # type: ignore[arg-type]
        node = targets[0]
    return node


def versions(node: fx.Node) -> list[fx.Node]:
    """The node and the results of in-place operators on it, in order: all share one memory."""
    chain = [node]
    for version in chain:
        chain += [user for user in version.users if version in mutated(user) and user not in chain]
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
    """Writes devices without their index, which differs between the ranks of one machine."""

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
    """A node's ``val``, with dynamic sizes (`Policy.dynamic`) replaced by their sizes at trace time, for estimates.

    Sizes that depend on data (``x[mask]``) are unknown before the step: they count as nothing. Asking a dynamic size
    itself, ``int(size)`` or ``size > 8``, would add a guard that ties the program to the answer.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return leaf.node.hint if leaf.node.has_hint() else 0
        if isinstance(leaf, torch.Tensor) and leaf._has_symbolic_sizes_strides:
            shape, stride = pytree.tree_map(one, (tuple(leaf.shape), leaf.stride()))
            return torch.empty_strided(shape, stride, dtype=leaf.dtype, device="meta")
        return leaf

    if isinstance(value, torch.Tensor):
        return one(value)
    # The most common kinds of values, without the cost of pytree.
    return type(value)(map(as_traced, value)) if type(value) in (tuple, list) else pytree.tree_map(one, value)


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The mode that the graph's fake tensors belong to."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    raise ValueError("The graph has no fake tensors; a Program's nodes carry one each in meta['val'].")


INT = {int}


def fake_tensor(
    mode: FakeTensorMode,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A fake tensor of this description; no memory is taken."""
    if {*map(type, shape), *map(type, stride)} <= INT:
        with no_dispatch():  # active modes would only find out what is given here
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, empty, device)
    with mode:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def name_device(graph: fx.Graph, device: torch.device) -> None:
    """Puts this device in the place of every one that the nodes' arguments name."""
    for node in graph.nodes:
        node.args, node.kwargs = pytree.tree_map_only(torch.device, lambda _: device, (node.args, node.kwargs))


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Each node's place in the order of execution."""
    return {node: index for index, node in enumerate(graph.nodes)}


def upstream(wanted: Iterable[fx.Node], among: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """These nodes and all they are computed from, as far as ``among`` is true without a gap."""
    found: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node not in found and among(node):
            found.add(node)
            stack += node.all_input_nodes
    return found


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


GATHERED = ("cast", "pack", "gather", "part", "wait", "unpack", "block", "view")
# Copies from and to host memory, by their role.
HOST_COPIES = {"fetch": "from the host", "restore": "from the host", "return": "to the host", "store": "to the host"}
HOST = (*HOST_COPIES, "restored", "stored")  # these copies, and the waits for them
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default)


def gathered(graph: fx.Graph) -> dict[str, set[fx.Node]]:
    """By unit, the forward nodes that hold its gathered parameters: gathers, views of them, casts and copies."""
    return gathered_by(node for node in graph.nodes if (mark := node.meta.get("mark")) and mark.role in GATHERED)


def gathered_by(marked: Iterable[fx.Node]) -> dict[str, set[fx.Node]]:
    """The same, from the nodes in those roles, in order. Other nodes that hold parameters read one unit's alone."""
    found = {node: node.meta["mark"].unit for node in marked if node.meta.get("phase") == "forward"}
    stack = list(found)
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in found or user.op != "call_function" or user.meta["phase"] != "forward":
                continue
            if is_view(user) or user.target in COPIES:
                units = {found.get(source) for source in user.all_input_nodes}
                if units == {found[node]}:
                    found[user] = found[node]
                    stack.append(user)
    chains: dict[str, set[fx.Node]] = {}
    for node, unit in found.items():
        chains.setdefault(unit, set()).add(node)
    return chains


def calls(graph: fx.Graph, are: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The calls, in order, for whose operator ``are`` is true; ``are`` is asked for one call of each operator."""
    asked: dict[Any, bool] = {}
    found = []
    for node in graph.nodes:
        if node.op == "call_function":
            if (wanted := asked.get(node.target)) is None:
                wanted = asked[node.target] = are(node)
            if wanted:
                found.append(node)
    return found
