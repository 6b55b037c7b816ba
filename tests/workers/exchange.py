"""Reduce-scatters of a graph over gloo, as they stand and exchanged: what comes out, and what is sent for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from fsdp_compiled.distributed.mesh import close
from fsdp_compiled.lower.exchange import copy_exchanged, is_over
from tests.workers.lowering import Sent

c10d = torch.ops._c10d_functional
CASES = [(how, dtype) for how in ("sum", "avg") for dtype in ("float32", "float64", "bfloat16")]


def reduction(how: str, flat: Tensor, group: str) -> fx.Graph:
    """``wait(reduce_scatter(flat))``, scaled by 2."""
    world = dist.get_world_size()
    graph = fx.Graph()
    given = graph.placeholder("flat")
    given.meta["val"] = flat
    part = graph.call_function(c10d.reduce_scatter_tensor.default, (given, how, world, group))
    part.meta["val"] = flat[: flat.shape[0] // world]
    waited = graph.call_function(c10d.wait_tensor.default, (part,))
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (waited, 2)))
    return graph


def copied(graph: fx.Graph, groups: set[str]) -> fx.Graph:
    found = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = copy_exchanged(node, found, mapping.__getitem__, groups)
    found.lint()
    return found


def run(graph: fx.Graph, flat: Tensor) -> tuple[Tensor, list[str]]:
    with Sent() as sent:
        result = fx.GraphModule(nn.Module(), graph)(flat)
    return result, [name for name, _ in sent.calls]


def compared(how: str, dtype: torch.dtype, group: str) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    everyone = torch.randn(world, 5 * world, generator=torch.Generator().manual_seed(0)).to(dtype)
    flat = everyone[rank].clone()
    graph = reduction(how, flat, group)
    before, sent_before = run(copied(graph, set()), flat)
    after, sent_after = run(copied(graph, {group}), flat)
    exact = everyone.double().sum(0)[5 * rank : 5 * rank + 5] * 2 / (world if how == "avg" else 1)
    bound = 2 * world * torch.finfo(dtype).eps * everyone.double().abs().sum(0)[5 * rank : 5 * rank + 5]
    return {
        "sent": [sent_before, sent_after],
        "same": torch.equal(before, after),
        "close": bool(((after.double() - exact).abs() <= bound).all()),
        "wrong is close": bool(((after.double() * 1.5 - exact).abs() <= bound).all()),
        "untouched": torch.equal(flat, everyone[rank]),
        "own memory": after.untyped_storage().nbytes() == after.nbytes,
    }


def others(group: str) -> list[bool]:
    """Whether a reduction of rows, which is no flat buffer, would be exchanged, one elsewhere, and one as it should."""
    world = dist.get_world_size()
    found = []
    for given in (torch.zeros(2 * world, 3), torch.zeros(2 * world, device="meta"), torch.zeros(2 * world)):
        found.append(any(is_over(node, {group}) for node in reduction("sum", given, group).nodes))
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    found = {f"{how} {dtype}": compared(how, getattr(torch, dtype), world.group_name) for how, dtype in CASES}
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, {"cases": found, "others": others(world.group_name)})
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(answers))
    dist.barrier()
    close()


if __name__ == "__main__":
    main()
