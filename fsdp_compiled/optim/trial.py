"""Compares an update over shards, traced or as it is, with what the optimizer itself does, before it is trusted.

The user's class, with its options, makes some steps on small parameters of several shapes. Rates change (also to zero
and back), and gradients have many sizes. The update makes the same steps on all parameters laid end to end, as in a
shard. Every element of every parameter and of the state, and every counter, must come out alike. Then counters are set
far ahead on both sides, to see what happens only late in training. `Side` makes the class's own steps, here and in
`whole`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.optim.discovery import NUMBERS, is_one
from fsdp_compiled.optim.hyperparameters import with_hyper
from fsdp_compiled.optim.optimizer_copy import (
    Refused,
    all_leaves,
    attributes_of,
    copy_of,
    fresh_of,
    named_state,
    step_of,
)
from fsdp_compiled.optim.rule import RuleInput, StateTensor, inputs_of
from fsdp_compiled.optim.tracing import Subject

Number = tuple[str, str]  # its place, as in `StateTensor`, and its name
SHAPES: tuple[tuple[int, ...], ...] = ((5,), (2, 3), (), (2, 1, 3, 2), (3, 4, 2))
FACTORS = (0.0, 1.0, 0.5, 0.0, 2.0, 1.0, 0.7, 0.0, 1.3)  # of the rate, from step to step
LATE = 3000  # what is added to counters
# Relative to how far parameters moved. In float64 rounding is nothing; a bound for each dtype besides.
BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


class Side:
    """The class's own steps on these parameters. ``notes``: attributes of each parameter."""

    def __init__(
        self, optimizer: Optimizer, options: Mapping[str, Any], begin: Sequence[torch.Tensor],
        notes: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.parameters = [nn.Parameter(value) for value in begin]
        for parameter in self.parameters:
            parameter.__dict__.update(notes or {})
        state: Any = defaultdict(dict)
        state |= named_state(optimizer)
        probe = fresh_of(optimizer, options, nn.Parameter(torch.ones(2, 3)))
        for parameter in self.parameters if probe is not None and any(probe.state.values()) else ():
            if (mine := fresh_of(optimizer, options, parameter)) is not None and mine.state.get(parameter):
                state[parameter] = dict(mine.state[parameter])
        self.made = copy_of(optimizer, [{**options, "params": self.parameters}], state)

    def step(
        self, gradients: Sequence[torch.Tensor], hypers: Mapping[str, float],
        guard: Callable[[Side], AbstractContextManager[Any]] = lambda side: nullcontext(),
    ) -> None:  # fmt: skip
        group = self.made.param_groups[0]
        for name, value in hypers.items():
            group.update(with_hyper(group, name, value))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        with torch.no_grad(), guard(self):
            step_of(type(self.made))(self.made)

    def kept(self) -> list[dict[str, Any]]:
        """What it keeps of each parameter, by name."""
        return [all_leaves(self.made.state.get(parameter, {})) for parameter in self.parameters]

    def numbers(self) -> dict[Number, float]:
        """The numbers that it keeps; of those of parameters, the first one's that has state."""
        first = next(filter(None, self.kept()), {})
        return {
            (place, name): float(value)
            for place, holders in (*self._holders().items(), ("parameter", [first]))
            for name, value in holders[0].items()
            if type(value) in NUMBERS or is_one(value)
        }

    def move_on(self, numbers: Collection[Number]) -> None:
        """Sets counters far ahead, but for those in containers."""
        kept = [self.made.state.get(parameter, {}) for parameter in self.parameters]
        for place, name in numbers:
            for holder in {**self._holders(), "parameter": kept}[place]:
                if name in holder:
                    holder[name] = holder[name] + LATE

    def _holders(self) -> dict[str, list[Any]]:
        return {"group": self.made.param_groups, "optimizer": [vars(self.made)], "state": [self.made.state]}

    def entries(self) -> int:
        """How many values it keeps; growing state makes this grow."""
        kept = [self.made.param_groups[0], attributes_of(self.made)]
        return len(pytree.tree_leaves((kept, list(self.made.state.values()))))


def counters(rows: Sequence[Mapping[Number, float]]) -> set[Number]:
    """The numbers that grew by one in each of the last two steps. ``rows``: the numbers after each step."""
    a, b, c = rows[-3:]
    return {one for one, value in c.items() if value - b.get(one, 0.0) == b.get(one, 0.0) - a.get(one, 0.0) == 1}


def gradient_of(shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """A float64 gradient whose elements have many sizes."""
    sizes = 10 ** (3 * torch.rand(shape, generator=draw, dtype=torch.float64) - 2)
    return torch.randn(shape, generator=draw, dtype=torch.float64) * sizes


def difference(
    mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], begin: Sequence[torch.Tensor], dtype: torch.dtype
) -> str | None:
    """How far these are off, where it is more than rounding explains."""
    if not theirs:
        return None
    ours, wanted, start = (torch.cat([value.reshape(-1) for value in row]) for row in (mine, theirs, begin))
    moved = float((wanted.double() - start.double()).nan_to_num().abs().max())
    bound = BOUNDS[dtype] * moved + 4 * torch.finfo(dtype).eps * wanted.double().abs()
    off = (ours.double() - wanted.double()).abs()
    wrong = ~((ours == wanted) | (ours.isnan() & wanted.isnan())) & ~(off <= bound)
    if not bool(wrong.any()):
        return None
    return f"an element is off by {float(off[wrong].max()):.2g}, where the one that moved most moved by {moved:.2g}"


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
        self._gradients = [[gradient_of(shape, draw).to(dtype) for shape in SHAPES] for _ in (*self.rates, *self.late)]
        self._counters: list[str] = []
        self.parameters: list[list[torch.Tensor]] = []  # by step, by parameter
        self._run()

    def _hypers(self, rate: float, place: int) -> dict[str, float]:
        others = {name: value * (1 - 0.05 * (place % 3)) for name, value in self.subject.hypers.items() if name != "lr"}
        return ({"lr": rate} if "lr" in self.subject.hypers else {}) | others

    def _run(self) -> None:
        """Makes the optimizer's own steps."""
        side = Side(self.subject.optimizer, self._options, [value.clone() for value in self._begin])
        kept = self.subject.kept.state
        numbers = [(entry.place, entry.name) for entry in kept if entry.scalar and entry.place != "ours"]
        counted: list[dict[Number, float]] = []
        for index, hypers in enumerate((*self.rates, *self.late)):
            if index == len(self.rates):
                far = {(entry.place, entry.name) for entry in kept if not entry.container} & counters(counted)
                self._counters = [name for _, name in far]
                side.move_on(far)
            side.step(self._gradients[index], hypers)
            self.parameters.append([parameter.detach().clone() for parameter in side.parameters])
            counted.append(side.numbers())
            if odd := [name for place, name in numbers if (place, name) not in counted[-1]]:
                raise Refused(f"its state {odd[0]!r} is not always there")
        self.scalars = {name: counted[-1][place, name] for place, name in numbers}
        self.state = [  # at the end, by parameter
            {e.name: row[e.name] for e in kept if not e.scalar and isinstance(row.get(e.name), torch.Tensor)}
            for row in side.kept()
        ]

    def compare(self, update: Callable[..., object]) -> str | None:
        """Where the update, over the inputs of a rule, differs from the optimizer's own steps; None: nowhere."""

        def flat(values: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([value.reshape(-1) for value in values])

        mine = flat(self._begin)
        kept, hypers_of = self.subject.kept.state, self.subject.hypers
        state = {entry.name: initial(entry, mine) for entry in kept}
        inputs = inputs_of(kept, hypers_of)
        for step, hypers in enumerate((*self.rates, *self.late)):
            if step == len(self.rates):
                for name in self._counters:
                    state[name] += LATE
            given = {RuleInput("parameter"): mine, RuleInput("gradient"): flat(self._gradients[step]).clone()}
            given |= {RuleInput("state", name): value for name, value in state.items()}
            given |= {
                RuleInput("hyper", name): torch.tensor(value, dtype=torch.float64) for name, value in hypers.items()
            }
            with torch.no_grad():
                update(*[given[one] for one in inputs])
            if (off := difference([mine], self.parameters[step], self._begin, self.dtype)) is not None:
                hyper = ", ".join(f"{name} {value:g}" for name, value in hypers.items())
                return f"at step {step + 1} ({hyper}) {off}"
        for name in self.state[0]:
            theirs = [values[name] for values in self.state]
            zeros = [torch.zeros_like(value) for value in theirs]
            if (off := difference([state[name]], theirs, zeros, self.dtype)) is not None:
                return f"in its state {name!r} {off}"
        for name, value in self.scalars.items():
            if not abs(float(state[name]) - value) <= 1e-6 * max(abs(value), 1e-12):
                return f"its {name!r} is {float(state[name])}, not {value}"
        return None


def initial(entry: StateTensor, like: torch.Tensor) -> torch.Tensor:
    """What an entry of the state starts from, for a flat tensor of parameters."""
    dtype = entry.dtype or like.dtype
    return torch.full(() if entry.scalar else like.shape, entry.initial, dtype=dtype, device=like.device)
