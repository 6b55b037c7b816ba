"""What a model's code may do besides computing, and what becomes of it when the code is traced once and not run.

- *Said*: `print`, `warnings` and loggers. A program says nothing; the calls are left out of it.
- *Kept*: attributes of modules that forward sets to tensors, ``self.last = y``. They would be left holding tensors
  without values, so each gets its old value back. One that forward also reads, ``self.h = f(self.h)``, is state: the
  program writes its new value to it.
- *Wrapped*: a submodule under `torch.compile` is traced as the module inside.
- *Counted*: Python numbers on modules. A program keeps what they were when it was captured; that they change is said.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

log = logging.getLogger("fsdp_compiled")
WRAPPED = re.compile(r"(?<![^.])_orig_mod\.")  # what `torch.compile` puts into the names of a module's tensors
SPOKEN = (
    builtins.print, warnings.warn, warnings.warn_explicit, warnings.simplefilter, warnings.filterwarnings,
)  # fmt: skip
LEVELS = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log", "isEnabledFor")


def speech() -> set[Callable[..., Any]]:
    """The functions that print, warn or log, those that libraries have put on `logging.Logger` included."""
    added = [value for value in vars(logging.Logger).values() if getattr(value, "__module__", "") != "logging"]
    return {*SPOKEN, *(vars(logging.Logger)[name] for name in LEVELS if name in vars(logging.Logger)),
            *(value for value in added if callable(value))}  # fmt: skip


def inside(module: nn.Module) -> nn.Module:
    """The module itself, or what `torch.compile` made it from."""
    return module._modules.get("_orig_mod") or module


@contextlib.contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Inside, submodules under `torch.compile` are the modules that they wrap."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and inside(child) is not child
    ]
    for parent, name, child in places:
        parent._modules[name] = inside(child)
    try:
        yield
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


class Attributes:
    """The plain attributes of a model's modules, as they were before it was traced."""

    def __init__(self, model: nn.Module) -> None:
        self.before = [(name, module, _plain(module)) for name, module in model.named_modules()]

    def restore(self, results: Sequence[Any], closed: Mapping[int, str]) -> dict[str, Any]:
        """Takes the traced tensors back out of the modules; the new values of those that are state, by name.

        ``results``: the tensors that tracing computed. ``closed``: the names of those that it read, by identity.
        """
        traced = {id(result) for result in results if isinstance(result, torch.Tensor)}
        state: dict[str, Any] = {}
        lost, counted = [], []
        for path, module, before in self.before:
            for name, value in _plain(module).items():
                old = before.get(name)
                if value is old:
                    continue
                where = f"{path}.{name}".lstrip(".")
                if id(value) in traced:
                    if name in before:
                        module.__dict__[name] = old
                    else:
                        del module.__dict__[name]
                    if isinstance(old, torch.Tensor) and id(old) in closed:
                        state[closed[id(old)]] = value
                    else:
                        lost.append(where)
                elif isinstance(old, bool | int | float | str) and value != old:
                    counted.append(f"{where} from {old} to {value}")
        if lost:
            log.warning(
                "forward keeps tensors in %s, which hold their old values again: return them as aux to see them, or "
                "make them buffers to use them in the next step",
                ", ".join(lost),
            )
        if counted:
            log.warning(
                "forward changes %s, as it is traced, and never again: what must count steps is a buffer",
                ", ".join(counted),
            )
        return state


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}
