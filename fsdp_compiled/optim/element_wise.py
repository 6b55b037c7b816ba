"""Whether an update is element-wise: each element of a parameter from its own gradient and state alone.

Only such an update may run on shards, which are slices of flat buffers of many parameters. This is not looked up in a
list of names but read off the operators: each is pointwise by its tag, is known to move nothing, or works on single
numbers. A traced update is checked in its trial (`PointwiseOnly`); for one that runs as it is, every step is checked
(`element_wise_only`). There code may not ask for a shape either, since that would decide the update of everything in a
shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled.optim.optimizer_copy import Refused

aten = torch.ops.aten

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
    aten.ones.default,
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
    aten.minimum.out,
    aten.masked_fill.Scalar,
    aten.masked_fill_.Scalar,
    aten.lift_fresh_copy.default,
)


def _is_pointwise(target: torch._ops.OpOverload) -> bool:
    """Whether it is pointwise by its tag, or by that of the operator of which it is the in-place form."""
    if torch.Tag.pointwise in target.tags:
        return True
    packet, name = str(target).split(".")[1], target._overloadname
    plain = getattr(aten, packet.rstrip("_"), None) if packet.endswith("_") else None
    return torch.Tag.pointwise in getattr(getattr(plain, name, None), "tags", ())


def keeps_places(target: torch._ops.OpOverload) -> bool:
    """Whether an operator on tensors of one shape keeps every element where it is."""
    return target in _KEEP_PLACES or _is_pointwise(target)


# On 1-d tensors these move nothing, if all shapes are the same.
SAME = frozenset(
    getattr(aten, name).default
    for name in "view _unsafe_view reshape expand t permute squeeze _reshape_alias new_zeros new_ones new_full "
    "new_empty empty_strided new_empty_strided".split()
    if hasattr(getattr(aten, name, None), "default")
) | {aten.empty.memory_format}
MADE = frozenset(getattr(aten, name).default for name in ("new_zeros", "new_ones", "new_full", "new_empty"))
REDUCING = ("_foreach_norm", "_foreach_max", "_foreach_powsum")
# A shard is 1-d and of a size of its own, and elements in PyTorch's memory are PyTorch's alone.
QUESTIONS = frozenset(
    "dim ndim ndimension size shape numel nelement stride __len__ tolist numpy data_ptr storage untyped_storage".split()
)


@contextmanager
def element_wise_only() -> Iterator[None]:
    """Inside a step on shards, raises `Refused` for what would update an element otherwise than in its parameter."""
    with NoQuestions(), PointwiseOnly():
        yield


class NoQuestions(TorchFunctionMode):
    """Inside, code that asks for the shape of a tensor, or takes its elements out of PyTorch, raises `Refused`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if name in QUESTIONS and args and isinstance(args[0], torch.Tensor) and args[0].dim():
            raise Refused(f"its step asks for {name.strip('_')} of tensors of a parameter's shape")
        return func(*args, **(kwargs or {}))


class ShardParameter(nn.Parameter):
    """Stands, in an optimizer's code, for the parameters that lie in a shard, ``[elements]``.

    ``noted``: says whether somebody put an attribute of this name on one of them. No shard can stand for that.
    """

    noted: Callable[[str], bool] = staticmethod(lambda name: False)

    def __getattr__(self, name: str) -> Any:  # of what is not there
        if self.noted(name):
            raise Refused(f"its step reads {name!r}, an attribute of parameters")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


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
    """The shapes of those tensors that are not one number."""
    found = {tuple(leaf.shape) for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)}
    return found - {(), (1,)}
