"""Every combination of placement, precision, accumulation, clipping and recomputation trains as eager PyTorch does.

The reference is one process that holds the parameters in float32, knows every rank's batch, computes each rank's
gradient with autograd in the precision that is asked for, and does the rest in float32: mean over ranks and
microbatches, `GradScaler`'s rule, clipping, SGD. In float32 programs are within 1e-6 of it. In a shorter format, the
wire and the sums on it round besides, once for every number that is added: ``ROUNDINGS * eps`` of the update.
Numbers could agree though something was left out, so each program's collectives are counted, with their dtypes.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, compile_sharded
from tests.chosen import chosen
from tests.combination_checks import check_acted, check_numbers, check_wire, furthest
from tests.combinations import (
    ACCUMULATIONS,
    CLIPS,
    EVERY,
    PLACEMENTS,
    PRECISIONS,
    RECOMPUTES,
    Case,
    batch,
    build,
    covering,
    loss,
    reference,
    trained,
)


def check_case(case: Case) -> None:
    simulation, adding = trained(case)
    check_numbers(case, simulation)
    for program, kind in ((simulation.program, "last"), (adding, "microbatch")):
        if program is not None:
            check_wire(case, program, kind)
            check_acted(case, program, kind)


# On four ranks all values of any two fields meet, the mesh among them; on two, each value is seen. The other
# combinations are for `make test-all`.
MESHES = ((4, 1), (2, 2))
ON_FOUR = [replace(case, mesh=mesh) for case in EVERY for mesh in MESHES]
TWO = list(covering(EVERY, 1))
PAIRS = list(covering(EVERY, 2))
FOUR = list(covering(ON_FOUR, 2))


@pytest.mark.parametrize("case", chosen(EVERY, TWO, ids=str))
def test_every_combination_on_two_ranks(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("case", chosen(ON_FOUR, FOUR, ids=str))
def test_every_combination_on_four_ranks(case: Case) -> None:
    check_case(case)


def test_the_lists_are_complete() -> None:
    assert len(set(EVERY)) == 4 * 3 * 3 * 3 * 2
    values = {
        "shard": PLACEMENTS, "precision": PRECISIONS, "accumulate": ACCUMULATIONS, "clip": CLIPS,
        "recompute": RECOMPUTES, "mesh": MESHES,
    }  # fmt: skip
    for cases, fields, together in ((TWO, [*values][:5], 1), (FOUR, [*values], 2)):
        for some in itertools.combinations(fields, together):
            seen = {tuple(getattr(case, field) for field in some) for case in cases}
            assert seen == set(itertools.product(*(values[field] for field in some)))


BASE = Case("zero3", "fp32", "shards", None, None)


@pytest.mark.parametrize(
    ("case", "other"),
    [
        (BASE, replace(BASE, clip="norm")),
        (BASE, replace(BASE, clip="value")),
        (replace(BASE, clip="norm"), replace(BASE, clip="value")),
        (BASE, replace(BASE, precision="bf16")),
        (replace(BASE, accumulate=None), BASE),
        (replace(BASE, precision="bf16"), replace(BASE, precision="bf16", clip="norm")),
        (replace(BASE, precision="bf16", clip="value"), replace(BASE, precision="bf16", clip="norm")),
        (replace(BASE, precision="fp16", clip="value"), replace(BASE, precision="fp16")),
    ],
    ids=str,
)
def test_the_numbers_of_another_combination_are_noticed(case: Case, other: Case) -> None:
    start = {name: value.detach().clone() for name, value in build()[0].named_parameters()}
    simulation, _ = trained(case)
    assert furthest(case, simulation, reference(case, start), start) < case.bound
    assert furthest(case, simulation, reference(other, start), start) > case.bound


@pytest.mark.parametrize("field", chosen(["precision", "accumulate", "recompute", "clip"], ["precision", "recompute"]))
def test_the_program_of_another_combination_is_noticed(field: str) -> None:
    other = {"precision": "fp16", "accumulate": "full", "recompute": "unit", "clip": "value"}[field]
    simulation, adding = trained(BASE)
    assert adding is not None
    wrong = replace(BASE, **{field: other})
    with pytest.raises(AssertionError):
        for program, kind in ((simulation.program, "last"), (adding, "microbatch")):
            check_wire(wrong, program, kind)
            check_acted(wrong, program, kind)


HALF = MixedPrecisionPolicy(param_dtype=torch.int8)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"shard": "zero4"}, "Policy.shard is 'zero4'; expected one of 'zero3', 'zero2', 'zero1', 'ddp'"),
    ({"precision": "bf16"}, "Policy.precision is a str; expected torch.distributed.fsdp.MixedPrecisionPolicy"),
    ({"precision": HALF}, "Policy.precision.param_dtype is torch.int8; expected a floating-point dtype"),
    ({"accumulate": "none"}, "Policy.accumulate is 'none'; expected one of 'shards', 'full'"),
    ({"clip": 0.0}, "Policy.clip is 0.0; expected a positive number"),
    ({"clip_value": "big"}, "Policy.clip_value is 'big'; expected a positive number"),
    ({"clip": 1.0, "clip_value": 1.0}, "both given; which comes first changes the result"),
    ({"recompute": "block"}, "Policy.recompute is 'block'; expected one of None"),
    ({"loss_scale": "auto"}, "Policy.loss_scale is 'auto'; expected None"),
    ({"limit": 1, "prefetch": 1}, "Policy.limit=1 leaves no room for prefetch=1"),
    ({"lower": "triton"}, "Policy.lower is 'triton'"),
    ({"offload": True}, "Policy.offload is True, but the model is on cpu: its shards are in host memory already"),
    ({"offload": True, "shard": "ddp"}, 'under shard="ddp" there are none'),
    ({"offload": "cpu"}, "Policy.offload is 'cpu'; expected one of False, True"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=["-".join(given) for given, _ in REFUSED])
def test_what_is_not_allowed_is_refused_before_anything_is_changed(given: dict[str, Any], message: str) -> None:
    model, optimizer = build()
    with pytest.raises(ValueError, match=re.escape(message)):
        compile_sharded(model, optimizer, loss=loss, policy=Policy(**given))
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("case", chosen(PAIRS, PAIRS[::3], ids=str))
def test_what_is_allowed_is_taken(case: Case) -> None:
    model, optimizer = build()
    sharded = compile_sharded(model, optimizer, loss=loss, policy=case.policy)
    before = [shard.clone() for shard in sharded.state.parameters.values()]
    if case.accumulate:
        sharded.accumulate(*batch(0))
    sharded.step(*batch(1))
    assert not any(map(torch.equal, before, sharded.state.parameters.values()))
