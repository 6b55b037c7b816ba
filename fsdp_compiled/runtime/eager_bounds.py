"""How far what a program gives may be from what eager PyTorch gives, and the comparison of the two.

    loss, norm, what is returned    a share of the largest element, by the coarsest dtype that the model computes in
    a gradient                      a share of the parameter's largest element, and of the model's; and what the wire
                                    rounds
    an update                       what the optimizer makes of gradients that are so far off (`verify`)

**The wire.** Under `Policy.wire` a rank sends each element of its gradient as one of the two numbers of the format
around it, drawn at random (`kernels.reference.pack`). Formats are scaled to the largest element of each 128. Around it
the numbers of int8 are 1/127 of it apart, and those of fp8, which go up to 448, 32/448. No two others are further
apart. So a rank's gradient moves by less than that, and a mean over ranks by less than the mean of it over the ranks. A
sum that is sent again (an all-reduce, or replicas) moves as far once more. Errors add up over microbatches. None is
carried from step to step: rounding at random needs no error feedback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.tensor_parallel import own_part
from fsdp_compiled.kernels.reference import LARGEST
from fsdp_compiled.plan.make_plan import SCALED
from fsdp_compiled.plan.plan import Plan

# Two computations of one number: relative to it, and in absolute terms.
RESULTS = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-4, 1e-6)}
HALF_RESULTS = (3e-2, 1e-3)
# Two of a gradient: relative to the parameter's largest element, and to the model's.
GRADIENTS = {torch.float64: (1e-8, 1e-12), torch.float32: (1e-3, 1e-6)}
HALF_GRADIENTS = (0.1, 1e-3)
TINY = 1e-30
# Between neighbours of the format, as a share of a block's largest element.
STEPS = {"int8": 1 / LARGEST["int8"], "fp8": 32 / LARGEST["fp8"]}
ODD_ROUNDING = 1.05  # what a second rounding adds to the largest element of a block, and float32 to all of it


def result_bound(plan: Plan, value: torch.Tensor) -> tuple[float, float]:
    return _by_dtype([value.dtype, *map(plan.compute_dtype, plan.buffers)], value.device, RESULTS, HALF_RESULTS)


def gradient_bound(plan: Plan) -> tuple[float, float]:
    dtypes = [of(buffer) for buffer in plan.buffers for of in (plan.compute_dtype, plan.reduce_dtype)]
    return _by_dtype(dtypes, plan.device, GRADIENTS, HALF_GRADIENTS)


def _by_dtype(
    dtypes: Sequence[torch.dtype], device: torch.device, bounds: Mapping[torch.dtype, tuple[float, float]],
    half: tuple[float, float],
) -> tuple[float, float]:  # fmt: skip
    real = [dtype for dtype in dtypes if dtype.is_floating_point]
    coarse = max(real, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
    return half if torch.is_autocast_enabled(device.type) else bounds.get(coarse, half)


def sent_apart(flat: torch.Tensor, form: str) -> torch.Tensor:
    """``[numel]``, a rank's flat gradient -> ``[numel / 128]``: how far the wire may move the elements of a block."""
    return flat.view(-1, SCALED).abs().amax(1) * STEPS[form]


def moved_by_wire(apart: torch.Tensor, plan: Plan) -> torch.Tensor:
    """``[numel / 128]``, the mean of `sent_apart` over the ranks -> ``[numel]``: how far the wire may move the mean."""
    times = 0 if plan.shard == 1 else 1 if plan.placement.gradient else 2
    if plan.replicate > 1:  # which cut rows where a block may begin in one of these and end in the next
        times += 2
        apart = torch.nn.functional.max_pool1d(apart[None], 3, 1, 1)[0]
    return (apart * times * ODD_ROUNDING).repeat_interleave(SCALED)


def largest(values: torch.Tensor) -> float:
    """The largest magnitude that is finite."""
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0


def off(
    what: str, mine: torch.Tensor, theirs: torch.Tensor, bound: torch.Tensor | float, known: torch.Tensor | bool = True
) -> str | None:
    """Describes the first element of ``mine`` that is further from eager PyTorch's than the bound; None: none is.
    ``known``: which elements are compared."""
    one, two, bound = mine.detach().double(), theirs.detach().double(), torch.as_tensor(bound, dtype=torch.double)
    same = (one == two) | (one.isnan() & (two.isnan() | ~bound.isfinite()))
    wrong = ~same & ~((one - two).abs() <= bound) & known
    if not bool(wrong.any()):
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    if not place:
        return f"{what} is {float(one):.7g}, and {float(two):.7g} in eager PyTorch"
    return (
        f"{what} is {float(one[place]):.7g} at an element that is {float(two[place]):.7g} in eager PyTorch "
        f"({int(wrong.sum())} of {wrong.numel()} are off)"
    )


def result_off(what: str, mine: torch.Tensor, theirs: torch.Tensor, plan: Plan) -> str | None:
    share, least = result_bound(plan, theirs)
    return off(what, mine, theirs, share * largest(theirs.detach()) + least)


def returned_off(mine: Any, theirs: Any, plan: Plan, apart: Any = None) -> str | None:
    """Describes what differs in what was returned. ``apart``: a tensor of eager PyTorch's that is not compared."""
    values, others = pytree.tree_leaves(mine), pytree.tree_leaves(theirs)
    if len(values) != len(others):
        return f"{len(values)} values were returned, and {len(others)} in eager PyTorch"
    for place, (one, other) in enumerate(zip(values, others, strict=True)):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and other is not apart:
            one, other = own_part(one.detach()), own_part(other.detach())
            what = f"value {place} that was returned"
            if one.shape != other.shape:
                return f"{what} has shape {list(one.shape)}, and {list(other.shape)} in eager PyTorch"
            if said := result_off(what, one, other, plan):
                return said
    return None
