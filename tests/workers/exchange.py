"""Reduce-scatters of a graph over gloo, as they stand and exchanged: what comes out, and what is sent for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compiled.ir.nodes import Mark
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.lower.fusions.reductions import exchange
from tests.launch import answer, of_all
from tests.workers.lowering import Sent

c10d = torch.ops._c10d_functional
CASES = [(how, dtype) for how in ("sum", "avg") for dtype in ("float32", "float64", "bfloat16")]


def reduction(how: str, flat: Tensor, group: str, own: bool = False) -> Program:
    """``wait(reduce_scatter(flat))``, scaled by 2; ``own``: the model's own."""
    world = dist.get_world_size()
    graph = fx.Graph()
    given = graph.placeholder("flat")
    part = graph.call_function(c10d.reduce_scatter_tensor.default, (given, how, world, group))
    waited = graph.call_function(c10d.wait_tensor.default, (part,))
    twice = graph.call_function(torch.ops.aten.mul.Tensor, (waited, 2))
    graph.output([twice])
    with FakeTensorMode():
        whole = torch.empty_strided(flat.shape, flat.stride(), dtype=flat.dtype, device=flat.device)
    for node, role in ((given, None), (part, "reduce"), (waited, "wait"), (twice, "scale")):
        node.meta["val"] = whole if node is given else whole[: flat.shape[0] // world]
        node.meta["phase"] = "backward"
        if role and not own:
            node.meta["mark"] = Mark(role, "unit", "buffer")  # type: ignore[arg-type]
    return Program(graph, (Port("in", "batch", "flat"), Port("out", "gradient", "buffer")), ())


def exchanged(program: Program, axes: set[str]) -> Program:
    return exchange(axes)(program, None)  # type: ignore[arg-type]


def run(program: Program, flat: Tensor) -> tuple[Tensor, list[str]]:
    with Sent() as sent:
        (result,) = fx.GraphModule(nn.Module(), program.graph)(flat)
    return result, [name for name, _ in sent.calls]


def compared(how: str, dtype: torch.dtype, group: str) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    everyone = torch.randn(world, 5 * world, generator=torch.Generator().manual_seed(0)).to(dtype)
    flat = everyone[rank].clone()
    program = reduction(how, flat, group)
    before, sent_before = run(exchanged(program, set()), flat)
    after, sent_after = run(exchanged(program, {group}), flat)
    exact = everyone.double().sum(0)[5 * rank : 5 * rank + 5] * 2 / (world if how == "avg" else 1)
    bound = 2 * world * torch.finfo(dtype).eps * everyone.double().abs().sum(0)[5 * rank : 5 * rank + 5]
    return {
        "sent": [sent_before, sent_after],
        "the same bits": torch.equal(before, after),
        "close": bool(((after.double() - exact).abs() <= bound).all()),
        "wrong is close": bool(((after.double() * 1.5 - exact).abs() <= bound).all()),
        "untouched": torch.equal(flat, everyone[rank]),
        "own memory": after.untyped_storage().nbytes() == after.nbytes,
    }


def others(group: str) -> list[bool]:
    """Whether a reduction of rows, which is no flat buffer, would be exchanged, one elsewhere, the model's own, and one
    as it should."""
    world = dist.get_world_size()
    found = []
    flat = torch.zeros(2 * world)
    for given, own in ((torch.zeros(2 * world, 3), False), (flat.to("meta"), False), (flat, True), (flat, False)):
        before = reduction("sum", given, group, own)
        found.append(exchanged(reduction("sum", given, group, own), {group}).wire != before.wire)
    return found


def main() -> list[Any]:
    torch.set_num_threads(1)
    world = dist.group.WORLD
    assert world is not None
    found = {f"{how} {dtype}": compared(how, getattr(torch, dtype), world.group_name) for how, dtype in CASES}
    return of_all({"cases": found, "others": others(world.group_name)})


if __name__ == "__main__":
    answer(main)
