"""Equal blocks are differentiated once: the program is what differentiating all of them gives, node for node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.capture import aot, dynamo_run
from fsdp_compiled.capture.blocks import equal_blocks, equal_stretches
from fsdp_compiled.ir.program import Program
from tests.equal_models import LAYERS, WIDTH, Model, TwoLists, loss, program_of


def everything(program: Program) -> list[Any]:
    """The text, and what passes and people read besides."""
    regions: dict[int, int] = {}
    described = []
    for node in program.graph.nodes:
        region = node.meta.get("region")
        number = None if region is None else regions.setdefault(region, len(regions))
        keys = ("path", "phase", "effect", "seed", "stack_trace", "stretch")
        described.append((number, *(node.meta.get(key) for key in keys)))
    return [program.text(), [str(port) for port in program.ports], described]


@pytest.fixture
def differentiated(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Each capture's program from both; how many nodes AOTAutograd was given; what was found."""
    seen: dict[str, list[Any]] = {"short": [], "whole": [], "nodes": [], "runs": []}

    def both(*given: Any) -> Any:
        seen["runs"].append([len(run.stretches) for run in equal_blocks.runs_of(*given[:3])])
        found = equal_stretches.differentiate(*given)
        seen["short"].append(everything(found.program))
        seen["whole"].append(everything(whole(*given).program))
        return found

    def counted(module: Any, *rest: Any) -> Any:
        seen["nodes"].append(len(module.graph.nodes))
        return whole(module, *rest)

    whole = aot.differentiate
    monkeypatch.setattr(aot, "differentiate", counted)
    monkeypatch.setattr(dynamo_run, "differentiate", both)
    return seen


@pytest.mark.parametrize(
    ("make", "runs"),
    [
        pytest.param(lambda: Model("tied"), [LAYERS], id="tied embedding"),
        pytest.param(lambda: Model("dropout"), [LAYERS], id="dropout", marks=pytest.mark.exhaustive),
        pytest.param(lambda: Model("autocast"), [LAYERS], id="autocast"),
        pytest.param(lambda: Model("begins with nothing"), [LAYERS], id="empty literals"),
        pytest.param(lambda: Model("literals"), [LAYERS], id="literals before and after"),
        pytest.param(lambda: Model("takes turns", 13), [6], id="every second block"),
        pytest.param(lambda: Model("no round", 13), [], id="some blocks", marks=pytest.mark.exhaustive),
        pytest.param(lambda: Model("around"), [LAYERS], id="something between blocks", marks=pytest.mark.exhaustive),
        pytest.param(lambda: Model("in place"), [LAYERS], id="written in place", marks=pytest.mark.exhaustive),
        pytest.param(lambda: Model("rotary"), [LAYERS], id="read by all blocks"),
        pytest.param(lambda: Model("shared"), [LAYERS], id="gradients of what all blocks read"),
        pytest.param(lambda: Model("checkpointed"), [LAYERS], id="checkpointed"),
        pytest.param(lambda: Model("one frozen inside"), [LAYERS], id="frozen parts", marks=pytest.mark.exhaustive),
        pytest.param(lambda: Model("frozen", 9), [6], id="frozen blocks first"),
        pytest.param(lambda: Model("", 8, odd=1), [6], id="another block first", marks=pytest.mark.exhaustive),
        pytest.param(TwoLists, [LAYERS, LAYERS + 1], id="two lists"),
        pytest.param(lambda: Model("one mask", 11), [7], id="one is given something else"),
        pytest.param(lambda: Model("tuple"), [LAYERS], id="two results", marks=pytest.mark.exhaustive),
        # These differentiate everything as it stands.
        pytest.param(lambda: Model("index"), [], id="a number of its own"),
        pytest.param(lambda: Model("hidden states"), [], id="results read elsewhere"),
        pytest.param(lambda: Model("", 6, odd=3), [], id="another block between", marks=pytest.mark.exhaustive),
    ],
)
def test_the_program_is_that_of_all_blocks(
    make: Callable[[], nn.Module], runs: list[int], differentiated: dict[str, list[Any]]
) -> None:
    torch.manual_seed(0)
    program_of(make())
    assert differentiated["short"] == differentiated["whole"]
    assert differentiated["runs"] == [runs] and len(differentiated["nodes"]) == 1


def test_a_literal_without_values_is_no_input(differentiated: dict[str, list[Any]]) -> None:
    programs = [program_of(Model(like)) for like in ("begins with nothing", "")]
    assert [port.kind for port in programs[0].inputs] == [port.kind for port in programs[1].inputs]


def test_aotautograd_sees_no_more_of_more_blocks(differentiated: dict[str, list[Any]]) -> None:
    program_of(Model("", 7))
    program_of(Model("", 9))
    assert differentiated["nodes"][0] == differentiated["nodes"][1]
    assert differentiated["short"] == differentiated["whole"]


def test_forward_alone(differentiated: dict[str, list[Any]]) -> None:
    program_of(Model(), None, gradient=False)
    assert differentiated["short"] == differentiated["whole"] and differentiated["runs"] == [[LAYERS]]


@pytest.mark.parametrize("make", [lambda: Model("a literal in each"), lambda: TwoLists(one=True)])
def test_blocks_that_turn_out_unequal_are_differentiated_one_by_one(
    make: Callable[[], nn.Module], differentiated: dict[str, list[Any]]
) -> None:
    program_of(make())
    assert differentiated["short"] == differentiated["whole"] and len(differentiated["nodes"]) == 2


def test_what_forward_writes_is_not_taken_apart(differentiated: dict[str, list[Any]]) -> None:
    """The new values of buffers are outputs, whose order is not that of blocks: all are differentiated."""
    program_of(Model("counts"))
    assert differentiated["short"] == differentiated["whole"] and len(differentiated["nodes"]) == 2


def test_blocks_that_only_seem_equal_are_differentiated_one_by_one(
    differentiated: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The control: were a block's own number no part of what it is, the programs would be told apart."""
    kind = equal_blocks._Kinds.of
    monkeypatch.setattr(equal_blocks._Kinds, "of", lambda kinds, node: tuple(map(str, kind(kinds, node)[:2])))
    keys = equal_blocks._keys

    def blind(*given: Any) -> Any:
        return [(*key[:-1], torch.fx.node.map_arg(key[-1], lambda node: node) and None) for key in keys(*given)]

    monkeypatch.setattr(equal_blocks, "_keys", blind)
    with caplog.at_level("INFO", logger="fsdp_compiled"):
        program_of(Model("index"))
    assert differentiated["short"] == differentiated["whole"]
    assert "differentiated one by one" in caplog.text


class Replaces(nn.Module):
    """A buffer that is assigned, and one that an operator writes with ``out=``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.embedding = nn.Embedding(5, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.embedding(tokens))
        self.mean = self.mean * 0.9 + x.detach().mean((0, 1)) * 0.1
        return x - self.mean


def test_a_trace_leaves_the_models_own_tensors_in_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They stand aside for those that are traced; `functional_call`, which Dynamo would walk through, has no part."""
    monkeypatch.setattr(torch.func, "functional_call", None)
    model = Replaces()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    program = program_of(model)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(before) == list(after) and all(before[name] is after[name] for name in before)
    written = {port.name for port in program.outputs if port.kind == "buffer"}
    assert written == set(dict(model.named_buffers()))
    assert not [record for record in caplog.records if record.name == "fsdp_compiled"]


def test_a_parameter_that_forward_replaces_is_refused() -> None:
    model = Model("", 1)

    def replacing(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        model._parameters["shared"] = model.shared * 2
        return loss(model, tokens)

    before = model.shared
    with pytest.raises(ValueError, match="Forward writes parameter"):
        program_of(model, replacing)
    assert model.shared is before


class Signed(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + y * torch.copysign(torch.ones_like(y), y.abs() * self.factor)


@pytest.mark.parametrize("told_apart", [True, False])
def test_zeros_of_another_sign_are_other_numbers(
    told_apart: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control takes 0.0 and -0.0, which are equal, for one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # whose traces are its own
    if not told_apart:
        monkeypatch.setattr(equal_blocks, "numbers", lambda _: ())
    torch.manual_seed(0)
    model = nn.Sequential(*(Signed(-0.0 if index == LAYERS else 0.0) for index in range(LAYERS + 3)))
    x = torch.ones(2, WIDTH)
    value = model(x).square().mean().item()
    sharded = compile_sharded(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss=lambda model, x: model(x).square().mean(),
        policy=Policy(lower="eager"),
    )
    assert (sharded.step(x).item() == value) is told_apart
