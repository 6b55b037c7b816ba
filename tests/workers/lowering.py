"""Lowers programs on real ranks: who compiled what, in which order collectives ran, and what a failure does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.ir.nodes import is_collective
from fsdp_compiled.lower import inductor
from tests.launch import answer, of_all
from tests.parts import parts


class Model(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def build(lower: str, width: int = 16, blocks: int = 3) -> Sharded:
    torch.manual_seed(0)
    model = Model(blocks, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = Policy(lower=lower, bucket_mb=0, clip=1.0)
    return compile_sharded(model, optimizer, loss=lambda model, x: (model(x) - 1).square().mean(), policy=policy)


def batch(width: int = 16) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(dist.get_rank()))


class Sent(TorchDispatchMode):
    """Collectives as they are called: name and size of what a rank gives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            self.calls.append((func.overloadpacket.__name__, args[0].numel()))
        return func(*args, **(kwargs or {}))


def order(lower: str) -> dict[str, Any]:
    """The collectives of a step as the program has them, and as they ran."""
    with parts() as of:
        sharded = build(lower)
    sharded.step(batch())
    sent = Sent()
    (compiled,) = of(sharded).programs.cached
    run = compiled.runner

    def watched(*given: torch.Tensor) -> Any:  # a mode around the whole step is refused where it is compiled
        with sent:
            return run(*given)

    compiled.runner = watched
    sharded.step(batch())
    planned = [
        (node.target.overloadpacket.__name__, node.args[0].meta["val"].numel())
        for node in sharded.program.graph.nodes
        if node.op == "call_function" and is_collective(node)
    ]
    return {"planned": planned, "ran": sent.calls}


def compiled() -> dict[str, Any]:
    """What this rank compiled, and what it found on disk."""
    made: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            made[name] += 1
            return function(*args)

        return call

    with (
        mock.patch.object(inductor, "_artifact", counted("compiled", inductor._artifact)),
        mock.patch.object(inductor, "_unpack", counted("found", inductor._unpack)),
    ):
        sharded = build("inductor")
        losses = [sharded.step(batch()).item() for _ in range(3)]
    made["misses"] = counters["inductor"]["fxgraph_cache_miss"]
    return {**made, "losses": losses}


def eager() -> dict[str, Any]:
    sharded = build("eager")
    return {"losses": [sharded.step(batch()).item() for _ in range(3)]}


def failure() -> dict[str, Any]:
    """The compiler fails on rank 1; afterwards it does not."""
    artifact = inductor._artifact

    def broken(piece: Any) -> Any:
        raise RuntimeError("the compiler was not in the mood")

    sharded = build("inductor", width=24, blocks=1)
    if dist.get_rank() == 1:
        inductor._artifact = broken
    try:
        sharded.step(batch(24))
        said = "nothing"
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    inductor._artifact = artifact
    return {"said": said, "then": sharded.step(batch(24)).item()}


CASES = {
    "compiled": compiled,
    "eager": eager,
    "failure": failure,
    "order eager": lambda: order("eager"),
    "order inductor": lambda: order("inductor"),
}


def main(*names: str) -> dict[str, list[Any]]:
    torch.set_num_threads(1)
    return {name: of_all(CASES[name]()) for name in names}


if __name__ == "__main__":
    answer(main)
