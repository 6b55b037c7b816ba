"""Whatever a loop says to a model of FSDP2's, said to ours: the same losses, gradients and weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chosen import needs_torch
from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "beside_fsdp2.py"
ON_TWO = (
    "totals", "within_groups", "features_of_all_ranks", "features_with_derivatives", "in_a_checkpoint",
    "accumulated_and_evaluated",
    "dataclasses", "nested_dataclasses", "lists_of_dataclasses", "sets", "arrays",
    "reduced_otherwise", "each_its_own", "root_apart", "kept",
    "held_for_another_head", "held_for_a_part", "held_and_frozen", "held_and_a_bias_frozen",
    "never_called", "dropout_in_bfloat16",
    "a_part_waits", "neighbours_wait", "watched", "stopped", "sampled", "replicas_wait",
    "hooked_in_halves", "hooked_neighbours",
    "other_dims", "other_dims_merged", "other_dims_saved", "other_dims_uneven",
)  # fmt: skip
ON_FOUR = (
    "replicas_wait", "replicas_wait_in_bfloat16", "ranks_and_replicas_wait", "parts_wait", "divided_by_three",
    "hooked_replicas", "other_dims_on_replicas", "other_dims_cut", "within_groups",
)  # fmt: skip
BROKEN = ("broken", "hooked_broken", "other_dims_broken")
REFUSED = {
    "written": "CaptureError: A collective of torch.distributed writes a tensor that requires a gradient",
    "changed": "Forward changes its argument, a Batch",
    "scalar": "ValueError: The batch holds a numpy.float32",
    "hook_of_one": "RankError: The ranks called with different",
    "dim_of_one": "RankError: The ranks called with different",
}


UNREAD = "its Dynamo cannot look through a dataclass: refused"


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    return launch(WORKER, 2, *ON_TWO, *BROKEN, "refused")


@pytest.fixture(scope="module")
def four() -> dict[str, Any]:
    return launch(WORKER, 4, *ON_FOUR)


@pytest.mark.parametrize("case", ON_TWO)
def test_two_ranks_leave_what_they_leave_with_fsdp2(two: dict[str, Any], case: str) -> None:
    if "dataclasses" in case:
        needs_torch((2, 12), UNREAD)
    if case == "never_called":
        needs_torch((2, 13), "its FSDP2 has no set_reduce_scatter_unused_params")
    assert not two[case]


@pytest.mark.parametrize("case", ON_FOUR)
def test_two_replicas_of_two_ranks_leave_what_they_leave_with_fsdp2(four: dict[str, Any], case: str) -> None:
    assert not four[case]


def test_a_backward_without_communication_reduces_nothing(two: dict[str, Any], four: dict[str, Any]) -> None:
    for found in (two, four):
        assert len(found["reductions"]) >= 3 and not any(found["reductions"])


@pytest.mark.parametrize("case", BROKEN)
def test_another_loss_hook_or_layout_of_gradients_is_told_apart(two: dict[str, Any], case: str) -> None:
    assert "off by" in two[case]


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_is_refused_on_every_rank(two: dict[str, Any], case: str) -> None:
    if case == "changed":
        needs_torch((2, 12), UNREAD)
    assert all(REFUSED[case] in one[case] for one in two["refused"]), two["refused"]
