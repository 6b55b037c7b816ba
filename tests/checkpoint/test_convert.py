"""Checkpoints of FSDP2 and DCP load here, and this package's go there; a pickle runs nothing."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.cli import main
from fsdp_compiled.runtime.sharded import Sharded

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4, bias=False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.down.weight if self.down.weight.shape == (4, 4) else self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(torch.tanh(self.norm(self.up(x))))).square().mean()


def build(seed: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return model, torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)


def shard(seed: int) -> Sharded:
    model, optimizer = build(seed)
    return compile_sharded(model, optimizer, policy=Policy(lower="eager"))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(X)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flat", [False, True])
def test_what_fsdp2_wrote_loads_here_and_goes_on_alike(tmp_path: Path, flat: bool) -> None:
    model, optimizer = build(0)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.02,
    )
    plain_step(model, optimizer)
    plain_step(model, optimizer)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    theirs = {**weights, **state} if flat else {"model": weights, "optim": state}
    dcp.save(theirs, checkpoint_id=tmp_path / "fsdp2")
    assert main(["convert", str(tmp_path / "fsdp2"), str(tmp_path / "ours"), "--to", "ours"]) == 0
    sharded = shard(1)
    assert sharded.load(tmp_path / "ours") == 2
    assert sharded.optimizer is not None and sharded.optimizer.param_groups[1]["lr"] == 0.02
    expected = [plain_step(model, optimizer) for _ in range(2)]
    found = [sharded.step(X) for _ in range(2)]
    assert all(torch.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(found, expected))
    assert not torch.allclose(shard(1).step(X), expected[0], rtol=1e-3)  # the control


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flat", [False, True])
def test_ours_goes_to_fsdp2_and_to_weights(tmp_path: Path, flat: bool) -> None:
    sharded = shard(0)
    for _ in range(2):
        sharded.step(X)
    sharded.save(tmp_path / "ours", wait=True)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    model, optimizer = build(1)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    theirs = {"model": weights, "optim": state}
    dcp.load(theirs, checkpoint_id=tmp_path / "dcp")
    set_state_dict(
        model, optimizer, model_state_dict=theirs["model"], optim_state_dict=theirs["optim"], options=options
    )
    for name, value in sharded.full_state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert torch.equal(plain_step(model, optimizer), sharded.step(X))
    assert torch.equal(plain_step(model, optimizer), sharded.step(X))
    assert main(["convert", str(tmp_path / "ours" / "step-2"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    other = shard(3)
    other.import_weights(tmp_path / "hf")
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back"), "--to", "ours"]) == 0
    with pytest.raises(ValueError, match="has no optimizer's state"):
        other.load(tmp_path / "back")
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "again"), "--to", "ours"]) == 0
    other.load(tmp_path / "again")
    sharded.load(tmp_path / "ours")
    assert torch.equal(other.step(X), sharded.step(X))


@pytest.mark.filterwarnings("ignore")
def test_what_fsdp2_wrote_loads_as_it_is_and_the_other_way_round(tmp_path: Path) -> None:
    """By DCP alone, over `state_dict`."""
    model, optimizer = build(0)
    for _ in range(2):
        plain_step(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.02
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "theirs")
    sharded = shard(1)
    found = sharded.state_dict()
    dcp.load({name: found[name] for name in ("model", "optim")}, checkpoint_id=tmp_path / "theirs")
    sharded.load_state_dict(found)
    assert sharded.optimizer is not None and sharded.optimizer.param_groups[1]["lr"] == 0.02
    assert not torch.equal(shard(1).step(X), plain_step(*build(0)))  # the control
    for _ in range(2):
        assert torch.equal(sharded.step(X), plain_step(model, optimizer))
    dcp.save(sharded.state_dict(), checkpoint_id=tmp_path / "ours")
    model, optimizer = build(2)
    weights, state = get_state_dict(model, optimizer)
    theirs = {"model": weights, "optim": state}
    dcp.load(theirs, checkpoint_id=tmp_path / "ours")
    set_state_dict(model, optimizer, model_state_dict=theirs["model"], optim_state_dict=theirs["optim"])
    for _ in range(2):
        assert torch.equal(plain_step(model, optimizer), sharded.step(X))


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(EVIL),)


EVIL = Path("/nonexistent")


def test_a_pickle_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{__name__}.EVIL", tmp_path / "run")
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "ours"]) == 2
    assert "it wants posix.mkdir, which no checkpoint needs" in capsys.readouterr().err
    with pytest.warns(UserWarning):
        dcp.save({"a": torch.ones(2), "b": 3}, checkpoint_id=tmp_path / "good", no_dist=True)
    file = io.BytesIO()
    torch.save(Evil(), file)
    data = next((tmp_path / "good").glob("*.distcp"))
    data.write_bytes(file.getvalue().ljust(data.stat().st_size, b"\0"))
    assert main(["convert", str(tmp_path / "good"), str(tmp_path / "out"), "--to", "ours"]) == 2
    assert not (tmp_path / "run").exists() and not (tmp_path / "out").exists()
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "hf"]) == 2
    assert "is no checkpoint: it has neither" in capsys.readouterr().err
