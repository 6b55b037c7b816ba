"""A call of a model that nobody has given a batch for yet: on the meta device, with tokens or features of our own.

`Policy(tp="auto")` derives its plan before the first batch is there. A copy of the model on the meta device is called
as the loss would call it, with guessed inputs, and the calls of its blocks are recorded: shapes and dtypes, no numbers.
The model itself is never called, so nothing that it does in forward is done to it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

ROWS, TIME = 3, 5  # sizes that no number of heads or ranks is likely to be


@dataclass(frozen=True)
class Call:
    """Arguments of a module's forward; tensors are on the meta device."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def key(self) -> tuple[Any, ...]:
        """Equal for calls whose tensors have the same shapes and dtypes, and which are the same otherwise."""
        leaves, tree = pytree.tree_flatten((self.args, self.kwargs))
        return str(tree), *(
            (tuple(one.shape), one.dtype, one.requires_grad) if isinstance(one, torch.Tensor) else repr(one)
            for one in leaves
        )


@dataclass(frozen=True)
class Example:
    """A way to call the model that works: through the loss, where there is one."""

    loss: Callable[..., Any] | None
    batch: tuple[torch.Tensor, ...]

    def run(self, model: nn.Module) -> None:
        """``model``: a copy on the meta device."""
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model(*self.batch) if self.loss is None else self.loss(model, *self.batch)


def copied(module: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the module in which each tensor that it or a module inside of it holds is another one."""
    memo: dict[int, Any] = {}
    for inner in module.modules():
        for holder in (inner._parameters, inner._buffers, inner.__dict__):
            for value in list(holder.values()):
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    memo[id(value)] = replacement(value)
    return copy.deepcopy(module, memo)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy without numbers; frozen parameters too can be differentiated, since they may be trained one day."""

    def empty(value: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(value.detach(), device="meta")
        return nn.Parameter(made, made.is_floating_point()) if isinstance(value, nn.Parameter) else made

    return copied(model, empty)  # type: ignore[no-any-return]


def find_example(model: nn.Module, loss: Callable[..., Any] | None) -> Example:
    """Raises ``ValueError`` where no call of ours works, with what the first one said."""
    first: Exception | None = None
    for batch in _batches(model, loss):
        example = Example(loss, batch)
        try:
            example.run(on_meta(model))
        except Exception as error:
            first = first or error
        else:
            return example
    what = "the loss" if loss is not None else type(model).__name__
    raise ValueError(
        f"it is derived from a call of the model on generated inputs, and {what} could not be called with any "
        f"(tokens or features, [{ROWS}, {TIME}] rows and positions). With the first: {type(first).__name__}: {first}"
    )


def record(model: nn.Module, example: Example, names: Sequence[str]) -> tuple[dict[str, Call], list[str]]:
    """The first call of each of these modules, and the names of all modules in the order of their first calls."""
    made = on_meta(model)
    found: dict[str, Call] = {}
    order: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in order:
                order.append(name)
            if name in names and name not in found:
                found[name] = Call(args, kwargs)

        return before

    for name, module in made.named_modules():
        module.register_forward_pre_hook(hook(name), with_kwargs=True)
    example.run(made)
    return found, order


def used_by_hand(model: nn.Module, example: Example, names: Sequence[str]) -> list[str]:
    """Of these modules (`nn.Linear`, `nn.Embedding`), those whose weights are read by others than their own forward."""

    def works(stubs: Sequence[str]) -> bool:
        made = on_meta(model)
        modules = dict(made.named_modules())
        for name in stubs:
            _stub(modules[name])
        try:
            example.run(made)
        except Exception:
            return False
        return True

    return [] if works(names) else [name for name in names if not works([name])]


def _stub(module: Any) -> None:
    """Gives results of the right shape; has no weights any more."""
    dtype = module.weight.dtype
    for name in list(module._parameters):
        del module._parameters[name]

    def forward(value: torch.Tensor) -> torch.Tensor:
        lead = value.shape[:-1] if isinstance(module, nn.Linear) else value.shape
        size = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
        return torch.empty((*lead, size), dtype=dtype, device="meta", requires_grad=True)

    module.forward = forward


def _batches(model: nn.Module, loss: Callable[..., Any] | None) -> Iterator[tuple[torch.Tensor, ...]]:
    """Guesses: tokens, or features of the width that the first layer takes; targets like them, or classes of rows."""
    linear = next((one for one in model.modules() if isinstance(one, nn.Linear)), None)
    tokens = torch.zeros(ROWS, TIME, dtype=torch.int64, device="meta")
    first = [tokens]
    if linear is not None:
        first += [torch.empty(ROWS, *time, linear.in_features, device="meta") for time in ((TIME,), ())]
    if not any(isinstance(one, nn.Embedding) for one in model.modules()):
        first = first[1:] + first[:1]
    for count in _counts(loss, 1) if loss is not None else _counts(model.forward, 0):
        for one in first:
            rest = [one] if count == 1 else [one, tokens, tokens[:, 0]]
            yield from ((one, *[other] * (count - 1)) for other in rest)


def _counts(function: Callable[..., Any], given: int) -> list[int]:
    """How many inputs the function may want: those that it must have, or one or two."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [2, 1]
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    must = sum(one.default is one.empty for one in positional) - given
    most = len(positional) - given
    return [must] if must > 0 else [count for count in (2, 1) if count <= most or len(positional) < len(parameters)]
