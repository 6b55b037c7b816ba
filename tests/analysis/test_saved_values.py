"""Saved values are made again under a budget: the cheapest that are enough, the same bits, the predicted peak."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.analysis.saved_values import Saved, cheapest, saved_values
from fsdp_compiled.ir.nodes import is_random
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.programs.memory_budget import GIB
from tests.allocator import record
from tests.feed_forward import ROWS, WIDTH, Model
from tests.simulate import stages


def captured() -> tuple[Program, Plan]:
    policy = Policy(lower="eager", bucket_mb=0)
    found, plan = stages(Model(), None, None, (torch.ones(ROWS, WIDTH),), policy, kind="gradient")
    at = next(at for at, one in enumerate(found) if one.history and one.history[-1] == "recompute")
    return found[at - 1], plan


def cost(values: Sequence[Saved]) -> float:
    return sum(value.seconds for value in values)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), max_size=7), st.integers(0, 150))
def test_the_choice_is_the_cheapest_that_is_enough(sizes: list[tuple[int, int]], wanted: int) -> None:
    values = [Saved(str(at), nbytes, float(seconds), frozenset()) for at, (nbytes, seconds) in enumerate(sizes)]
    chosen = cheapest(values, wanted)
    if sum(value.nbytes for value in values) <= wanted:
        assert chosen == values
        return
    assert sum(value.nbytes for value in chosen) >= wanted
    enough = [
        cost(some)
        for count in range(len(values) + 1)
        for some in combinations(values, count)
        if sum(value.nbytes for value in some) >= wanted
    ]
    assert cost(chosen) == min(enough)


def test_what_can_be_made_again_and_from_what() -> None:
    program, plan = captured()
    values = {value.name: value for value in saved_values(program, plan)}
    nodes = {node.name: node for node in program.graph.nodes}
    assert sum("gelu" in name for name in values) == 3 and sum("addmm" in name for name in values) == 3
    for value in values.values():
        repeated = [nodes[name] for name in value.nodes]
        assert not any(is_random(node) or node.meta["phase"] != "forward" for node in repeated)
        assert len({node.meta["path"].split(".")[1] for node in repeated if "." in node.meta["path"]}) <= 1
    gelu, product = (next(v for name, v in values.items() if part in name) for part in ("gelu", "addmm"))
    assert product.name not in gelu.nodes and 0 < gelu.seconds < product.seconds  # it is made of what is kept
    assert not any("dropout" in name for name in values)


def trained(memory_gb: float | None, **policy: object) -> tuple[list[torch.Tensor], int, int, str]:
    """After three steps, losses and weights; the predicted peak of a step and the measured one, both with what is held;
    and what was chosen."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    chosen = Policy(lower="eager", memory_gb=memory_gb, **policy)  # type: ignore[arg-type]
    sharded = compile_sharded(model, optimizer, policy=chosen)
    batches = [torch.randn(ROWS, WIDTH) for _ in range(3)]
    losses = [sharded.step(batch) for batch in batches[:2]]
    with record() as recording:
        losses.append(sharded.step(batches[2]))
    memory = sharded.memory
    weights = list(sharded.full_state_dict().values())
    held = memory.persistent.total + memory.batch
    return [*losses, *weights], memory.peak.nbytes, recording.peak + held, " ".join(sharded.program.notes)


@pytest.mark.parametrize("part", [0.9, 0.7])
def test_a_budget_is_kept_with_the_same_bits(part: float) -> None:
    free, peak, measured, _ = trained(None)
    tight, less, seen, note = trained(part * peak / GIB)
    assert all(torch.equal(one, other) for one, other in zip(free, tight, strict=True))
    assert "saved values" in note and "the first that fits" in note
    assert less <= part * peak and seen <= part * peak * 1.05 and seen < measured
    assert seen == pytest.approx(less, rel=0.05)


def test_what_the_policy_says_is_kept_and_what_cannot_be_had_is_told(caplog: pytest.LogCaptureFixture) -> None:
    free, peak, _, _ = trained(None)
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        _, same, _, note = trained(0.7 * peak / GIB, recompute=None)
    assert same == peak and "nothing fits" in note and "saved values" not in note
    least, less, _, note = trained(1e-9)
    assert "nothing fits" in note and "the least is" in note and "saved values" in note and less < 0.7 * peak
    assert all(torch.equal(one, other) for one, other in zip(free, least, strict=True))
