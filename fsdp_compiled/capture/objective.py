"""The function that is traced: the user's loss on the model, what is taken of its result, and what of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.tensor_parallel import own_part, whole


class Objective(nn.Module):
    """Calls the user's loss on the model, as one module that Dynamo traces."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.cached: list[Any] = []  # what functions under `lru_cache` return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs) if self.loss is None else self.loss(self.model, *args, **kwargs)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Past the hooks of all modules, which are for the user's: this one is no module of theirs."""
        return self.forward(*args, **kwargs)


def find_loss(result: Any, first: bool) -> Any:
    """The loss in what was returned: itself, ``.loss``, ``["loss"]`` or, of a model, the ``first`` of a tuple."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, Mapping) and "loss" in result:
        return result["loss"]
    if getattr(result, "loss", None) is not None:
        return result.loss
    return result[0] if first and isinstance(result, tuple | list) and result else result


def own(value: Any) -> Any:
    """Copies of the tensors, so that no output shares memory with an input or another output."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: whole(tensor).detach().clone(), value)


def apart_from_others(value: Any) -> Any:
    """The same without `detach`: what is made of it is differentiated outside. Of a DTensor, this rank's part."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: own_part(tensor).clone(), value)


def apart(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The same tensors as nodes of the trace: `requires_grad_` is traced for those alone, not for its inputs.

    One tensor that is given twice stays one, so that ``x is y`` is what it is in eager PyTorch.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    apart: list[Any] = []
    for place, leaf in enumerate(leaves):
        first = next((other for other in range(place) if leaves[other] is leaf), None)
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.requires_grad:
            apart.append(leaf)
        else:
            apart.append(apart[first] if first is not None else leaf.detach())
    return pytree.tree_unflatten(apart, spec)
