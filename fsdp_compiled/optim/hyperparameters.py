"""What param groups say: which hyperparameters may change from step to step, and what a traced rule depends on.

Scheduled ones are tensors on the device; a change of any other is noticed (`Hyperparameters`). Every step reads them,
so reading costs one comparison while nothing changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_compiled.optim.given_optimizer import members
from fsdp_compiled.optim.optimizer_copy import code_of
from fsdp_compiled.optim.rule import Rule

PLAIN = (bool, int, float, str, type(None))  # a list or a tensor may be changed in place
# Where schedulers note their bounds; no optimizer's step reads them, but for its own ``max_lr`` where it has one.
NOTES = ("initial_lr", "min_lr", "base_momentum", "max_momentum")


class Hyperparameters:
    """What the optimizer's param groups say, and the tensors that programs read it from."""

    def __init__(self, optimizer: Optimizer | None, device: torch.device) -> None:
        self.tensors: dict[str, torch.Tensor] = {}  # by ``"<group>.<name>"``
        self.values: dict[str, float] = {}
        self.digest = 0  # of the values, below 2**60
        self._optimizer, self._device = optimizer, device
        self._fixed: list[Any] = []  # values that are not scheduled
        self._code: list[Any] = []  # for each optimizer
        self.traced()
        self._begun = self._fixed, self._code
        self._seen: list[dict[str, Any]] | None = None  # the groups at the last `write`

    def unchanged(self) -> bool:
        """Whether groups, and the code that makes the update, are those of the last `write`."""
        try:
            same = self._seen is not None and self._groups() == self._seen
        except Exception:  # other parameters: these are compared by value, which raises
            return False
        return same and self._codes() == self._code

    def changed(self, rules: Iterable[Rule]) -> list[str]:
        """The names of what changed and is not scheduled, so that rules have to be traced again.

        Raises ``ValueError`` for a change of the optimizer's state, which lives elsewhere.
        """
        if len(self._groups()) != len(self._fixed):
            raise ValueError("A param group was added or removed after compile_sharded; do so before.")
        found: dict[tuple[int, str], str] = {}
        for index, (group, fixed) in enumerate(zip(self._groups(), self._fixed, strict=True)):
            names = dict.fromkeys(name for name, _ in set(signature(group)) ^ set(fixed))
            found |= {(index, name): f"optimizer.param_groups[{index}][{name!r}]" for name in names}
        for rule in rules:
            for entry in rule.state:
                if entry.place == "group" and (key := (rule.group, entry.name)) in found:
                    raise ValueError(
                        f"{found[key]} was set after compile_sharded, where nothing reads it: it is state of "
                        f"{rule.name}, and lives in sharded.state.optimizer[{f'{rule.key}.{entry.name}'!r}]. Write it "
                        "there, and put this back."
                    )
        pairs = zip(members(self._optimizer), self._codes(), self._code, strict=True)
        return [*found.values(), *(f"the code of {type(one).__name__}" for one, now, then in pairs if now != then)]

    def options(self) -> str:
        """What differs from the beginning, as text, which ranks compare: options that are not scheduled, and code."""
        found = []
        for index, (before, now) in enumerate(zip(self._begun[0], self._groups(), strict=True)):
            found += [f"{index}.{name}={value}" for name, value in signature(now) if (name, value) not in before]
        pairs = zip(members(self._optimizer), self._codes(), self._begun[1], strict=True)
        return ", ".join([*found, *(f"other code of {type(one).__name__}" for one, now, then in pairs if now != then)])

    def traced(self) -> None:
        """Remembers that the rules were made for the present groups and code."""
        self._fixed = [signature(group) for group in self._groups()]
        self._code = self._codes()

    def _codes(self) -> list[Any]:
        return list(map(code_of, members(self._optimizer)))

    def write(self, rules: Iterable[Rule]) -> None:
        """Brings the tensors up to date, without waiting for the device."""
        self._seen = None  # if a value is refused, all are written again
        groups = self._groups()
        for rule in rules:
            if rule.eagerly is not None:  # the numbers that its own code reads are noted, for the ranks to compare
                own = f"{rule.group}."
                self.values = {key: value for key, value in self.values.items() if not key.startswith(own)}
                self.values |= {f"{own}{name}": value for name, value in numbers_of(groups[rule.group]).items()}
            for name in rule.hypers:
                key, value = f"{rule.group}.{name}", hyper(groups[rule.group], name)
                if rule.nonzero and name == "lr" and value == 0:
                    raise ValueError(
                        f"{rule.name} divides by zero at a rate of 0, which group {rule.group} has now. Let the "
                        "schedule begin and end at a small rate."
                    )
                if rule.eagerly is not None:
                    self.values[key] = value
                    continue
                if key not in self.tensors:
                    self.tensors[key] = torch.tensor(value, dtype=torch.float64, device=self._device)
                elif self.values[key] != value:
                    self.tensors[key].fill_(value)
                self.values[key] = value
        self._digest()
        values = (value for group in groups for value in options_of(group).values())
        self._seen = list(map(dict, groups)) if all(map(_is_plain, values)) else None

    def overwrite(self, values: Mapping[str, float]) -> None:
        """Takes another rank's values, until the next `write`."""
        for key, value in values.items():
            if key in self.tensors:
                self.tensors[key].fill_(value)
            self.values[key] = value
        self._digest()
        self._seen = None

    def _digest(self) -> None:
        digest = hashlib.sha256(repr(sorted(self.values.items())).encode()).digest()
        self.digest = int.from_bytes(digest[:8], "little") >> 4

    def __str__(self) -> str:
        return "".join(f", {name} = {value}" for name, value in self.values.items())

    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups if self._optimizer is not None else []


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def signature(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a traced rule depends on: every hyperparameter that is not scheduled, and the sign of momentum."""
    moving = scheduled(group)
    notes = (*NOTES, *(["max_lr"] if "initial_lr" in group and "min_lr" in group else []))
    fixed = []
    for name, value in sorted(options_of(group).items()):
        if name in notes or name in moving:
            continue
        fixed.append((name, value[1:] if name == "betas" and "beta1" in moving else value))
    return (
        *((name, repr(value)) for name, value in fixed),
        *((name, (hyper(group, name) > 0) - (hyper(group, name) < 0)) for name in moving if name != "lr"),
    )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group's hyperparameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def scheduled(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The hyperparameters that may change from step to step: the rate, and what cyclic schedulers drive with it."""
    names = ["lr"] if "lr" in group else []
    if "max_momentum" in group:  # OneCycleLR and CyclicLR note their bounds in the group
        names.append("momentum" if "momentum" in group else "beta1")
    return tuple(names)


def hyper(group: Mapping[str, Any], name: str) -> float:
    """The current value of a scheduled hyperparameter."""
    return float(hyper_of(group, name))


def hyper_of(group: Mapping[str, Any], name: str) -> Any:
    """A scheduled hyperparameter as the group has it: a number or a tensor."""
    return group["betas"][0] if name == "beta1" else group[name]


def with_hyper(group: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The group's options, with another value for one hyperparameter."""
    return {**group, **({"betas": (value, *group["betas"][1:])} if name == "beta1" else {name: value})}


def numbers_of(group: Mapping[str, Any]) -> dict[str, float]:
    """The group's numbers, by name, those in tuples too."""
    found: dict[str, float] = {}
    for name, value in options_of(group).items():
        for place, one in enumerate(value) if isinstance(value, tuple) else ((None, value),):
            if isinstance(one, bool | int | float):
                found[name if place is None else f"{name}[{place}]"] = float(one)
    return found


def with_numbers(group: Mapping[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    """The group's options with these numbers in place of its own; the names are those of `numbers_of`."""

    def one(name: str, value: Any) -> Any:
        new = values.get(name)
        if new is None or not isinstance(value, bool | int | float | torch.Tensor) or value == new:
            return value
        if isinstance(value, torch.Tensor):
            return torch.full_like(value, new)
        return type(value)(new) if type(value)(new) == new else new

    return {
        name: tuple(one(f"{name}[{place}]", item) for place, item in enumerate(value)) if type(value) is tuple
        else one(name, value)
        for name, value in options_of(group).items()
    }  # fmt: skip
