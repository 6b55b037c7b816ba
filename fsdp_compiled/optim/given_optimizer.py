"""Opens what is given as ``optimizer``: an optimizer, one that another library wraps, or several.

    compile_sharded(model, [muon, adamw], ...)          each over parameters of its own

Several are one to everyone else: their groups are one list, of the very dictionaries that schedulers of each write to.
Each keeps its class and rules. A ``step`` of the instance's own, and hooks around it, are refused.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as module

from fsdp_compiled.optim.optimizer_copy import WRAPS, step_of

# Their wrappers hold the user's optimizer, and add work around its ``step``; here this is work of the program.
LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


class Together(Optimizer):
    """Shows what several optimizers hold, for reading only; each is asked by itself for everything else."""

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
    """The optimizers that it stands for."""
    if isinstance(optimizer, Together):
        return optimizer.optimizers
    return (optimizer,) if optimizer is not None else ()


def numbered(optimizer: Optimizer) -> Iterator[tuple[Optimizer, int]]:
    """Each of its optimizers, with the number of that one's first group among all groups."""
    first = 0
    for one in members(optimizer):
        yield one, first
        first += len(one.param_groups)


def together(optimizers: Iterable[Any]) -> Optimizer:
    """Makes these one. Raises ``ValueError`` where that cannot be: one is no optimizer, or two have one parameter."""
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


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside one that accelerate or Lightning Fabric prepared; any other as it is."""
    while any(base.__module__.split(".")[0] in LIBRARIES for base in type(optimizer).__mro__):
        inner = vars(optimizer).get("_optimizer", vars(optimizer).get("optimizer"))
        if inner is None or inner is optimizer:
            break
        optimizer = inner
    if isinstance(optimizer, list | tuple):
        return together(map(unwrapped, optimizer))
    if isinstance(optimizer, Optimizer) and not hasattr(optimizer, "param_groups"):
        raise ValueError(f"{type(optimizer).__name__} is not supported: {WRAPS}.")
    return optimizer


def check_own_step(optimizer: Optimizer) -> None:
    """Raises ``ValueError`` if ``optimizer.step`` is not its class's, since the class's step is what is traced."""
    step = vars(optimizer).get("step")
    while step is not None:
        step = getattr(step, "__func__", step)
        if getattr(step, "__globals__", {}).get("__name__") != lr_scheduler.__name__:
            break
        step = getattr(step, "__wrapped__", None)  # schedulers put a function there that only counts calls
    if step is not None and step is not type(optimizer).step and step is not step_of(type(optimizer)):
        raise ValueError(
            f"optimizer.step of this {type(optimizer).__name__} is {getattr(step, '__qualname__', step)!r}, not its "
            "class's: the update is made from the class's step, inside the program, and this one would never be "
            "called. Write it as the step of a class of your own, or remove it (del optimizer.step) and call what it "
            "adds before or after sharded.step(*batch)."
        )


def _is_ours(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("fsdp_compiled.")


def check_step_hooks(optimizer: Optimizer) -> None:
    """Raises ``ValueError`` for step hooks, of this optimizer or of all: the update is inside the program."""
    own = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    every = [module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks]
    if not any(own) and not any(every):
        return
    for kind, hooks in zip(("pre", "post"), zip(own, every, strict=True), strict=True):
        # Our own hook, which counts what a loop of the user's updates, has nothing to see here either.
        users = (one for row in hooks for one in row.values() if not _is_ours(one))
        if hook := next(users, None):
            name = getattr(hook, "__qualname__", repr(hook))
            raise ValueError(
                f"{name} is registered as a step {kind}-hook of {type(optimizer).__name__}, whose update is inside the "
                "compiled step: no gradient or parameter is there for a hook to see. Remove it (handle.remove()), and "
                f"call what it does {'before' if kind == 'pre' else 'after'} sharded.step(*batch)."
            )
