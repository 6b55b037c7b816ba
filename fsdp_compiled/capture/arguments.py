"""Whether the loss, or the model, takes the arguments that it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def check_arguments(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    batch: tuple[Any, ...],
    named: Mapping[str, Any],
    method: str = "forward",
) -> None:
    """Raises ``ValueError`` that says what is expected and what was given. ``method``: of the model, what is called.

    A model whose hooks may change its arguments, and a function without a signature, are not checked.
    """
    called: Any = model if loss is None else loss
    name = f"{type(model).__name__}.{method}" if loss is None else f"the loss, {getattr(loss, '__name__', 'loss')}"
    if isinstance(called, nn.Module):
        if called._forward_pre_hooks and method == "forward":
            return
        called = getattr(called, method)
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*(() if loss is None else (model,)), *batch, **named)
    except TypeError as error:
        plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
        takes = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
        given = [*["model"] * (loss is not None), *map(_text, batch), *(f"{key}={_text(named[key])}" for key in named)]
        raise ValueError(
            f"{name} does not take this batch: {error}.\n  Expected: {takes}\n  Got:      ({', '.join(given)})\n"
            "  Pass to the call what the function takes, in its order or by name."
        ) from None


def _text(value: Any) -> str:
    """``float32[4, 8]`` for a tensor, also inside a structure."""

    def one(leaf: Any) -> Any:
        return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else leaf

    return str(pytree.tree_map(one, value)).replace("'", "")
