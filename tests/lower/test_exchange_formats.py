"""Weights and optimizers go to PyTorch's and Hugging Face's formats and back; on ranks: `test_checkpoint_ranks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.runtime.checkpoint import hugging_face
from fsdp_compiled.runtime.sharded import Sharded

EAGER = Policy(lower="eager")
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.turned = nn.Parameter(torch.randn(4, 5).t())
        self.cube = nn.Parameter(torch.randn(4, 3, 2).permute(2, 0, 1))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.norm(self.up(x)) @ self.turned) * self.cube.sum((0, 2))).square().mean()


def build(seed: int, kind: Any = torch.optim.AdamW) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return model, kind([{"params": matrices}, {"params": vectors, "lr": 0.02}], lr=0.01)


def shard(seed: int, kind: Any = torch.optim.AdamW) -> Sharded:
    model, optimizer = build(seed, kind)
    return compile_sharded(model, optimizer, policy=EAGER)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_state_dictionaries_of_a_plain_run_go_in_and_out(kind: Any) -> None:
    plain, optimizer = build(0, kind)
    for _ in range(2):
        plain(X).backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded = shard(1, kind)
    sharded.step(X)
    sharded.load_full_state_dict(plain.state_dict())
    sharded.load_full_optimizer_state_dict(optimizer.state_dict())
    loss = plain(X)
    loss.backward()
    optimizer.step()
    assert torch.equal(sharded.step(X), loss.detach())
    other, resumed = build(2, kind)  # and a plain run goes on from there
    other.load_state_dict(sharded.full_state_dict())
    resumed.load_state_dict(sharded.full_optimizer_state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    ours, theirs = resumed.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, kept in theirs["state"].items():
        assert {name: value.tolist() for name, value in kept.items()} == {
            name: value.tolist() for name, value in ours["state"][index].items()
        }


def test_what_does_not_fit_is_refused_by_name() -> None:
    sharded = shard(0)
    before = sharded.full_state_dict()
    weights = dict(before)
    weights["up.bias"] = torch.zeros(4)
    del weights["cube"]
    expected = r"cube is not in the checkpoint\n  up.bias is float32\[5\] here, and float32\[4\] in the checkpoint\nBu"
    with pytest.raises(ValueError, match=expected):
        sharded.load_full_state_dict(weights)
    _, optimizer = build(0, torch.optim.Adagrad)
    with pytest.raises(ValueError, match="the optimizer keeps no sum of turned"):
        sharded.load_full_optimizer_state_dict(optimizer.state_dict())
    after = sharded.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_export_is_the_state_dict_in_files_of_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "LARGEST", 200)
    sharded = shard(0)
    sharded.step(X)
    sharded.export(tmp_path / "weights")
    index = json.loads((tmp_path / "weights" / hugging_face.INDEX).read_text())["weight_map"]
    assert set(index.values()) == {f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    found: dict[str, torch.Tensor] = {}
    for name in set(index.values()):
        found |= safetensors.load_file(tmp_path / "weights" / name)
    expected = sharded.full_state_dict()
    assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="exists and is not empty"):
        sharded.export(tmp_path / "weights")
    other = shard(1)
    other.import_weights(tmp_path / "weights")
    assert all(torch.equal(value, expected[name]) for name, value in other.full_state_dict().items())
    (tmp_path / "weights" / "model-00001-of-00003.safetensors").write_bytes(b"\xff" * 50)
    with pytest.raises(ValueError, match=r"model-00001-of-00003.safetensors is no safetensors file"):
        other.import_weights(tmp_path / "weights")
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor"):
        other.import_weights(tmp_path)


def test_transformers_reads_an_export_and_its_own_files_load(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=29, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    tokens = torch.arange(12).reshape(2, 6)
    sharded = compile_sharded(model, torch.optim.AdamW(model.parameters()), policy=EAGER)
    sharded.step(input_ids=tokens, labels=tokens)
    sharded.export(tmp_path / "ours")
    weights = sharded.full_state_dict()
    loaded, said = LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(said.values())
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
    loaded.half().save_pretrained(tmp_path / "theirs")
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    other = compile_sharded(
        empty,
        policy=EAGER,
        init=lambda module: [
            one.zero_() for one in (*module._parameters.values(), *module._buffers.values()) if one is not None
        ],
    )
    other.import_weights(tmp_path / "theirs")
    for name, value in other.full_state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, weights[name].half().float())
    bare = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"(?s)weight is not in the checkpoint.*model\.embed_tokens\.weight is not in the model"
    ):
        compile_sharded(bare, policy=EAGER).import_weights(tmp_path / "theirs")
