"""Families of transformers whose blocks are traced once: the program is that of tracing all of them.

Each has something that plain lists of blocks have not: a first block that differs and hands on what it made, experts, a
result that is a view, a decoder whose blocks all read what the encoder made, masks that take turns.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.capture import dynamo
from fsdp_compiled.capture.blocks import equal_blocks, equal_stretches, repeated_calls
from fsdp_compiled.capture.blocks.repeated_calls import Repeats
from fsdp_compiled.torch_private.names import plainly
from tests import huggingface
from tests.chosen import chosen

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and of the models' own code
DEPTH = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layer")
# How deep each is, how many blocks Dynamo does not walk through, and the rows that are differentiated once.
FAMILIES = {
    "OPT": (6, 4, [6]),
    "Mixtral": (6, 4, [6]),
    "T5": (7, 10, [6, 6]),
    "Whisper": (7, 10, [7, 7]),
    "Gemma 2": (13, 11, [6]),
}


def built(name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    wanted = huggingface.MODELS[name]
    sizes = wanted.sizes | dict.fromkeys(wanted.sizes.keys() & set(DEPTH), layers)
    with monkeypatch.context() as patched:
        patched.setitem(huggingface.MODELS, name, replace(wanted, sizes=sizes))
        return huggingface.build(name).train()


def loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(inputs, labels=labels, use_cache=False).loss


def stepped(model: nn.Module, batch: Any) -> tuple[Sharded, torch.Tensor]:
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, policy=Policy(lower="eager"))
    torch.manual_seed(1)
    sharded.step(*batch)
    return sharded, sharded.step(*batch)


@pytest.mark.parametrize("name", chosen(FAMILIES, ("Mixtral",)))
def test_the_program_is_that_of_all_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    layers, written, rows = FAMILIES[name]
    watched: list[Repeats] = []
    found: list[list[int]] = []

    def watching(*given: Any) -> Repeats:
        watched.append(Repeats(*given))
        return watched[-1]

    def finding(*given: Any) -> Any:
        runs = equal_blocks.runs_of(*given)
        found.append([len(run.stretches) for run in runs])
        return runs

    monkeypatch.setattr(dynamo, "Repeats", watching)
    monkeypatch.setattr(equal_stretches, "runs_of", finding)
    model = built(name, layers, monkeypatch)
    full, slow, eager = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(0)
    batch = huggingface.MODELS[name].batch()
    sharded, value = stepped(model, batch)
    assert [len(one.written) for one in watched] == [written] and found == [rows]
    with monkeypatch.context() as patched:
        patched.setattr(repeated_calls, "FEWEST", 1000)
        patched.setattr(equal_blocks, "FEWEST", 1000)
        other, _ = stepped(full, batch)
    assert str(sharded.program) == str(other.program) and len(watched[-1].written) == 0
    assert sharded.program.text() == other.program.text()
    with plainly():
        plain, _ = stepped(slow, batch)
    assert plain.program.text() == sharded.program.text()
    optimizer = torch.optim.SGD(eager.parameters(), 0.1)
    torch.manual_seed(1)
    for _ in range(2):
        optimizer.zero_grad()
        expected = loss(eager, *batch)
        expected.backward()
        optimizer.step()
    assert value == expected
    assert loss(eager, *batch) != expected  # control: another step, and other dropout
