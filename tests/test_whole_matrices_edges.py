"""What a person may do around an optimizer of whole matrices: as eager PyTorch, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from fsdp_compiled import Policy, compile_sharded
from tests.launch import launch
from tests.matrices import Matrices, batches, loss

EAGER = Policy(lower="eager")


def test_on_ranks_and_from_other_numbers_of_them(tmp_path: Path) -> None:
    """Three ranks, then two, which load what three saved: see the worker."""
    script = Path(__file__).parent / "workers" / "whole_matrices_edges.py"
    three = launch(script, 3, str(tmp_path))
    two = launch(script, 2, str(tmp_path))
    assert not any([*three.values(), *two.values()]), json.dumps([three, two], indent=1)
    assert "from another world" in two and "from another world" not in three


def _sharded(**options: Any) -> tuple[Any, Any]:
    model = Matrices(**options)
    optimizer = optim.Muon(model.parameters(), lr=0.02)
    return compile_sharded(model, optimizer, loss=loss, policy=EAGER), optimizer


def test_state_dicts_are_refused_with_the_cure() -> None:
    sharded, optimizer = _sharded()
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(RuntimeError, match="taken over by compile_sharded"):
            call()
    for call in (sharded.full_optimizer_state_dict, lambda: sharded.load_full_optimizer_state_dict({})):
        with pytest.raises(ValueError, match=r"with Muon, which runs as it is, .* Call save and load"):
            call()
    sharded.step(next(batches(1)))


@pytest.mark.parametrize("trained", [True, False])
def test_thawing_and_freezing_later_is_refused(trained: bool) -> None:
    model = Matrices()
    weight = model.layers[0].up.weight  # type: ignore[union-attr]
    weight.requires_grad_(not trained)
    optimizer = optim.Muon(model.parameters(), lr=0.02)
    sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER)
    sharded.step(next(batches(1)))
    with pytest.raises((RuntimeError, ValueError), match=r"requires_grad|frozen|trained"):
        model.layers[0].up.weight.requires_grad_(trained)  # type: ignore[union-attr]
        sharded.step(next(batches(1)))


def test_a_rate_that_is_a_tensor() -> None:
    weights = []
    for ours in (False, True):
        model, rate = Matrices(), torch.tensor(0.02)
        optimizer = optim.Muon(model.parameters(), lr=rate)  # type: ignore[arg-type]
        sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER) if ours else None
        for index, batch in enumerate(batches(3)):
            rate.fill_(0.02 / (index + 1))
            if sharded is not None:
                sharded.step(batch)
            else:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
        weights.append(sharded.full_state_dict() if sharded is not None else model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_state_that_a_person_writes_is_what_the_next_step_reads() -> None:
    theirs, mine = Matrices(), Matrices()
    other = optim.Muon(theirs.parameters(), lr=0.02)
    sharded = compile_sharded(mine, optim.Muon(mine.parameters(), lr=0.02), loss=loss, policy=EAGER)
    for index, batch in enumerate(batches(3)):
        if index == 2:
            other.state[theirs.mix]["momentum_buffer"].mul_(-3)
            sharded.state.optimizer["mix.momentum_buffer"].mul_(-3)
        other.zero_grad()
        loss(theirs, batch).backward()
        other.step()
        sharded.step(batch)
    found = sharded.full_state_dict()
    assert all(torch.equal(value, found[name]) for name, value in theirs.state_dict().items())
