"""Refuses models with tensors that share memory in a way that a program could not keep.

In eager PyTorch a write to one tensor is a write to the other. In a program each is a separate value, and parameters
move into shards. So nothing may share memory with a parameter, except ordinary ties (one object under two names).
Forward may not write to buffers and closed-over tensors that share memory, with each other or with the batch. Parts of
one storage that do not overlap, such as cuDNN's flat weights, share nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from fsdp_compiled.capture.aot import CaptureError

OTHERS = frozenset((bool, int, float, str, type(None), OrderedDict))  # no tensors, and not searched for tensors
OWN = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))  # every module's


def check_shared_memory(modules: Iterable[tuple[str, nn.Module]], named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raises ``ValueError`` if a buffer, an attribute or another parameter shares memory with a parameter.

    ``modules``: the model's, by name; ``named``: its parameters, tied ones under each of their names.
    """
    own: set[int] = set()
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in named:
        if id(parameter) in own:
            continue
        own.add(id(parameter))
        known = by_storage.setdefault(storage(parameter), [])
        for other, tensor in known:
            if (parameter.requires_grad or tensor.requires_grad) and overlap(parameter, tensor):
                raise ValueError(
                    f"{name} and {other} are two parameters that share memory, as `.data` ties them: each would get "
                    f"shards of its own, and they would part. Tie them as one parameter, {name} = {other}, before "
                    "the optimizer is built."
                )
        known.append((name, parameter))
    for path, module in modules:
        # Their hooks compute the weight anew in each forward.
        computed = {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)}
        for name, tensor in _tensors(module):
            if id(tensor) in own or name in computed:
                continue
            for parameter_name, parameter in by_storage.get(storage(tensor), ()):
                written = parameter.requires_grad or name in module._buffers
                if written and overlap(tensor, parameter):
                    where = f"{path}.{name}".lstrip(".")
                    raise ValueError(
                        f"{where} shares memory with the parameter {parameter_name}, whose values move into shards: it "
                        "would not follow the training. Compute it in forward from the parameter, or give it memory of "
                        "its own: tensor.clone()."
                    )


def check_written(written: Iterable[str], held: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor] = ()) -> None:
    """Raises `CaptureError` where forward writes to memory that another of its inputs shares.

    ``written``: the names of what it writes; ``held``: the buffers and the closed-over tensors, by name.
    """
    places, given = list(map(storage, held.values())), set(map(storage, batch))
    if len(given.union(places)) == len(given) + len(places):  # each has a storage of its own, as usual
        return
    others: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for place, one in zip(places, held.items(), strict=True):
        others.setdefault(place, []).append(one)
    for name in written:
        if (tensor := held.get(name)) is None:
            continue
        place = storage(tensor)
        other = next((two for two, one in others[place] if one is not tensor and overlap(one, tensor)), None)
        if place in given and any(storage(one) == place and overlap(one, tensor) for one in batch):
            other = "a tensor of the batch"
        if other is not None:
            raise CaptureError(
                f"Forward writes to {name}, which shares memory with {other}: a program has two values there, "
                "and the other would not follow. Give each memory of its own: tensor.clone()."
            )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and tensors in attributes and in lists, tuples and dictionaries there."""
    yield from ((name, tensor) for name, tensor in module._buffers.items() if tensor is not None)
    for name, value in vars(module).items():
        if type(value) not in OTHERS and name not in OWN:
            yield from _inside(name, value, 3)


def _inside(name: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, list | tuple):
        for place, entry in enumerate(value):
            yield from _inside(f"{name}[{place}]", entry, depth - 1)
    elif depth and type(value) is dict:
        for key, entry in value.items():
            yield from _inside(f"{name}[{key!r}]", entry, depth - 1)


def storage(tensor: torch.Tensor) -> int:
    """Equal for tensors on one storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # it has none
        return -id(tensor)


def overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors on one storage have an element in common."""
    if not one.numel() or not two.numel():
        return False
    spans = [_span(tensor) for tensor in (one, two)]
    if spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]:
        return False
    if one.element_size() != two.element_size() or all(tensor.is_contiguous() for tensor in (one, two)):
        return True
    start, end = min(span[0] for span in spans), max(span[1] for span in spans)
    marks = torch.zeros((end - start) // one.element_size(), dtype=torch.uint8, device="cpu")
    for tensor in (one, two):
        place = tensor.storage_offset() - start // one.element_size()
        marks.as_strided(tensor.shape, tensor.stride(), place).bitwise_or_(1 if tensor is one else 2)
    return bool((marks == 3).any())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that it lies in: the first, and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset()
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()
