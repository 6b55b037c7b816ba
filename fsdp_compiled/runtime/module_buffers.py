"""Follows the model's buffers: if the user replaces one in a module, the next call reads the new tensor.

    model.norm.running_mean = torch.zeros(8)        # the state's "norm.running_mean" is that tensor from the next call
    model.norm = other                              # and so it is where the module was replaced, or moved

The state holds the tensors that programs read and write; the modules hold the same tensors. A user who replaces a
module's tensor (by assignment, `register_buffer` or `setattr`) means the state's too. Calls compare them, and the
modules that lead to them, by identity.
"""

from __future__ import annotations

import hashlib
from operator import is_
from typing import Any

import torch
from torch import nn

from fsdp_compiled.plan.leaf import check_class


class ModuleBuffers:
    """The places of the model's buffers, and the tensors that were there at the last call."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._seen: dict[str, torch.Tensor | None] = {}  # by name
        self._untaken: dict[str, torch.Tensor | None] = {}  # of these, what no state has yet; None: a deleted buffer
        self._tables: list[dict[str, Any]] = []  # of the buffers, and of the modules that lead to them
        self._keys: list[str] = []
        self._held: list[Any] = []
        self.scan()
        self.first, self._untaken = self.layout, {}

    def scan(self) -> None:
        """Looks for buffers that were registered, replaced or deleted."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        places = [
            (f"{path}.{name}".lstrip("."), module._buffers, name)
            for path, module in modules.items()
            for name in module._buffers
        ]
        ways = [path.split(".") for path, module in modules.items() if path and module._buffers]
        leading = {tuple(way[:end]) for way in ways for end in range(1, len(way) + 1)}
        now = {place[0]: self._own(*place) for place in places}
        self._untaken |= {name: tensor for name, tensor in now.items() if self._seen.get(name) is not tensor}
        self._untaken |= dict.fromkeys(self._seen.keys() - now.keys())
        self._tables = [table for _, table, _ in places] + [modules[".".join(way[:-1])]._modules for way in leading]
        self._keys = [key for _, _, key in places] + [way[-1] for way in leading]
        self._held = [*now.values(), *(modules[".".join(way)] for way in leading)]
        self._seen = now
        self.layout = self._layout()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The buffers by name."""
        return {name: one for name, one in self._seen.items() if one is not None}

    def look(self) -> None:
        """Looks for buffers that are not the same tensors as at the last call."""
        if not all(map(is_, map(dict.get, self._tables, self._keys), self._held)):
            self.scan()

    def take(self, *holders: dict[str, torch.Tensor]) -> None:
        """Puts buffers that were replaced into these dictionaries too."""
        self.look()
        for holder in holders:
            for name, tensor in self._untaken.items():
                holder.pop(name, None) if tensor is None else holder.update({name: tensor})
        self._untaken = {}

    def _own(self, name: str, holder: dict[str, Any], key: str) -> torch.Tensor | None:
        """The buffer's tensor, in a form that a program can write to."""
        tensor = holder[key]
        if tensor is None:
            return None
        check_class(f"The buffer {name}", tensor, parameter=False)
        if tensor.device != self._device:
            raise ValueError(
                f"The buffer {name} was replaced by a tensor on {tensor.device}, but the model's shards are on "
                f"{self._device}. Move it: tensor.to({str(self._device)!r})."
            )
        if tensor.requires_grad:
            raise ValueError(
                f"The buffer {name} was replaced by a tensor that requires a gradient, which no program gives it. "
                "Detach it: tensor.detach()."
            )
        if not tensor.is_contiguous():
            holder[key] = tensor = tensor.clone(memory_format=torch.contiguous_format)
        return tensor

    def _layout(self) -> str:
        """A digest that is equal if programs that read these buffers are the same."""
        first: dict[int, int] = {}
        said = [
            (
                name,
                None if tensor is None else (tuple(tensor.shape), str(tensor.dtype), first.setdefault(id(tensor), i)),
            )
            for i, (name, tensor) in enumerate(self._seen.items())
        ]
        return hashlib.sha256(repr(said).encode()).hexdigest()[:8]
