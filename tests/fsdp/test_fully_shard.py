"""`fully_shard` in the place of FSDP2's: the same loops, run with either, leave the same bits."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.chosen import chosen, needs_torch, selected
from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "fully_shard.py"
# Where several forwards come before one backward, FSDP2 adds up the gradients of the root, whose input needs none,
# before it reduces them, and this package after it: the last bit may differ, from then on in all weights. So it is with
# what a parameter outside of forward gives a gradient, and with what waits for the all-reduction.
ROUNDED = {"several_forwards", "adversarial", "methods", "penalised", "own_class_replicas"}
CASES = (
    "adamw", "sgd_groups", "fused", "accumulate", "divided", "evaluation", "checkpointed", "several_forwards", "frozen",
    "adapters", "structured", "adversarial", "autocast", "mixed_precision", "scaler", "fused_scaler",
    "nested", "uneven", "meta", "saved", "assigned", "written", "hooks", "methods", "held_by_methods",
    "ignored", "unsharded", "hybrid", "around", "copied", "regrouped", "stepped_in_backward", "inserted",
    "penalised", "failing",
    "own_class", "own_class_held", "own_class_replicas", "torchao",
)  # fmt: skip


# What these show is in another of the cases too, or in examples/.
REPEATED = (
    "fused",
    "frozen",
    "fused_scaler",
    "several_forwards",
    "nested",
    "uneven",
    "assigned",
    "held_by_methods",
    "around",
)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    cases = [case for case in selected(request, "case", "found") if case != "torchao" or find_spec("torchao")]
    return launch(WORKER, 2, *cases, "broken", "broken_class")


@pytest.mark.parametrize("case", chosen(CASES, [case for case in CASES if case not in REPEATED]))
def test_a_loop_leaves_what_it_leaves_with_fsdp2(found: dict[str, str], case: str) -> None:
    if case == "torchao":
        pytest.importorskip("torchao")
    if case == "own_class":
        needs_torch((2, 12), "it cannot view what a class of its own gathers: refused")
    said = found[case]
    if case in ROUNDED and "off by " in said:
        assert float(said.rpartition(" ")[2]) < 1e-6, said  # the last bits of a loss of 5
    else:
        assert not said


def test_another_rate_is_told_apart(found: dict[str, str]) -> None:
    assert "off by" in found["broken"]
    assert "off by" in found["broken_class"]
