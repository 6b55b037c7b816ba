"""Cuts the calls of a program into stretches, and finds which of them are alike.

A *stretch* is what one block or unit computes in one phase, between collectives. Two stretches are alike if they make
the same calls, on values in the same places, and free the same values: they can share one function. Each stretch is
compared, node by node, with the first of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, getitem
from typing import Any, TypeAlias

import torch
from torch import fx

from fsdp_compiled.ir.nodes import is_collective, is_wait, may_be_random, owner

SHORT = 4  # operators; a stretch of this many or fewer is not compared
LITERAL = (int, bool, str, type(None))
INT = {int}
Call = Callable[[fx.Node], tuple[Callable[..., Any], Sequence[Any]]]


@dataclass(frozen=True)
class Bundle:
    """Values that go together (`program_code.bundled`), by one name."""

    name: str
    nodes: Sequence[fx.Node]


Value: TypeAlias = "fx.Node | Bundle"


@dataclass(frozen=True)
class Stretch:
    """Calls in order, with the values that they take for good, borrow and return.

    ``start``: the place of the first call. ``kind``: a number that like stretches share; None where there is no other.
    """

    nodes: Sequence[fx.Node]
    start: int
    kind: int | None = None
    taken: Sequence[Value] = ()
    lent: Sequence[fx.Node] = ()
    returned: Sequence[Value] = ()


def last_uses(nodes: Sequence[fx.Node], returned: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each value, the place of the last node that reads it: its own place where none does, and the end where it is
    returned."""
    found: dict[fx.Node, int] = {}
    for place, node in enumerate(nodes):
        found[node] = place
        for source in node.all_input_nodes:
            found[source] = place
    found.update(dict.fromkeys(returned, len(nodes)))
    return found


def stretches(nodes: Sequence[fx.Node], ends: Mapping[fx.Node, int], call: Call) -> list[Stretch]:
    """The stretches of all nodes. ``ends``: their `last_uses`; ``call``: what a node calls, with which arguments."""
    parts = list(_cut(nodes))
    kinds: dict[tuple[int, ...], list[_Kind]] = {}  # by the identities of the first one's operators
    starts = list(accumulate(map(len, parts), initial=0))[:-1]
    found: list[tuple[_Kind, list[fx.Node]] | None] = []
    for part, start in zip(parts, starts, strict=True):
        if len(part) <= SHORT:
            found.append(None)
            continue
        alike = kinds.setdefault(tuple([id(node.target) for node in part]), [])
        for kind in alike:
            if (values := kind.values_of(part, start)) is not None:
                break
        else:
            kind = _Kind(part, start, ends, call)
            alike.append(kind)
            values = kind.values
        kind.count += 1
        found.append((kind, values))
    numbers: dict[_Kind, int] = {}
    return [
        one[0].stretch(part, start, one[1], numbers.setdefault(one[0], len(numbers)))
        if one is not None and one[0].count > 1
        else Stretch(part, start)
        for part, start, one in zip(parts, starts, found, strict=True)
    ]


def _cut(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """The nodes in order, cut where another block or phase begins, and around collectives."""
    found: list[fx.Node] = []
    before: object = None
    known: object = None  # the key of the place: most nodes have the same key as the node before
    place: object = None
    kinds: dict[int, tuple[bool, bool]] = {}  # by the operator's identity: whether it is a collective, or a wait, too
    for node in nodes:
        target, meta = node.target, node.meta
        if (kind := kinds.get(id(target))) is None:
            kind = kinds[id(target)] = is_collective(node), is_collective(node) or is_wait(node)
        alone = kind[1]
        if target is getitem:
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            alone = kinds[id(source.target)][0] if id(source.target) in kinds else is_collective(source)
        where = meta.get("phase"), meta.get("mark"), meta.get("path")
        if where != known:
            known, place = where, (where[0], owner(node))
        if (alone or place != before) and found:
            yield found
            found = []
        found.append(node)
        before = None if alone else place
    if found:
        yield found


class _Kind:
    """Stretches that are alike, by the first of them."""

    def __init__(self, nodes: Sequence[fx.Node], start: int, ends: Mapping[fx.Node, int], call: Call) -> None:
        self._ends, self._call, self.count = ends, call, 0
        self._nodes = nodes
        self._calls = [self._asked(node) for node in nodes]
        self.values = self._same(nodes) or []
        self._lives = self._lives_of(self.values, start)
        own = len(nodes)  # these come first among the values; the values read follow
        taken = [place for place, life in enumerate(self._lives) if place >= own and life < own]
        lent = [place for place, life in enumerate(self._lives) if place >= own and life == own]
        returned = [place for place, life in enumerate(self._lives) if place < own and life == own]
        self._places = taken, lent, returned

    def _asked(self, node: fx.Node) -> tuple[Any, list[tuple[Any, Any, bool, bool]], Mapping[str, Any], bool]:
        """What the node calls, and its arguments, each with how it is compared: its kind, whether it is a literal, and
        whether it is integers; the keyword arguments; and whether the call is the node's own target for all
        arguments."""
        target, args = self._call(node)
        plain = target is node.target and not (is_collective(node) or may_be_random(node))
        return target, [(one, type(one), type(one) in LITERAL, _is_ints(one)) for one in args], node.kwargs, plain

    def values_of(self, nodes: Sequence[fx.Node], start: int) -> list[fx.Node] | None:
        """What the nodes compute and read, in the order of the first stretch; None where they are not alike."""
        values = self._same(nodes)
        return values if values is not None and self._lives_of(values, start) == self._lives else None

    def stretch(self, nodes: Sequence[fx.Node], start: int, values: Sequence[fx.Node], number: int) -> Stretch:
        taken, lent, returned = ([values[place] for place in places] for places in self._places)
        return Stretch(nodes, start, number, taken, lent, returned)

    def _lives_of(self, values: Sequence[fx.Node], start: int) -> list[int]:
        """For each value, the node of the stretch after which it is freed; the number of nodes, where that is later."""
        ends, end = self._ends, start + len(self._nodes)
        return [at - start if (at := ends[value]) < end else end - start for value in values]

    def _same(self, nodes: Sequence[fx.Node]) -> list[fx.Node] | None:
        same = dict(zip(self._nodes, nodes, strict=True))
        find = same.setdefault
        given: Sequence[Any]
        for node, given, others, (target, args, kwargs, plain) in zip(
            nodes, map(attrgetter("args"), nodes), map(attrgetter("kwargs"), nodes), self._calls, strict=True
        ):
            if not plain or node.target is not target:
                own, given = self._call(node)
                if own is not target:
                    return None
            if len(given) != len(args):
                return None
            for (one, kind, literal, ints), other in zip(args, given):
                if kind is not type(other):
                    return None
                if kind is fx.Node:
                    if find(one, other) is not other:
                        return None
                elif literal:
                    if one != other:
                        return None
                elif ints:
                    if not (INT.issuperset(map(type, other)) and one == other):
                        return None
                elif not _alike(one, other, same):
                    return None
            if (others or kwargs) and not _alike(kwargs, others, same):
                return None
        values = list(same.values())
        return values if len(set(values)) == len(values) else None


def _is_ints(value: Any) -> bool:
    return isinstance(value, list | tuple) and INT.issuperset(map(type, value))


def _alike(one: Any, other: Any, same: dict[fx.Node, fx.Node]) -> bool:
    """Whether two arguments are alike; ``same`` maps each node of the first to one node of the other throughout."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is fx.Node:
        return same.setdefault(one, other) is other
    if kind in LITERAL:
        return one == other  # type: ignore[no-any-return]
    if isinstance(one, list | tuple):
        if INT.issuperset(map(type, one)):
            return INT.issuperset(map(type, other)) and one == other  # type: ignore[no-any-return]
        return len(one) == len(other) and all(_alike(*pair, same) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_alike(one[key], other[key], same) for key in one)
    if kind is slice:
        return all(_alike(getattr(one, name), getattr(other, name), same) for name in ("start", "stop", "step"))
    return one is other or (kind in (float, torch.device) and str(one) == str(other))
