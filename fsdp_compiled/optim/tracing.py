"""An optimizer's ``step`` -> an ATen graph that updates one flat shard in place.

The code is run once for each way that it may branch on numbers which change from step to step, on fake tensors of the
parameter's own shape, with its counters, rates and state as tensors of the trace (`scalars`), and the ways are joined
(`branches`). An optimizer is *element-wise* when every element of a parameter is updated from its own gradient and
state alone; only then may it run on slices of flat buffers. That is not looked up in a list of names: every operator
of the graph must be pointwise or work on single numbers. Operators name no sizes, so that a graph traced on a matrix
runs on a flat shard.

Sets ``torch.compiler._is_compiling_flag``, which optimizers ask for their branch-free form.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from fsdp_compiled.ir.nodes import mutated
from fsdp_compiled.optim.branches import merge, resolve_aliases
from fsdp_compiled.optim.elementwise import check_elementwise
from fsdp_compiled.optim.groups import hyper_of, with_hyper
from fsdp_compiled.optim.nested import Form, filled, form_of, leaves_of
from fsdp_compiled.optim.rule import RuleInput, StateTensor, inputs_of
from fsdp_compiled.optim.rule_graph import drop_predicates, inline_constants, read_gradient_from_a_copy
from fsdp_compiled.optim.scalars import Numbers, functions_of_tensors
from fsdp_compiled.optim.twin import Refused, Untraceable, attributes_of, named_state, state_of, step_of, twin_of
from fsdp_compiled.torch_private.names import there

aten = torch.ops.aten
WORDS = {"group": "its group entry", "optimizer": "its attribute", "state": "its state"}
WAYS = 32  # the most ways through an optimizer's code that are joined


@dataclass(frozen=True)
class Subject:
    """What is traced: the optimizer, on a parameter of this kind."""

    optimizer: Optimizer
    options: Mapping[str, Any]  # of the group
    hypers: Mapping[str, float]  # the scheduled ones, as they are now
    state: tuple[StateTensor, ...]
    started: tuple[str, ...]  # the parameter's state that the constructor made
    empty: tuple[str, ...] = ()  # and what holds None
    forms: tuple[tuple[str, Form], ...] = ()  # of containers in it
    branchless: bool = False  # in the optimizer's form for compilers
    first: bool = False  # whether the first step is a way of its own, chosen by the state ``first``


@dataclass(frozen=True)
class Traced:
    """A graph, and whether the code asked for the parameter's shape."""

    graph: fx.Graph
    asked_shape: bool
    forked: bool


def trace(subject: Subject, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Traced:
    """Raises `Refused` for an optimizer that is not element-wise, or whose code cannot be traced."""
    ways = 0
    asked = False

    def explore(given: tuple[bool, ...]) -> fx.Graph | None:
        nonlocal ways, asked
        ways += 1
        if ways > WAYS:
            raise Untraceable(f"its Python code branches on numbers that change in more than {WAYS} ways")
        graph, decided, mine = _one_way(subject, given, shape, dtype, device)
        asked |= mine
        for place in reversed(range(len(given), len(decided))):
            other = explore((*decided[:place], not decided[place]))
            if graph is None or other is None:
                graph = graph or other
                if graph is not None:
                    drop_predicates(graph, place)
            else:
                graph = merge(other, graph, place) if not decided[place] else merge(graph, other, place)
        return graph

    graph = explore(())
    if graph is None:
        raise Refused("its step divides by zero whichever way it goes")
    drop_predicates(graph, 0)
    read_gradient_from_a_copy(graph)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or bool(mutated(node)))
    check_elementwise(graph, tuple(shape))
    return Traced(graph, asked, ways > 1)


def _one_way(
    subject: Subject, decisions: tuple[bool, ...], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[fx.Graph | None, tuple[bool, ...], bool]:
    """The graph of one way through the code (None: it divides by zero there), the decisions on it, and `asked_shape`.

    The graph returns the predicates that were decided.
    """
    inputs = inputs_of(subject.state, subject.hypers)
    found: dict[str, Any] = {}
    twin = twin_of(subject.optimizer, [{"params": []}], {})

    def update(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(inputs, tensors, strict=True))
        fixed = {
            name: (given[RuleInput("hyper", name)], value) for name, value in subject.hypers.items() if name != "lr"
        }
        mode = Numbers(decisions, fixed, catches_zero=_catches_zero(type(subject.optimizer)))
        found["mode"] = mode
        with functions_of_tensors(type(subject.optimizer)), _quiet(), _compiling(subject.branchless), mode:
            _step(subject, twin, given, mode)
        return tuple(mode.predicates)

    entries = {entry.name: entry for entry in subject.state}

    def example(one: RuleInput) -> torch.Tensor:
        if one.kind == "hyper":
            return torch.zeros((), dtype=torch.float64, device=device)
        if one.kind == "state":
            entry = entries[one.name]
            return torch.zeros(() if entry.scalar else tuple(shape), dtype=entry.dtype or dtype, device=device)
        return torch.zeros(tuple(shape), dtype=dtype, device=device)

    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        examples = [example(one) for one in inputs]
        try:
            traced = make_fx(update)(*examples)
        except ZeroDivisionError:
            mode = found["mode"]
            return None, tuple(mode.decided), mode.asked_shape
    graph = traced.graph
    inline_constants(traced)
    for node, one in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.target = str(one)
        node._rename(str(one))
    resolve_aliases(graph)
    check_elementwise(graph, tuple(shape))
    if not found["mode"].decided:
        graph.eliminate_dead_code(
            is_impure_node=lambda node: node.op in ("placeholder", "output") or bool(mutated(node))
        )
    return graph, tuple(found["mode"].decided), found["mode"].asked_shape


def _step(subject: Subject, twin: Optimizer, given: Mapping[RuleInput, torch.Tensor], mode: Numbers) -> None:
    """The twin's step on these tensors; whatever its code keeps is written to the tensor that holds it."""
    group = dict(subject.options)
    for name in subject.hypers:
        value, own = given[RuleInput("hyper", name)], hyper_of(group, name)
        # One that is a tensor (lr=torch.tensor(...)) is computed with in its dtype.
        value = value.to(own.dtype) if isinstance(own, torch.Tensor) else mode.number(value, f"hyper_{name}")
        group = with_hyper(group, name, value)
    begins = subject.first and mode.decide(given[RuleInput("state", "first")] != 0)
    entries: dict[str, Any] = {} if begins else dict.fromkeys(subject.empty)
    attributes: dict[str, Any] = {}
    shared = named_state(subject.optimizer)
    places: dict[str, dict[str, Any]] = {
        "parameter": entries, "group": group, "optimizer": attributes, "state": shared,
    }  # fmt: skip
    for entry in subject.state:
        if entry.place in places and not (begins and (entry.number or not _is_there(entry, subject))):
            value = given[RuleInput("state", entry.name)]
            places[entry.place][entry.name] = mode.number(value, entry.name) if entry.number else value
    for name, form in subject.forms:
        inside = [entry.name for entry in subject.state if entry.container == name]
        if all(label in entries for label in inside):
            entries[name] = filled(form, [entries.pop(label) for label in inside])
    undamped = given.get(RuleInput("state", "undamped"))
    if undamped is not None:  # the first step adds the gradient whole: no dampening
        group["dampening"] = group["dampening"] * (1 - undamped)
    parameter = given[RuleInput("parameter")]
    parameter.grad = given[RuleInput("gradient")]
    state: Any = defaultdict(dict)
    state |= {parameter: entries, **shared}
    own = group | {"params": [parameter]}
    twin.param_groups, twin.state = [own], state
    twin.__dict__.update(attributes)
    before, started = attributes_of(twin), dict(own)
    step_of(type(twin))(twin)
    asked = mode.asked_shape
    places = {
        "parameter": _opened(subject, state[parameter]),
        "group": own,
        "optimizer": attributes_of(twin),
        "state": state,
    }
    for entry in subject.state:
        if entry.place in places:
            _write(given[RuleInput("state", entry.name)], places[entry.place].get(entry.name))
    if undamped is not None:
        undamped.zero_()
    if subject.first:
        given[RuleInput("state", "first")].zero_()
    _check_kept(subject, places, started, before)
    mode.asked_shape = asked


def _opened(subject: Subject, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter's state, what is in containers by its own name."""
    found = dict(entries)
    for name, form in subject.forms:
        value = found.pop(name, None)
        if value is None or form_of(value) != form:
            raise Untraceable(f"its state {name!r}, a {form.type.__name__}, does not keep its form from step to step")
        inside = [entry.name for entry in subject.state if entry.container == name]
        found |= dict(zip(inside, leaves_of(value), strict=True))
    return found


def _write(target: torch.Tensor, value: Any) -> None:
    if value is target or value is None:
        return
    if isinstance(value, torch.Tensor):
        if target.dim() == 0 and value.shape == (1,):
            value = value.reshape(())
        if value.shape != target.shape:
            raise Untraceable(f"its state of shape {list(target.shape)} becomes one of shape {list(value.shape)}")
        target.copy_(value)
    elif isinstance(value, (bool, int, float)):
        target.fill_(value)
    else:
        raise Untraceable(f"it keeps a {type(value).__name__} in its state")


def _check_kept(
    subject: Subject, places: Mapping[str, Mapping[str, Any]], group: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """Refuses what the code keeps anywhere else than in the state that is known."""
    known = {(entry.place, entry.name) for entry in subject.state}
    if odd := [n for n, v in places["parameter"].items() if ("parameter", n) not in known and v is not None]:
        raise Untraceable(f"its state {odd[0]!r} is made at some later step")
    if any(not isinstance(key, str) for key in list(places["state"])[1:]):
        raise Untraceable("it keeps state that belongs to no parameter")
    for place, before in (("group", group), ("optimizer", own), ("state", named_state(subject.optimizer))):
        for name, value in places[place].items():
            if (
                isinstance(name, str)
                and (place, name) not in known
                and (name not in before or value is not before[name])
            ):
                if not _same(value, before.get(name)):
                    raise Untraceable(f"it changes {WORDS[place]} {name!r}")


def _is_there(entry: StateTensor, subject: Subject) -> bool:
    """Whether the code finds this entry before its first step."""
    if entry.place == "parameter":
        return (entry.container or entry.name) in subject.started
    if entry.place == "state":
        return entry.name in state_of(subject.optimizer)
    return entry.name in (subject.options if entry.place == "group" else attributes_of(subject.optimizer))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    try:
        return bool(one == other)
    except Exception:
        return one is other


def _catches_zero(kind: type[Optimizer]) -> bool:
    """Whether the code says what to do when it divides by zero."""
    for base in kind.__mro__:
        with contextlib.suppress(OSError, TypeError):
            if not base.__module__.startswith("torch.") and "ZeroDivisionError" in inspect.getsource(base):
                return True
    return False


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
    """Lets optimizers take their branch-free form, which they keep for compilers, on any device."""
    before = torch.compiler.is_compiling()
    if there("optimizers' traced form"):
        torch.compiler._is_compiling_flag = on or before
    try:
        yield
    finally:
        if there("optimizers' traced form"):
            torch.compiler._is_compiling_flag = before
