"""What a batch holds besides tensors: containers that forward changes, dataclasses, and arrays of numpy.

**Containers that forward changes**: ``labels = batch.pop("labels")``, ``log.append(loss)``.

    batch = {"x": x, "y": y}; sharded.step(batch)          forward: y = batch.pop("y")

A trace gets copies of the containers, and records what each one holds at the end (`left`). In the user's own training
loop these contents are a result of the program, and each call writes them to the caller's containers (`leave`). Under
compile_sharded the caller's containers stay as they are, and a warning says so once.

**Arguments that a program cannot take as they are**, in a loop of the user's own: dataclasses and arrays of numpy.

    model(Batch(tokens, 0.5), array)          called with these
    closed(args)                              Closed(Batch, (tokens, 0.5)), Closed(Array, (tensor over its memory,))
    opened(args)                              in the trace: a Batch again, and an array

pytree opens `Closed`: the tensors inside are inputs of the program, and all else is in the program's key. A program
gets a copy of such an argument, so the caller would not see changes that forward makes to it; they are refused.

`contents`, `left`, `opened` and `check_unchanged` run under Dynamo: plain loops over lists and dictionaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

Contents = list[tuple[str, Any, list[Any], list[Any]]]  # path, container, its keys, its values
PLAIN_DTYPES = "biufc"  # the kinds of numpy dtypes that tensors have, too


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


class Array:
    """Stands for the class of numpy's arrays, which need not be installed."""


class Closed:
    """An argument of class ``kind`` and its contents. ``names``: the attributes' names, if it is a dataclass."""

    def __init__(self, kind: type, names: tuple[str, ...], values: Iterable[Any]) -> None:
        self.kind, self.names, self.values = kind, names, list(values)


def _flatten(one: Closed) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return one.values, (one.kind, one.names)


def _unflatten(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Closed:
    return Closed(context[0], context[1], values)


def _with_keys(one: Closed) -> tuple[list[tuple[Any, Any]], tuple[type, tuple[str, ...]]]:
    names = one.names or ("array",)
    return [(pytree.GetAttrKey(name), value) for name, value in zip(names, one.values, strict=True)], _flatten(one)[1]


pytree.register_pytree_node(Closed, _flatten, _unflatten, flatten_with_keys_fn=_with_keys)


def closed(value: Any) -> Any:
    """The same arguments with `Closed` in the place of dataclasses and arrays. It looks inside lists, tuples and
    dictionaries alone."""
    if type(value) in (list, tuple):
        return type(value)(map(closed, value))
    if type(value) is dict:
        return {key: closed(one) for key, one in value.items()}
    kind = type(value)
    if (kind.__module__, kind.__qualname__) == ("numpy", "ndarray") and value.dtype.kind in PLAIN_DTYPES:
        usual = value.flags.writeable and all(stride >= 0 for stride in value.strides)
        return Closed(Array, (), [torch.from_numpy(value if usual else value.copy())])
    if is_dataclass(value):
        names = tuple(vars(value))
        return Closed(type(value), names, [closed(getattr(value, name)) for name in names])
    return value


def is_dataclass(value: Any) -> bool:
    """Whether it is a dataclass with a ``__dict__``, no tensor, module or container, that pytree does not know."""
    kind = type(value)
    return (
        dataclasses.is_dataclass(kind)
        and hasattr(value, "__dict__")
        and not isinstance(value, torch.Tensor | torch.nn.Module | dict | list | tuple)
        and kind not in pytree.SUPPORTED_NODES
    )


def opened(value: Any, made: list[tuple[Any, list[Any]]]) -> Any:
    """The original arguments again; traced. Adds each new container to ``made``, with its contents."""
    if isinstance(value, Closed):
        inner = [opened(one, made) for one in value.values]
        if value.kind is Array:
            return inner[0].numpy()
        found: Any = object.__new__(value.kind)
        for name, one in zip(value.names, inner, strict=True):
            object.__setattr__(found, name, one)
        made.append((found, inner))
        return found
    if type(value) in (list, tuple):
        inner = [opened(one, made) for one in value]
        if all(one is other for one, other in zip(inner, value, strict=True)):
            return value
        if type(value) is tuple:
            return tuple(inner)
        made.append((inner, list(inner)))
        return inner
    if type(value) is dict:
        entries = {key: opened(one, made) for key, one in value.items()}
        if all(entries[key] is one for key, one in value.items()):
            return value
        made.append((entries, list(entries.values())))
        return entries
    return value


def check_unchanged(made: list[tuple[Any, list[Any]]]) -> None:
    """Raises ``ValueError`` where forward put something else into an argument; traced."""
    for container, before in made:
        if isinstance(container, list):
            now = container
        else:
            now = list(container.values()) if isinstance(container, dict) else list(vars(container).values())
        if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
            raise ValueError(
                f"Forward changes its argument, a {type(container).__name__}, which the loop would not see: a program "
                "is given a copy. Return what is new."
            )
