"""Follows the model's buffers: if the user replaces one in a module, the next call reads the new tensor.

    model.norm.running_mean = torch.zeros(8)        # the state's "norm.running_mean" is that tensor from the next call

The state holds the tensors that programs read and write; the modules hold the same tensors. A user who replaces a
module's tensor (by assignment, `register_buffer` or `setattr`) means the state's too. Calls compare them by identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import nn

from fsdp_compiled.plan.leaf import check_class


def take(replaced: Mapping[str, torch.Tensor | None], *holders: dict[str, torch.Tensor]) -> None:
    """Puts buffers that the user replaced in the model's modules into the holders too; None: a deleted buffer."""
    for holder in holders:
        for name, tensor in replaced.items():
            holder.pop(name, None) if tensor is None else holder.update({name: tensor})


class ModuleBuffers:
    """The places of the model's buffers, and the tensors that were there at the last call."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._names: list[str] = []
        self._holders: list[dict[str, torch.Tensor | None]] = []
        self._keys: list[str] = []
        self._seen: list[torch.Tensor | None] = []
        self.scan()
        self.first = self.layout

    def scan(self) -> dict[str, torch.Tensor | None]:
        """Looks for buffers that were registered, replaced or deleted. Returns them by name, None for a deleted one."""
        before = dict(zip(self._names, self._seen, strict=True))
        places = [
            (f"{path}.{name}".lstrip("."), module._buffers, name)
            for path, module in self._model.named_modules(remove_duplicate=False)
            for name in module._buffers
        ]
        self._names = [name for name, _, _ in places]
        self._holders = [holder for _, holder, _ in places]
        self._keys = [key for _, _, key in places]
        self._seen = [self._own(*place) for place in places]
        self.layout = self._layout()
        now = dict(zip(self._names, self._seen, strict=True))
        found = {name: tensor for name, tensor in now.items() if before.get(name) is not tensor}
        return found | dict.fromkeys(before.keys() - now.keys())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The buffers by name."""
        return {name: one for name, one in zip(self._names, self._seen, strict=True) if one is not None}

    def replaced(self) -> Mapping[str, torch.Tensor | None]:
        """The buffers that are not the same tensors as at the last call."""
        now = map(dict.get, self._holders, self._keys)
        return {} if all(map(is_, now, self._seen)) else self.scan()

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
            for i, (name, tensor) in enumerate(zip(self._names, self._seen, strict=True))
        ]
        return hashlib.sha256(repr(said).encode()).hexdigest()[:8]
