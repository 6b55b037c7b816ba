"""`fully_shard` where each rank has batches of its own lengths, as variable lengths are: as FSDP2, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "own_lengths.py"


@pytest.fixture(scope="module")
def found() -> Any:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return launch(WORKER, 2)


@pytest.mark.parametrize("case", ["train", "evaluate", "replicas"])
def test_lengths_that_differ_between_ranks(found: Any, case: str) -> None:
    assert not found[case]


def test_another_rate_is_told_apart(found: Any) -> None:
    assert "off by" in found["broken"]


def test_another_order_of_layers_is_an_error_with_and_without_a_program(found: Any) -> None:
    assert "differs between rank 0 and rank 1" in found["turned"]
    assert "communicate otherwise" in found["turned"]
