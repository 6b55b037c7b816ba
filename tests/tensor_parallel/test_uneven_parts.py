"""Dims that tp does not divide: parts of different sizes, some empty, beside PyTorch with the same plan; on 4 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compiled.plan.leaf import Leaf, TensorParallel, contiguous_stride
from fsdp_compiled.runtime.checkpoint.chunks import Place, chunks_of
from tests.launch import answers, launch, results_of

WORKER = Path(__file__).parents[1] / "workers" / "uneven_parts.py"
results = results_of(WORKER, 4)


def test_they_are_pytorch_with_the_same_plan_to_the_bit_and_one_process(results: dict[str, Any]) -> None:
    found = answers(results, "values")
    assert found[0]["plain"]["bits"] and found[0]["fsdp2"]["bits"], found[0]
    for run in ("eager", "clipped"):
        assert all(found[0][run][what] < 1e-5 for what in ("loss", "norm", "weights")), found[0]
    assert found[0]["control"]["weights"] > 1e-3  # of another rank's eight rows of 41 and one of 10
    assert all(one["copies"] for one in found)
    assert "7 parameters cut over 2 ranks" in found[0]["plan"]


def test_models_are_filled_and_cut_as_whole_ones(results: dict[str, Any]) -> None:
    found = answers(results, "filled")
    assert all(one["meta"] for one in found)
    assert found[0]["patterns"]["loss"] < 1e-5 and found[0]["patterns"]["weights"] < 1e-5
    assert found[0]["whole"] and found[0]["parameter"] and found[0]["logits"] < 1e-5


def test_checkpoints_go_from_any_tp_to_any(results: dict[str, Any]) -> None:
    for one in answers(results, "checkpoints"):
        assert not any(value for name, value in one.items() if name.endswith("before"))  # the control
        assert all(value for name, value in one.items() if not name.endswith("before")), one
        assert len(one) == 15


REFUSED = {
    "sequence": "sequence parallelism 4 must divide the length of sequences.",
    "parts": "go on, ColwiseParallel(use_local_output=False)",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_to_be_right_is_refused_on_every_rank(results: dict[str, Any], case: str) -> None:
    for one in answers(results, "refusals"):
        assert one[case].startswith(("CaptureError: ", "RankError: ")) and REFUSED[case] in one[case], one[case]


@pytest.mark.exhaustive
def test_inductor_gives_the_same() -> None:
    found = answers(launch(WORKER, 4, "inductor"), "inductor")[0]
    assert all(found[what] < 1e-5 for what in ("loss", "norm", "weights")), found


@pytest.mark.parametrize("shape", [(10, 3), (5, 2), (3, 41), (2, 5, 3)])
@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_of_parts_of_different_sizes(shape: tuple[int, ...], dim: int) -> None:
    """Cut in four, each part's elements, all or some, are where they are in the whole."""
    whole = torch.arange(1, torch.Size(shape).numel() + 1).view(shape)
    cut = TensorParallel(dim, shape, 4)
    leaf = Leaf(("it",), cut.part_shape, contiguous_stride(cut.part_shape), whole.dtype, True, 0, "", cut)
    each = cut.part_shape[dim]
    longer = [size if place != dim else 4 * each for place, size in enumerate(shape)]
    laid = torch.zeros(longer, dtype=torch.int64)
    laid.narrow(dim, 0, shape[dim]).copy_(whole)
    for part in range(4):
        flat = laid.narrow(dim, part * each, each).reshape(-1)
        for start, stop in ((0, len(flat)), (1, len(flat) - 1), (len(flat) // 2, len(flat))):
            found = torch.zeros_like(flat)[start:stop]
            for one in chunks_of("it", leaf, Place(0, part), start, found):
                one.values.copy_(one.part_of(whole))
            assert torch.equal(found, flat[start:stop])
