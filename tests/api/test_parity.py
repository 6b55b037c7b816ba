"""The package against FSDP2, DDP and plain eager PyTorch, trained side by side: the same losses, the same weights.

With two ranks every sum over ranks has two terms, and so one value in whatever order: what is equal at all is equal
bit for bit. That holds for DDP too, whose halves are taken before the sum and not after, since halving is exact; and
on a 2 x 2 mesh, where each of the two reductions has two terms. With four terms in a row, in the gradient's norm and
in Inductor's kernels the order of sums differs, and the last bits with it.

AdamW turns the last bit of a gradient near zero into a whole step. The keys' biases are the plain case, in that the
loss does not depend on them: there its weights end up a thousand times further apart than anywhere else. So where
sums run in another order, its losses are compared and its weights are not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chosen import chosen, selected
from tests.launch import launch
from tests.workers.parity import CASES, Case, measure

WORKER = Path(__file__).parents[1] / "workers" / "parity.py"
BOUND = 1e-6
Record = dict[str, Any]


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> dict[str, Record]:
    return launch(WORKER, 2, *selected(request, "name", "two"))


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> dict[str, Record]:
    return launch(WORKER, 4, *selected(request, "name", "four"))


def names(world: int, **wanted: object) -> list[str]:
    """The cases whose fields have these values."""
    return [
        name
        for name, case in CASES[world].items()
        if all(getattr(case, field) == value for field, value in wanted.items())
    ]


# Each optimizer, each placement and each option of a case is in one of these; the others are for `make test-all`.
TWO = (
    "adamw zero3", "sgd zero2 seeds", "adamw zero1", "sgd ddp", "sgd clip", "sgd inductor",
)  # fmt: skip


def two_ranks(**fields: object) -> list[Any]:
    found = names(2, **fields)
    return chosen(found, [name for name in TWO if name in found])


def check_bitwise(record: Record) -> None:
    """Losses and weights are equal bit for bit, and those of the control are not."""
    assert record["reference"]["unequal"] == []
    broken = {name.startswith("loss ") for name in record["control"]["unequal"]}
    assert broken == {True, False}, "the control's losses and weights both have to differ"


def check_close(record: Record, *, weights: bool, norms: bool = False) -> None:
    """Each measure is within the bound, and each is outside of it for the control."""
    for what in ["losses"] + ["weights"] * weights + ["norms"] * norms:
        far = {name: value for name, value in distances(record["reference"], what).items() if not value <= BOUND}
        assert far == {}
        assert max(distances(record["control"], what).values()) > BOUND, f"the control's {what} have to differ"


def distances(comparison: Record, what: str) -> dict[str, float]:
    found = comparison[what]
    return found if isinstance(found, dict) else {what: found}


def check_acted(record: Record, case: Case, world: int) -> None:
    """One capture, the collectives that the placement asks for, an update a step, and frozen weights unmoved."""
    acted = record["acted"]
    gathers = {
        "zero3": 2 * acted["units"] - 1,  # the root is kept from forward to backward
        "zero2": acted["units"],
        "zero1": acted["units"],
        "ddp": 0,
    }
    assert acted["units"] == case.layers + 1
    assert acted["captures"] == 1
    assert acted["updates"] == case.steps
    assert acted["gathers"] == (gathers[case.shard] if world > 1 else 0)
    assert acted["reductions"] == (acted["trainable buffers"] * (2 if case.hybrid else 1) if world > 1 else 0)
    assert acted["buffers"] > acted["trainable buffers"] > 0
    assert record["unmoved"] == record["frozen"] != []


def look_up(results: dict[str, Record], world: int, name: str) -> tuple[Record, Case]:
    record, case = results[name], CASES[world][name]
    check_acted(record, case, world)
    return record, case


@pytest.mark.parametrize("name", names(1))
def test_a_world_of_one_is_bitwise_plain_eager_pytorch(name: str) -> None:
    record, _ = look_up({name: measure(CASES[1][name])}, 1, name)
    check_bitwise(record)


@pytest.mark.parametrize("name", two_ranks(against="fsdp2", lower="eager", clip=None))
def test_two_ranks_are_bitwise_fsdp2(name: str, two: dict[str, Record]) -> None:
    record, _ = look_up(two, 2, name)
    check_bitwise(record)


@pytest.mark.parametrize("name", two_ranks(against="ddp"))
def test_two_ranks_are_bitwise_ddp(name: str, two: dict[str, Record]) -> None:
    record, _ = look_up(two, 2, name)
    check_bitwise(record)


@pytest.mark.parametrize("name", two_ranks(clip=0.1))
def test_clipping_is_that_of_fsdp2_with_clip_grad_norm(name: str, two: dict[str, Record]) -> None:
    record, case = look_up(two, 2, name)
    assert case.clip is not None and record["smallest norm"] > case.clip  # every step was clipped
    check_close(record, weights=case.optimizer == "sgd", norms=True)


@pytest.mark.parametrize("name", two_ranks(lower="inductor"))
def test_inductor_is_close_to_fsdp2(name: str, two: dict[str, Record]) -> None:
    record, case = look_up(two, 2, name)
    check_close(record, weights=case.optimizer == "sgd")


# What four terms in a row change is a sum, and SGD's weights show that; AdamW is there bit for bit on two ranks.
@pytest.mark.parametrize(
    "name",
    [
        *names(4, hybrid=False, optimizer="sgd"),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in names(4, hybrid=False, optimizer="adamw")),
    ],
)
def test_four_ranks_are_close_to_fsdp2(name: str, four: dict[str, Record]) -> None:
    record, case = look_up(four, 4, name)
    check_close(record, weights=case.optimizer == "sgd")


@pytest.mark.parametrize("name", names(4, hybrid=True))
def test_hybrid_sharding_has_the_weights_of_fsdp2_bit_for_bit(name: str, four: dict[str, Record]) -> None:
    record, _ = look_up(four, 4, name)
    check_close(record, weights=True)
    assert set(record["reference"]["weights"].values()) == {0.0}
