"""Loaders that keep their own place go along in a checkpoint: the next batch after a load is the one that was next."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.runtime.checkpoint.contents import dealt_out

stateful = pytest.importorskip("torchdata.stateful_dataloader")
StatefulDistributedSampler = pytest.importorskip("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler
DATA = TensorDataset(torch.arange(24.0)[:, None])


def loader(kind: str, rank: int = 0) -> Any:
    sampler = DistributedSampler(DATA, 2, rank, shuffle=True, seed=3) if kind == "distributed" else None
    workers = 2 if kind == "workers" else 0
    return stateful.StatefulDataLoader(
        DATA,
        3,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=workers,
        generator=torch.Generator().manual_seed(1),
    )


def sharded() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return compile_sharded(model, optimizer, loss=lambda m, x: m(x).square().mean(), policy=Policy(lower="eager"))


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
def test_a_loader_that_deals_examples_out_is_known() -> None:
    """Its state is the same on all ranks, and is no place among the examples of another number of them."""
    states = []
    for rank in (0, 1):
        one = loader("distributed", rank)
        list(islice(one, 2))
        states.append(one.state_dict())
        assert dealt_out(one) and dealt_out(StatefulDistributedSampler(DATA, 2, rank))
    assert states[0] == states[1], "the control: nothing else tells them apart"
    assert not dealt_out(loader("shuffled")) and not dealt_out(torch.optim.lr_scheduler.LRScheduler)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("kind", ["shuffled", "workers", "distributed"])
def test_a_stateful_loader_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    one, batches = sharded(), loader(kind)
    rest = iter(batches)
    for (x,) in islice(rest, 2):
        one.step(x)
    one.save(tmp_path, step=2, wait=True, extra={"loader": batches})
    expected = [(x.flatten().tolist(), float(one.step(x))) for (x,) in rest]
    assert len(expected) == (2 if kind == "distributed" else 6)

    other, again = sharded(), loader(kind)
    assert other.load(tmp_path, extra={"loader": again}) == 2
    found = [(x.flatten().tolist(), float(other.step(x))) for (x,) in again]
    assert found == expected
    fresh = [x.flatten().tolist() for (x,) in islice(loader(kind), len(expected))]
    assert fresh != [x for x, _ in expected], "the control: without its state it would begin anew"
