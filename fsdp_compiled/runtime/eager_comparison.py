"""The comparison of a program with eager PyTorch, for both faces of `Policy.verify`: which calls are compared, how far
numbers may be from eager PyTorch's, and what ranks are told.

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

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_compiled.analysis.best_effort import reason
from fsdp_compiled.capture.captured import Capture
from fsdp_compiled.capture.mutations import PLAIN
from fsdp_compiled.capture.tensor_parallel import own_part
from fsdp_compiled.distributed.mesh import Mesh, RankError, said_by
from fsdp_compiled.ir.nodes import call_text, describe
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.reference import LARGEST
from fsdp_compiled.plan.make_plan import SCALED
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.programs.compile import Compiled
from fsdp_compiled.runtime.programs.program_cache import Programs
from fsdp_compiled.torch_private.names import there

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
FIRST = 2  # so many first calls of each program are verified, including the one that compiled it
CURE = (
    'The next such call is traced anew. Policy(verify_difference="recapture") traces it anew at once and goes on; '
    "Policy(verify=False) turns the comparison off."
)
log = logging.getLogger("fsdp_compiled")


class ProgramDiffers(RankError):
    """A program's results are not those of eager PyTorch. Every rank raises it, and none keeps the program."""


class VerifiedPrograms:
    """The programs of one model, by their numbers."""

    def __init__(self, programs: Programs, mesh: Mesh) -> None:
        self._programs, self._plan, self._mesh = programs, programs.plan, mesh
        self._traced: dict[int, dict[str, Any]] = {}  # modules' plain attributes at the program's first call
        self._told: set[str] = set()

    def due(self, count: int) -> bool:
        """Whether the call that follows ``count`` good ones is verified."""
        every = self._plan.policy.verify
        return count < FIRST or (every is not True and count % every == 0)

    @property
    def gradients(self) -> bool:
        return self._plan.policy.verify_gradients and there("backward under a mode")

    def draws_otherwise(self, compiled: Compiled) -> bool:
        """Whether the program draws other random numbers than eager PyTorch; the log says so once."""
        if not (compiled.random and (self._plan.device.type == "cuda" or self._mesh.tp > 1)):
            return False
        why = "draws random numbers, which on a GPU, and along tp, are others than in eager PyTorch"
        self.tell(f"{compiled.label} {why}, so it is not compared.")
        return True

    def changed(self, compiled: Compiled, model: torch.nn.Module) -> str:
        """Which plain attributes of modules differ from those at the program's first call, for a message."""
        now = {
            f"{path}.{name}".lstrip("."): value
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, PLAIN)
        }
        kept = {one.number for one in self._programs.cached}
        self._traced = {number: values for number, values in self._traced.items() if number in kept}
        found = [f"{name} was {was!r} and is {value!r}"
                 for name, was, value in _differing(self._traced.setdefault(compiled.number, now), now)]  # fmt: skip
        return f" (since the first such call, {'; '.join(found[:3])})" if found else ""

    def agree(
        self, said: str | None, changed: str, compiled: Compiled, again: Callable[[], Capture], where: str = "",
        before: str = "",
    ) -> None:  # fmt: skip
        """Raises `ProgramDiffers` on every rank if one of them has said that something differs. Then none keeps the
        program. ``again``: traces its call again. Collective."""
        label = f"{where}{compiled.label}"
        if said is not None:
            said += _traced_otherwise(compiled, again)
        own = f"in {label}, on rank {self._mesh.rank}, {said}{changed}" if said is not None else None
        if (first := next((one for one in said_by(own, self._mesh) if one is not None), None)) is not None:
            self._programs.forget(compiled)
            raise ProgramDiffers(f"Policy.verify: {first}. {before}{CURE}")

    def goes_on(self, error: ProgramDiffers) -> bool:
        """Whether the call is to be traced anew and run again; the log says so."""
        if self._plan.policy.verify_difference == "raise":
            return False
        self.tell(f"{str(error).removeprefix('Policy.verify: ').removesuffix(f' {CURE}')} It is traced anew.")
        return True

    def alike(self, compiled: Compiled, took: float, more: str = "") -> None:
        """Says once that a call was compared, and what it cost."""
        told = f"{compiled.label} gave in eager PyTorch what its program gives{more}. That took {took:.2f} s."
        self.tell(told, "compared")

    def tell(self, said: str, once: str | None = None) -> None:
        """Writes to the log of rank 0, unless something was told by this name before."""
        if (once or said) not in self._told and self._mesh.rank == 0:
            log.warning("Policy.verify: %s", said)
        self._told.add(once or said)


def _traced_otherwise(compiled: Compiled, again: Callable[[], Capture]) -> str:
    """What the same call, traced again, computes otherwise: the first module where it does, for a message.

    ``again``: traces it. Only this rank does; nothing is changed.
    """
    try:
        now = again()
    except Exception as error:
        return f"; traced again, its code fails ({reason(error)})"
    if found := _first_difference(compiled.known.captured(), now.program):
        return f"; traced again, {found}"
    held = compiled.capture.constants
    for name, tensor in now.constants.items():
        if name not in compiled.capture.written and name in held and not torch.equal(tensor, held[name]):
            return f"; traced again, {name} has other values"
    return "; traced again, its code gives the same program, so it is not the trace that is out of date"


def _first_difference(before: Program, now: Program) -> str | None:
    calls = [[one for one in program.graph.nodes if one.op == "call_function"] for program in (before, now)]
    for was, found in zip_longest(*calls):
        texts = [None if one is None else f"{call_text(one)} -> {describe(one)}" for one in (was, found)]
        if texts[0] != texts[1]:
            path = (found or was).meta.get("path") or "the loss"
            has, had = (text or "nothing" for text in reversed(texts))
            return f"{path} is the first module that computes something else: {has}, where the program has {had}"
    return None


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs = [(name, before.get(name), now.get(name)) for name in sorted({**before, **now})]
    return [one for one in pairs if (one[1], type(one[1])) != (one[2], type(one[2]))]


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


def buffers_off(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], plan: Plan) -> str | None:
    """Describes the first buffer that forward left otherwise."""
    both = ((name, own_part(mine[name].detach()), one) for name, one in theirs.items() if name in mine)
    said = (
        result_off(f"the buffer {name}", one, other, plan)
        if one.shape == other.shape
        else f"the buffer {name} has shape {list(one.shape)}, and {list(other.shape)} in eager PyTorch"
        for name, one, other in both
    )
    return next(filter(None, said), None)


def result_off(what: str, mine: torch.Tensor, theirs: torch.Tensor, plan: Plan) -> str | None:
    share, least = result_bound(plan, theirs)
    return off(what, mine, theirs, share * largest(theirs.detach()) + least)


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
