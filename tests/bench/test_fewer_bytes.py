"""`bench.fewer_bytes`: its control rounds to the nearest while it trains and only then; losses are kept and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import fewer_bytes
from bench.plot import plot_losses
from fsdp_compiled.kernels.operators import operators
from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "fewer_bytes.py"


def packed(seed: int | None) -> torch.Tensor:
    given = () if seed is None else (torch.tensor(seed), 5)
    return operators.pack(torch.linspace(-1, 1, 300), 2, *given, form="int8")


def test_inside_of_nearest_no_seed_counts() -> None:
    with pytest.raises(KeyError), fewer_bytes.nearest():
        assert torch.equal(packed(3), packed(None))
        raise KeyError
    assert not torch.equal(packed(3), packed(None)), "put back, however it ended"


def test_the_control_trains_as_no_policy_does() -> None:
    """Nothing put the rounding back that is at random, as the trial of an operator on its first use would."""
    found: dict[str, Any] = launch(WORKER, 2)
    rounded, control = found["int8"], found[fewer_bytes.CONTROL]
    assert [*map(int, rounded["losses"])] == [2, 3], "every two steps, and after the last"
    assert rounded["bytes a step"] == control["bytes a step"]
    one, other = (list(each["losses"].values())[-1] for each in (rounded, control))
    assert one != other and one == pytest.approx(other, rel=0.01)


def test_losses_are_drawn_over_tokens_and_over_bytes(tmp_path: Path) -> None:
    one = {"losses": {"50": 3.0, "100": 2.5}, "bytes a step": 1000}
    assert plot_losses({"plain": one, "int8": one | {"bytes a step": 250}}, 256, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
