"""`fully_shard` after `parallelize_module` beside FSDP2 with the same plan, on 2 x 2 ranks, the update on 1 x 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import answers, launch, results_of

WORKER = Path(__file__).parents[1] / "workers" / "tensor_parallel_loop.py"
results = results_of(WORKER, 4, timeout=400)


@pytest.fixture(scope="module")
def more() -> dict[str, Any]:
    return launch(WORKER, 4, "half", "classes", timeout=400)


def test_with_sequence_parallelism_and_clipping_it_is_fsdp2_to_the_bit(results: dict[str, Any]) -> None:
    for found in answers(results, "sequence"):
        assert found["odd"] == []
        assert found["specs"]  # parameters are the same DTensors
        assert found["losses"][0] != found["losses"][1]
        assert found["unsharded"] == [True, "(Shard(dim=0),)"]


def test_verify_compares_gradients_of_parts() -> None:
    """The first call is no difference, and the second's derivative is one; the control compares forward alone."""
    for found in answers(launch(WORKER, 2, "verified"), "verified"):
        assert "Policy.verify: in the backward" in found["True"] and "the gradient of" in found["True"], found
        assert found["False"] == "nothing"


@pytest.mark.exhaustive
def test_half_precision_on_replicas_with_microbatches_is_fsdp2_to_the_bit(more: dict[str, Any]) -> None:
    assert [found["odd"] for found in answers(more, "half")] == [[]] * 4


@pytest.mark.exhaustive  # under compile_sharded it is in test_tensor_parallel
def test_loss_parallel_and_the_norm_of_what_is_cut_and_what_is_not(more: dict[str, Any]) -> None:
    for found in answers(more, "classes"):
        assert found["losses"] < 1e-5 and found["norms"] < 1e-5
        assert abs(found["twice"] / found["first"] - 1) > 1e-3
        assert found["placements"]["tokens.weight"] == "(Shard(dim=0), Replicate())"  # which no plan names


def test_dropout_is_fsdp2s_where_activations_are_whole_and_independent_on_parts(results: dict[str, Any]) -> None:
    found = answers(results, "dropout")
    assert [one["odd"] for one in found] == [[]] * 4
    ours, fsdp2 = found[0]["masks"]  # by rank, by call: of what all along tp have, and of parts
    for one in range(4):
        other = one ^ 1  # along tp
        for call in range(2):
            assert ours[one][call][0] == ours[other][call][0]
            same = sum(a == b for a, b in zip(ours[one][call][1], ours[other][call][1], strict=True))
            assert 16 < same < 48  # of 64 fair coins: 4 standard deviations around 32
            assert fsdp2[one][call][1] == fsdp2[other][call][1]  # the control: one mask for all parts
            assert ours[one][call] != ours[one ^ 2][call]  # on another batch
        assert ours[one][0][0] != ours[one][1][0] and ours[one][0][1] != ours[one][1][1]
    for one in found:
        assert one["copies"] and one["losses"] != one["without"]
        assert "RankError: In a forward, ranks along the tp axis were given different batches" in one["seeds"]
        assert one["unchanged"]


REFUSED = {
    "other batches": "RankError: In a forward, ranks along the tp axis were given different batches",
    "parts": "CaptureError: What the model returns (0) is a plain tensor of what this rank along",
    "input": "CaptureError: batch[0] is a DTensor. Pass a plain tensor",
    "no mesh": "mesh holds 4 ranks, beside 2 along tp, but the world has 4",
    "other mesh": "is a DTensor over ranks [0, 1, 2, 3], and the tp axis is [",
    "partial": "is a DTensor with placement P(sum); a parameter is cut along one dim",
    "uneven": "is cut along dim 0 over 2 ranks, which do not divide 17",
    "buffer": "ValueError: The buffer table is a DTensor",
    "broken tie": "ValueError: The config of Net ties the embedding's weight and the head's, and they are",
    "dynamic": "ValueError: Policy.dynamic is not supported under tensor parallelism",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_right_is_refused_on_every_rank(results: dict[str, Any], case: str) -> None:
    for found in answers(results, "refusals"):
        assert REFUSED[case] in found[case]
        assert found["unchanged"] and found["as it was"]
