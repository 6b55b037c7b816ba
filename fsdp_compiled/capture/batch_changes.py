"""What forward changes in the containers of the batch: ``labels = batch.pop("labels")``, ``log.append(loss)``.

    batch = {"x": x, "y": y}; sharded.step(batch)          forward: y = batch.pop("y")

A trace is given copies of the containers, so the caller's own stay as they are. That is noted while the function is
traced, container by container, and said once; what a loop of the user's would read there is refused. What is here runs
under Dynamo: plain loops over lists and dictionaries.
"""

from __future__ import annotations

from typing import Any

import torch

Contents = list[tuple[str, Any, list[Any], list[Any]]]  # path, container, its keys, its values


def contents(args: Any, kwargs: Any) -> Contents:
    """The lists and dictionaries in a batch, with what they hold now; that of its names is made for the call."""
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


def changed(before: Contents) -> list[str]:
    """The paths of those that hold something else now."""
    found = []
    for path, container, keys, values in before:
        if isinstance(container, dict):
            now, others = list(container.keys()), list(container.values())
        else:
            now, others = list(range(len(container))), list(container)
        if now != keys:
            found.append(path)
        else:
            for old, new in zip(values, others, strict=True):
                if not isinstance(new, (dict, list, tuple)) and old is not new:
                    found.append(path)
                    break
    return found


def given(before: Contents) -> list[str]:
    """The paths of those that hold new tensors, for whoever reads them after the call: lists, and dictionaries that
    held none."""
    found = []
    for path, container, _, values in before:
        if isinstance(container, dict) and _tensors(values):
            continue
        others = list(container.values()) if isinstance(container, dict) else list(container)
        for place, new in enumerate(others):
            if not isinstance(new, (dict, list, tuple)):
                fresh = isinstance(new, torch.Tensor) and not _is_among(new, values)
            elif place < len(values) and isinstance(values[place], (dict, list, tuple)):
                fresh = False  # its own change is found
            else:
                fresh = _tensors(new)
            if fresh:
                found.append(path)
                break
    return found


def _is_among(value: Any, values: list[Any]) -> bool:
    for one in values:  # noqa: SIM110
        if one is value:
            return True
    return False


def _tensors(value: Any) -> bool:
    """Whether there are tensors in a container."""
    for inner in value.values() if isinstance(value, dict) else value:
        if _tensors(inner) if isinstance(inner, (dict, list, tuple)) else isinstance(inner, torch.Tensor):
            return True
    return False
