"""`Policy.wire`: what ranks send each other in one byte an element, beside the same done by hand; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, fully_shard
from fsdp_compiled.ir.nodes import carried
from fsdp_compiled.kernels import reference
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.kernels.trial import failure
from fsdp_compiled.plan import make_plan
from tests.chosen import chosen, selected
from tests.kernel_cases import LIKES
from tests.launch import launch
from tests.recipes import program_of, recipe
from tests.workers.wire import CASES

WORKER = Path(__file__).parents[1] / "workers" / "wire.py"


REPEATED = ("zero2", "limit", "forward verified", "few programs")  # what is sent is that of zero3


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> dict[str, Any]:
    return launch(WORKER, 2, *selected(request, "name", "answers"))


@pytest.mark.parametrize("name", chosen(CASES, [name for name in CASES if name not in REPEATED]))
def test_it_is_the_same_rounding_done_by_hand(name: str, answers: dict[str, Any]) -> None:
    found = answers[name]
    assert found["off"] <= (1e-6 if name == "inductor" else 0) and found["alike"]
    assert found["controls"]["nearest"] > 1e-3
    assert found["controls"]["own weights"] > 1e-3 or name in ("ddp", "replicas")
    assert (found["gathers that end sums"] > 0) == (name in ("zero1", "ddp", "replicas"))
    sent = [line for line in found["collectives"] if "shard" in line or "replicate" in line]
    assert all("uint8" in line or "float64" in line for line in sent)


@pytest.mark.parametrize("shard", ["zero3", "ddp"])
def test_a_program_sends_a_quarter_of_the_bytes(shard: str) -> None:
    """Of layers that are large beside what a row is filled up to."""

    def sent(wire: str | None) -> int:
        what = recipe(shard, width=128, hidden=512)
        program = program_of(what.__class__(**{**vars(what), "policy": Policy(**{**vars(what.policy), "wire": wire})}))
        marked = [*program.marked("gather"), *program.marked("reduce")]
        return sum(max(carried(node)) * (1 + ("all_reduce" in str(node.target))) for node in marked)

    assert sent("int8") / sent(None) == pytest.approx(0.258, abs=0.01)


def test_the_plan_and_the_kernels_have_the_same_blocks() -> None:
    assert make_plan.SCALED == reference.SCALED


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_the_mean_of_many_roundings_is_the_value(form: str) -> None:
    """Rounded to the nearest, what is small beside its neighbours would be lost for ever."""
    values = torch.full((256,), 1e-3)
    values[::128] = 1.0

    def read(seed: int | None) -> torch.Tensor:
        given = () if seed is None else (torch.tensor(seed), 5)
        return operators.unpack(operators.pack(values, 2, *given, form=form), 2, 256, torch.float32, form=form)

    mean = torch.stack([read(seed) for seed in range(2000)]).mean(0)
    assert (mean[1:128].mean() - 1e-3).abs() < 2e-5
    assert torch.equal(read(7), read(7)) and not torch.equal(read(7), read(8))
    assert form == "fp8" or read(None)[1] == 0


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(odd: float) -> None:
    values = torch.randn(2, 1000)
    values[0, 300] = odd
    rows = torch.stack([operators.pack(one, 2, torch.tensor(3), 0, form="int8") for one in values])
    for rank in range(2):
        mine = rows.view(2, 2, -1)[:, rank].reshape(-1)
        total = operators.combine(mine, 2, 500, torch.float32, form="int8", mean=True)
        assert total.isnan().sum() == (128 if rank == 0 else 0)


@pytest.mark.parametrize("name", ["pack", "unpack", "combine"])
def test_the_trial_knows_them(name: str) -> None:
    assert failure(LIKES[name], torch.device("cpu")) == ""


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Policy.wire is 'int4'"):
        Policy(wire="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wire"):
        fully_shard(nn.Linear(4, 4), policy=Policy(wire="int8"))
    with pytest.raises(ValueError, match=r"pack: values of torch\.float64"):
        operators.pack(torch.ones(4, dtype=torch.float64), 1, form="int8")
