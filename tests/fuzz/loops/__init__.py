"""Loops of `fully_shard` on several ranks, drawn at random, beside a plain model whose gradients are reduced by hand;
under mixed precision beside FSDP2.

A loop is made of its seed: a model (`model.Shape`), optimizers, and some twenty steps of the kinds in `steps.STEPS`.
Both sides (`sides`) do each step; then results, weights, gradients, buffers and random numbers are compared.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_compiled import CaptureError, RankError
from tests.fuzz.loops import changes, failures, later, passes, updates  # noqa: F401 # which fill the table of steps
from tests.fuzz.loops.fsdp2 import Theirs, not_alike
from tests.fuzz.loops.model import Shape
from tests.fuzz.loops.sides import PRECISIONS, Ours, Plain, Side
from tests.fuzz.loops.steps import LATER, STEPS, draw, with_later
from tests.launch import of_all

REFUSED = (ValueError, NotImplementedError, CaptureError, RankError, RuntimeError)  # what an error by name is
BOUND = {torch.float64: 1e-6, torch.float32: 5e-3}  # relative to the largest element
HALF = 0.1  # the same, once something was rounded to bfloat16
BESIDE = 1e-3  # of FSDP2, which rounds where we do


KINDS = {**STEPS, **LATER}


class Differs(AssertionError):
    pass


def run(seed: int, rank: int, world: int) -> tuple[str, str]:
    """What became of it on this rank, and what is to say: "right", "refused", "differs" or "crashed".

    Where plain PyTorch raises too, the loop ends there, and was right.
    """
    rng = random.Random(seed)
    shape = Shape.draw(rng, random.Random(f"{seed} more"), PRECISIONS)
    more = random.Random(f"{seed} later") if seed % 3 == 1 else None
    shape = shape.with_more(more) if more is not None else shape
    beside = Theirs if shape.precision else Plain
    try:
        plain, ours = beside(shape, seed, rank, world), Ours(shape, seed, rank, world)
    except REFUSED as error:
        return "refused", f"{_told(error)}: {shape}"
    makes = rng.randrange(10**9)
    for side in (plain, ours):
        updates.begin(side, random.Random(makes))
    done: list[str] = []
    torch.manual_seed(2 * seed + rank)
    without = not_alike(shape) if shape.precision else ()
    names = draw(rng, rng.randint(8, 24), without)
    for place, name in enumerate(with_later(names, more, without) if more is not None else names):
        done.append(name)
        kind, said = _together(*_step(plain, ours, name, f"{seed} {place}"))
        if kind:
            return kind, f"step {place}, {name}: {said}: {done}, {shape}"
    return "right", ""


def _step(plain: Side, ours: Side, name: str, seed: str) -> tuple[str, str]:
    """What is to say where the loop cannot go on, and else nothing."""
    start = torch.get_rng_state()
    expected, raised = _act(plain, name, seed)
    state = torch.get_rng_state()
    torch.set_rng_state(start)
    found, error = _act(ours, name, seed)
    if error is not None:
        if not isinstance(error, REFUSED):
            return "crashed", "".join(traceback.format_exception(error))
        return "right" if raised is not None else "refused", _told(error)
    if raised is not None:
        return "differs", f"it went through, where plain PyTorch raises {_told(raised)}"
    drawn = torch.equal(torch.get_rng_state(), state) or KINDS[name].makes_noise
    torch.set_rng_state(state)
    ours.loose |= plain.loose
    wrong = differences(plain, ours, expected, found)
    return ("differs", ", ".join(wrong)[:600]) if wrong or not drawn else ("", "")


def _act(side: Side, name: str, seed: str) -> tuple[Any, Exception | None]:
    side.seen = []
    try:
        return KINDS[name].run(side, random.Random(seed)), None
    except Exception as error:
        return None, error


def _together(kind: str, said: str) -> tuple[str, str]:
    """The same on all ranks, of which none goes on where another does not."""
    if not dist.is_initialized():  # ended by an error in a program
        return "right" if kind == "right" else "crashed", f"the process group was ended: {said}"
    everyone = of_all((kind, said))
    for wanted in ("crashed", "differs", "refused", "right"):
        for rank, (one, text) in enumerate(everyone):
            if one == wanted:
                return one, f"rank {rank}: {text}"
    return "", ""


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def differences(plain: Side, ours: Side, expected: Any, found: Any) -> list[str]:
    """What is not the same on both sides, on this rank."""
    bound = HALF if plain.loose else BESIDE if plain.shape.precision else BOUND[plain.shape.dtype]
    both = zip(plain.named(), ours.named(), strict=True)
    pairs: list[tuple[str, Any, Any]] = [
        ("the result", expected, found),
        ("hooks", *(sorted(side.seen, key=itemgetter(0)) for side in (plain, ours))),
    ]
    for (name, one), (_, other) in both:
        pairs += [(name, one, other), (f"{name}.grad", one.grad, other.grad)]
    pairs += zip(*zip(*plain.model.named_buffers()), [one for _, one in ours.model.named_buffers()], strict=True)
    return [text for name, one, other in pairs for text in _differ(name, one, other, bound)]


def _differ(name: str, expected: Any, found: Any, bound: float) -> Iterator[str]:
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple) and len(expected) == len(found):
        for one, other in zip(expected, found, strict=True):
            yield from _differ(name, one, other, bound)
    elif isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        expected, found = expected.detach(), found.detach()
        if isinstance(found, DTensor):
            own = expected.to_local() if isinstance(expected, DTensor) else _own_rows(expected, found)
            expected, found = own, found.to_local()
        if expected.shape != found.shape or expected.dtype != found.dtype:
            yield f"{name} is {found.dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.shape)}"
        elif expected.numel():
            largest = max(float(expected.abs().max()), 1e-2)
            off = float((expected - found).abs().max())
            same = torch.equal(expected.nan_to_num(7), found.nan_to_num(7))
            if not off <= bound * largest and not same:
                yield f"{name} is off by {off:.3g} of {largest:.3g}"
    elif expected != found:
        yield f"{name} is {found}, expected {expected}"


def _own_rows(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's rows of it, as `Shard(0)` has them."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    rows = -(-len(whole) // like.device_mesh.size(-1))
    return whole[coordinate[-1] * rows : (coordinate[-1] + 1) * rows]
