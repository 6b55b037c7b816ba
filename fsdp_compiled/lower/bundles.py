"""Values that go together from one kind of stretch to another, as one: a list that one makes and the other takes.

    def part_0(taken, weight):                 # of forward
     ...
     return [[mm, add, gelu], x]               # what backward of the same block takes for good, and what it does not
    def part_1(taken):                         # of backward
     [d_y, [mm, add, gelu]] = taken; taken.clear()

A block keeps some twenty values for backward. To name each of them where they are passed on takes Python longer, in
each layer, than all else that is written of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from torch import fx

from fsdp_compiled.lower.stretches import Bundle, Stretch, Value

Place = tuple[int, int]  # a stretch, or its kind, and the place among what it returns or takes


def bundled(parts: Sequence[Stretch], prefix: str) -> list[Stretch]:
    """The same, with bundles among what they return and take. Their names begin with ``prefix``."""
    apart: set[fx.Node] = set()  # what is read elsewhere, too
    for part in parts:
        if part.kind is not None:
            apart.update(part.lent)  # type: ignore[arg-type]
        else:
            for node in part.nodes:
                apart.update(node.all_input_nodes)
    makers = _where([part.returned for part in parts], apart)
    takers = _where([part.taken for part in parts], apart)
    made: list[dict[int, Bundle]] = [{} for _ in parts]  # by the kind that takes it
    taken: list[dict[int, Bundle]] = [{} for _ in parts]  # by the kind that made it
    for (kind, other), places in _pairs(parts, makers, takers).items():
        for number, part in enumerate(parts):
            if part.kind == kind:
                nodes = [part.returned[place] for place in places]
                bundle = Bundle(f"{prefix}{number}_{other}", nodes)  # type: ignore[arg-type]
                made[number][other] = taken[takers[nodes[0]][0]][kind] = bundle
    return [
        replace(part, returned=_with(part.returned, given), taken=_with(part.taken, got)) if given or got else part
        for part, given, got in zip(parts, made, taken, strict=True)
    ]


def _where(values: Sequence[Sequence[Value]], apart: Container[Value]) -> dict[Value, Place]:
    """Of each value, the number of the stretch and its place there."""
    return {
        value: (number, place)
        for number, row in enumerate(values)
        for place, value in enumerate(row)
        if value not in apart
    }


def _pairs(
    parts: Sequence[Stretch], makers: Mapping[Value, Place], takers: Mapping[Value, Place]
) -> dict[tuple[int, int], list[int]]:
    """By two kinds, the places of what the first returns and the second takes, in all stretches of both."""

    def links(values: Sequence[Value], others: Mapping[Value, Place]) -> list[Place | None]:
        found = [others.get(value) for value in values]
        return [(parts[one[0]].kind, one[1]) if one is not None else None for one in found]  # type: ignore[misc]

    given: dict[int, list[Place | None]] = {}
    taken: dict[int, list[Place | None]] = {}
    for part in parts:
        if part.kind is not None:
            for known, own in ((given, links(part.returned, takers)), (taken, links(part.taken, makers))):
                before = known.setdefault(part.kind, own)
                if before != own:
                    known[part.kind] = [one if one == other else None for one, other in zip(before, own, strict=True)]
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for kind, row in given.items():
        for place, link in enumerate(row):
            if link is not None and taken[link[0]][link[1]] == (kind, place):
                found[kind, link[0]].append(place)
    whole = {
        kinds: all(
            len({takers[part.returned[place]][0] for place in places}) == 1 for part in parts if part.kind == kinds[0]
        )
        for kinds, places in found.items()
    }
    return {kinds: places for kinds, places in found.items() if whole[kinds] and len(places) > 1}


def _with(values: Sequence[Value], bundles: Mapping[int, Bundle]) -> list[Value]:
    """The bundles, in the order of the kinds that they go to or come from, and what is in none."""
    inside = {node for bundle in bundles.values() for node in bundle.nodes}
    return [*(bundles[kind] for kind in sorted(bundles)), *(value for value in values if value not in inside)]
