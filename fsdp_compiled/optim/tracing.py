"""A `torch.optim` optimizer -> rules that update flat shards, traced from the optimizer's own code.

An optimizer is *element-wise* when every element of a parameter is updated from its own gradient and state alone.
Only then may it run on slices of flat buffers. That is not looked up in a list of names: the optimizer's ``step`` is
traced on a flat tensor, and every operator in the trace must be pointwise or work on scalars. Whatever passes may
be used, subclasses and third-party ones included; Muon, LBFGS and Adafactor are refused by that same test.

The step count and the learning rate are 0-d tensors of the trace, so a scheduler never causes a recompilation. The
arithmetic on them is in float64, as Python's is: on a CPU the update is bit for bit the eager one.
``foreach``, ``fused`` and ``capturable`` choose between implementations of one formula, and are ignored.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from fsdp_compiled.ir.nodes import written
from fsdp_compiled.kernels.scaled import operators
from fsdp_compiled.optim.fused import Formula, formula_of

aten = torch.ops.aten


@dataclass(frozen=True)
class StateTensor:
    """One entry of the optimizer's state: per element of the parameter, or (``scalar``) one for the whole group."""

    name: str
    scalar: bool
    initial: float
    dtype: torch.dtype | None  # None: the parameter's


@dataclass(frozen=True)
class Rule:
    """How one parameter group updates a flat shard.

    ``trace(numel, dtype, device)`` gives an ATen graph with placeholders named ``parameter``, ``gradient``,
    ``state_<name>`` and ``hyper_<name>``, which it writes in place. ``formula`` is the same as one operator, where
    there is one.
    """

    group: int
    name: str
    state: tuple[StateTensor, ...]
    hypers: tuple[str, ...]
    trace: Callable[[int, torch.dtype, torch.device], fx.Graph] = field(compare=False)
    formula: Formula | None = None


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
    return float(group["betas"][0] if name == "beta1" else group[name])


def signature(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a traced rule depends on: every hyperparameter that is not scheduled, and whether momentum is zero."""
    moving = scheduled(group)
    fixed = []
    for name, value in sorted(options_of(group).items()):
        if name in ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", *moving):
            continue
        fixed.append((name, value[1:] if name == "betas" and "beta1" in moving else value))
    return (
        *((name, repr(value)) for name, value in fixed),
        *((name, hyper(group, name) == 0) for name in moving),
    )


def make_rules(optimizer: Optimizer) -> tuple[Rule, ...]:
    """One rule a parameter group. Raises ``ValueError`` for an optimizer that is not element-wise, by name."""
    return tuple(_make_rule(optimizer, index, group) for index, group in enumerate(optimizer.param_groups))


def _make_rule(optimizer: Optimizer, index: int, group: Mapping[str, Any]) -> Rule:
    kind = type(optimizer)
    options = options_of(group) | {
        name: False for name in ("foreach", "fused", "capturable", "differentiable") if name in group
    }
    moving = scheduled(group)
    values = {name: hyper(group, name) for name in moving}
    try:
        state = _initial_state(optimizer, options)
        try:
            rule = _bind(kind, optimizer, index, options, state, values, branchless=False)
            rule.trace(7, torch.float32, torch.device("cpu"))
        except _Branches:
            options = options | {"capturable": True}
            state = tuple(
                StateTensor(entry.name, entry.scalar, entry.initial, torch.float64 if entry.scalar else entry.dtype)
                for entry in state
            )
            rule = _bind(kind, optimizer, index, options, state, values, branchless=True)
            rule.trace(7, torch.float32, torch.device("cpu"))
    except (_NotElementwise, _Branches) as error:
        raise ValueError(_refusal(kind, str(error))) from None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
        raise ValueError(_refusal(kind, reason)) from error
    return rule


def _refusal(kind: type, reason: str) -> str:
    return (
        f"{kind.__name__} is not supported: it does not update each element from its own gradient and state alone "
        f"({reason}). Use an element-wise optimizer, such as AdamW, Adam, SGD, RMSprop or Adagrad."
    )


class _NotElementwise(Exception):
    """The trace holds an operator that mixes elements."""


class _Branches(Exception):
    """The optimizer's Python code branches on the step count."""


def _bind(
    kind: type[Optimizer],
    optimizer: Optimizer,
    index: int,
    options: Mapping[str, Any],
    state: tuple[StateTensor, ...],
    values: Mapping[str, float],
    *,
    branchless: bool,
) -> Rule:
    cache: dict[tuple[int, torch.dtype, torch.device], fx.Graph] = {}

    def trace(numel: int, dtype: torch.dtype, device: torch.device) -> fx.Graph:
        key = (numel, dtype, device)
        if key not in cache:
            cache[key] = _trace(kind, optimizer, options, state, values, branchless, *key)
        return cache[key]

    formula = formula_of(kind, options, tuple(values), {entry.name for entry in state})
    return Rule(index, kind.__name__, state, tuple(values), trace, formula)


def _on_one(
    kind: type[Optimizer],
    optimizer: Optimizer,
    options: Mapping[str, Any],
    parameter: torch.Tensor,
    state: Any,
) -> Optimizer:
    """The user's optimizer over one other parameter, without its hooks; the user's own is left as it is."""
    twin: Optimizer = object.__new__(kind)
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's wrapper is bound to the user's optimizer
    twin.param_groups = [{**options, "params": [parameter]}]
    twin.state = state
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    return twin


class _FirstWritten(dict[str, Any]):
    """A parameter's state that remembers each entry as it was first set, before the update changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.initial: dict[str, torch.Tensor] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.initial and value is not None:
            self.initial[name] = torch.as_tensor(value).detach().clone()
        super().__setitem__(name, value)


def _initial_state(optimizer: Optimizer, options: Mapping[str, Any]) -> tuple[StateTensor, ...]:
    """What the optimizer sets its state to before its first update, learnt from one step on two elements."""
    kind = type(optimizer)
    parameter = torch.nn.Parameter(torch.tensor([1.0, -3.0], dtype=torch.float64))
    entries = _constructed(kind, options, parameter)
    parameter.grad = torch.tensor([0.5, 2.0], dtype=torch.float64)
    kept = _FirstWritten()
    state: Any = defaultdict(dict)
    state[parameter] = kept
    for name, value in entries.items():
        kept[name] = value
    kind.step(_on_one(kind, optimizer, options, parameter, state))
    found = []
    for name, value in kept.initial.items():
        if value.dim() == 0:
            found.append(StateTensor(name, True, value.item(), value.dtype))
        elif value.shape == parameter.shape:
            # An entry that starts from the gradient (SGD's momentum) starts from zero here; see `_trace`.
            same = bool(value[0] == value[1])
            found.append(StateTensor(name, False, value[0].item() if same else 0.0, None))
            if not same and name != "momentum_buffer":
                raise _NotElementwise(f"its state {name!r} starts from the gradient")
        else:
            raise _NotElementwise(f"its state {name!r} has shape {list(value.shape)} for a parameter of shape [2]")
    if any(entry.name == "momentum_buffer" for entry in found) and options.get("dampening", 0) != 0:
        found.append(StateTensor("undamped", True, 1.0, torch.float64))
    return tuple(found)


def _constructed(kind: type[Optimizer], options: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """State that the constructor makes, as Adagrad's does."""
    known = inspect.signature(kind.__init__).parameters
    try:
        fresh = kind([parameter], **{name: value for name, value in options.items() if name in known})
    except Exception:
        return {}
    return dict(fresh.state.get(parameter, {}))


class _Scalars(TorchFunctionMode):
    """Keeps step count and hyperparameters in tensors where the optimizer's code takes numbers from them."""

    def __init__(self, hypers: Mapping[str, torch.Tensor], values: Mapping[str, float]) -> None:
        super().__init__()
        self.known = [(tensor, values[name]) for name, tensor in hypers.items()]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.item:
            return args[0].to(torch.float64)
        if func in (torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__):
            raise _Branches("its Python code branches on the step count or the rate")
        if name in ("__ne__", "__eq__", "__gt__", "__lt__", "__ge__", "__le__", "ne", "eq", "gt", "lt"):
            for tensor, value in self.known:
                if args[0] is tensor and not isinstance(args[1], torch.Tensor):
                    return getattr(value, name if name.startswith("__") else f"__{name}__")(args[1])
        scale = kwargs.get("alpha", kwargs.get("value"))
        base = name.rstrip("_")
        if isinstance(scale, torch.Tensor) and base in ("add", "sub", "addcdiv", "addcmul"):
            target = args[0] if name.endswith("_") else args[0].clone()
            if base == "sub":
                base, scale = "add", -scale
            getattr(operators, base + "_")(target, *args[1:], scale)
            return target
        if base == "lerp" and isinstance(args[2], torch.Tensor):
            args = (*args[:2], args[2].to(args[0].dtype))
        return func(*args, **kwargs)


@contextlib.contextmanager
def _compiling(on: bool) -> Iterator[None]:
    """Lets optimizers take their branch-free form, which they keep for compilers, on any device."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = on or before
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _trace(
    kind: type[Optimizer],
    optimizer: Optimizer,
    options: Mapping[str, Any],
    state: tuple[StateTensor, ...],
    values: Mapping[str, float],
    branchless: bool,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> fx.Graph:
    names = [
        "parameter",
        "gradient",
        *(f"state_{entry.name}" for entry in state),
        *(f"hyper_{n}" for n in values),
    ]

    def update(*tensors: torch.Tensor) -> None:
        given = dict(zip(names, tensors, strict=True))
        hypers = {name: given[f"hyper_{name}"] for name in values}
        entries = {entry.name: given[f"state_{entry.name}"] for entry in state}
        current = dict(options)
        for name, tensor in hypers.items():
            current |= {"betas": (tensor, *current["betas"][1:])} if name == "beta1" else {name: tensor}
        parameter = given["parameter"]
        parameter.grad = given["gradient"]
        undamped = entries.pop("undamped", None)
        if undamped is not None:  # the first step adds the gradient whole: no dampening
            current["dampening"] = current["dampening"] * (1 - undamped)
        everything: Any = defaultdict(dict)
        everything[parameter] = entries
        with _Scalars(hypers, values), _compiling(branchless):
            kind.step(_on_one(kind, optimizer, current, parameter, everything))
            if undamped is not None:
                undamped.zero_()

    def example(name: str) -> torch.Tensor:
        entry = next((entry for entry in state if f"state_{entry.name}" == name), None)
        if name.startswith("hyper_"):
            return torch.zeros((), dtype=torch.float64, device=device)
        if entry is not None and entry.scalar:
            return torch.zeros((), dtype=entry.dtype, device=device)
        return torch.zeros(numel, dtype=dtype, device=device)

    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        examples = [example(name) for name in names]
        traced = make_fx(update)(*examples)
    graph = traced.graph
    _inline_constants(traced)
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = name
        node._rename(name)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or bool(written(node)))
    _check_elementwise(graph, numel)
    return graph


def _inline_constants(traced: fx.GraphModule) -> None:
    """Numbers that the optimizer's code wrapped in 0-d tensors become operators that make them."""
    for node in traced.graph.find_nodes(op="get_attr"):
        value = getattr(traced, str(node.target))
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            raise _NotElementwise(f"its step closes over {node.target}")
        with traced.graph.inserting_before(node):
            made = traced.graph.call_function(
                aten.full.default, ([], value.item()), {"dtype": value.dtype, "device": value.device}
            )
        made.meta = dict(node.meta)
        made.meta["val"] = torch.empty((), dtype=value.dtype, device="meta")
        node.replace_all_uses_with(made)
        traced.graph.erase_node(node)


# Operators without the pointwise tag that still keep every element where it is.
_KEEP_PLACES = (
    aten.copy_.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.detach.default,
    aten.alias.default,
    aten.view_as.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.full.default,
    aten.zeros.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.lerp_.Scalar,
    aten.lerp_.Tensor,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    aten.index_put_.default,  # x[mask] = number
    aten.index_put.default,
    aten.maximum.out,
    aten.lift_fresh_copy.default,
)


def _check_elementwise(graph: fx.Graph, numel: int) -> None:
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            raise _NotElementwise(f"its step closes over {node.target}")
        vals = [source.meta["val"] for source in node.all_input_nodes]
        if all(not isinstance(value, torch.Tensor) or value.dim() == 0 for value in vals) and _size(node) <= 1:
            continue
        if node.target in _KEEP_PLACES:
            continue
        if torch.Tag.pointwise not in node.target.tags:
            raise _NotElementwise(f"its step uses {node.target}")


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return math.prod(value.shape) if isinstance(value, torch.Tensor) else 0
