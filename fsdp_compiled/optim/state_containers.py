"""Opens containers in an optimizer's state: each value in them gets a name of its own.

    state["momentum_buffer"] = {0.9: a, 0.99: b}        momentum_buffer_0_9: a, momentum_buffer_0_99: b

Containers are dictionaries, lists, tuples and deques, also inside one another. If a container does not keep its form
from step to step, the optimizer is not traced.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


def is_container(value: Any) -> bool:
    """Whether it is a container that can be looked into, and made again."""
    return type(value) in (dict, OrderedDict, defaultdict, list, tuple, deque)


def named_leaves(name: str, value: Any) -> dict[str, Any]:
    """The values in the container of this name, in order; a value that is no container has its own name."""
    if not is_container(value):
        return {name: value}
    found: dict[str, Any] = {}
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        place = re.sub(r"\W+", "_", pytree.keystr(path)).strip("_")
        label = f"{name}_{place}"
        while label in found:  # -1 and 1, for one
            label += "_"
        found[label] = leaf
    return found


def all_leaves(state: Mapping[Any, Any]) -> dict[str, Any]:
    """What a parameter's state holds, by name."""
    return {label: leaf for name, value in state.items() for label, leaf in named_leaves(str(name), value).items()}


def copied(value: Any) -> Any:
    """The value with copies of its tensors, in containers of its own."""
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.copy(leaf), value
    )
