"""Plain values, as in a `state_dict`, to JSON and back, with their tensors beside. Nothing is ever unpickled.

{"lr": 0.1, "seen": {3}, "best": tensor}  ->  {"lr": 0.1, "seen": {"$set": [3]}, "best": {"$tensor": "x:best"}}
                                              and {"x:best": tensor}
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
import xxhash

from fsdp_compiled.runtime.checkpoint.data_file import memory_of

Tensors = dict[str, torch.Tensor]


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


LEAVES: dict[Any, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {  # tag, to JSON, from JSON
    float: ("$float", str, float),  # those that JSON has not
    bytes: ("$bytes", _base64, base64.b64decode),
    bytearray: ("$bytearray", _base64, lambda text: bytearray(base64.b64decode(text))),
    complex: ("$complex", lambda value: [str(value.real), str(value.imag)], lambda two: complex(*map(float, two))),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch."), lambda name: getattr(torch, name)),
    torch.device: ("$device", str, torch.device),
}  # fmt: skip
SEQUENCES: dict[Any, str] = {
    tuple: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
    deque: "$deque",
    torch.Size: "$size",
}
MAPS: dict[Any, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter", defaultdict: "$dict"}
OF_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "$tensor": lambda tensor: tensor,
    "$numpy": lambda tensor: tensor.numpy(),
    "$numpy_scalar": lambda tensor: tensor.numpy()[()],
}
# What makes values of their parts. A defaultdict comes back as an ordinary dictionary, since what makes its defaults is
# code.
MADE: dict[str, Callable[[list[Any]], Any]] = {tag: kind for kind, tag in SEQUENCES.items()} | {
    "$dict": dict, "$ordered": OrderedDict, "$counter": lambda pairs: Counter(dict(pairs)),
    "$bounded": lambda parts: deque(parts[1], parts[0]),
}  # fmt: skip
READ = {tag: read for tag, _, read in LEAVES.values()}


def encode(value: Any, name: str, tensors: Tensors, where: str = "") -> Any:
    """The value as JSON; its tensors are copied to the host into ``tensors``, by ``"<name>:<where>"``.

    Raises ``ValueError``, with the place in the value, for what is neither a tensor nor plain data.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind in LEAVES:
        tag, write, _ = LEAVES[kind]
        return {tag: write(value)}
    if kind is list or kind in SEQUENCES:
        items = sorted(value, key=repr) if kind in (set, frozenset) else value  # an order that every rank has
        found = [encode(one, name, tensors, f"{where}[{index}]") for index, one in enumerate(items)]
        if kind is deque and value.maxlen is not None:
            return {"$bounded": [value.maxlen, found]}
        return found if kind is list else {SEQUENCES[kind]: found}
    if kind in MAPS:
        parts = {key: encode(one, name, tensors, f"{where}.{key}") for key, one in value.items()}
        if kind in (dict, defaultdict) and all(type(key) is str and not key.startswith("$") for key in value):
            return parts
        return {MAPS[kind]: [[encode(key, name, tensors, f"{where}.{key} (key)"), one] for key, one in parts.items()]}
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta:
        return {"$tensor": _stored(value, name, where, tensors)}
    if kind.__module__ == "numpy" and kind.__name__ != "matrix" and hasattr(value, "dtype"):
        with suppress(TypeError):  # torch takes neither negative strides nor another byte order
            array = torch.as_tensor(value.astype(value.dtype.newbyteorder("="), order="C"))
            tag = "$numpy" if kind.__name__ == "ndarray" else "$numpy_scalar"
            return {tag: _stored(array, name, where, tensors)}
    raise ValueError(
        f"{name}{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: tensors, numbers, "
        "strings, bytes, lists, tuples, sets, dictionaries and None are written, and nothing is ever unpickled. Give a "
        "state_dict() that says the same in those."
    )


def _stored(value: torch.Tensor, name: str, where: str, tensors: Tensors) -> str:
    key = f"{name}:{where.lstrip('.')}" if where else name
    while key in tensors:
        key += "'"
    tensors[key] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return key


def renamed(tree: Any, rename: Callable[[str], str]) -> Any:
    """The JSON with its tensors renamed."""
    if isinstance(tree, dict):
        if len(tree) == 1 and next(iter(tree)) in OF_TENSORS:
            return {key: rename(name) for key, name in tree.items()}
        return {key: renamed(one, rename) for key, one in tree.items()}
    return [renamed(one, rename) for one in tree] if isinstance(tree, list) else tree


def tensor_names(tree: Any) -> list[str]:
    """The tensors that the JSON speaks of."""
    found: list[str] = []
    renamed(tree, lambda name: (found.append(name), name)[1])  # type: ignore[func-returns-value]
    return found


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that the JSON and these tensors represent."""
    if isinstance(tree, list):
        return [decode(one, tensors) for one in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if len(tree) != 1 or not tag.startswith("$"):
        return {key: decode(one, tensors) for key, one in tree.items()}
    if tag in OF_TENSORS:
        return OF_TENSORS[tag](tensors[tree[tag]])
    if tag in READ:
        return READ[tag](tree[tag])
    if tag in MADE:
        return MADE[tag](decode(tree[tag], tensors))
    raise ValueError(f"{tag} is no kind of value that this version knows.")


def digest(tree: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """Equal where two ranks have equal values, bit for bit."""
    found = xxhash.xxh3_128(json.dumps(tree, sort_keys=True).encode())
    for name in tensor_names(tree):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(memory_of(tensor))
    return found.hexdigest()
