"""Loaders that keep their own place go along in a checkpoint: the next batch after a load is the one that was next."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from fsdp_compiled import Policy, compile_sharded

stateful = pytest.importorskip("torchdata.stateful_dataloader")
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
