"""What the forwards and backwards of a training program look up, found once: places instead of ports.

A run in a loop of the user's is two calls with Python between them, whose time is the host's alone: nothing here is
asked of the graphs again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.lower.lowering import Boxed
from fsdp_compiled.lower.split_forward_backward import SplitProgram, flat_gradients


@dataclass(frozen=True)
class Backward:
    """A backward that can run. Places among its outputs: ``gradients``, of flat buffers by key, reduced or whole, and
    ``others``, of inputs by name."""

    runner: Boxed
    gradients: Mapping[str, int]
    others: Mapping[str, int]
    wire: str


def backward_of(program: Program, runner: Boxed) -> Backward:
    places = dict(zip((port for port in program.ports if port.side == "out"), range(len(program.ports))))
    return Backward(
        runner,
        {port.name: place for port, place in places.items() if port.kind in ("gradient", "whole gradient")},
        {port.name: place for port, place in places.items() if port.kind == "input gradient"},
        program.wire,
    )


@dataclass(frozen=True)
class Tangent:
    """A derivative that backward reads: of the result in this ``place``, in the layout that it was traced in.

    ``stride``: as traced; None where sizes move, and then ``order``: the dims from slowest to fastest.
    """

    place: int
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None
    order: tuple[int, ...]

    def laid_out(self, given: torch.Tensor | None, sizes: Sequence[int]) -> torch.Tensor:
        """This derivative in that layout; zeros where there is none."""
        if given is None:
            return torch.zeros(tuple(sizes), dtype=self.dtype, device=self.device)
        stride = self.stride
        if stride is None:
            steps, size = dict.fromkeys(self.order, 0), 1
            for dim in reversed(self.order):
                steps[dim], size = size, size * max(sizes[dim], 1)
            stride = tuple(steps[dim] for dim in range(len(sizes)))
        if given.stride() == stride and not given.is_neg() and not given.is_conj():
            return given
        return torch.empty_strided(given.shape, stride, dtype=given.dtype, device=given.device).copy_(given)


def _tangent(place: int, traced: torch.Tensor) -> Tangent:
    # Symbols are looked at, not asked: a comparison would make the program be for these sizes alone.
    sizes = [one.node.hint if isinstance(one, torch.SymInt) else one for one in (*traced.shape, *traced.stride())]
    moves = any(isinstance(one, torch.SymInt) for one in (*traced.shape, *traced.stride()))
    strides = sizes[traced.dim() :]
    order = tuple(sorted(range(traced.dim()), key=lambda dim: -strides[dim]))
    return Tangent(place, traced.dtype, traced.device, None if moves else tuple(strides), order)


@dataclass(frozen=True)
class Training:
    """``sources``: of each thing saved, its place among inputs and outputs together; ``shards``: of these, the ones
    that are shards; ``tangents``: the derivatives that backward reads; ``constant``: the places of the other results;
    ``others``: inputs that have gradients beside the sharded parameters, by name, and their places; ``units``: those
    of whose parameters this gives gradients; ``read``: the parameters that backward reads, by name.
    """

    backward: Backward
    results: tuple[Port, ...]
    sources: tuple[int, ...]
    shards: frozenset[int]
    tangents: tuple[Tangent, ...]
    constant: tuple[int, ...]
    others: tuple[tuple[str, int], ...]
    units: frozenset[str]
    read: frozenset[str]
    _by_name: Mapping[str, frozenset[str]]
    _reached: dict[frozenset[int], frozenset[str]] = field(default_factory=dict)

    @cached_property
    def moved(self) -> frozenset[str]:
        """The parameters and inputs that have gradients where all results have derivatives."""
        return self.reached(frozenset(range(len(self.results))))

    def reached(self, differentiated: frozenset[int]) -> frozenset[str]:
        """The parameters and inputs that have gradients, where the results in these places have derivatives."""
        if differentiated not in self._reached:
            keys = {self.results[place].key for place in differentiated}
            self._reached[differentiated] = frozenset(name for name, moved in self._by_name.items() if moved & keys)
        return self._reached[differentiated]


def training_of(
    split: SplitProgram,
    inputs: tuple[Port, ...],
    outputs: tuple[Port, ...],
    reached: Mapping[str, frozenset[str]],
    runner: Boxed,
) -> Training:
    """``inputs``, ``outputs``: of the forward program; ``runner``: the backward one."""
    places = {port: place for place, port in enumerate(inputs)}
    places |= {port: len(inputs) + place for place, port in enumerate(outputs)}
    results = tuple(port for port in outputs if port.kind == "result")
    index = {port.key: place for place, port in enumerate(results)}
    traced = {port: node for port, node in split.backward.inputs.items() if port.kind == "tangent"}
    tangents = tuple(_tangent(index[port.key], node.meta["val"]) for port, node in traced.items())
    moving = {index[port.key] for port, node in traced.items() if node.users}
    backward = backward_of(split.backward, runner)
    named = {port.name: place for place, port in enumerate(inputs) if port.kind in ("batch", "plain")}
    return Training(
        backward,
        results,
        sources=tuple(places[port] for port in split.saved),
        shards=frozenset(places[port] for port in split.saved if port.kind == "shard"),
        tangents=tangents,
        constant=tuple(set(range(len(results))) - moving),
        others=tuple((name, named[name]) for name in backward.others),
        units=frozenset(node.meta["mark"].unit for node in flat_gradients(split.backward).values()),
        read=split.read,
        _by_name=reached,
    )
