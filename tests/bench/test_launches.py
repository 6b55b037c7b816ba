"""What a step launches, by unit: nothing is left out, and repeated layers are alike."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench import RESULTS
from bench.launches import fused_in, launched, pieces_of, table
from fsdp_compiled import Policy, simulate
from fsdp_compiled.analysis.roofline import flops
from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss
from fsdp_compiled.cli.simulate import Preset
from fsdp_compiled.ir.nodes import is_collective
from fsdp_compiled.runtime.simulate import Estimate


def gpt(layers: int) -> Estimate:
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    policy = Policy(precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32), bucket_mb=0)
    return simulate(lambda: GPT(GPTConfig(layers, 64, 2, 64)), next_byte_loss, (tokens, tokens), 8, "h100", policy)


def sums(lines: list[str]) -> dict[str, tuple[int, float]]:
    """Kernels and milliseconds of a step, by what they are."""
    found = (re.match(r"step +(\w+) +(\d+) .* ([\d.]+) ms$", line) for line in lines)
    return {one[1]: (int(one[2]), float(one[3])) for one in found if one is not None}


def test_every_node_that_takes_time_is_in_one_kernel() -> None:
    few, more = gpt(2), gpt(4)
    graph = few.program.graph
    listed = [node for node, *_ in launched(graph)]
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert len(listed) == len({*listed}) and {*listed} >= {node for node in calls if flops(node) or is_collective(node)}
    assert {*listed} >= {node for node in calls for span in few.timeline.nodes if span.node == node.name
                         and span.lane != "wait"}  # fmt: skip
    told = sums(table(few))
    assert told["products"][0] == sum(flops(node) > 0 for node in calls)
    assert told["collectives"][0] == sum(map(is_collective, calls))
    assert sum(taken for _, taken in told.values()) == pytest.approx(
        1e3 * (few.busy("compute") + few.busy("network")), abs=0.01
    )
    grown = sums(table(more))
    assert all((grown[what][0] - told[what][0]) % 2 == 0 for what in told) and grown["products"] > told["products"]


def test_a_whole_block_has_no_more_kernels_and_bytes_than_its_pieces() -> None:
    preset = Preset(2, 64, 4, 64, 2, vocabulary=64, llama=True)
    tokens = torch.zeros(preset.batch, preset.context, dtype=torch.int64)
    policy = Policy(precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32), bucket_mb=0)
    few, more = (
        simulate(replace(preset, layers=layers).model, preset.loss, (tokens, tokens), 8, "h100", policy)
        for layers in (2, 4)
    )
    cut, whole = (pieces_of(more, whole) for whole in (False, True))
    assert cut.keys() == whole.keys()
    assert len({*whole.values()}) - len({*pieces_of(few, True).values()}) == 2 * 2  # forward and backward, of two more
    assert len({*zip(cut.values(), whole.values(), strict=True)}) == len({*cut.values()})  # each lies in a whole block
    apart, pieces, blocks = (fused_in(more, numbers) for numbers in ({}, cut, whole))
    assert apart[0] > pieces[0] >= blocks[0] and apart[1] > pieces[1] >= blocks[1]


def test_the_page_says_what_the_file_says() -> None:
    page = (RESULTS.parent.parent / "docs" / "gpu.md").read_text()
    lines = (RESULTS / "launches-8b.txt").read_text().splitlines()
    told = sums(lines)
    assert len(told) == 4
    for kernels, taken in told.values():
        assert re.search(rf"\| {kernels} \| [\d.]+ GiB \| {taken:.0f} ms \|", page)
    cut = [line for line in lines if re.match(r"cut at|blocks whole", line)]
    for count in (one for line in cut for one in re.findall(r"[\d.]+", line)):
        assert re.search(rf"\b{count}\b", page)
    assert len(cut) == 2
