"""Cutting a program: equal blocks make equal pieces whatever the units, and the pieces together are the program."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Sequence
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench import host_time
from fsdp_compiled import Policy, Program, compile_sharded
from fsdp_compiled.cli.gpt import GPT, GPTConfig
from fsdp_compiled.ir.nodes import is_collective, is_view, mutated, role_of
from fsdp_compiled.kernels.aten_operators import split_rows
from fsdp_compiled.lower import partition
from fsdp_compiled.lower.inductor import divide
from fsdp_compiled.lower.partition import segments
from fsdp_compiled.lower.piece import FEW, Piece
from tests import models, recipes, simulate
from tests.chosen import chosen, examples
from tests.models import Block, Recipe
from tests.simulate import uncompiled

NAMES = ("blocks.0", "blocks.1", "blocks.2", "embed", "head", "root")


@functools.cache
def gpt(layers: int, **policy: Any) -> tuple[Program, tuple[str, ...]]:
    """A step of a GPT of equal layers on two ranks, and its blocks."""
    model = GPT(GPTConfig(layers=layers, width=16, heads=2, context=8))
    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.zeros(1, 8, dtype=torch.int64)

    def loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    stages, plan = simulate.stages(model, optimizer, loss, (words, words), Policy(lower="eager", clip=1.0, **policy))
    return stages[-1], plan.blocks


def pieces(program: Program, blocks: Collection[str]) -> list[Piece]:
    return [segment for segment in segments(program.graph, blocks) if isinstance(segment, Piece)]


@pytest.mark.parametrize(
    ("shard", "cases"),
    chosen(
        [("zero3", [(0, 4), (0, 6), (0.03, 4), (0.05, 8)]), ("zero2", [(0.03, 4), (0.05, 8)])],
        [("zero3", [(0, 4), (0, 6), (0.03, 4), (0.05, 8)])],
        ids=lambda case: case[0],
    ),
)
def test_more_layers_and_larger_units_make_no_more_distinct_pieces(shard: str, cases: list[tuple[float, int]]) -> None:
    counts = []
    for bucket, layers in cases:
        program, blocks = gpt(layers, bucket_mb=bucket, shard=shard)
        cut = pieces(program, blocks)
        assert len(cut) > 2 * layers
        counts.append(len({piece.key() for piece in cut}))
    assert max(counts) == counts[0] <= 11, counts


def test_what_is_compiled_at_96_layers_is_what_is_at_24() -> None:
    found = []
    for layers in (24, 96):
        torch.manual_seed(0)
        model = host_time.GPT(layers)
        sharded = compile_sharded(
            model, torch.optim.AdamW(model.parameters()), loss=host_time.loss, policy=Policy(lower="eager")
        )
        sharded.step(*host_time.batch())
        distinct = {piece.key(): piece for piece in pieces(sharded.program, sharded.plan.blocks)}
        assert len(sharded.program.graph.nodes) > 110 * layers
        found.append(distinct)
    few, many = found
    (statistics,) = (piece for key, piece in many.items() if key not in few)  # of more numbers than `FEW`
    assert {role_of(node) for node in statistics.nodes} == {"norm"} and few.keys() <= many.keys()
    assert len(few) == 7


def test_without_blocks_the_merged_units_make_pieces_that_grow() -> None:
    """What the cut at blocks is good for."""
    program, blocks = gpt(4, bucket_mb=0.05)
    largest = max(len(piece.nodes) for piece in pieces(program, blocks))
    assert max(len(piece.nodes) for piece in pieces(program, ())) > 2 * largest


def test_a_piece_takes_and_gives_whole_tensors() -> None:
    program, blocks = gpt(4, bucket_mb=0.03)
    cut = pieces(program, blocks)
    for piece in cut:
        assert not any(is_view(node) or mutated(node) for node in piece.outputs)
        assert not any(is_collective(node) for node in piece.nodes)
        assert any(
            node.meta["val"].numel() > FEW for node in piece.inputs if isinstance(node.meta["val"], torch.Tensor)
        )


@pytest.mark.parametrize(("device", "parameters"), [("cpu", 3), ("cpu", 2), ("cuda", 3)])
def test_rows_of_several_parameters_are_split_by_one_piece_on_a_cpu(device: str, parameters: int) -> None:
    """Which is equal in forward and backward, whatever is used first; on a GPU it is one kernel as it stands."""
    found = []
    for order in (range(parameters), reversed(range(parameters))):
        graph = fx.Graph()
        full = graph.placeholder("full")
        with FakeTensorMode(allow_non_fake_inputs=True):
            full.meta["val"] = torch.empty(2, 4 * parameters, device=device)
            split = graph.call_function(split_rows, (full, [4] * parameters))
            split.meta = {"val": split_rows(full.meta["val"], [4] * parameters), "phase": "forward"}
        parts = [graph.call_function(getitem, (split, index)) for index in order]
        for part in parts:
            part.meta = {"val": split.meta["val"][part.args[1]], "phase": "forward"}  # type: ignore[index]
        graph.output(tuple(parts))
        found.append(segments(graph))
    if (device, parameters) == ("cpu", 3):
        assert [[type(one) for one in each] for each in found] == [[Piece]] * 2
        assert found[0][0].key() == found[1][0].key() and len(found[0][0].outputs) == parameters  # type: ignore[union-attr]
    else:
        assert all(isinstance(one, fx.Node) for each in found for one in each) and len(found[0]) == 1 + parameters


def test_collectives_keep_their_order() -> None:
    program, blocks = gpt(4, bucket_mb=0.03)

    def sent(nodes: Sequence[Any]) -> list[fx.Node]:
        return [
            node for node in nodes if isinstance(node, fx.Node) and node.op == "call_function" and is_collective(node)
        ]

    assert sent(segments(program.graph, blocks)) == sent(list(program.graph.nodes))


def test_every_piece_is_compiled_by_one_rank_and_the_work_is_even() -> None:
    program, blocks = gpt(4, bucket_mb=0.03)
    distinct = {piece.key(): piece for piece in pieces(program, blocks)}
    for count in (1, 2, 3, 50):
        parts = divide(distinct, count)
        assert Counter(key for part in parts for key in part) == Counter(list(distinct))
    sizes = [sum(len(piece.nodes) for piece in part.values()) for part in divide(distinct, 2)]
    assert max(sizes) <= 1.5 * min(sizes)


# The pieces, run one by one, are the program.


def trained(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Weights, losses and module buffers of two steps, the second of two microbatches' sum."""
    found = {}
    for microbatches in (1, 2):
        result = recipes.trained(recipe, 2 // microbatches, microbatches)
        found |= {f"{microbatches} {name}": value for name, value in result.parameters.items()}
        found |= {f"{microbatches} loss {index}": value for index, value in enumerate(result.losses)}
        for rank, buffers in enumerate(result.buffers):
            found |= {f"{microbatches} {rank} {name}": value for name, value in buffers.items()}
    return found


def differences(recipe: Recipe) -> list[str]:
    expected = trained(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "lower", uncompiled)
        found = trained(recipe)
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


@settings(
    max_examples=examples(2, 5), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)  # fmt: skip
@given(recipe=models.recipes())
def test_the_pieces_together_are_the_program(recipe: Recipe) -> None:
    assert differences(recipe) == []


def test_a_key_that_mistakes_pieces_for_each_other_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe((Block("linear"),) * 3, width=7, hidden=11, policy=Policy(lower="eager", bucket_mb=0))
    assert differences(recipe) == []
    key = Piece.key
    updates = {"update": "same"}  # of buffers whose optimizer groups differ
    monkeypatch.setattr(Piece, "key", lambda piece: updates.get(piece.nodes[-1].meta["phase"]) or key(piece))
    with pytest.raises((RuntimeError, AssertionError, KeyError)):
        assert differences(recipe) == []


class Normed(torch.nn.Module):
    """A block whose norm multiplies by its weight in float32, or in the dtype that the products read."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.weight, self.up = torch.nn.Parameter(torch.ones(64)), torch.nn.Linear(64, 64)
        self.half = half

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        y = self.weight * y.to(x.dtype) if self.half else (self.weight * y).to(x.dtype)
        return x + self.up(y)


@pytest.mark.parametrize("half", [False, True])
def test_a_norm_before_a_wait_is_in_the_piece_that_reads_its_float32(
    half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.Stack(3, 64)
    model.layers = torch.nn.ModuleList(Normed(half) for _ in range(3))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    policy = Policy(lower="eager", bucket_mb=0, precision=precision, recompute=None)
    batch = (torch.randn(32, 64, dtype=torch.bfloat16),)
    found, plan = simulate.stages(model, None, None, batch, policy, kind="forward")

    def count() -> tuple[int, int]:
        made = pieces(found[-1], plan.blocks)
        return len(made), sum(node.meta["val"].nbytes for piece in made for node in piece.outputs)

    joined = count()
    monkeypatch.setattr(partition, "_hands_more", lambda run: False)  # the control
    apart = count()
    if half:  # nothing more is written, and it can run while the weights arrive
        assert joined == apart
    else:
        assert apart[0] - joined[0] == 3 and apart[1] - joined[1] == 3 * 32 * 64 * 4
