"""`Policy.verify` under `fully_shard`: what a module's call returns, and the gradients that it leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import Policy, fully_shard
from fsdp_compiled.capture.guards import Guards
from fsdp_compiled.distributed.mesh import RankError
from fsdp_compiled.runtime.fsdp.verified_call import VerifiedCalls
from tests.launch import launch
from tests.stale_models import Backwards, Layers, set_scale
from tests.toys import batches

WORKER = Path(__file__).parents[1] / "workers" / "verified_call.py"


def losses(model: nn.Module, steps: int, change: Callable[[], Any] = lambda: None, **policy: Any) -> list[float]:
    """``change``: what is done before the last step, of which no guard tells."""
    fully_shard(model, policy=Policy(lower="eager", **policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for step, (x, y) in enumerate(batches(steps, 4)):
        if step == steps - 1:
            change()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    set_scale(1.0)
    yield
    set_scale(1.0)


def test_what_is_stale_in_forward_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all guards off. The control, without verify, goes on."""
    for verify in (False, 1):
        with monkeypatch.context() as off:
            torch.manual_seed(0)
            model = Layers()
            statistics = model.norm.running_mean

            def change(model: Any = model, off: Any = off) -> None:
                off.setattr(Guards, "hold", lambda _: True)
                model.gain = 2.0

            if not verify:
                losses(model, 3, change, verify=verify)
                continue
            with pytest.raises(RankError, match=r"value 0 that was returned is .*gain was 1.0 and is 2.0"):
                losses(model, 3, change, verify=verify)
            assert int(model.norm.num_batches_tracked) == 2 and model.norm.running_mean is statistics


def test_what_is_stale_in_backward_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which results tell nothing: the control compares forward alone."""
    for gradients in (False, True):
        with monkeypatch.context() as off:
            set_scale(1.0)
            torch.manual_seed(0)
            model = Backwards()

            def change(off: Any = off) -> None:
                off.setattr(Guards, "hold", lambda _: True)
                set_scale(1.5)

            policy = {"verify": 1, "verify_gradients": gradients}
            if not gradients:
                losses(model, 3, change, **policy)
                continue
            with pytest.raises(RankError, match=r"in the backward of .* the gradient of linear\.(weight|bias) is"):
                losses(model, 3, change, **policy)
            assert all(one.grad is None for one in model.parameters())


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(6, 2), 1.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.gain


@pytest.mark.parametrize("how", ["recapture", "raise"])
@pytest.mark.parametrize("gradients", [True, False], ids=["training", "evaluation"])
def test_a_program_that_differs_is_traced_anew(how: str, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or at the call after the error. Buffers are then written once."""
    torch.manual_seed(0)
    model, plain = Counts(), Counts()
    plain.load_state_dict(model.state_dict())
    fully_shard(model, policy=Policy(lower="eager", verify=True, verify_difference=how))  # type: ignore[arg-type]
    for step in range(4):
        x = batches(4, 4)[step][0]
        if step == 1:
            monkeypatch.setattr(Guards, "hold", lambda _: True)
            model.gain = plain.gain = 3.0
            if how == "raise":
                with torch.set_grad_enabled(gradients), pytest.raises(RankError, match="first module"):
                    model(x)
        with torch.set_grad_enabled(gradients):
            results = model(x), plain(x)
        assert torch.equal(*results), step
        if gradients:
            for one in results:
                one.square().sum().backward()
        assert int(model.calls) == int(plain.calls) == step + 1
    if gradients:
        assert torch.equal(model.linear.weight.grad.full_tensor(), plain.linear.weight.grad)  # type: ignore[operator,union-attr]


def test_verified_calls_are_those_without(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for verify in (False, 2):
        torch.manual_seed(0)
        model = Layers()
        found.append((losses(model, 5, verify=verify), float(torch.rand(())), model.norm.running_var.tolist()))
    assert found[0] == found[1]
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        losses(Layers(), 1, verify=True)
    assert "gave in eager PyTorch what its program gives" in caplog.text


def test_on_two_ranks() -> None:
    results = launch(WORKER, 2, "same", "own_class", "own_class_stale", "held_back", "own_lengths", "stale_on_one")
    assert [one.get("result", one) for one in results["own_lengths"]] == ["True"] * 2
    assert [one.get("result", one) for one in results["own_class"]] == ["True"] * 2
    for one in results["own_class_stale"]:
        assert "the gradient of linear." in one["message"], one
    assert [one["result"] for one in results["same"]] == ["True"] * 2
    assert [one["result"] for one in results["held_back"]] == ["True"] * 2
    for one in results["stale_on_one"]:
        assert "Policy.verify: in " in one["message"] and "on rank 1" in one["message"], one


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))  # type: ignore[no-any-return]


def test_a_part_that_runs_again_in_backward_leaves_buffers_as_they_were() -> None:
    found = []
    for verify in (False, 1):
        torch.manual_seed(0)
        model = Checkpointed()
        found.append((losses(model, 3, verify=verify), [one.tolist() for one in model.buffers()]))
    assert found[0] == found[1]


def test_parameters_that_are_frozen_before_backward_are_not_compared() -> None:
    torch.manual_seed(0)
    model = Checkpointed()
    fully_shard(model, policy=Policy(lower="eager", verify=1))
    loss = model(batches(1, 4)[0][0]).sum()
    model.head.weight.requires_grad_(False)
    loss.backward()
    assert model.head.weight.grad is None and model.head.bias.grad is not None


def test_an_input_that_forward_does_not_write_is_not_written() -> None:
    """NaN is no other value than NaN: the loop's own backward goes through what made the input."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 2), torch.randn(4, 6)
    fully_shard(model, policy=Policy(lower="eager", verify=1))
    given = torch.sigmoid(torch.where(torch.arange(4)[:, None] > 2, torch.nan, x).requires_grad_())
    model(given).nansum().backward()
    assert given._version == 0


def test_two_plans_in_turn_are_verified_twice_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(VerifiedCalls, "run", lambda *given, run=VerifiedCalls.run: ran.append(1) or run(*given))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    fully_shard(model, policy=Policy(lower="eager", verify=True))
    for step in range(8):
        model[0].requires_grad_(step % 2 == 0)
        model(batches(1, 4)[0][0]).sum().backward()
    assert len(ran) == 4
