"""Several optimizers as one, each over parameters of its own: Muon for matrices, AdamW for the rest.

    compile_sharded(model, [muon, adamw], ...)

Their groups are one list, of the very dictionaries that schedulers of each write to; each keeps its class and rules.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer


class Together(Optimizer):
    """What several optimizers hold, to be read; each is asked by itself for everything else."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:  # not the base's, which makes groups of its own
        self.optimizers = tuple(optimizers)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        return ChainMap(*(one.state for one in self.optimizers))

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.optimizers))}]"


def members(optimizer: Optimizer | None) -> tuple[Optimizer, ...]:
    """The optimizers that it is."""
    if isinstance(optimizer, Together):
        return optimizer.optimizers
    return (optimizer,) if optimizer is not None else ()


def numbered(optimizer: Optimizer) -> Iterator[tuple[Optimizer, int]]:
    """Each of them, with the number of its first group among all."""
    first = 0
    for one in members(optimizer):
        yield one, first
        first += len(one.param_groups)


def together(optimizers: Iterable[Any]) -> Optimizer:
    """These as one. Raises ``ValueError`` where that cannot be: no optimizer, or two for one parameter."""
    found = list(optimizers)
    if not found or not all(isinstance(one, Optimizer) for one in found):
        kinds = ", ".join(type(one).__name__ for one in found)
        raise ValueError(f"optimizer is a list of [{kinds}]; expected torch.optim.Optimizers, at least one.")
    if len(found) == 1:
        return found[0]
    holders: dict[int, str] = {}
    for one in found:
        own = {id(parameter): parameter for group in one.param_groups for parameter in group["params"]}
        for key, parameter in own.items():
            if key in holders:
                raise ValueError(
                    f"{holders[key]} and {type(one).__name__} both hold a parameter of shape "
                    f"{list(parameter.shape)}: each would update it. Give every parameter to one optimizer."
                )
            holders[key] = type(one).__name__
    return Together(found)
