"""Loss scaling on one process: step by step what `torch.amp.GradScaler` does, and what a person sees of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_compiled import LossScale, Policy, compile_sharded
from fsdp_compiled.ir.program import NORM
from tests.scaled import SCALE, batch, build, loss, optimizer_of, policy_of
from tests.simulate import Batch, stages

OVERFLOWING = {2, 3, 7}  # steps
STEPS = 11


@dataclass
class Run:
    """What was seen after each step, and the model's state at the end."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    good: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: int = 0  # that the optimizer counted


def ours(policy: Policy, kind: str, rows: Sequence[Sequence[Batch]]) -> tuple[Run, Any]:
    model = build()
    sharded = compile_sharded(model, optimizer_of(model, kind), loss=loss, policy=policy)
    found = Run()
    for row in rows:
        for part in row[:-1]:
            sharded.accumulate(*part)
        found.losses.append(sharded.step(*row[-1]).item())
        found.scales.append(sharded.loss_scale.item())
        found.good.append(int(sharded.state.scale["good"]))
        found.norms.append(sharded.grad_norm.item())
    found.model = sharded.full_state_dict()
    found.updates = int(sharded.state.step)
    return found, sharded


def eager(policy: Policy, kind: str, rows: Sequence[Sequence[Batch]], broken: str = "") -> Run:
    model = build()
    optimizer = optimizer_of(model, kind)
    scaler = torch.amp.GradScaler("cpu", SCALE.init, SCALE.growth, SCALE.backoff, SCALE.interval + (broken == "late"))
    found = Run()
    for row in rows:
        losses = []
        optimizer.zero_grad()
        for part in row:
            value = loss(model, *part)
            scaler.scale(value / len(row)).backward()
            losses.append(value.item())
        if broken != "scaled":
            scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), policy.clip or float("inf"))
        if policy.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), policy.clip_value)
        before = copy.deepcopy(model.state_dict())
        scaler.step(optimizer)
        moved = any(not torch.equal(before[name], value) for name, value in model.named_parameters())
        found.updates += moved
        scaler.update()
        found.losses.append(sum(losses) / len(losses))
        found.scales.append(scaler.get_scale())
        found.good.append(scaler._get_growth_tracker())
        found.norms.append(norm.item())
    found.model = model.state_dict()
    return found


def rows_of(sizes: Sequence[int], odd: set[int]) -> list[list[Batch]]:
    """Rows of so many microbatches; the ``odd`` ones, counted through, overflow."""
    found, count = [], 0
    for size in sizes:
        found.append([batch(index, index in odd) for index in range(count, count + size)])
        count += size
    return found


def furthest(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == other.keys()
    return max(
        ((mine[n].double() - v.double()).norm() / v.double().norm().clamp(min=1e-6)).item() for n, v in other.items()
    )


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_one_process_is_bit_for_bit_the_grad_scaler(kind: str) -> None:
    rows = rows_of([1] * STEPS, OVERFLOWING)
    mine, sharded = ours(policy_of(), kind, rows)
    theirs = eager(policy_of(), kind, rows)
    assert mine.losses == theirs.losses
    assert (mine.scales, mine.good) == (theirs.scales, theirs.good)
    ratios = {round(b / a, 2) for a, b in zip(theirs.scales, theirs.scales[1:], strict=False)}
    assert ratios == {1.0, SCALE.growth, SCALE.backoff}, "the scale has to move both ways"
    assert all(torch.equal(mine.model[name], value) for name, value in theirs.model.items())
    assert int(sharded.overflows) == len(OVERFLOWING)
    assert mine.updates == theirs.updates == STEPS - len(OVERFLOWING)
    if kind == "adamw":
        assert sharded.state.optimizer["group 0.step"] == STEPS - len(OVERFLOWING)
    assert sharded.captures == 1
    late = eager(policy_of(), kind, rows, broken="late")
    assert late.scales != mine.scales


@pytest.mark.parametrize("options", [{"clip": 0.05}, {"clip_value": 0.01}], ids=["norm", "value"])
def test_gradients_are_clipped_after_they_are_unscaled(options: dict[str, float]) -> None:
    rows = rows_of([1] * STEPS, OVERFLOWING)
    mine, _ = ours(policy_of(**options), "sgd", rows)
    theirs = eager(policy_of(**options), "sgd", rows)
    assert mine.scales == theirs.scales
    assert furthest(mine.model, theirs.model) < 1e-6
    finite = [index for index in range(STEPS) if index not in OVERFLOWING]
    for index in finite:
        assert mine.norms[index] == pytest.approx(theirs.norms[index], rel=1e-5)
        assert mine.norms[index] > 0.05
    assert furthest(mine.model, eager(policy_of(**options), "sgd", rows, broken="scaled").model) > 1e-4
    assert furthest(mine.model, eager(policy_of(), "sgd", rows).model) > 1e-4, "nothing was clipped"


@pytest.mark.parametrize("accumulate", ["shards", "full"])
def test_an_overflow_in_any_microbatch_voids_the_step_and_its_sums(accumulate: str) -> None:
    sizes = [2, 3, 1, 2, 3]
    odd = {2, 7}  # the first microbatch of the second row, the last of the fourth
    rows = rows_of(sizes, odd)
    mine, sharded = ours(policy_of(accumulate=accumulate), "sgd", rows)
    theirs = eager(policy_of(), "sgd", rows)
    assert mine.scales == theirs.scales
    assert (int(sharded.overflows), mine.updates) == (2, 3)
    assert furthest(mine.model, theirs.model) < 1e-6
    assert not any(total.any() for total in sharded.state.sums.values())
    assert furthest(mine.model, eager(policy_of(), "sgd", rows_of(sizes, {2})).model) > 1e-4


@pytest.mark.parametrize("scale", [1024, LossScale(init=1024, growth=1, backoff=1)])
def test_a_number_is_a_scale_that_stays(scale: float | LossScale) -> None:
    rows = rows_of([1] * 4, {2})
    mine, sharded = ours(policy_of(loss_scale=scale), "sgd", rows)
    assert mine.scales == [1024.0] * 4
    assert (int(sharded.overflows), mine.updates) == (1, 3)


@pytest.mark.exhaustive  # a program like any other to Inductor, of which test_lowering and test_parity have some
def test_inductor_scales_and_skips_as_eager_does() -> None:
    def train(lower: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = nn.Linear(6, 3)
        sharded = compile_sharded(model, optimizer_of(model, "sgd"), loss=loss, policy=policy_of(lower=lower))
        scales = []
        for (row,) in rows_of([1] * 6, OVERFLOWING):
            sharded.step(*row)
            scales.append(sharded.loss_scale.item())
        assert (int(sharded.overflows), int(sharded.state.step)) == (2, 4)
        return scales, sharded.full_state_dict()

    (scales, model), (expected, reference) = train("inductor"), train("eager")
    assert scales == expected
    assert furthest(model, reference) < 1e-6


def test_without_a_scale_the_program_has_none_of_it() -> None:
    model = build()
    program = stages(model, optimizer_of(model), loss, batch(0), Policy(lower="eager"))[0][-1]
    assert not {"scale", "unscale", "skip"} & set(program.history)
    assert not program.marked("scale")


def test_the_scale_is_part_of_the_state_and_apply_consumes_it() -> None:
    model = build()
    sharded = compile_sharded(model, optimizer_of(model), loss=loss, policy=policy_of())
    state = pytree.tree_map(torch.clone, sharded.state)
    state, _ = sharded.apply(state, *batch(0, overflows=True))
    assert state.scale["overflows"] == 1
    assert state.scale["factor"] == pytest.approx(SCALE.init * SCALE.backoff)
    assert (int(sharded.overflows), sharded.loss_scale.item()) == (0, SCALE.init)
    with pytest.raises(RuntimeError, match="consumed"):
        state.consume()
        _ = state.scale


def test_value_and_grad_gives_gradients_without_the_scale() -> None:
    model = build()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, loss=loss, policy=policy_of())
    value, gradients = sharded.value_and_grad(*batch(0))
    expected = loss(plain, *batch(0))
    expected.backward()
    assert value.item() == expected.item()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(gradients[name], parameter.grad.flatten(), rtol=1e-5, atol=1e-8)


def test_without_a_scale_asking_for_it_says_what_to_do() -> None:
    model = build()
    sharded = compile_sharded(model, optimizer_of(model), loss=loss, policy=Policy(lower="eager"))
    for name in ("loss_scale", "overflows"):
        with pytest.raises(RuntimeError, match=r'Policy.*loss_scale="dynamic"'):
            getattr(sharded, name)


def test_the_norm_that_is_reported_is_unscaled() -> None:
    model = build()
    program = stages(model, optimizer_of(model), loss, batch(0), policy_of())[0][-1]
    assert program.outputs[NORM].meta["val"].dtype == torch.float32
    one, _ = ours(policy_of(), "sgd", rows_of([1], set()))
    other, _ = ours(Policy(lower="eager", loss_scale=1), "sgd", rows_of([1], set()))
    assert one.norms == pytest.approx(other.norms, rel=1e-6)
