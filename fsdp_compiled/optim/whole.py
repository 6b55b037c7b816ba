"""An optimizer that needs whole parameters runs as it is on those that a rank owns: Muon, Shampoo, Adafactor, LAMB.

    all parameters, on one rank        w  b  v  c      torch.optim's step over all four
    its owners, on two ranks           w     v         the same step over two
                                          b     c      and over the other two

That comes to the same if it updates each parameter from its own gradient and state alone, and what it counts in groups
and attributes does not depend on which parameters it has. It is tried here: the class makes some steps on small
parameters of as many dims as the group's have, all together and divided among owners, of whom one has none; and no
operator may see tensors that come from two parameters, so that what mixes them only late in training is found too. One
that sums over parameters (D-Adaptation, Prodigy) or draws random numbers is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.optim.eager import Side, Way, difference, run_beside
from fsdp_compiled.optim.groups import options_of
from fsdp_compiled.optim.nested import all_leaves
from fsdp_compiled.optim.trial import FACTORS
from fsdp_compiled.optim.twin import Refused, attributes_of, named_state, step_of

# Wide, tall, square, and of one shape: owners of each.
SHAPES: Mapping[int, tuple[tuple[int, ...], ...]] = {
    0: ((), ()),
    1: ((5,), (4,), (5,), (6,)),
    2: ((2, 3), (4, 2), (3, 3), (2, 3), (2, 5), (2, 3)),
    3: ((2, 3, 2), (3, 1, 2), (2, 3, 2)),
    4: ((2, 1, 3, 2), (2, 2, 2, 2), (2, 1, 3, 2)),
}
STEADY = 0.8  # the part of a gradient that stays, for those who wait until parameters move in one direction


def is_known(kind: type[Optimizer]) -> bool:
    """Whether the step is PyTorch's own code, which draws no numbers and talks to nobody: it need not be looked at."""
    return all(f"{module}.".startswith("torch.optim.") for module in (kind.__module__, step_of(kind).__module__))


class OnItsOwn(TorchDispatchMode):
    """Inside, an operator that draws random numbers, or talks to other ranks, raises `Refused`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refused(f"its step draws random numbers ({func})")
        if "c10d" in func.namespace:
            raise Refused(f"its step communicates between ranks by itself ({func})")
        return func(*args, **(kwargs or {}))


class Apart(OnItsOwn):
    """Inside one step of this side, besides, an operator on tensors that come from two parameters raises `Refused`."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self._from: dict[int, int] = {}  # by storage: the place of the parameter
        self._alive: list[torch.Tensor] = []  # or another storage could have the same address
        for place, parameter in enumerate(side.parameters):
            for value in (parameter, parameter.grad, *all_leaves(side.twin.state.get(parameter, {})).values()):
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
            self._follow(func, pytree.tree_leaves((args, kwargs)), pytree.tree_leaves((args, result)))
        return result

    def _follow(self, func: Any, given: Sequence[Any], seen: Sequence[Any]) -> None:
        """Of what was given, one parameter's; of the same are what was written and what was made."""
        found = {
            self._from[key]
            for value in given
            if isinstance(value, torch.Tensor) and (key := value.untyped_storage()._cdata) in self._from
        }
        if len(found) > 1:
            raise Refused(f"its step mixes parameters ({func})")
        written = [
            argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
        ]
        for value in seen if found else ():
            if any(written) or not any(value is one for one in given):
                self._note(value, next(iter(found)))

    def _note(self, value: Any, place: int) -> None:
        if isinstance(value, torch.Tensor):
            self._from[value.untyped_storage()._cdata] = place
            self._alive.append(value)


def check_runs_on_some(
    optimizer: Optimizer, group: Mapping[str, Any], kinds: Sequence[tuple[torch.dtype, int]]
) -> bool:
    """Raises `Refused` where the class does on some parameters anything else than on all.

    ``kinds``: dtype and number of dims of the group's parameters. Returns whether its code divides by the rate, and
    fails at a rate of zero.
    """
    divides = False
    for dtype in dict.fromkeys(dtype for dtype, _ in kinds):
        shapes = _shapes(dtype, kinds)
        try:
            _try(optimizer, group, dtype, FACTORS, shapes)
        except ZeroDivisionError:
            divides = True
            _try(optimizer, group, dtype, tuple(filter(None, FACTORS)), shapes)
    return divides


def _try(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, factors: Sequence[float],
    shapes: Sequence[tuple[int, ...]],
) -> None:  # fmt: skip
    owners: list[Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]] = [
        list,
        partial(_every, 0, 2),
        partial(_every, 1, 2),
        partial(_every, len(shapes), 1),
    ]
    ways: list[Way] = [(select, Apart) for select in owners]

    def compare(sides: Sequence[Side], begin: Sequence[torch.Tensor], index: int) -> None:
        everything = [parameter.detach() for parameter in sides[0].parameters]
        counted = _counters(sides[0])
        for side, select in zip(sides[1:], owners[1:], strict=True):
            mine = [parameter.detach() for parameter in side.parameters]
            if (off := difference(mine, select(everything), select(begin), dtype)) is not None:
                raise Refused(
                    f"how it updates a parameter depends on which others it has: at step {index + 1}, beside half of "
                    f"them, {off}"
                )
            if odd := [name for name, value in _counters(side).items() if not _same(value, counted.get(name))]:
                raise Refused(f"its {odd[0]!r} depends on which parameters it has")

    for steady in (0.0, STEADY):
        run_beside(optimizer, group, dtype, factors, shapes, ways, compare, steady)


def may_be_called_on_some(
    optimizer: Optimizer, group: Mapping[str, Any], kinds: Sequence[tuple[torch.dtype, int]], divides: bool
) -> bool:
    """Whether its step comes to the same, bit for bit, if it is called on some of its parameters, then on the others.

    Not if its code counts calls, or keeps what cannot be looked into. It is one that `check_runs_on_some` accepts.
    """

    def compare(sides: Sequence[Side], begin: Sequence[torch.Tensor], index: int) -> None:
        rows = zip(*(side.parameters for side in sides), strict=True)
        same = all(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) for one, other in rows)
        if not same or not _same(*({**_others(side), **_counters(side)} for side in sides)):
            raise Refused("it is not the same in several calls")

    ways: list[Way] = [(list, lambda _: OnItsOwn()), (list, lambda _: OnItsOwn(), _thirds)]
    factors = tuple(filter(None, FACTORS)) if divides else FACTORS
    try:
        for dtype in dict.fromkeys(dtype for dtype, _ in kinds):
            shapes = _shapes(dtype, kinds)
            run_beside(optimizer, group, dtype, factors, shapes, ways, compare)
    except Refused:
        return False
    return True


def _thirds(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    return [list(parameters[first::3]) for first in (1, 0, 2)]


def _shapes(dtype: torch.dtype, kinds: Sequence[tuple[torch.dtype, int]]) -> list[tuple[int, ...]]:
    return [shape for one, dims in kinds if one == dtype for shape in SHAPES.get(dims, ((2,) * dims,) * 3)]


def _every(first: int, step: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(values[first::step])


def _counters(side: Side) -> dict[str, Any]:
    """Tensors and numbers that belong to no parameter: every rank has them."""
    group = {name: value for name, value in side.twin.param_groups[0].items() if name != "params"}
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in all_leaves({**attributes_of(side.twin), **group}).items()
        if isinstance(value, torch.Tensor | bool | int | float | str)
    }


def _others(side: Side) -> dict[str, str]:
    """All that belongs to no parameter, as text: of an object that says nothing of itself, which one it is."""
    kept = {**attributes_of(side.twin), **options_of(side.twin.param_groups[0]), **named_state(side.twin)}
    return {name: repr(value) for name, value in kept.items()}


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # of nan too
