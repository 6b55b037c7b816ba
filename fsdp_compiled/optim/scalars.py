"""Python numbers of an optimizer's code, as tensors of the trace.

    group["step"] += 1                       step' = add(step, 1)
    scale = math.sqrt(1 - beta2 ** step)     scale = sqrt(rsub(pow(0.999, step'), 1))
    if step > warmup:                        the trace forks: see `branches`
    p.add_(update, alpha=-lr * scale)        fsdp_compiled.add_(p, update, neg(lr) * scale)

A step count or a rate that is a Python number would be frozen in the trace at what it is now. Here it is a 0-d float64
tensor, which computes as Python's floats do. Unlike a tensor, and like a number, ``+=`` makes a new one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fsdp_compiled.kernels.scaled import operators
from fsdp_compiled.optim.twin import Refused, Untraceable

COMPARISONS = ("ne", "eq", "gt", "lt", "ge", "le")
IN_PLACE = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__ipow__": "pow"}
SHAPES = ("dim", "size", "numel", "nelement", "shape", "ndim", "stride", "ndimension", "__len__", "is_contiguous")
# What makes one value of many elements, mixes them or draws them: refused where it is called, by its name.
MIXING = frozenset(
    "norm vector_norm linalg_norm linalg_vector_norm linalg_matrix_norm mean sum std var dot matmul mm bmm addmm "
    "__matmul__ einsum any all count_nonzero median quantile topk sort argsort argmax argmin cumsum prod nansum "
    "nanmean amax amin aminmax logsumexp softmax linalg_svd linalg_qr linalg_eigh svd qr outer kthvalue rand_like "
    "randn_like randint_like bernoulli bernoulli_ normal_ uniform_ dropout cosine_similarity normalize addmm_ baddbmm "
    "vdot inner trace fft_fft fft_rfft dist var_mean std_mean".split()
)
HALF = (torch.bfloat16, torch.float16)
ARITHMETIC = tuple(
    "mul multiply div divide true_divide truediv rtruediv imul itruediv add sub iadd isub radd rsub rmul pow".split()
)
QUOTIENTS = ("div", "divide", "true_divide", "truediv")
CASTS = (torch.Tensor.to, torch.Tensor.float, torch.Tensor.double, torch.Tensor.type)


class Numbers(TorchFunctionMode):
    """Inside, numbers are tensors, and a branch on one is decided by ``decisions``, in the order they are asked for."""

    def __init__(
        self,
        decisions: Sequence[bool],
        fixed: Mapping[str, tuple[torch.Tensor, float]],
        *,
        catches_zero: bool = False,
        forks: bool = True,
    ) -> None:
        super().__init__()
        self.asked_shape = False
        self.decided: list[bool] = []
        self.predicates: list[torch.Tensor] = []
        self._given = decisions
        self._fixed = [(tensor, value) for tensor, value in fixed.values()]
        self._known: dict[int, tuple[torch.Tensor, Any]] = {}  # the number, and the expression that makes it
        self._outcomes: dict[Any, bool] = {}
        self._catches_zero, self._forks = catches_zero, forks

    def number(self, tensor: torch.Tensor, name: Any = None) -> torch.Tensor:
        """Takes the 0-d tensor for a Python number; those of equal names are equal."""
        self._known[id(tensor)] = (tensor, ("given", len(self._known)) if name is None else name)
        return tensor

    def is_number(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and id(value) in self._known

    def decide(self, predicate: torch.Tensor) -> bool:
        """Which way the trace goes at this branch; the same way wherever it is asked again."""
        if predicate.dtype != torch.bool:
            predicate = predicate != 0
        name = self._known.get(id(predicate), (None, id(predicate)))[1]
        if name not in self._outcomes:
            if not self._forks:
                raise Forks
            place = len(self.decided)
            outcome = self._given[place] if place < len(self._given) else False
            self.decided.append(outcome)
            self.predicates.append(predicate)
            self._known[id(predicate)] = (predicate, name)  # kept alive: its id is its name
            self._outcomes[name] = outcome
        return self._outcomes[name]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return self._property(func, name, args)
        if func is torch.Tensor.item:
            return self.number(args[0].to(torch.float64))
        if func in CASTS and self.is_number(args[0]):
            return args[0]  # of a Python number there is no cast: rounded here, it would be rounded twice
        if func in (torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero):
            return self.decide(args[0])
        if func in (torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.tolist):
            raise Untraceable(
                f"its code makes a Python number ({name.strip('_')}) of one that changes from step to step"
            )
        if name in SHAPES and args and args[0].dim():
            self.asked_shape = True
        if (
            name in MIXING | {"max", "min"}
            and isinstance(args[0], torch.Tensor)
            and args[0].dim()
            and args[0].numel() > 1
        ):
            if name in MIXING or len(args) == 1:
                raise Refused(f"its step calls {name}, which does not keep every element to itself")
        base = name.strip("_")
        if base in COMPARISONS and (outcome := self._compared(base, args)) is not None:
            return outcome
        if name in IN_PLACE and self.is_number(args[0]):
            return getattr(torch, IN_PLACE[name])(*args)
        if self._catches_zero and name in ("__truediv__", "__rtruediv__", "true_divide", "div"):
            divisor = args[0] if name == "__rtruediv__" else args[1]
            dividend = args[1] if name == "__rtruediv__" else args[0]
            if self.is_number(divisor) and (self.is_number(dividend) or not isinstance(dividend, torch.Tensor)):
                if self.decide(divisor == 0):
                    raise ZeroDivisionError
        result = self._scaled(func, name, args, kwargs)
        if isinstance(result, torch.Tensor) and result.dim() == 0 and id(result) not in self._known:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if given and all(map(self.is_number, given)):
                self._known[id(result)] = (result, self._expression(name, args, kwargs))
        return result

    def _property(self, func: Any, name: str, args: Any) -> Any:
        field = getattr(func.__self__, "__name__", "")
        if field in SHAPES and args[0].dim():
            self.asked_shape = True
        if field == "data" and name == "__set__":
            with torch.no_grad():
                return args[0].copy_(args[1])
        return func(*args)

    def _compared(self, base: str, args: Any) -> bool | None:
        """A scheduled number other than the rate is compared with zero as it is now: `signature` guards that."""
        if base in ("eq", "ne") and not isinstance(args[1], torch.Tensor) and args[1] == 0:
            for tensor, value in self._fixed:
                if args[0] is tensor:
                    return (value == 0) == (base == "eq")
        return None

    def _expression(self, name: str, args: Any, kwargs: Any) -> Any:
        def one(value: Any) -> Any:
            return self._known[id(value)][1] if isinstance(value, torch.Tensor) else repr(value)

        return (name, *map(one, args), *((key, one(value)) for key, value in kwargs.items()))

    def _scaled(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The call, in a form whose numbers may be tensors and which rounds as it does with Python numbers."""
        base = name.rstrip("_") if not name.startswith("__") else name.strip("_")
        scale = kwargs.get("alpha", kwargs.get("value"))
        if base in ("addcdiv", "addcmul") and len(args) == 4:  # the deprecated order: self, value, tensor1, tensor2
            return func(*args, **kwargs)
        if isinstance(scale, torch.Tensor) and base in ("add", "sub", "addcdiv", "addcmul"):
            others = [*args[1:], *(kwargs[key] for key in ("other", "tensor1", "tensor2") if key in kwargs)]
            target = args[0] if name.endswith("_") else args[0].clone()
            if base == "sub":
                base, scale = "add", -scale
            if not all(isinstance(other, torch.Tensor) for other in others):
                return func(*args, **kwargs)
            getattr(operators, base + "_")(target, *others, scale)
            return target
        if base == "full_like" and self.is_number(args[1] if len(args) > 1 else kwargs.get("fill_value")):
            fill = args[1] if len(args) > 1 else kwargs["fill_value"]
            rest = {key: value for key, value in kwargs.items() if key != "fill_value"}
            return torch.zeros_like(args[0], **rest).copy_(fill)
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
            inverse = torch.reciprocal(args[1])  # what PyTorch computes of a Python number over a tensor
            if inverse.dtype in HALF:
                return self._upcast(torch.mul, "mul", (inverse, args[0]), {})
            return inverse * args[0]
        if base in ("clamp", "clip", "clamp_min", "clamp_max"):
            bounds = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.Tensor)]
            if bounds and all(bound.dim() == 0 for bound in bounds):
                low = args[1] if len(args) > 1 else kwargs.get("min")
                high = args[2] if len(args) > 2 else kwargs.get("max")
                if base == "clamp_max":
                    low, high = None, args[1] if len(args) > 1 else kwargs.get("max")
                result = args[0]
                if low is not None:
                    result = torch.maximum(result, torch.as_tensor(low, dtype=result.dtype, device=result.device))
                if high is not None:
                    result = torch.minimum(result, torch.as_tensor(high, dtype=result.dtype, device=result.device))
                return args[0].copy_(result) if name.endswith("_") else result
        if base in ARITHMETIC:
            args = self._in_its_dtype(args)
            if any(isinstance(a, torch.Tensor) and a.dim() and a.dtype in HALF for a in args[:1]):
                if len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].dim() == 0:
                    return self._upcast(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _in_its_dtype(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Beside a tensor without dims, a number is rounded to its dtype first, where a 0-d tensor would widen it."""
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


class Forks(Exception):
    """The optimizer's Python code branches on a number that changes."""


def _log(x: torch.Tensor, base: Any = None) -> torch.Tensor:
    return torch.log(x) if base is None else torch.log(x) / math.log(base)


def _chosen(way: Callable[..., torch.Tensor], bound: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """``max`` or ``min`` that makes a number of numbers, where Python's would branch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        numbers = [value for value in args if isinstance(value, torch.Tensor)]
        if len(args) < 2 or kwargs or not numbers or any(value.dim() for value in numbers):
            return plain(*args, **kwargs)
        return functools.reduce(one, args)

    def one(first: Any, second: Any) -> Any:
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            return way(first, second)
        if isinstance(first, torch.Tensor):
            return torch.clamp(first, **{bound: second})
        return torch.clamp(second, **{bound: first}) if isinstance(second, torch.Tensor) else plain(first, second)

    return call


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sqrt": torch.sqrt, "exp": torch.exp, "log": _log, "log2": torch.log2, "log10": torch.log10,
    "log1p": torch.log1p, "cos": torch.cos, "sin": torch.sin, "tanh": torch.tanh, "fabs": torch.abs,
    "ceil": torch.ceil, "floor": torch.floor, "pow": torch.pow, "isnan": torch.isnan, "isinf": torch.isinf,
    "isfinite": torch.isfinite,
}  # fmt: skip


def _either(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if not any(isinstance(arg, torch.Tensor) for arg in args):
            return getattr(math, name)(*args)
        if any(arg.numel() != 1 for arg in args if isinstance(arg, torch.Tensor)):
            raise Untraceable(f"its code makes a Python number (math.{name}) of a tensor")
        return FUNCTIONS[name](*[a.item().reshape(()) if isinstance(a, torch.Tensor) else a for a in args])

    return call


class _Math(types.ModuleType):
    """The module ``math``, whose functions take tensors too."""

    def __getattr__(self, name: str) -> Any:
        return _EITHER.get(name) or getattr(math, name)


_EITHER = {name: _either(name) for name in FUNCTIONS}
_MATH = _Math("math")
_CHOICES = {"max": _chosen(torch.maximum, "min", max), "min": _chosen(torch.minimum, "max", min)}


@functools.cache
def _names_of(kind: type) -> list[tuple[dict[str, Any], str, Any]]:
    """Where the modules of a class's package name functions of numbers, and what is to stand there."""
    own = [base.__module__.split(".") for base in kind.__mro__]
    roots = {".".join(parts[:2]) if parts[0] == "torch" else parts[0] for parts in own if parts[0] not in OUTSIDE}
    found: list[tuple[dict[str, Any], str, Any]] = []
    for name, module in list(sys.modules.items()):
        if not any(name == root or name.startswith(root + ".") for root in roots):
            continue
        given = getattr(module, "__dict__", {})
        for key, value in list(given.items()):
            if value is math:
                found.append((given, key, _MATH))
            elif getattr(value, "__module__", None) == "math" and getattr(value, "__name__", "") in _EITHER:
                found.append((given, key, _EITHER[value.__name__]))
        found += [(given, key, value) for key, value in _CHOICES.items() if key not in given]
    return found


OUTSIDE = ("builtins", "abc", "typing", "collections")


@contextlib.contextmanager
def functions_of_tensors(kind: type) -> Iterator[None]:
    """In the modules of this class's package, ``math.sqrt``, ``max`` and the like take numbers that are tensors."""
    places = [(given, key, given.get(key), new) for given, key, new in _names_of(kind)]
    for given, key, _, new in places:
        given[key] = new
    try:
        yield
    finally:
        for given, key, old, _ in places:
            if old is None:
                del given[key]
            else:
                given[key] = old
