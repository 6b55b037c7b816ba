"""Two threads in calls of one `Sharded`: the second is refused, and nothing is read or written half-way."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.runtime.sharded import Sharded
from tests.launch import told

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Slow:
    """What a save asks for its state, and waits for."""

    def __init__(self) -> None:
        self.asked, self.answers = Event(), Event()

    def state_dict(self) -> dict[str, Any]:
        self.asked.set()
        assert self.answers.wait(60)
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"n": 1}


def make(seed: int) -> Sharded:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return compile_sharded(model, optimizer, loss=lambda m, x: m(x).square().mean(), policy=Policy(lower="eager"))


def test_a_step_while_another_thread_saves_is_refused(tmp_path: Path) -> None:
    sharded, slow = make(0), Slow()
    sharded.step(X)
    before = {name: value.clone() for name, value in sharded.full_state_dict().items()}
    saves = Thread(target=lambda: sharded.save(tmp_path, step=1, extra={"slow": slow}, wait=True))
    saves.start()
    assert slow.asked.wait(60)
    calls = {
        "step": lambda: sharded.step(X), "accumulate": lambda: sharded.accumulate(X), "forward": lambda: sharded(X),
        "save": lambda: sharded.save(tmp_path, step=2), "load": lambda: sharded.load(tmp_path),
        "full_state_dict": lambda: sharded.full_state_dict(),
    }  # fmt: skip
    refused = {name: told(call) for name, call in calls.items()}
    slow.answers.set()
    saves.join(60)
    for name, error in refused.items():
        assert "while another thread is in a call of the same one" in error, (name, error)
    other = make(1)
    other.load(tmp_path, extra={"slow": slow})
    for name, value in other.full_state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    torch.testing.assert_close(sharded.step(X), other.step(X), rtol=0, atol=0)  # both go on


def test_one_thread_after_another_and_calls_inside_of_calls_are_taken(tmp_path: Path) -> None:
    sharded, twin = make(0), make(0)

    class Steps(Slow):
        def state_dict(self) -> dict[str, Any]:
            return {"norm": float(sharded.full_state_dict()["0.bias"].norm())}

    losses: list[torch.Tensor] = []
    for _ in range(3):
        thread = Thread(target=lambda: losses.append(sharded.step(X)))
        thread.start()
        thread.join(60)
    assert [float(loss) for loss in losses] == [float(twin.step(X)) for _ in range(3)]
    sharded.save(tmp_path, step=3, extra={"steps": Steps()}, wait=True)
    with pytest.raises(ValueError, match="does not take this batch"):  # a call that fails gives the thread's place back
        sharded.step(X, X, X)
    thread = Thread(target=lambda: losses.append(sharded.step(X)))
    thread.start()
    thread.join(60)
    assert float(losses[-1]) == float(twin.step(X))
