"""Python numbers of an optimizer's code, as tensors of the trace.

    step_t += 1                              step' = add(step, 1)
    scale = (1 - beta2 ** step_t.item()) ** 0.5      scale = pow(rsub(pow(0.999, step'), 1), 0.5)
    p.add_(update, alpha=-lr * scale)        fsdp_compiled.add_(p, update, neg(lr) * scale)
    if rho_t > 5:                            raises `Refused`

A step count or a rate that is a Python number would be frozen in the trace at what it is now. Here it is a 0-d float64
tensor, which computes as Python's floats do. Unlike a tensor, and like a number, ``+=`` makes a new one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fsdp_compiled.kernels.scaled import operators
from fsdp_compiled.optim.optimizer_copy import Refused

COMPARISONS = ("ne", "eq", "gt", "lt", "ge", "le")
IN_PLACE = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__ipow__": "pow"}
HALF = (torch.bfloat16, torch.float16)
ARITHMETIC = tuple(
    "mul multiply div divide true_divide truediv rtruediv imul itruediv add sub iadd isub radd rsub rmul pow".split()
)
QUOTIENTS = ("div", "divide", "true_divide", "truediv")
CASTS = (torch.Tensor.to, torch.Tensor.float, torch.Tensor.double, torch.Tensor.type)


class Numbers(TorchFunctionMode):
    """Inside, numbers are tensors. ``fixed``: scheduled numbers other than the rate, each with what it is now."""

    def __init__(self, fixed: Sequence[tuple[torch.Tensor, float]]) -> None:
        super().__init__()
        self._fixed = fixed
        self._known: dict[int, torch.Tensor] = {}  # by id, and held, so that no other has it

    def number(self, tensor: torch.Tensor) -> torch.Tensor:
        """Takes the 0-d tensor for a Python number."""
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
            return args[0]  # of a Python number there is no cast: rounded here, it would be rounded twice
        if func in (torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero):
            raise Refused("its Python code branches on numbers that change")
        if func in (torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.tolist):
            raise Refused(f"its code makes a Python number ({name.strip('_')}) of one that changes from step to step")
        base = name.strip("_")
        if base in COMPARISONS and (outcome := self._compared(base, args)) is not None:
            return outcome
        if name in IN_PLACE and self.is_number(args[0]):
            return getattr(torch, IN_PLACE[name])(*args)
        result = self._scaled(func, name, args, kwargs)
        if isinstance(result, torch.Tensor) and result.dim() == 0 and id(result) not in self._known:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if given and all(map(self.is_number, given)):
                self.number(result)
        return result

    def _compared(self, base: str, args: Any) -> bool | None:
        """A scheduled number other than the rate is compared with zero as it is now: `signature` guards that."""
        if not isinstance(args[1], torch.Tensor) and args[1] == 0:
            for tensor, value in self._fixed:
                if args[0] is tensor:
                    return bool(getattr(operator, base)(value, 0))
        return None

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
