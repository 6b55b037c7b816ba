"""`compile_optimizer` as a CUDA graph, on a stand-in for a GPU: whatever a loop does between two launches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_compiled import compile_optimizer, fully_shard
from fsdp_compiled.lower.cuda_graph import WARM, Replays
from fsdp_compiled.lower.fixed_addresses import Held
from fsdp_compiled.runtime.loop import loop_optimizer
from tests.standin import Plain, Seen, StandIn
from tests.toys import build, mse

READ = "aten._local_scalar_dense"
Loop = Callable[[nn.Module, Any, int], None]


class Run:
    """A model and its compiled optimizer, with graphs, or without on the same operators."""

    def __init__(self, graphs: bool, make: Callable[..., Any], max_norm: float | None) -> None:
        self.device = StandIn()
        self.replays = Replays(self.device, "auto") if graphs else Plain()
        torch.manual_seed(0)
        self.model = fully_shard(build())
        with (
            mock.patch.object(loop_optimizer, "Replays", lambda *_: self.replays),
            mock.patch.object(loop_optimizer, "make_device", lambda *_: self.device),
        ):
            self.optimizer = compile_optimizer(self.model, make(self.model.parameters()), max_norm=max_norm)

    def left(self) -> list[Any]:
        found = [one.full_tensor().detach().clone() for one in self.model.parameters()]
        for one in self.model.parameters():
            for _, value in sorted(self.optimizer.state.get(one, {}).items()):
                found.append(value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone())
        norm = self.optimizer.grad_norm
        return [*found, *([norm.nan_to_num()] if norm is not None else [])]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def backward(model: nn.Module, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(5, 6, generator=generator), torch.randn(5, 2, generator=generator)
    (mse(model, x, y) * scale).backward()


def plain(model: nn.Module, optimizer: Any, step: int) -> None:
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad()


def both(loop: Loop, steps: int, make: Any = adamw, max_norm: float | None = 0.3) -> Run:
    """The loop with graphs and without, equal after each step to the bit."""
    runs = [Run(graphs, make, max_norm) for graphs in (True, False)]
    for step in range(steps):
        for run in runs:
            loop(run.model, run.optimizer, step)
        one, two = (run.left() for run in runs)
        assert len(one) == len(two) and all(map(torch.equal, one, two)), step
    return runs[0]


@pytest.mark.parametrize("max_norm", [0.3, None])
def test_each_step_is_a_launch_whatever_the_schedule_says(max_norm: float | None) -> None:
    schedules: dict[int, Any] = {}

    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        schedule = schedules.setdefault(id(optimizer), torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 50))
        plain(model, optimizer, step)
        schedule.step()

    run = both(loop, 40, max_norm=max_norm)
    assert run.device.log == ["warm"] * WARM + ["capture", "warm"] + ["launch"] * (40 - WARM)
    assert any("all_reduce" not in name for name in run.device.graphs[0].operators)


def test_gradients_are_copied_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a graph that read the gradients it was captured with is noticed."""

    class Same(Held):
        def __init__(self, like: torch.Tensor) -> None:
            super().__init__(like)
            self.tensor = like

    monkeypatch.setattr("fsdp_compiled.lower.cuda_graph.Held", Same)
    with pytest.raises(AssertionError):
        both(plain, WARM + 3)


def changes(model: nn.Module, optimizer: Any, step: int) -> None:
    """Gradients that stay and add up, are the loop's own, or are missing; state that is loaded; options that change."""
    if step == 4:
        for one in model.parameters():
            one.grad = torch.ones_like(one)
    else:
        backward(model, step)
    if step == 6:
        next(model.parameters()).grad = None
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    if step == 10:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if step == 15:
        optimizer.param_groups[0]["weight_decay"] = 0.2
    if step == 20:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    if step == 24:
        with torch.no_grad():
            next(model.parameters()).mul_(2)


def test_what_a_loop_does_in_between() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    run = both(changes, 28, make)
    # Captured anew for other state, and for another program; the step without a gradient is made without it.
    assert run.device.log.count("capture") == 3
    assert run.device.log.count("launch") == 28 - 1 - 3 * WARM


def test_adamw_counts_apart_from_the_step_that_missed_a_gradient() -> None:
    run = both(changes, 12)
    assert run.device.log.count("capture") == 1  # from step 6 on parameters have made different steps
    assert run.device.log.count("launch") == 6 - WARM


def test_two_models_and_a_snapshot_by_reference() -> None:
    """What `state_dict` gave before other state was loaded is not written any more, as with the optimizer itself."""
    snapshots: dict[int, Any] = {}

    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        plain(model, optimizer, step)
        if step == 4:
            snapshots[id(optimizer)] = optimizer.state_dict()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if step == 8:
            optimizer.load_state_dict(snapshots[id(optimizer)])

    run = both(loop, 12)
    assert run.device.log.count("launch") > 4
    reference = build()
    optimizer = adamw(reference.parameters())
    snapshot: Any = None
    for step in range(12):
        backward(reference, step)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        if step == 4:
            snapshot = optimizer.state_dict()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if step == 8:
            optimizer.load_state_dict(snapshot)
    for mine, other in zip(run.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("apart", [False, True], ids=["step", "unscale_"])
def test_a_scale_is_divided_out_and_an_overflow_skipped_without_waiting(apart: bool) -> None:
    scalers: dict[int, Any] = {}
    overflow = (1, 5, 6)

    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        scaler = scalers.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))
        loss = float("inf") if step in overflow else 1.0
        backward(model, step, loss * scaler.get_scale())
        scaler.scale(torch.zeros(()))  # which makes the scale
        if apart:
            scaler.unscale_(optimizer)
        run = optimizer.step
        seen = Seen()

        def watched() -> None:
            with seen if isinstance(optimizer, loop_optimizer.CompiledOptimizer) and step > 8 else Seen():
                run()

        with mock.patch.object(optimizer, "step", watched):
            scaler.step(optimizer)
        assert READ not in seen.names
        scaler.update()
        optimizer.zero_grad()

    run = both(loop, 14)
    assert run.device.log.count("launch") == 14 - WARM
    reference = build()
    optimizer = adamw(reference.parameters())
    for step in range(14):
        backward(reference, step)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        if step not in overflow:
            optimizer.step()
        optimizer.zero_grad()
    for mine, other in zip(run.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-5, atol=1e-6)
        assert run.optimizer.state[mine]["step"].item() == 14 - len(overflow)


def test_a_capture_that_fails_is_said_once_and_the_program_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(True, adamw, None)
    run.device.fail = "the device said no"
    other = Run(False, adamw, None)
    for step in range(6):
        plain(run.model, run.optimizer, step)
        plain(other.model, other.optimizer, step)
    assert all(map(torch.equal, run.left(), other.left()))
    assert caplog.text.count("update runs without a CUDA graph") == 1 and "the device said no" in caplog.text
