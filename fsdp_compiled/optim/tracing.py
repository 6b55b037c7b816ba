"""The step of a class of `torch.optim` -> an ATen graph that updates one flat shard in place.

The code is run once on fake tensors, with its counters, rates and state as tensors of the trace (`traced_numbers`), in
a form that asks no Python number back: the plain one, or where that branches on a number that changes (RAdam, ASGD), or
looks at what it has to begin with, the one that PyTorch keeps for CUDA graphs, ``capturable``. Operators name no sizes,
so that a graph traced on a matrix runs on a flat shard.

Sets ``torch.compiler._is_compiling_flag``, which optimizers ask for that form on any device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from fsdp_compiled.ir.nodes import mutated
from fsdp_compiled.optim.element_wise import check_elementwise
from fsdp_compiled.optim.optimizer_copy import Refused, copy_of
from fsdp_compiled.optim.param_groups import hyper_of, with_hyper
from fsdp_compiled.optim.rule import Kept, RuleInput, inputs_of
from fsdp_compiled.optim.step import Part, make_step
from fsdp_compiled.optim.traced_numbers import Numbers
from fsdp_compiled.torch_private.names import there

aten = torch.ops.aten
SHAPE = (2, 3)  # that a parameter has in the trace
ALIASES = (aten.detach.default, aten.alias.default, aten.view_as.default)


@dataclass(frozen=True)
class Subject:
    """What is traced or run: the optimizer, of one group."""

    optimizer: Optimizer
    options: Mapping[str, Any]  # of the group
    hypers: Mapping[str, float]  # the scheduled ones, as they are now
    kept: Kept
    capturable: bool = False  # in the form of torch.optim's for CUDA graphs


def trace(subject: Subject, dtype: torch.dtype, device: torch.device) -> fx.Graph:
    """Raises `Refused` for an optimizer that is not element-wise, or whose code cannot be traced."""
    state = subject.kept.state
    inputs = inputs_of(state, subject.hypers)
    made = copy_of(subject.optimizer, [{"params": []}], {})

    def update(*tensors: torch.Tensor) -> None:
        given = dict(zip(inputs, tensors, strict=True))
        fixed = [(given[RuleInput("hyper", name)], value) for name, value in subject.hypers.items() if name != "lr"]
        mode = Numbers(fixed)
        with _quiet(), _compiling(subject.capturable), mode:
            _step(subject, made, given, mode)

    def example(one: RuleInput) -> torch.Tensor:
        if one.kind == "hyper":
            return torch.zeros((), dtype=torch.float64, device=device)
        entry = next((entry for entry in state if one.kind == "state" and entry.name == one.name), None)
        if entry is None:
            return torch.zeros(SHAPE, dtype=dtype, device=device)
        return torch.zeros(() if entry.scalar else SHAPE, dtype=entry.dtype or dtype, device=device)

    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        traced = make_fx(update)(*map(example, inputs))
    graph = traced.graph
    _inline_constants(traced)
    for node, one in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.target = str(one)
        node._rename(str(one))
    _resolve_aliases(graph)
    _read_gradient_from_a_copy(graph)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or bool(mutated(node)))
    check_elementwise(graph, SHAPE)
    return graph


def _step(subject: Subject, made: Optimizer, given: Mapping[RuleInput, torch.Tensor], mode: Numbers) -> None:
    """The copy's step on these tensors."""
    group = dict(subject.options)
    for name in subject.hypers:
        value, own = given[RuleInput("hyper", name)], hyper_of(group, name)
        # One that is a tensor (lr=torch.tensor(...)) is computed with in its dtype.
        value = value.to(own.dtype) if isinstance(own, torch.Tensor) else mode.number(value)
        group = with_hyper(group, name, value)
    parameter = given[RuleInput("parameter")]
    parameter.grad = given[RuleInput("gradient")]
    tensors = {entry.name: given[RuleInput("state", entry.name)] for entry in subject.kept.state}
    if (first := tensors.get("first")) is not None:
        for entry in subject.kept.state:
            if entry.from_rate:  # until the first step nobody knows it
                rate = given[RuleInput("hyper", "lr")].to(tensors[entry.name].dtype)
                tensors[entry.name].copy_(torch.where(first != 0, rate, tensors[entry.name]))
    if (undamped := tensors.get("undamped")) is not None:  # the first step adds the gradient whole: no dampening
        group["dampening"] = group["dampening"] * (1 - undamped)
    make_step(made, [Part(subject.kept, group, tensors, [(parameter, tensors)])], lambda tensor, _: mode.number(tensor))
    for own in (first, undamped):
        if own is not None:
            own.zero_()


def _resolve_aliases(graph: fx.Graph) -> None:
    """Every value is read by the name of the tensor that holds it: views of the whole, and results of writes, go."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ALIASES or (
            node.target is aten.view.default and node.meta["val"].shape == node.args[0].meta["val"].shape
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif (targets := mutated(node)) and node.users and isinstance(node.meta.get("val"), torch.Tensor):
            node.replace_all_uses_with(targets[0])


def _read_gradient_from_a_copy(graph: fx.Graph) -> None:
    """A gradient that the code writes is copied first: it may be the sum over microbatches, or be read again."""
    gradient = graph.find_nodes(op="placeholder")[1]
    if any(gradient in mutated(node) for node in gradient.users):
        last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            copy = graph.call_function(aten.clone.default, (gradient,))
        copy.meta["val"] = gradient.meta["val"]
        gradient.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _inline_constants(traced: fx.GraphModule) -> None:
    """Numbers that the optimizer's code wrapped in 0-d tensors become operators that make them."""
    for node in traced.graph.find_nodes(op="get_attr"):
        value = getattr(traced, str(node.target))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise Refused(f"its step closes over {node.target}")
        with traced.graph.inserting_before(node):
            made = traced.graph.call_function(
                aten.full.default, ([], value.item()), {"dtype": value.dtype, "device": value.device}
            )
        made.meta = dict(node.meta)
        made.meta["val"] = torch.empty((), dtype=value.dtype, device="meta")
        node.replace_all_uses_with(made)
        traced.graph.erase_node(node)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What fails here is told in the refusal; PyTorch's own log of it is not wanted."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _compiling(on: bool) -> Iterator[None]:
    """Lets optimizers take their form for CUDA graphs, which they keep for compilers too, on any device."""
    before = torch.compiler.is_compiling()
    if there("optimizers' traced form"):
        torch.compiler._is_compiling_flag = on or before
    try:
        yield
    finally:
        if there("optimizers' traced form"):
            torch.compiler._is_compiling_flag = before
