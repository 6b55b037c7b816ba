"""Tensor parallelism beside FSDP2 with the same plan and beside one process, on four ranks as 2 x 2 and others."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.runtime.simulate import simulated_ranks
from tests.launch import answers, launch, results_of

WORKER = Path(__file__).parents[1] / "workers" / "tensor_parallel.py"
results = results_of(WORKER, 4)


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    """What two ranks along tp show."""
    return launch(WORKER, 2, "stale", "other_batches")


@pytest.fixture(scope="module")
def more() -> dict[str, Any]:
    """What shows again, on other models and formats, what these and tests of single programs show."""
    return launch(WORKER, 4, "distilled", "half")


def first(results: dict[str, Any], case: str) -> dict[str, Any]:
    return answers(results, case)[0]


def test_with_sequence_parallelism_it_is_fsdp2_to_the_bit(results: dict[str, Any]) -> None:
    found = first(results, "gpt")
    assert found["fsdp2"]["bits"], found["fsdp2"]
    assert found["eager"]["loss"] < 1e-5 and found["eager"]["norm"] < 1e-5
    assert all(one["copies"] for one in answers(results, "gpt"))
    assert found["shapes"]


def test_collectives_are_those_of_the_plan(results: dict[str, Any]) -> None:
    depth, counts = 1, first(results, "gpt")["counts"]
    # A block gathers before attention and feed-forward and scatters after them; in backward the other way round. The
    # embedding scatters, the head gathers its input and its output.
    assert counts["all_gather_into_tensor tp"] == 4 * depth + 3
    assert counts["reduce_scatter_tensor tp"] == 4 * depth + 2
    # The weights and biases of norms, which see a part of each sequence; and the message of losses and norms.
    assert counts["all_reduce tp"] == 2 * (2 * depth + 1) + 1
    # Each unit has a buffer of what is cut, and one of what is whole.
    assert counts["reduce_scatter_tensor shard"] == 2 * (depth + 1)
    assert counts["all_reduce shard"] == 1


def test_plan_program_and_timeline_know_the_axis(results: dict[str, Any]) -> None:
    found = first(results, "gpt")
    assert "zero3 on 2 ranks x 2 tensor-parallel" in found["plan"]
    assert "tensor parallelism: 11 parameters cut over 2 ranks" in found["plan"]
    assert "along tp" in found["program"]
    assert found["timeline"]
    assert found["dump"] == []


def test_loss_parallel_clipping_and_microbatches(results: dict[str, Any]) -> None:
    found = first(results, "classes")
    assert found["eager"]["loss"] < 1e-5 and found["eager"]["norm"] < 1e-5 and found["eager"]["weights"] < 1e-5
    assert all(one["copies"] for one in answers(results, "classes"))
    assert abs(found["twice"] / found["norm"] - 1) > 1e-3  # a norm that counts twice what all ranks have would differ
    assert found["wide"] == 0 and first(results, "gpt")["wide"] > 0  # nothing of the size of the vocabulary is made


def test_verify_compares_gradients_of_parts(row: dict[str, Any]) -> None:
    """The control compares forward alone. That what is right is no difference, `classes` shows."""
    for found in answers(row, "stale"):
        assert "Policy.verify: in step" in found["True"] and "the gradient's norm is" in found["True"], found
        assert found["False"] == "nothing"


@pytest.mark.exhaustive
def test_log_softmax_over_parts_has_its_true_derivative(more: dict[str, Any]) -> None:
    found = first(more, "distilled")["eager"]
    assert found["loss"] < 1e-6 and found["weights"] < 1e-5


@pytest.mark.exhaustive
def test_hsdp_in_half_precision_with_checkpointing_is_fsdp2_to_the_bit(more: dict[str, Any]) -> None:
    found = first(more, "half")
    assert found["fsdp2"]["bits"], found["fsdp2"]
    assert found["overflows"] == 0
    assert all(one["copies"] for one in answers(more, "half"))


def test_an_overflow_in_one_part_is_seen_by_all(results: dict[str, Any]) -> None:
    for found in answers(results, "overflow"):
        assert found == {"same": True, "overflows": 1, "moved": True, "after": 1}


def test_dropout_is_the_same_where_activations_are(results: dict[str, Any]) -> None:
    found = answers(results, "dropout")
    assert all(one["copies"] for one in found)
    masks = found[0]["masks"]  # by rank: by call: of what all have, and of parts
    for call in range(2):
        for one, other in combinations(range(4), 2):
            same = one // 2 == other // 2  # along tp
            assert (masks[one][call][0] == masks[other][call][0]) == same
            assert masks[one][call][1] != masks[other][call][1]
    for rank in range(4):
        assert masks[rank][0][0] != masks[rank][1][0] and masks[rank][0][1] != masks[rank][1][1]


def test_other_batches_along_tp_are_an_error_on_every_rank(row: dict[str, Any]) -> None:
    found = answers(row, "other_batches")
    for one in found:
        for call in ("step", "forward", "microbatch", "order", "seeds"):
            message, unchanged = one[call]
            assert message.startswith("RankError: In ") and "were given different batches" in message
            assert unchanged
        assert one["after"]
    assert found[0]["apart"] < 1e-5  # forward alone, beside one process


def test_a_model_on_the_meta_device_is_filled_as_the_whole_is(results: dict[str, Any]) -> None:
    found = first(results, "meta")
    whole, pieces = found.pop("root cut")
    assert whole == 1 < pieces and found.pop("same, cut")
    assert found == {"same": True, "count": 20, "halves differ": True}


REFUSED = {
    "no axis": 'layers.0.up.weight is a DTensor, as parallelize_module makes them, but the mesh has no axis named "tp"',
    "no mesh": 'layers.0.up.weight is a DTensor, as parallelize_module makes them, but the mesh has no axis named "tp"',
    "other mesh": "of another mesh than the one passed, whose tp axis is [",
    "partial": "ValueError: norm.weight is a DTensor with placement P(sum); a parameter is cut along one dim",
    "nothing cut": 'ValueError: The mesh has 2 ranks along "tp", but no parameter is cut along it',
    "buffer": "ValueError: The buffer table is a DTensor",
    "dynamic": "ValueError: Policy.dynamic is not supported under tensor parallelism",
    "join": "ValueError: join is not supported under tensor parallelism",
    "eager optimizer": "ValueError: Queue runs as it is, after the program",
    "heads": "Let 2 divide the number of heads",
    "forgotten": "CaptureError: layers.0.attention.scale is whole on every rank along the tp axis, but its gradient",
    "parts": "CaptureError: The loss is computed of what ranks along the tp axis have parts of, and differs",
}


def test_axes_of_other_names_are_refused_on_every_rank(results: dict[str, Any]) -> None:
    for one in answers(results, "other_names"):
        assert one["said"].startswith(
            "ValueError: mesh has axes ('a', 'tp'); expected one axis, which shards, or two named"
        )


@pytest.fixture(scope="module")
def refused() -> dict[str, Any]:
    return launch(WORKER.parent / "tensor_parallel_refusals.py", 2)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_right_is_refused_on_every_rank(refused: dict[str, Any], case: str) -> None:
    for one in answers(refused, "refusals"):
        assert REFUSED[case] in one[case]


@pytest.mark.parametrize(
    ("shape", "more"),
    [({"shard": 2, "tp": 2}, {"wire": "int8"}), ({"replicate": 2, "shard": 1, "tp": 2}, {"sync_every": 4}),
     ({"shard": 4, "tp": 2}, {"reshard_onto": 3})],
)  # fmt: skip
def test_what_is_refused_leaves_the_model_uncut(shape: dict[str, int], more: dict[str, Any]) -> None:
    with simulated_ranks(shape) as mesh:
        model = nn.Sequential(OrderedDict(up=nn.Linear(8, 16), act=nn.GELU(), down=nn.Linear(16, 8)))
        policy = Policy(tp={"up": "colwise", "down": "rowwise"}, **more)
        with pytest.raises(ValueError, match="Policy"):
            compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), mesh=mesh, policy=policy)
        assert not any(isinstance(one, DTensor) for one in model.parameters())
