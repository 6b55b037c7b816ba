"""Frameworks that have a loop of their own, on two ranks: with this package's `fully_shard` as with FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs

from tests.chosen import chosen, selected
from tests.launch import launch

pytest.importorskip("accelerate", reason="accelerate is not installed")
WORKER = Path(__file__).parents[1] / "workers" / "integrations.py"
LOOPS = ("accelerated", "half", "efficient", "trained")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    loops = dict.fromkeys(["accelerated", *selected(request, "loop", "found")])
    imports = ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")
    return launch(WORKER, 2, *loops, imports=imports)


@pytest.mark.parametrize("loop", chosen(LOOPS, ["accelerated", "trained"]))
def test_a_loop_of_another_framework_leaves_what_it_leaves_with_fsdp2(found: dict[str, Any], loop: str) -> None:
    assert len(found[loop]["ours"]) > 8
    assert found[loop]["ours"] == found[loop]["FSDP2"]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo copies a configuration from torch 2.13 on")
def test_the_seq2seq_trainer_predicts_with_generate_of_a_tied_t5(found: dict[str, Any]) -> None:
    (shown, loss), (expected, whole), beyond = found["translated"]
    assert shown == expected and beyond == 0
    assert loss == pytest.approx(whole, rel=1e-6)


def test_another_rate_is_told_apart(found: dict[str, Any]) -> None:
    fsdp2, broken = found["accelerated"]["FSDP2"][1:], found["broken"]
    assert 0 < len(broken) < len(fsdp2) and broken != fsdp2[: len(broken)]


def test_what_would_not_take_the_path_is_refused() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from fsdp_compiled.integrations.accelerate import use_fully_shard

    with pytest.raises(ValueError, match="expects an Accelerator"):
        use_fully_shard(object())
    try:
        with pytest.raises(ValueError, match="does not use FSDP2"):
            use_fully_shard(Accelerator(cpu=True))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_their_function_is_put_back_also_after_an_error() -> None:
    from fsdp_compiled.integrations.accelerate import _in_the_place_of_theirs

    before = theirs.fully_shard
    with pytest.raises(KeyError), _in_the_place_of_theirs(None):
        assert theirs.fully_shard is not before
        raise KeyError
    assert theirs.fully_shard is before
