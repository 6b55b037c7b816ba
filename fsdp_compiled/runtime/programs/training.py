"""What forwards and backwards of a training program need to look up, found once: places instead of ports.

A run in a loop of the user's is two calls with Python between them, which costs time on the host alone. So nothing here
looks at the graphs again.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.lower.lowering import Boxed
from fsdp_compiled.lower.split_forward_backward import SplitProgram


@dataclass(frozen=True)
class Backward:
    """A backward that can run. ``gradients``: the outputs' places of flat buffers' gradients, reduced or whole, by key;
    ``others``: those of inputs' gradients, by name."""

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
    """A result's gradient that backward reads. ``place``: of the result. It is read in the layout that was traced.

    ``stride``: as traced; None if sizes may change: then ``order`` has the dims from slowest to fastest.
    """

    place: int
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None
    order: tuple[int, ...]

    def laid_out(self, given: torch.Tensor | None, sizes: Sequence[int]) -> torch.Tensor:
        """This gradient in the traced layout; zeros if there is none."""
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
    # Reads the hints of symbols: a comparison of symbols would fix the program to these sizes.
    sizes = [one.node.hint if isinstance(one, torch.SymInt) else one for one in (*traced.shape, *traced.stride())]
    moves = any(isinstance(one, torch.SymInt) for one in (*traced.shape, *traced.stride()))
    strides = sizes[traced.dim() :]
    order = tuple(sorted(range(traced.dim()), key=lambda dim: -strides[dim]))
    return Tangent(place, traced.dtype, traced.device, None if moves else tuple(strides), order)


@dataclass(frozen=True)
class Training:
    """``sources``: for each saved value, its place among inputs and outputs together; ``shards``: of these places, the
    shards'; ``tangents``: the gradients of results that backward reads; ``constant``: the places of the other results;
    ``others``: inputs that have gradients beside the sharded parameters, by name, and their places; ``read``: the names
    of the parameters that backward reads; ``gathered``: of those that forward gathers.
    """

    backward: Backward
    results: tuple[Port, ...]
    sources: tuple[int, ...]
    shards: frozenset[int]
    tangents: tuple[Tangent, ...]
    constant: tuple[int, ...]
    others: tuple[tuple[str, int], ...]
    read: frozenset[str]
    gathered: frozenset[str]
    _by_name: Mapping[str, frozenset[str]]
    _forward: Program
    _reached: dict[frozenset[int], frozenset[str]] = field(default_factory=dict)

    @cached_property
    def moved(self) -> frozenset[str]:
        """The parameters and inputs that have gradients if all results have gradients."""
        return self.reached(frozenset(range(len(self.results))))

    def check_watched(
        self, results: Sequence[weakref.ref[torch.Tensor] | None], tangents: Sequence[torch.Tensor | None]
    ) -> None:
        """Raises ``RuntimeError`` where a result's hook, or its ``grad``, misses what comes to it through others."""
        for place, ref in enumerate(results):
            one = ref() if ref is not None else None
            if one is None or not (one.retains_grad or one._backward_hooks):
                continue
            later = next((other for other in self._made_of(place) if tangents[other] is not None), None)
            if later is not None:
                raise RuntimeError(
                    f"{self.results[place]} has a hook or retain_grad(), and the loss also depends on it through "
                    f"{self.results[later]}: inside of the program no hook sees that part of its gradient. Register "
                    "the hook inside of forward, where it is traced; or leave the other result out of the loss."
                )

    def _made_of(self, result: int) -> list[int]:
        """The places of the results that are computed from this one."""
        outputs = self._forward.outputs
        ends = {outputs[port]: place for place, port in enumerate(self.results) if place != result}
        value = outputs[self.results[result]]
        while value.target is torch.ops.aten.clone.default:  # what is returned may be a copy
            value = value.all_input_nodes[0]
        stack, found = [value], set[fx.Node]()
        while stack:
            for user in stack.pop().users:
                if user not in found:
                    found.add(user)
                    stack.append(user)
        return sorted(place for node, place in ends.items() if node in found)

    def reached(self, differentiated: frozenset[int]) -> frozenset[str]:
        """The parameters and inputs that have gradients if the results at these places have gradients."""
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
    """``inputs``, ``outputs``: of the forward program; ``runner``: runs the backward program."""
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
        read=split.read,
        gathered=frozenset(
            name for node in split.forward.graph.nodes if (name := node.meta.get("parameter")) is not None
        ),
        _by_name=reached,
        _forward=split.forward,
    )
