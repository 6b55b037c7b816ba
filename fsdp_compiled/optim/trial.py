"""Compares an update over shards, traced or as it is, with what the optimizer itself does, before it is trusted.

The user's class, with its options, makes some steps on small parameters of several shapes. Rates change (also to zero
and back), and gradients have many sizes. The update makes the same steps on all parameters laid end to end, as in a
shard. Every element of every parameter and of the state, and every counter, must come out alike. Then counters are set
far ahead on both sides, to see what happens only late in training.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_compiled.optim.optimizer_copy import Refused, copy_of, fresh_of, named_state, step_of
from fsdp_compiled.optim.param_groups import with_hyper
from fsdp_compiled.optim.rule import RuleInput, StateTensor, inputs_of
from fsdp_compiled.optim.state_containers import all_leaves
from fsdp_compiled.optim.tracing import Subject

SHAPES: tuple[tuple[int, ...], ...] = ((5,), (2, 3), (), (2, 1, 3, 2), (3, 4, 2))
FACTORS = (0.0, 1.0, 0.5, 0.0, 2.0, 1.0, 0.7, 0.0, 1.3)  # of the rate, from step to step
LATE = 3000  # what is added to counters
# Relative to how far parameters moved. In float64 rounding is nothing; a bound for each dtype besides.
BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


class Trial:
    """One optimizer, ready to be compared with an update that should do the same."""

    def __init__(
        self, subject: Subject, options: Mapping[str, Any], dtype: torch.dtype, rates: Sequence[float]
    ) -> None:
        draw = torch.Generator().manual_seed(0)
        self.subject, self.dtype = subject, dtype
        self._options = options
        self._begin = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]
        rate = abs(subject.hypers.get("lr", 0.0)) or 0.01
        self.rates = [self._hypers(rate * factor, place) for place, factor in enumerate(rates)]
        self.late = [self._hypers(rate * factor, place) for place, factor in enumerate((1.0, 0.5, 0.8))]
        self._gradients = [
            [
                (torch.randn(shape, generator=draw, dtype=torch.float64)
                 * 10 ** (3 * torch.rand(shape, generator=draw, dtype=torch.float64) - 2)).to(dtype)
                for shape in SHAPES
            ]
            for _ in range(len(self.rates) + len(self.late))
        ]  # fmt: skip
        self._counters: list[StateTensor] = []
        self.parameters: list[list[torch.Tensor]] = []  # by step, by parameter
        self.state: list[dict[str, torch.Tensor]] = []  # at the end, by parameter
        self._run()

    def _hypers(self, rate: float, place: int) -> dict[str, float]:
        others = {name: value * (1 - 0.05 * (place % 3)) for name, value in self.subject.hypers.items() if name != "lr"}
        return ({"lr": rate} if "lr" in self.subject.hypers else {}) | others

    def _run(self) -> None:
        """Makes the optimizer's own steps."""
        subject = self.subject
        parameters = [nn.Parameter(value.clone()) for value in self._begin]
        state: Any = defaultdict(dict)
        state |= named_state(subject.optimizer)
        for parameter in parameters if subject.kept.started else ():
            mine = fresh_of(subject.optimizer, self._options, parameter)
            if mine is not None:
                state[parameter] = dict(mine.state[parameter])
        made = copy_of(subject.optimizer, [{**self._options, "params": parameters}], state)
        step = step_of(type(made))
        counted: list[dict[str, float]] = []
        for index, hypers in enumerate((*self.rates, *self.late)):
            if index == len(self.rates):
                self._counters = [
                    entry
                    for entry in subject.kept.state
                    if entry.scalar
                    and entry.place != "ours"
                    and not entry.container
                    and _counts([row[entry.name] for row in counted[-3:]])
                ]
                for entry in self._counters:
                    for parameter in parameters:
                        _move_on(made, entry, parameter, LATE)
            for name, value in hypers.items():
                made.param_groups[0].update(with_hyper(made.param_groups[0], name, value))
            for parameter, gradient in zip(parameters, self._gradients[index], strict=True):
                parameter.grad = gradient.clone()
            step(made)
            self.parameters.append([parameter.detach().clone() for parameter in parameters])
            counted.append(
                {e.name: _value(made, e, parameters[0]) for e in subject.kept.state if e.scalar and e.place != "ours"}
            )
        self.scalars = counted[-1]
        self.state = [
            {e.name: kept[e.name] for e in subject.kept.state
             if not e.scalar and isinstance(kept.get(e.name), torch.Tensor)}
            for kept in (all_leaves(state[parameter]) for parameter in parameters)
        ]  # fmt: skip

    def compare(self, update: Callable[..., object]) -> str | None:
        """Where the update, over the inputs of a rule, differs from the optimizer's own steps; None: nowhere."""

        def flat(values: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([value.reshape(-1) for value in values])

        mine = flat(self._begin)
        kept, hypers_of = self.subject.kept.state, self.subject.hypers
        state = {entry.name: initial(entry, mine) for entry in kept}
        inputs = inputs_of(kept, hypers_of)
        begin = mine.clone().double()
        for step, hypers in enumerate((*self.rates, *self.late)):
            if step == len(self.rates):
                for entry in self._counters:
                    state[entry.name] += LATE
            given = {RuleInput("parameter"): mine, RuleInput("gradient"): flat(self._gradients[step]).clone()}
            given |= {RuleInput("state", name): value for name, value in state.items()}
            given |= {
                RuleInput("hyper", name): torch.tensor(value, dtype=torch.float64) for name, value in hypers.items()
            }
            with torch.no_grad():
                update(*[given[one] for one in inputs])
            theirs = flat(self.parameters[step])
            moved = float((theirs.double() - begin).nan_to_num().abs().max())
            if (worst := self._off(mine, theirs, moved)) is not None:
                hyper = ", ".join(f"{name} {value:g}" for name, value in hypers.items())
                return (
                    f"at step {step + 1} ({hyper}) an element is off by {worst:.2g}, where the one that moved most "
                    f"moved by {moved:.2g}"
                )
        for name in self.state[0]:
            theirs = flat([values[name] for values in self.state])
            largest = float(theirs.double().nan_to_num().abs().max())
            if (worst := self._off(state[name], theirs, largest)) is not None:
                return f"its state {name!r} is off by {worst:.2g}"
        for name, value in self.scalars.items():
            if not abs(float(state[name]) - value) <= 1e-6 * max(abs(value), 1e-12):
                return f"its {name!r} is {float(state[name])}, not {value}"
        return None

    def _off(self, mine: torch.Tensor, theirs: torch.Tensor, size: float) -> float | None:
        """The largest difference, where it is more than rounding explains."""
        difference = (mine.double() - theirs.double()).abs()
        bound = BOUNDS[self.dtype] * size + 4 * torch.finfo(self.dtype).eps * theirs.double().abs()
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        wrong = ~same & ~(difference <= bound)
        return float(difference[wrong].max()) if bool(wrong.any()) else None


def initial(entry: StateTensor, like: torch.Tensor) -> torch.Tensor:
    """What an entry of the state starts from, for a flat tensor of parameters."""
    dtype = entry.dtype or like.dtype
    return torch.full(() if entry.scalar else like.shape, entry.initial, dtype=dtype, device=like.device)


def _counts(values: Sequence[float]) -> bool:
    return len(values) == 3 and all(b - a == 1 for a, b in itertools.pairwise(values))


def _holder(made: Optimizer, entry: StateTensor, parameter: torch.Tensor) -> dict[str, Any]:
    if entry.place == "parameter":
        return made.state[parameter]  # type: ignore[no-any-return]
    if entry.place == "state":
        return made.state  # type: ignore[return-value]
    return made.param_groups[0] if entry.place == "group" else vars(made)


def _value(made: Optimizer, entry: StateTensor, parameter: torch.Tensor) -> float:
    holder = _holder(made, entry, parameter)
    value = all_leaves(holder).get(entry.name) if entry.container else holder.get(entry.name)
    if value is None:
        raise Refused(f"its state {entry.name!r} is not always there")
    return float(value)


def _move_on(made: Optimizer, entry: StateTensor, parameter: torch.Tensor, by: int) -> None:
    holder = _holder(made, entry, parameter)
    if entry.place == "parameter" or parameter is made.param_groups[0]["params"][0]:
        holder[entry.name] = holder[entry.name] + by
