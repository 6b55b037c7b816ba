"""What a step launches, by unit: nothing is left out, and repeated layers are alike."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench import RESULTS
from bench.launches import launched, table
from fsdp_compiled import Policy, simulate
from fsdp_compiled.analysis.roofline import flops
from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss
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


def test_the_page_says_what_the_file_says() -> None:
    page = (RESULTS.parent.parent / "docs" / "gpu.md").read_text()
    told = sums((RESULTS / "launches-8b.txt").read_text().splitlines())
    assert len(told) == 4
    for kernels, taken in told.values():
        assert re.search(rf"\| {kernels} \| [\d.]+ GiB \| {taken:.0f} ms \|", page)
