"""`Policy.wire` beside every other field: the loss is within 1% of the run that sends all of it, or it is refused by
name before the model is changed."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, compile_sharded
from tests.simulate import Simulation, simulate
from tests.toys import build
from tests.workers.wire import CASES

STEPS, ROWS, WIDTH, RATE = 6, 6, 24, 0.003
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# A field, and what it is given with those that it needs: what simulated ranks can run.
RUN: list[tuple[str, dict[str, Any]]] = [
    ("shard", {"shard": "zero2"}),
    ("shard", {"shard": "zero1"}),
    ("shard", {"shard": "ddp"}),
    ("reshard_onto", {"reshard_onto": 2}),
    ("precision", {"precision": BF16}),
    ("clip", {"clip": 0.1}),
    ("clip_value", {"clip_value": 0.01}),
    ("accumulate", {"accumulate": "full"}),
    ("recompute", {"recompute": "unit"}),
    ("recompute", {"recompute": "cheap"}),
    ("prefetch", {"prefetch": 2}),
    ("limit", {"limit": 1, "prefetch": 0}),
    ("bucket_mb", {"bucket_mb": 64}),
    ("network", {"network": (0.01, 100.0), "bucket_mb": "auto"}),
    ("loss_rows", {"loss_rows": 2}),
    ("weigh", {"weigh": "rows"}),
    ("kernels", {"kernels": True}),
    ("copies", {"precision": BF16, "copies": True}),
    ("without", {"without": "all"}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("loss_scale", {"loss_scale": "dynamic"}),
    ("offload", {"offload": True}),
    ("unrounded_gradients", {"unrounded_gradients": True, "precision": BF16, "kernels": True, "lower": "inductor"}),
    ("tp", {"tp": "auto"}),
    ("async_tp", {"async_tp": True}),
    ("cuda_graph", {"cuda_graph": True}),
]
# Of calls, not of programs: on two processes in tests/api/test_wire.py, by the case.
ON_PROCESSES = {
    "lower": "inductor", "verify": "verified", "verify_difference": "verified",
    "verify_gradients": "forward verified", "network": "measured",
    "memory_gb": "little memory", "dynamic": "sizes that move", "programs": "few programs",
}  # fmt: skip
# tests/api/test_local_steps.py: test_exchanges_are_sent_in_a_byte_an_element; tests/api/test_open_sites.py
LOCAL = {"sync_every", "outer", "rendezvous"}


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).float(), y)  # in bfloat16 two neighbouring losses are 1.4% apart


def trained(given: dict[str, Any]) -> Simulation:
    model = build(width=WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(1)
    batches = []
    ranks = 4 if "reshard_onto" in given else 2
    for _ in range(2):
        rows = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)] * (ranks // 2)
        batches.append([(x, (x.sum(1) > 0).long()) for x in rows])
    policy = Policy(**{"lower": "eager", "bucket_mb": 0, **given})
    count = 2 if "accumulate" in given else 1
    return simulate(
        model,
        optimizer,
        loss,
        batches * (STEPS * count // 2),
        policy,
        microbatches=count,
        traced_as="beside",
        shard=ranks,
    )


@functools.cache
def text_of(wire: str) -> str:
    return trained({"wire": wire}).program.text()


@pytest.mark.parametrize(("field", "given"), RUN, ids=[f"{field}-{number}" for number, (field, _) in enumerate(RUN)])
def test_the_loss_is_near_that_of_all_bytes(field: str, given: dict[str, Any]) -> None:
    plain, rounded = trained(given), trained(given | {"wire": "int8"})
    first, last = plain.losses[0].item(), plain.losses[-1].item()
    assert last < 0.9 * first, "it learnt something"
    assert rounded.losses[-1].item() == pytest.approx(last, rel=0.01)
    assert not torch.equal(rounded.losses[-1], plain.losses[-1]), "what is sent is rounded"
    assert rounded.replicas_agree
    if field != "network":  # on which a model this small sends the same messages
        assert rounded.program.text() != text_of("int8"), "the field acted"


@pytest.mark.parametrize(("field", "given"), REFUSED, ids=[field for field, _ in REFUSED])
def test_what_does_not_go_with_it_is_refused_before_anything_is_changed(field: str, given: dict[str, Any]) -> None:
    model = build(width=WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    before = {name: (id(one), one.detach().clone()) for name, one in model.named_parameters()}
    with pytest.raises(ValueError, match=rf"Policy\.{field}|{field}="):
        compile_sharded(model, optimizer, loss=loss, policy=Policy(**{"lower": "eager", **given, "wire": "int8"}))
    for name, one in model.named_parameters():
        assert id(one) == before[name][0] and torch.equal(one, before[name][1])


def test_no_field_is_left_out() -> None:
    named = {field for field, _ in RUN + REFUSED} | set(ON_PROCESSES) | LOCAL
    assert named | {"wire"} == {field.name for field in fields(Policy)}
    assert set(ON_PROCESSES.values()) <= set(CASES)
