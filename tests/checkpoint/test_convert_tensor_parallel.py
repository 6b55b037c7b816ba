"""`convert` from and to checkpoints of models that are cut along tp: by the weights' whole names, bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.launch import launch
from tests.workers import convert_tensor_parallel as worker


def test_fsdp2_with_tensor_parallelism_to_ours_and_back(tmp_path: Path) -> None:
    for rank in launch(Path(worker.__file__), 4, str(tmp_path), timeout=300):
        control = rank.pop("control")
        assert all(rank.values()), rank
    assert control, "ranks but the first compare nothing"
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)
    sharded = worker.ours(5, None)
    assert not worker.equal(sharded, expected)
    sharded.load(tmp_path / "tp")
    found = sharded.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
