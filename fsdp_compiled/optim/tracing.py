"""The step of a class of `torch.optim` -> an ATen graph that updates one flat shard in place.

The code is run once on fake tensors. Its counters, rates and state are tensors of the trace. It runs in a form that
asks for no Python number: the plain one; or, if that branches on a number that changes (RAdam, ASGD), or looks at what
it has to begin with, ``capturable``, which PyTorch keeps for CUDA graphs. Operators name no sizes, so a graph traced on
a matrix runs on a flat shard.

Sets ``torch.compiler._is_compiling_flag``, by which optimizers take that form on any device.

Python numbers of an optimizer's code become tensors of the trace:

    step_t += 1                              step' = add(step, 1)
    scale = (1 - beta2 ** step_t.item()) ** 0.5      scale = pow(rsub(pow(0.999, step'), 1), 0.5)
    p.add_(update, alpha=-lr * scale)        fsdp_compiled.add_(p, update, neg(lr) * scale)
    if rho_t > 5:                            raises `Refused`

A step count or a rate that is a Python number would be frozen in the trace at its present value. Here it is a 0-d
float64 tensor, which computes as Python's floats do. ``+=`` makes a new one, as for a number, not
as for a tensor.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from fsdp_compiled.ir.nodes import mutated, name_device
from fsdp_compiled.kernels.aten_operators import operators
from fsdp_compiled.optim.hyperparameters import hyper_of, with_hyper
from fsdp_compiled.optim.optimizer_copy import Refused, copy_of
from fsdp_compiled.optim.rule import Kept, RuleInput, inputs_of
from fsdp_compiled.optim.step import Part, make_step
from fsdp_compiled.torch_private.names import there

COMPARISONS = ("ne", "eq", "gt", "lt", "ge", "le")
HALF = (torch.bfloat16, torch.float16)
ARITHMETIC = tuple(
    "mul multiply div divide true_divide truediv rtruediv imul itruediv add sub iadd isub radd rsub rmul pow".split()
)
QUOTIENTS = ("div", "divide", "true_divide", "truediv")
CASTS = (torch.Tensor.to, torch.Tensor.float, torch.Tensor.double, torch.Tensor.type)


class Numbers(TorchFunctionMode):
    """Inside, numbers are tensors. ``fixed``: scheduled numbers other than the rate, each with its present value."""

    def __init__(self, fixed: Sequence[tuple[torch.Tensor, float]]) -> None:
        super().__init__()
        self._fixed = fixed
        self._known: dict[int, torch.Tensor] = {}  # by id; tensors are held, so that no other has the id

    def number(self, tensor: torch.Tensor) -> torch.Tensor:
        """Treats the 0-d tensor as a Python number."""
        self._known[id(tensor)] = tensor
        return tensor

    def is_number(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and id(value) in self._known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.item:
            return self.number(args[0].to(torch.float64))
        if func in CASTS and self.is_number(args[0]):
            return args[0]  # a Python number has no cast: rounded here, it would be rounded twice
        if func in (torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero):
            raise Refused("its Python code branches on numbers that change")
        if func in (torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.tolist):
            raise Refused(f"its code makes a Python number ({name.strip('_')}) of one that changes from step to step")
        base = name.strip("_")
        if base in COMPARISONS and (outcome := self._compared(base, args)) is not None:
            return outcome
        result = self._scaled(func, name, args, kwargs)
        if isinstance(result, torch.Tensor) and result.dim() == 0 and id(result) not in self._known:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if given and all(map(self.is_number, given)):
                self.number(result)
        return result

    def _compared(self, base: str, args: Any) -> bool | None:
        """Compares a scheduled number other than the rate with zero, by its present value: `signature` guards that."""
        if not isinstance(args[1], torch.Tensor) and args[1] == 0:
            for tensor, value in self._fixed:
                if args[0] is tensor:
                    return bool(getattr(operator, base)(value, 0))
        return None

    def _scaled(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Makes the call in a form whose numbers may be tensors, and which rounds as with Python numbers."""
        base = name.rstrip("_") if not name.startswith("__") else name.strip("_")
        scale = kwargs.get("alpha", kwargs.get("value"))
        if isinstance(scale, torch.Tensor) and base in ("add", "addcdiv", "addcmul"):
            target = args[0] if name.endswith("_") else args[0].clone()
            getattr(operators, base + "_")(target, *args[1:], scale)
            return target
        if base == "lerp":
            end = args[1] if len(args) > 1 else kwargs["end"]
            weight = args[2] if len(args) > 2 else kwargs["weight"]
            if isinstance(weight, torch.Tensor) and weight.dim() == 0:
                if args[0].dtype in HALF:
                    return self._upcast(func, name, (args[0], end, weight), {})
                return func(args[0], end, weight.to(args[0].dtype))
            return func(args[0], end, weight)
        if (base in QUOTIENTS and self.is_number(args[0]) and isinstance(args[1], torch.Tensor)
                and not self.is_number(args[1])):  # fmt: skip
            return torch.reciprocal(args[1]) * args[0]  # what PyTorch computes for a Python number over a tensor
        if base in ARITHMETIC:
            args = self._in_its_dtype(args)
            if any(isinstance(a, torch.Tensor) and a.dim() and a.dtype in HALF for a in args[:1]):
                if len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].dim() == 0:
                    return self._upcast(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _in_its_dtype(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Rounds a number to the dtype of a tensor without dims beside it, which a 0-d tensor would widen."""
        single = [
            one for one in args[:2] if isinstance(one, torch.Tensor) and not one.dim() and not self.is_number(one)
        ]
        if len(single) != 1 or not single[0].is_floating_point():
            return args
        return tuple(one.to(single[0].dtype) if self.is_number(one) else one for one in args)

    def _upcast(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """In bfloat16 and float16, PyTorch takes a Python number in float32, but rounds a 0-d tensor first."""
        low = args[0].dtype
        wide = [value.to(torch.float32) if isinstance(value, torch.Tensor) else value for value in args]
        if name.endswith("_") and (not name.startswith("__") or name.startswith("__i")):
            return args[0].copy_(func(*wide, **kwargs))
        return func(*wide, **kwargs).to(low)


aten = torch.ops.aten
SHAPE = (2, 3)  # of the parameter in the trace


@dataclass(frozen=True)
class Subject:
    """What is traced or run: the optimizer, for one group."""

    optimizer: Optimizer
    options: Mapping[str, Any]  # of the group
    hypers: Mapping[str, float]  # the scheduled ones, as they are now
    kept: Kept
    capturable: bool = False  # in torch.optim's form for CUDA graphs


def trace(subject: Subject, dtype: torch.dtype, device: torch.device) -> fx.Graph:
    """Raises `Refused` for an optimizer that is not element-wise, or whose code cannot be traced.

    For a GPU that is not there it is traced on fake CPU tensors: PyTorch copies between fake GPU tensors only where it
    was built for a GPU.
    """
    traced_on = device if torch.accelerator.is_available() else torch.device("cpu")
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
            return torch.zeros((), dtype=torch.float64, device=traced_on)
        entry = next((entry for entry in state if one.kind == "state" and entry.name == one.name), None)
        if entry is None:
            return torch.zeros(SHAPE, dtype=dtype, device=traced_on)
        return torch.zeros(() if entry.scalar else SHAPE, dtype=entry.dtype or dtype, device=traced_on)

    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        traced = make_fx(update)(*map(example, inputs))
    graph = traced.graph
    _inline_constants(traced)
    for node, one in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.target = str(one)
        node._rename(str(one))
    if traced_on != device:
        name_device(graph, device)
    _resolve_aliases(graph)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or bool(mutated(node)))
    return graph


def _step(subject: Subject, made: Optimizer, given: Mapping[RuleInput, torch.Tensor], mode: Numbers) -> None:
    """Makes the copy's step on these tensors."""
    group = dict(subject.options)
    for name in subject.hypers:
        value, own = given[RuleInput("hyper", name)], hyper_of(group, name)
        # A hyperparameter that is a tensor (lr=torch.tensor(...)) is computed with in its dtype.
        value = value.to(own.dtype) if isinstance(own, torch.Tensor) else mode.number(value)
        group = with_hyper(group, name, value)
    parameter = given[RuleInput("parameter")]
    parameter.grad = given[RuleInput("gradient")]
    tensors = {entry.name: given[RuleInput("state", entry.name)] for entry in subject.kept.state}
    if (first := tensors.get("first")) is not None:
        for entry in subject.kept.state:
            if entry.from_rate:  # nobody knows it until the first step
                rate = given[RuleInput("hyper", "lr")].to(tensors[entry.name].dtype)
                tensors[entry.name].copy_(torch.where(first != 0, rate, tensors[entry.name]))
    if (undamped := tensors.get("undamped")) is not None:  # the first step adds the gradient whole: no dampening
        group["dampening"] = group["dampening"] * (1 - undamped)
    make_step(made, [Part(subject.kept, group, tensors, [(parameter, tensors)])], lambda tensor, _: mode.number(tensor))
    for own in (first, undamped):
        if own is not None:
            own.zero_()


def _resolve_aliases(graph: fx.Graph) -> None:
    """Lets every value be read from the tensor that holds it, and not from the result of a write."""
    for node in graph.nodes:
        if (targets := mutated(node)) and node.users and isinstance(node.meta.get("val"), torch.Tensor):
            node.replace_all_uses_with(targets[0])


def _inline_constants(traced: fx.GraphModule) -> None:
    """Replaces numbers that the optimizer's code wrapped in 0-d tensors by operators that make them."""
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
    """Silences PyTorch's own log of a failure, since the refusal tells of it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _compiling(on: bool) -> Iterator[None]:
    """Lets optimizers take their form for CUDA graphs on any device; they keep it for compilers too."""
    before = torch.compiler.is_compiling()
    if there("optimizers' traced form"):
        torch.compiler._is_compiling_flag = on or before
    try:
        yield
    finally:
        if there("optimizers' traced form"):
            torch.compiler._is_compiling_flag = before
