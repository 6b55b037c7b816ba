"""Optimizers that other libraries hand out in the place of the user's, and hooks around ``step``."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as module

from fsdp_compiled.optim.together import Together, together
from fsdp_compiled.optim.twin import WRAPS, step_of

# Their wrappers hold the user's optimizer, and add to ``step`` what happens around it, which here is the program's.
LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


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
    """Raises ``ValueError`` where ``optimizer.step`` is not its class's, which is what is traced."""
    if isinstance(optimizer, Together):
        for one in optimizer.optimizers:
            check_own_step(one)
        return
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
    if isinstance(optimizer, Together):
        for one in optimizer.optimizers:
            check_step_hooks(one)
        return
    own = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    every = [module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks]
    if not any(own) and not any(every):
        return
    for kind, hooks in zip(("pre", "post"), zip(own, every, strict=True), strict=True):
        # Our own, which counts what a loop of the user's updates, has nothing to see here either.
        users = (one for row in hooks for one in row.values() if not _is_ours(one))
        if hook := next(users, None):
            name = getattr(hook, "__qualname__", repr(hook))
            raise ValueError(
                f"{name} is registered as a step {kind}-hook of {type(optimizer).__name__}, whose update is inside the "
                "compiled step: no gradient or parameter is there for a hook to see. Remove it (handle.remove()), and "
                f"call what it does {'before' if kind == 'pre' else 'after'} sharded.step(*batch)."
            )
