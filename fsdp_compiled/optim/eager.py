"""An optimizer that cannot be traced, but is element-wise, runs as it is: its class, on pieces of the shards.

    state["queue"].append(grad.clone())        a container that grows: no graph of it serves every step
    p.add_(grad, alpha=-float(group["lr"]))    a number that leaves the trace

A *piece* is this rank's part of one parameter, 1-d. The update may run on pieces if that comes to the same as running
it on whole parameters, which is tried here: the class makes some steps on small parameters of several shapes and on
pieces of them, with rates that change. On pieces every operator is looked at as it is called, in the trial and in
training (`PointwiseOnly`): one that mixes elements, as a norm does, would give each rank another number.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.optim.discovery import begin_of
from fsdp_compiled.optim.elementwise import keeps_places
from fsdp_compiled.optim.groups import hyper, options_of, scheduled, with_hyper
from fsdp_compiled.optim.trial import BOUNDS, FACTORS, LATE
from fsdp_compiled.optim.twin import Refused, attributes_of, fresh_of, named_state, plain_options, step_of, twin_of

aten = torch.ops.aten
SHAPES: tuple[tuple[int, ...], ...] = ((5,), (2, 3), (), (2, 1, 4))
STEPS, SETTLED, MOST = len(FACTORS), 4, 128  # at least; without a new entry in the state; before the trial gives up
# On 1-d tensors these move nothing, if all shapes are the same.
SAME = frozenset(
    getattr(aten, name).default
    for name in "view _unsafe_view reshape expand t permute squeeze _reshape_alias new_zeros new_ones new_full "
    "new_empty empty_strided new_empty_strided".split()
    if hasattr(getattr(aten, name, None), "default")
) | {aten.empty.memory_format}
MADE = frozenset(getattr(aten, name).default for name in ("new_zeros", "new_ones", "new_full", "new_empty"))
REDUCING = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


class PointwiseOnly(TorchDispatchMode):
    """Inside, an operator that mixes the elements of a tensor, moves them, or draws numbers, raises `Refused`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refused(f"its step draws random numbers ({func})")
        name = func.overloadpacket.__name__
        lists = name.startswith("_foreach_") and name not in REDUCING
        known = lists or func in SAME or func.namespace == "prim" or keeps_places(func)
        if not known and _shapes((args, kwargs)):
            raise Refused(f"its step uses {func}, which does not keep every element where it is")
        result = func(*args, **kwargs)
        shapes = _shapes((args, kwargs, result))
        if not known and shapes:
            raise Refused(f"its step uses {func}, which does not keep every element where it is")
        if not lists and (len(shapes) > 1 or any(len(shape) > 1 for shape in shapes)):
            raise Refused(f"its step uses {func} on tensors of other shapes than its parameter")
        one = (
            tuple(result.shape) in ((), (1,)) if isinstance(result, torch.Tensor) else isinstance(result, bool | float)
        )
        if shapes and one and func not in MADE:
            raise Refused(f"its step makes one number of a parameter's elements ({func})")
        return result


def _shapes(values: Any) -> set[tuple[int, ...]]:
    """Of tensors that are not one number."""
    found = {tuple(leaf.shape) for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)}
    return found - {(), (1,)}


def check_runs_on_pieces(optimizer: Optimizer, group: Mapping[str, Any], dtypes: Sequence[torch.dtype]) -> bool:
    """Raises `Refused` where the class does on pieces anything else than on parameters.

    Returns whether its code divides by the rate, and fails at a rate of zero.
    """
    divides = False
    for dtype in dict.fromkeys((torch.float64, *dtypes)):
        try:
            _try(optimizer, group, dtype, FACTORS)
        except ZeroDivisionError:
            divides = True
            _try(optimizer, group, dtype, tuple(filter(None, FACTORS)))
    return divides


class _Side:
    """The class's own steps, on whole parameters or on their pieces."""

    def __init__(
        self, optimizer: Optimizer, options: Mapping[str, Any], begin: Sequence[torch.Tensor], whole: bool,
        notes: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.parts = [[value] if whole else _pieces(value) for value in begin]  # views
        self.parameters = [nn.Parameter(part) for row in self.parts for part in row]
        for parameter in self.parameters:
            parameter.__dict__.update(notes)
        state: Any = defaultdict(dict)
        state |= named_state(optimizer)
        probe = fresh_of(optimizer, options, nn.Parameter(torch.ones(2, 3)))
        for parameter in self.parameters if probe is not None and any(probe.state.values()) else ():
            if (mine := fresh_of(optimizer, options, parameter)) is not None and mine.state.get(parameter):
                state[parameter] = dict(mine.state[parameter])
        self.twin = twin_of(optimizer, [{**options, "params": self.parameters}], state)
        self.whole = whole

    def step(self, gradients: Sequence[torch.Tensor], hypers: Mapping[str, float]) -> None:
        group = self.twin.param_groups[0]
        for name, value in hypers.items():
            group.update(with_hyper(group, name, value))
        rows = gradients if self.whole else [part for gradient in gradients for part in _pieces(gradient)]
        for parameter, gradient in zip(self.parameters, rows, strict=True):
            parameter.grad = gradient.clone()
        with torch.no_grad():
            if self.whole:
                step_of(type(self.twin))(self.twin)
            else:
                with PointwiseOnly():
                    step_of(type(self.twin))(self.twin)

    def values(self) -> list[torch.Tensor]:
        """Each parameter, 1-d."""
        rows = iter(self.parameters)
        return [
            torch.cat([next(rows).detach().reshape(-1) for _ in row]).clone() for row in self.parts
        ]  # fmt: skip

    def numbers(self) -> dict[tuple[str, str], float]:
        """What it keeps as numbers, by where."""
        return {
            (place, name): float(value)
            for place, holders in self._holders().items()
            for name, value in (holders[0] if holders else {}).items()
            if type(value) in (int, float) or (isinstance(value, torch.Tensor) and not value.dim())
        }

    def move_on(self, counters: Sequence[tuple[str, str]]) -> None:
        """Sets counters far ahead."""
        for place, name in counters:
            for holder in self._holders()[place]:
                holder[name] = holder[name] + LATE

    def _holders(self) -> dict[str, list[Any]]:
        kept = [self.twin.state[parameter] for parameter in self.parameters if parameter in self.twin.state]
        return {"group": self.twin.param_groups, "attribute": [vars(self.twin)], "state": kept}

    def entries(self) -> int:
        """How much it keeps: what grows makes this grow."""
        kept = [self.twin.param_groups[0], attributes_of(self.twin)]
        return len(pytree.tree_leaves((kept, list(self.twin.state.values()))))


def _pieces(value: torch.Tensor) -> list[torch.Tensor]:
    """An empty one, and two."""
    flat = value.reshape(-1)
    cut = -(-len(flat) // 3)
    return [flat[:0], flat[:cut], flat[cut:]]


def _try(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, factors: Sequence[float]) -> None:
    draw = torch.Generator().manual_seed(0)
    options = plain_options(options_of(group))
    options = begin_of(optimizer, options, fresh_of(optimizer, options, nn.Parameter(torch.ones(2, 3, dtype=dtype))))
    begin = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]
    rate = abs(float(group.get("lr", 0.0))) or 0.01

    def both(call: Callable[[_Side], Any]) -> None:
        for side in sides:
            try:
                call(side)
            except (Refused, ZeroDivisionError):
                raise
            except Exception as error:
                raise Refused(_why(error)) from error

    notes: dict[str, Any] = next((copy.copy(vars(p)) for p in group["params"] if vars(p)), {})
    sides = [_Side(optimizer, options, [value.clone() for value in begin], whole, notes) for whole in (True, False)]
    counted: list[dict[tuple[str, str], float]] = []
    sizes: list[int] = []
    last = None
    for index in itertools.count():
        gradients = [
            (torch.randn(shape, generator=draw, dtype=torch.float64)
             * 10 ** (3 * torch.rand(shape, generator=draw, dtype=torch.float64) - 2)).to(dtype)
            for shape in SHAPES
        ]  # fmt: skip
        hypers = {name: hyper(group, name) * (1 - 0.05 * (index % 3)) for name in scheduled(group) if name != "lr"}
        hypers |= {"lr": rate * factors[index % len(factors)]} if "lr" in group else {}
        both(lambda side, given=gradients, now=hypers: side.step(given, now))  # type: ignore[misc]
        _compare(sides, begin, index, dtype)
        counted = [*counted[-2:], sides[0].numbers()]
        sizes = [*sizes[1 - SETTLED :], sides[0].entries()]
        if last is not None:
            if index == last:
                return
        elif index + 1 >= STEPS and len(sizes) == SETTLED and len(set(sizes)) == 1:
            far = [name for name in counted[-1] if _counts(counted, name)]
            both(lambda side, far=far: side.move_on(far))  # type: ignore[misc]
            last = index + 3
        elif index == MOST:
            raise Refused(f"its state still grows after {MOST} steps")


def _counts(rows: Sequence[Mapping[Any, float]], name: Any) -> bool:
    values = [row.get(name, 0.0) for row in rows]
    return len(values) == 3 and all(b - a == 1 for a, b in itertools.pairwise(values))


def _compare(sides: Sequence[_Side], begin: Sequence[torch.Tensor], index: int, dtype: torch.dtype) -> None:
    """Raises `Refused` where pieces are not what the whole is, but for rounding."""
    theirs, mine = (torch.cat(side.values()) for side in sides)
    start = torch.cat([value.reshape(-1) for value in begin]).double()
    moved = float((theirs.double() - start).nan_to_num().abs().max())
    bound = BOUNDS[dtype] * moved + 4 * torch.finfo(dtype).eps * theirs.double().abs()
    difference = (mine.double() - theirs.double()).abs()
    wrong = ~((mine == theirs) | (mine.isnan() & theirs.isnan())) & ~(difference <= bound)
    if bool(wrong.any()):
        raise Refused(
            f"on pieces of parameters it does not do what it does on parameters: at step {index + 1} an element is off "
            f"by {float(difference[wrong].max()):.2g}, where the one that moved most moved by {moved:.2g}"
        )


def _why(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
    return f"its step fails on small parameters ({text})"
