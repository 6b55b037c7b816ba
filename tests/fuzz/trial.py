"""Runs a case on both sides, compares call by call, and makes a case that fails smaller."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.fuzz.cases import Case, smaller
from tests.fuzz.sides import REFUSED, Differs, Ours, Plain

CLOSE = 1e-5  # relative to the largest element; sums in another order move the last bits
HALF = 2e-2  # the same, of what autocast rounds to bfloat16 on its way through a dozen layers


@dataclass
class Outcome:
    """What became of a case: ``refused`` (with the error's first line), ``differs``, ``crashed``, or empty: right."""

    case: Case
    kind: str = ""
    said: str = ""
    trace: str = field(default="", repr=False)


def run(case: Case) -> Outcome:
    """Both sides, call by call."""
    try:
        plain = Plain(case)
        ours = Ours(case)
        rounds = case.autocast or "autocast step" in case.actions or "half" in case.layers
        bound = HALF if rounds else CLOSE
        torch.manual_seed(case.seed + 1)
        for call, action in enumerate(case.actions):
            before = torch.get_rng_state()
            expected = plain.act(action, call)
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            got = ours.act(action, call)
            where = f"call {call} ({action})"
            compare(got, expected, bound, f"what {where} gave")
            if action != "wrong batch" and not torch.equal(torch.get_rng_state(), after):
                raise Differs(f"{where} left the generator elsewhere")
            torch.set_rng_state(after)
        compare(ours.weights(), plain.weights(), bound, "the state at the end")
        compare(rates(ours.optimizer), rates(plain.optimizer), 0.0, "the rates at the end")
    except Differs as error:
        return Outcome(case, "differs", str(error))
    except REFUSED as error:
        return Outcome(case, "refused", str(error).splitlines()[0], traceback.format_exc())
    except Exception as error:
        return Outcome(case, "crashed", f"{type(error).__name__}: {error}".splitlines()[0], traceback.format_exc())
    return Outcome(case)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def _sorted(value: Any) -> Any:
    """Dictionaries by name, however they were filled."""
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return type(value)(map(_sorted, value)) if type(value) in (tuple, list) else value


def compare(got: Any, expected: Any, bound: float, what: str) -> None:
    mine, spec = pytree.tree_flatten(_sorted(got))
    theirs, other = pytree.tree_flatten(_sorted(expected))
    if isinstance(got, dict) and isinstance(expected, dict) and got.keys() != expected.keys():
        raise Differs(f"{what} has other names: {sorted(got.keys() ^ expected.keys())}")
    if len(mine) != len(theirs):
        raise Differs(f"{what} has another form: {spec}, expected {other}")
    for place, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        if not isinstance(right, torch.Tensor):
            if left != right:
                raise Differs(f"{what}, entry {place}: {left}, expected {right}")
            continue
        left, right = left.detach(), right.detach()
        if left.shape != right.shape or left.dtype != right.dtype:
            raise Differs(
                f"{what}, entry {place}: {left.dtype} {list(left.shape)}, expected {right.dtype} {list(right.shape)}"
            )
        scale = max(float(right.double().abs().max()) if right.numel() else 0.0, 1e-2)
        off = float((left.double() - right.double()).abs().max()) if right.numel() else 0.0
        if not off <= bound * scale and not torch.equal(left.isnan(), right.isnan()):
            raise Differs(f"{what}, entry {place}: not finite where the other is")
        if off == off and off > bound * scale:
            raise Differs(f"{what}, entry {place}: off by {off:.3g} of {scale:.3g}")


def shrunk(outcome: Outcome) -> Outcome:
    """The smallest case found that fails in the same way."""
    found = True
    while found:
        found = False
        for case in smaller(outcome.case):
            if (other := run(case)).kind == outcome.kind:
                outcome, found = other, True
                break
    return outcome
