"""Opens arguments of forward that a program cannot take as they are: dataclasses and arrays of numpy.

    model(Batch(tokens, 0.5), array)          called with these
    closed(args)                              Closed(Batch, (tokens, 0.5)), Closed(ndarray, (tensor over its memory,))
    opened(args)                              in the trace: a Batch again, and an array

pytree opens `Closed`: the tensors inside are inputs of the program, and all else is in the program's key. A program
gets a copy of such an argument, so the caller would not see changes that forward makes to it; they are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

PLAIN_DTYPES = "biufc"  # the kinds of numpy dtypes that tensors have, too


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
    if isinstance(value, np.ndarray) and type(value) is np.ndarray and value.dtype.kind in PLAIN_DTYPES:
        usual = value.flags.writeable and all(stride >= 0 for stride in value.strides)
        return Closed(np.ndarray, (), [torch.from_numpy(value if usual else value.copy())])
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
        if value.kind is np.ndarray:
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
