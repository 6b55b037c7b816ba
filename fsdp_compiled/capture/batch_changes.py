"""What forward changes in the containers of the batch: ``labels = batch.pop("labels")``, ``log.append(loss)``.

    batch = {"x": x, "y": y}; sharded.step(batch)          forward: y = batch.pop("y")

A trace gets copies of the containers, and records what each one holds at the end. In the user's own training loop these
contents are a result of the program, and each call writes them to the caller's containers (`leave`). Under
compile_sharded the caller's containers stay as they are, and a warning says so once. All code here except `leave` runs
under Dynamo: plain loops over lists and dictionaries.
"""

from __future__ import annotations

from typing import Any

Contents = list[tuple[str, Any, list[Any], list[Any]]]  # path, container, its keys, its values


def contents(args: Any, kwargs: Any) -> Contents:
    """The lists and dictionaries in a batch, with what they hold now. ``kwargs`` itself is left out: each call makes
    it anew."""
    found: Contents = []
    for place, value in enumerate(args):
        _add(f"[{place}]", value, found)
    for name in kwargs:
        _add(f"['{name}']", kwargs[name], found)
    return found


def _add(path: str, value: Any, found: Contents) -> None:
    if isinstance(value, dict):
        found.append((path, value, list(value.keys()), list(value.values())))
        for key in value:
            _add(f"{path}[{key!r}]", value[key], found)
    elif isinstance(value, (list, tuple)):
        if isinstance(value, list):
            found.append((path, value, list(range(len(value))), list(value)))
        for place, inner in enumerate(value):
            _add(f"{path}[{place}]", inner, found)


def left(before: Contents) -> list[tuple[int, list[Any], list[int], list[Any]]]:
    """One entry for each container that changed: its place in ``before``, its keys now, for each value its place among
    the old values (-1 if it is new), and the new values."""
    found = []
    for number, (_, container, keys, values) in enumerate(before):
        now = list(container.keys()) if isinstance(container, dict) else list(range(len(container)))
        others = list(container.values()) if isinstance(container, dict) else list(container)
        same = now == keys
        if same:
            for old, new in zip(values, others, strict=True):
                if old is not new:
                    same = False
                    break
        if not same:
            places = [_place_among(new, values) for new in others]
            found.append((number, now, places, [new for new, place in zip(others, places, strict=True) if place < 0]))
    return found


def _place_among(value: Any, values: list[Any]) -> int:
    for place, one in enumerate(values):
        if one is value:
            return place
    return -1


def leave(before: Contents, changes: list[tuple[int, list[Any], list[int], list[Any]]]) -> None:
    """Writes to the caller's own containers what a call of the program left in the copies."""
    for number, keys, places, new in changes:
        _, container, _, values = before[number]
        fresh = iter(new)
        now = [values[place] if place >= 0 else next(fresh) for place in places]
        if isinstance(container, dict):
            container.clear()
            container.update(zip(keys, now, strict=True))
        else:
            container[:] = now
