"""The user's optimizer after compile_sharded took it over: the place of the rates, and of nothing else.

Its update is part of the program and its state lives in shards. Hyperparameters in its groups are read at every step;
calls that would update, save, load, or change what is trained are refused at once, each with what to call instead.
"""

from __future__ import annotations

from operator import is_
from typing import Any, NoReturn

from torch.optim import Optimizer

TAKEN = "This optimizer was taken over by compile_sharded: "


def _refuse_state(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{TAKEN}its state lives in sharded.state.optimizer, where it can be read and written in place. Load a state "
        "before compile_sharded, which brings it along."
    )


def _refuse_step(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{TAKEN}sharded.step(*batch) updates the parameters. It stays the place where learning-rate schedulers set "
        "the rate."
    )


_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else schedulers warn that step was replaced


def _refuse_change(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{TAKEN}which parameters its groups hold is laid out in shards. Add parameters and groups before "
        "compile_sharded."
    )


class _NoState(dict[Any, Any]):
    """Refuses whoever looks for state."""

    def __repr__(self) -> str:
        return "(in sharded.state.optimizer)"


class _FixedList(list[Any]):
    """A group's parameters, to be read only."""


for _name in ("getitem", "setitem", "delitem", "contains", "iter", "len", "eq", "ior", "or", "reduce_ex"):
    setattr(_NoState, f"__{_name}__", _refuse_state)
for _name in ("get", "setdefault", "pop", "popitem", "clear", "update", "keys", "values", "items", "copy"):
    setattr(_NoState, _name, _refuse_state)
for _name in ("__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "extend", "insert", "remove", "pop",
              "clear", "sort", "reverse"):  # fmt: skip
    setattr(_FixedList, _name, _refuse_change)


class ManagedOptimizer:
    """Closes the optimizer, and notices what was changed past its doors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        optimizer.state.clear()
        optimizer.state = self._state = _NoState()
        optimizer.step = _refuse_step
        optimizer._opt_called = True  # with the mark above, what schedulers look for
        optimizer.state_dict = optimizer.load_state_dict = _refuse_state
        optimizer.add_param_group = _refuse_change
        for group in optimizer.param_groups:
            group["params"] = _FixedList(group["params"])
        self._parameters = [group["params"] for group in optimizer.param_groups]

    def check(self) -> None:
        """Raises ``ValueError`` where its state or its groups' parameters are others."""
        now = [group["params"] for group in self._optimizer.param_groups]
        if len(now) != len(self._parameters) or not all(map(is_, now, self._parameters)):
            raise ValueError(
                "The parameters in the optimizer's groups were changed after compile_sharded, by which they are laid "
                "out in shards. Put them back, or choose them before compile_sharded."
            )
        if vars(self._optimizer).get("step") is not _refuse_step:
            raise ValueError(
                "optimizer.step was replaced after compile_sharded, where nothing calls it: sharded.step(*batch) "
                "updates the parameters as the class's own step says. Leave it alone, and call what yours adds before "
                "or after sharded.step."
            )
        if self._optimizer.state is not self._state:
            raise ValueError(
                "optimizer.state was replaced after compile_sharded, where nothing reads it: its state lives in "
                "sharded.state.optimizer, where it can be read and written in place."
            )
