"""Runs an optimizer that needs whole parameters (Muon, Shampoo, Adafactor, LAMB) on those that this rank owns.

    all parameters, on one rank        w  b  v  c      torch.optim's step over all four
    its owners, on two ranks           w     v         the same step over two
                                          b     c      and over the other two

That gives the same if the class updates each parameter from its own gradient and state alone, and if its counters in
groups and attributes do not depend on which parameters it has. This is tried here: the class makes some steps on small
parameters of as many dims as the group's have, all together and divided among owners, of whom one has none. No operator
may see tensors that come from two parameters, so that mixing late in training is found too. A class that sums over
parameters (D-Adaptation, Prodigy) or draws random numbers is refused.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.optim.discovery import begin_of
from fsdp_compiled.optim.hyperparameters import hyper, options_of, scheduled
from fsdp_compiled.optim.optimizer_copy import Refused, all_leaves, attributes_of, fresh_of, meaning, plain_options
from fsdp_compiled.optim.trial import FACTORS, Side, counters, difference, gradient_of

# Of all parameters, those that each owner has: all, every other one twice, and none.
OWNERS = (slice(None), slice(0, None, 2), slice(1, None, 2), slice(0))
STEPS, UNCHANGED, MOST = len(FACTORS), 4, 128  # at least; without a new entry in the state; before the trial gives up
# Wide, tall, square, and of one shape: owners of each.
SHAPES: Mapping[int, tuple[tuple[int, ...], ...]] = {
    0: ((), ()),
    1: ((5,), (4,), (5,), (6,)),
    2: ((2, 3), (4, 2), (3, 3), (2, 3), (2, 5), (2, 3)),
    3: ((2, 3, 2), (3, 1, 2), (2, 3, 2)),
    4: ((2, 1, 3, 2), (2, 2, 2, 2), (2, 1, 3, 2)),
}
STEADY = 0.8  # the part of a gradient that stays, for classes that wait until parameters move in one direction


class OnItsOwn(TorchDispatchMode):
    """Inside, an operator that draws random numbers, or talks to other ranks, raises `Refused`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refused(f"its step draws random numbers ({func})")
        if "c10d" in func.namespace:
            raise Refused(f"its step communicates between ranks by itself ({func})")
        return func(*args, **(kwargs or {}))


class Apart(OnItsOwn):
    """Inside one step of this side, an operator on tensors that come from two parameters raises `Refused` as well."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self._from: dict[int, int] = {}  # by storage: the place of the parameter that it comes from
        self._alive: list[torch.Tensor] = []  # or another storage could have the same address
        for place, parameter in enumerate(side.parameters):
            for value in (parameter, parameter.grad, *all_leaves(side.made.state.get(parameter, {})).values()):
                self._note(value, place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        lists = [one for one in args if isinstance(one, list | tuple) and one and isinstance(one[0], torch.Tensor)]
        if func.overloadpacket.__name__.startswith("_foreach_") and len({len(one) for one in lists}) == 1:
            single = [one for one in args if isinstance(one, torch.Tensor)]
            results = result if isinstance(result, list | tuple) else [None] * len(lists[0])
            for row in zip(*lists, results, strict=True):
                self._follow(func, [*row[:-1], *single], row)
        else:
            self._follow(func, _tensors((*args, *(kwargs or {}).values())), _tensors((*args, result)))
        return result

    def _follow(self, func: Any, given: Sequence[Any], seen: Sequence[Any]) -> None:
        """Checks that what was given comes from one parameter; marks what was written or made as that parameter's."""
        found = {
            self._from[key]
            for value in given
            if isinstance(value, torch.Tensor) and (key := value.untyped_storage()._cdata) in self._from
        }
        if len(found) > 1:
            raise Refused(f"its step mixes parameters ({func})")
        for place in found:
            writes = func._schema.is_mutable
            for value in seen:
                if writes or not any(value is one for one in given):
                    self._note(value, place)

    def _note(self, value: Any, place: int) -> None:
        if isinstance(value, torch.Tensor):
            self._from[value.untyped_storage()._cdata] = place
            self._alive.append(value)


def _tensors(given: Sequence[Any]) -> list[torch.Tensor]:
    """Those of an operator's arguments, or results: it has tensors, and lists of them."""
    found: list[torch.Tensor] = []
    for one in given:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += _tensors(one)
    return found


def check_runs_on_some(
    optimizer: Optimizer, group: Mapping[str, Any], kinds: Sequence[tuple[torch.dtype, int]]
) -> bool:
    """Raises `Refused` if the class does anything else on some parameters than on all.

    ``kinds``: dtype and number of dims of the group's parameters. Returns whether its code divides by the rate, and
    fails at a rate of zero.
    """
    divides = False
    for dtype in dict.fromkeys(dtype for dtype, _ in kinds):
        shapes = _shapes(dtype, kinds)
        for steady in (0.0, STEADY):
            try:
                _try(optimizer, group, dtype, FACTORS, shapes, steady)
            except ZeroDivisionError:
                divides = True
                _try(optimizer, group, dtype, tuple(filter(None, FACTORS)), shapes, steady)
    return divides


def _compare(sides: Sequence[Side], begin: Sequence[torch.Tensor], dtype: torch.dtype, index: int) -> None:
    """Raises `Refused` where an owner made another step than the one that has all parameters."""
    everything = [parameter.detach() for parameter in sides[0].parameters]
    counted = _counters(sides[0])
    for side, own in zip(sides[1:], OWNERS[1:], strict=True):
        mine = [parameter.detach() for parameter in side.parameters]
        if (off := difference(mine, everything[own], begin[own], dtype)) is not None:
            raise Refused(
                f"how it updates a parameter depends on which others it has: at step {index + 1}, beside half of "
                f"them, {off}"
            )
        if odd := [name for name, value in _counters(side).items() if repr(value) != repr(counted.get(name))]:
            raise Refused(f"its {odd[0]!r} depends on which parameters it has")


def _shapes(dtype: torch.dtype, kinds: Sequence[tuple[torch.dtype, int]]) -> list[tuple[int, ...]]:
    return [shape for one, dims in kinds if one == dtype for shape in SHAPES.get(dims, ((2,) * dims,) * 3)]


def _counters(side: Side) -> dict[str, Any]:
    """Tensors and numbers that belong to no parameter: every rank has them."""
    group = {name: value for name, value in side.made.param_groups[0].items() if name != "params"}
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in all_leaves({**attributes_of(side.made), **group}).items()
        if isinstance(value, torch.Tensor | bool | int | float | str)
    }


def _try(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, factors: Sequence[float],
    shapes: Sequence[tuple[int, ...]], steady: float,
) -> None:  # fmt: skip
    """Makes the same steps on small parameters as each of the owners, side by side, and compares after each.

    ``steady``: which part of a gradient is the same at all steps. Raises `Refused` where a step fails, or where what it
    keeps does not stop growing.
    """
    draw = torch.Generator().manual_seed(0)
    options = plain_options(options_of(group))
    options = begin_of(optimizer, options, fresh_of(optimizer, options, nn.Parameter(torch.ones(2, 3, dtype=dtype))))
    begin = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
    rate = abs(float(group.get("lr", 0.0))) or 0.01

    def each(call: Callable[[Side, slice], Any]) -> None:
        for side, own in zip(sides, OWNERS, strict=True):
            try:
                call(side, own)
            except (Refused, ZeroDivisionError):
                raise
            except Exception as error:
                raise meaning(error, "its step fails on small parameters") from error

    notes: dict[str, Any] = next((copy.copy(vars(p)) for p in group["params"] if vars(p)), {})
    sides = [Side(optimizer, options, [value.clone() for value in begin[own]], notes) for own in OWNERS]
    counted: list[dict[tuple[str, str], float]] = []
    sizes: list[int] = []
    last = None
    always: list[torch.Tensor] = []
    for index in itertools.count():
        gradients = [gradient_of(shape, draw) for shape in shapes]
        always = always or gradients
        gradients = [(one + steady * (first - one)).to(dtype) for one, first in zip(gradients, always, strict=True)]
        hypers = {name: hyper(group, name) * (1 - 0.05 * (index % 3)) for name in scheduled(group) if name != "lr"}
        hypers |= {"lr": rate * factors[index % len(factors)]} if "lr" in group else {}
        each(lambda side, own, given=gradients, now=hypers: side.step(given[own], now, Apart))  # type: ignore[misc]
        _compare(sides, begin, dtype, index)
        counted = [*counted[-2:], sides[0].numbers()]
        sizes = [*sizes[1 - UNCHANGED :], sides[0].entries()]
        if last is not None:
            if index == last:
                return
        elif index + 1 >= STEPS and len(sizes) == UNCHANGED and len(set(sizes)) == 1:
            far = counters(counted)
            each(lambda side, _, far=far: side.move_on(far))  # type: ignore[misc]
            last = index + 3
        elif index == MOST:
            raise Refused(f"its state still grows after {MOST} steps")
