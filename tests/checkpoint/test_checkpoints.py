"""A run that was saved and loaded goes on as if nothing had happened, on one process; what does not fit is refused."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.runtime.checkpoint import data_file
from fsdp_compiled.runtime.checkpoint.writing import SaveError
from fsdp_compiled.runtime.sharded import Sharded

WORDS, WIDTH = 11, 6
BATCHES = [torch.randint(0, WORDS, (8,), generator=torch.Generator().manual_seed(seed)) for seed in range(12)]


class Model(nn.Module):
    """Ties, a frozen weight, two dtypes, a transposed weight, a number, buffers, dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.layers[0].weight.requires_grad_(False)
        self.layers[1].bias = nn.Parameter(torch.zeros(width, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(width, width + 1).t().contiguous().t()[:, :width].t().contiguous().t())
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) * self.gain
        x = x + torch.tanh(self.layers[0](x) @ self.turned)
        x = x + F.linear(x, self.layers[1].weight) + self.layers[1].bias.float()
        return self.head(self.drop(self.norm(x)))


def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words), (words + 1) % WORDS)


def optimizer_of(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    heavy = [p for name, p in model.named_parameters() if name.endswith("weight") and p.requires_grad]
    light = [p for name, p in model.named_parameters() if not name.endswith("weight") and p.requires_grad]
    return kind([{"params": heavy, **options}, {"params": light}], lr=0.01)


def build(seed: int, policy: Policy | None = None, **options: Any) -> tuple[Sharded, Any]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = optimizer_of(model, **options)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6])
    return compile_sharded(model, optimizer, loss=loss, policy=policy or Policy(lower="eager", clip=1.0)), schedule


def train(sharded: Sharded, schedule: Any, first: int, last: int) -> list[torch.Tensor]:
    losses = []
    for words in BATCHES[first:last]:
        losses.append(sharded.step(words))
        schedule.step()
    return losses


def everything(sharded: Sharded) -> list[torch.Tensor]:
    return tree_map(torch.clone, tree_leaves(sharded.state))


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))


def test_a_loaded_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first, schedule = build(0)
    train(first, schedule, 0, 4)
    drawn = random.getstate(), np.random.get_state()[1].tolist()
    future = first.save(tmp_path, extra={"schedule": schedule})
    expected, state = train(first, schedule, 4, 8), everything(first)
    assert future.result() == tmp_path / "step-4"

    second, other = build(1)
    control = train(second, other, 0, 2)
    random.seed(9), np.random.seed(9)
    places = [tensor.data_ptr() for tensor in tree_leaves(second.state)]
    assert second.load(tmp_path, extra={"schedule": other}) == 4
    assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn
    assert other.last_epoch == 4 and second.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    found = train(second, other, 4, 8)
    assert same(found, expected) and same(everything(second), state)
    assert not same(control, expected[:2]) and second.captures == 1
    assert [tensor.data_ptr() for tensor in tree_leaves(second.state)] == places


def test_an_empty_folder_loads_nothing(tmp_path: Path) -> None:
    sharded, _ = build(0)
    before = everything(sharded)
    (tmp_path / ".step-7.0123abcd").mkdir()
    assert sharded.load(tmp_path) is None and sharded.load(tmp_path / "missing") is None
    assert same(everything(sharded), before)
    with pytest.raises(ValueError, match="no complete checkpoint of step 3; there are: none"):
        sharded.load(tmp_path, step=3)


def test_loss_scale_and_a_changed_tensor_of_the_losses_own_come_back(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[Sharded, torch.Tensor]:
        torch.manual_seed(seed)
        calls = torch.zeros(3)

        def counted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            calls.add_(1)
            return model(x).square().mean() + calls.sum() * 0

        model = nn.Linear(4, 2)
        policy = Policy(lower="eager", loss_scale="dynamic")
        return compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), loss=counted, policy=policy), calls

    first, calls = build(0)
    for x in (torch.ones(2, 4), torch.full((2, 4), torch.inf), torch.ones(2, 4)):
        first.step(x)
    first.save(tmp_path, wait=True)
    second, other = build(1)
    second.load(tmp_path)
    assert second.loss_scale == first.loss_scale and second.overflows == 1
    assert torch.equal(first.step(torch.ones(2, 4)), second.step(torch.ones(2, 4)))
    assert torch.equal(calls, other) and other[0] == 4


def test_what_is_saved_is_what_was_when_it_was_called(tmp_path: Path, writers: threading.Event) -> None:
    """The next steps overwrite the state while the writer has not begun."""
    first, schedule = build(0)
    train(first, schedule, 0, 2)
    expected = everything(first)
    future = first.save(tmp_path)
    train(first, schedule, 2, 4)
    assert not future.done() and not same(everything(first), expected)
    with pytest.raises(ValueError, match=r"step 2 in .* is still being written"):
        first.save(tmp_path, busy="refuse")
    writers.set()
    again = first.save(tmp_path)  # waits for the one before
    assert future.done() and again.result() == tmp_path / "step-4"
    second, _ = build(1)
    assert second.load(tmp_path, step=2) == 2
    assert same(everything(second)[:-1], expected[:-1])


def test_a_writer_that_fails_is_an_error_at_the_next_call_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded, schedule = build(0)
    train(sharded, schedule, 0, 1)
    sharded.save(tmp_path, wait=True)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    for call in (lambda: sharded.step(BATCHES[1]), lambda: sharded.save(tmp_path), lambda: sharded.load(tmp_path)):
        train(sharded, schedule, 1, 2)
        with monkeypatch.context() as patched:
            patched.setattr(data_file.os, "write", full)
            future = sharded.save(tmp_path)
            assert isinstance(future.exception(), SaveError)
        with pytest.raises(SaveError, match=r"No space left on device.*Earlier checkpoints are as they were"):
            call()
        assert sharded.load(tmp_path) == 1
    with monkeypatch.context() as patched, pytest.raises(SaveError):
        patched.setattr(data_file.os, "write", full)
        train(sharded, schedule, 1, 2)
        sharded.save(tmp_path, wait=True)
    train(sharded, schedule, 1, 2)  # who waited was told
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-1"]


def test_between_microbatches_nothing_is_saved_and_a_load_begins_anew(tmp_path: Path) -> None:
    first, schedule = build(0)
    train(first, schedule, 0, 2)
    first.save(tmp_path, wait=True)
    expected = train(first, schedule, 2, 3)
    first.accumulate(BATCHES[0])
    with pytest.raises(RuntimeError, match="save between microbatches"):
        first.save(tmp_path)
    first.load(tmp_path)
    assert same([first.step(BATCHES[2])], expected)


class Holder:
    def __init__(self, state: Any, fails: bool = False) -> None:
        self.state, self.fails = state, fails

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        if self.fails:
            raise KeyError("odd")


def test_an_extra_that_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    first, schedule = build(0)
    train(first, schedule, 0, 2)
    first.save(tmp_path, extra={"a": Holder({"x": 1}), "b": Holder({"y": torch.ones(2)})}, wait=True)
    train(first, schedule, 2, 3)
    before = everything(first)
    good, bad = Holder({"x": 7}), Holder(None, fails=True)
    with pytest.raises(KeyError, match="odd"):
        first.load(tmp_path, extra={"a": good, "b": bad})
    assert good.state == {"x": 7} and same(everything(first), before)
    with pytest.raises(ValueError, match=r"extra\['c'\] is not in the checkpoint"):
        first.load(tmp_path, extra={"c": good})
    with pytest.raises(ValueError, match=r"extra b\.y\[1\] is a .*Holder, which a checkpoint cannot hold"):
        first.save(tmp_path, extra={"b": Holder({"y": [1, good]})})
    with pytest.raises(ValueError, match=r"extra\['d'\] is a int, which has no state_dict"):
        first.save(tmp_path, extra={"d": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-2"]


def test_another_optimizer_or_other_options_are_refused_by_name_or_left_out(tmp_path: Path) -> None:
    first, schedule = build(0)
    train(first, schedule, 0, 2)
    first.save(tmp_path, wait=True, extra={"schedule": schedule})
    cases = {
        "the optimizer is torch.optim.sgd.SGD here, and torch.optim.adamw.AdamW": {"kind": torch.optim.SGD},
        r"param_groups\[0\]\['weight_decay'\] is 0.5 here, and 0.01 in the checkpoint": {"weight_decay": 0.5},
    }
    for text, options in cases.items():
        second, _ = build(1, **options)
        before = everything(second)
        with pytest.raises(ValueError, match=text):
            second.load(tmp_path)
        assert same(everything(second), before)
        assert second.load(tmp_path, strict=False) == 2
        assert torch.equal(second.full_state_dict()["gain"], first.full_state_dict()["gain"])
        assert second.step(BATCHES[0]).isfinite()
    evaluated = compile_sharded(Model(), loss=loss, policy=Policy(lower="eager"))
    evaluated.load(tmp_path)
    weights, expected = evaluated.full_state_dict(), first.full_state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_another_model_is_refused_by_name_or_loaded_where_it_fits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    first = compile_sharded(small, torch.optim.Adam(small.parameters()), policy=Policy(lower="eager"), loss=plain)
    first.step(torch.ones(3, 4))
    first.save(tmp_path, wait=True)
    grown = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 1).double(), nn.BatchNorm1d(1).double())
    second = compile_sharded(grown, torch.optim.Adam(grown.parameters()), policy=Policy(lower="eager"), loss=plain)
    before = second.full_state_dict()
    with pytest.raises(ValueError) as refused:
        second.load(tmp_path)
    for text in (
        "1.weight is float32[3, 4] here, and float32[2, 4] in the checkpoint",
        "2.weight is not in the checkpoint",
        "the buffer 3.running_mean is not in the checkpoint",
        "the optimizer's state of group 0 is of other parameters (1.weight is new)",
        "so the optimizer's state of group 0 is not loaded, that of these parameters too: 0.weight, 0.bias",
        "strict=False",
    ):
        assert text in str(refused.value)
    assert second.load(tmp_path, strict=False) == 1
    after = second.full_state_dict()
    assert torch.equal(after["0.weight"], first.full_state_dict()["0.weight"])
    assert torch.equal(after["1.weight"], before["1.weight"]) and torch.equal(after["2.weight"], before["2.weight"])


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def test_other_ties_groups_and_placements_load_by_name(tmp_path: Path) -> None:
    first, schedule = build(0)
    train(first, schedule, 0, 3)
    first.save(tmp_path, wait=True)
    torch.manual_seed(1)
    model = Model()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    heavy = {name: p for name, p in model.named_parameters() if name.endswith("weight") and p.requires_grad}
    light = [p for name, p in model.named_parameters() if p.requires_grad and name not in heavy]
    optimizer = torch.optim.AdamW([{"params": [*heavy.values()]}, {"params": light}], lr=0.01)
    second = compile_sharded(
        model, optimizer, loss=loss, units="embed", policy=Policy(lower="eager", shard="ddp", bucket_mb=0)
    )
    assert second.load(tmp_path) == 3
    found, expected = second.full_state_dict(), first.full_state_dict()
    assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
