"""Policy(tp=...), ties, other models, generated plans, on 1 x 2 and 2 x 2 ranks and on 2 x 2 x 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_compiled import Policy
from tests.launch import answers, launch, results_of

WORKER = Path(__file__).parents[1] / "workers" / "tensor_parallel_models.py"
results = results_of(WORKER, 4, timeout=400, imports=("transformers.models.llama.modeling_llama",))


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    return launch(WORKER, 2, timeout=400, imports=("transformers.models.qwen3.modeling_qwen3",))


def test_a_model_of_transformers_is_cut_by_the_plan_that_it_brings(row: dict[str, Any]) -> None:
    found = answers(row, "by_its_own_plan")
    assert found[0]["eager"]["loss"] < 1e-5 and found[0]["eager"]["weights"] < 1e-5
    assert "cut along tp by the tp_plan of Qwen3ForCausalLM: lm_head: colwise_gather_output" in found[0]["plan"]
    assert all(one["copies"] and one["tied"] for one in found)


def test_a_model_without_a_plan_is_cut_by_one_that_is_derived(results: dict[str, Any]) -> None:
    found = answers(results, "derived")
    assert found[0]["eager"]["loss"] < 1e-5 and found[0]["eager"]["norm"] < 1e-5 and found[0]["eager"]["weights"] < 1e-5
    assert "cut along tp by a plan derived from Llama and tried: " in found[0]["plan"]
    assert "layers.*.attention.wk: colwise" in found[0]["plan"]
    assert "layers.*.attention.norm: replicated_with_grad_allreduce" in found[0]["plan"]
    assert all(one["copies"] and one["tied"] for one in found)


def test_stretches_of_sequences_train_as_whole_ones_under_both_faces(row: dict[str, Any]) -> None:
    found = answers(row, "stretches")
    for face in ("step", "loop"):
        assert all(found[0][face][what] < 1e-6 for what in ("loss", "weights")), found[0]
    for one in found:
        assert (
            one["theirs"].startswith("ValueError: step inside PyTorch's context_parallel")
            or "SequenceAttention" in one["theirs"]
        )
        assert "Context parallelism has no axis of its own" in one["cp"]


def test_buffers_are_rank_zeros_along_tp_and_parts_are_not_written_to_them(results: dict[str, Any]) -> None:
    found = answers(results, "buffers")
    for one in found:
        assert one["loss"] < 1e-6 and one["scale"] == 1.0
        assert "Forward writes to buffer seen what differs between ranks along the tp axis" in one["part"]
    for one, other in ((0, 1), (2, 3)):  # along tp
        assert found[one]["seen"] == found[other]["seen"] > 0


@pytest.mark.exhaustive
def test_generated_models_and_plans() -> None:
    for found in answers(launch(WORKER, 4, "generated", timeout=400), "generated")[0]:
        assert found["loss"] < 1e-5 and found["norm"] < 1e-5 and found["weights"] < 1e-5, found


@pytest.mark.exhaustive  # eight ranks; two axes at a time are in test_parity and in these
def test_a_cube_of_replicas_shards_and_parts() -> None:
    found = answers(launch(WORKER, 8, timeout=300), "cube")
    assert found[0]["eager"]["loss"] < 1e-5 and found[0]["eager"]["norm"] < 1e-5
    assert found[0]["eager"]["weights"] < 1e-5
    assert all(one["copies"] for one in found)
    assert "zero3 on 2 ranks x 2 replicas x 2 tensor-parallel" in found[0]["plan"]


REFUSED = {
    "no plan": 'ValueError: Policy.tp is "auto", and Stack brings no plan',
    "no such style": "ValueError: Policy.tp has up: 'sideways', which is not supported here",
    "no such module": "ValueError: Policy.tp names layers.*.up, and there is no such module in Net",
    "no such cut": "ValueError: drop is a Dropout, which has no style 'colwise'",
    "no axis": 'ValueError: Policy.tp says how to cut the model along the axis "tp", which the mesh does not have',
    "cut before": "is a DTensor: the model was cut before",
    "dynamic": "ValueError: Policy.dynamic is not supported under tensor parallelism",
    "stepped": "ValueError: SGD has state of up already",
    "half tied": "ValueError: tokens.weight and head.weight are one parameter, which Policy.tp cuts in one place",
    "broken tie": "ValueError: The config of LlamaForCausalLM ties the embedding's weight and the head's",
    "heads": "ValueError: LlamaForCausalLM has num_attention_heads=3, which 2 ranks along tp do not divide",
    "other policies": "RankError: How compile_sharded cuts the model differs between rank 0 and rank 1",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_right_is_refused_on_every_rank(results: dict[str, Any], case: str) -> None:
    for found in answers(results, "refusals"):
        assert REFUSED[case] in found[case]


def test_two_equal_parameters_that_may_have_been_tied_are_told(results: dict[str, Any]) -> None:
    for found in answers(results, "refusals"):
        assert len(found["warned"]) == 1
        assert found["warned"][0].startswith("tokens.weight and head.weight have the same values")


def test_a_policy_says_what_is_no_plan() -> None:
    for wrong in ("by heart", {}, {"up": 3}, ("up",)):
        with pytest.raises(ValueError, match=r"Policy\.tp is .*expected"):
            Policy(tp=wrong)  # type: ignore[arg-type]
    assert Policy(tp={"up": "colwise"}) == Policy(tp={"up": "colwise"})
    assert hash(Policy(tp={"up": "colwise"})) == hash(Policy(tp={"up": "colwise"}))
