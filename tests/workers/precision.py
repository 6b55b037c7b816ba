"""Trains one small tower by `compile_sharded` and by FSDP2 with the same ``MixedPrecisionPolicy``, on two ranks.

``torchrun precision.py RESULT [CASE ...]``. The *control* is FSDP2 with another policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_compiled import LossScale, Policy, compile_sharded
from fsdp_compiled.ir.nodes import is_collective
from tests.launch import answer
from tests.loops import full
from tests.workers.parity import Run, compare

STEPS, WIDTH, ROWS = 6, 8, 4
OVERFLOWS = 2  # the step in which the last rank's loss is too large for fp16, where the loss is scaled
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    precision: MixedPrecisionPolicy
    control: MixedPrecisionPolicy
    scaled: bool = False
    copies: bool = False


CASES = {
    "bf16": Case(MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(BF16, reduce_dtype=FP32)),
    "bf16, reduced in fp32": Case(MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(BF16)),
    "fp32, reduced in bf16": Case(MixedPrecisionPolicy(reduce_dtype=BF16), MixedPrecisionPolicy()),
    "bf16, fp32 out": Case(MixedPrecisionPolicy(BF16, output_dtype=FP32), MixedPrecisionPolicy(BF16)),
    "fp16": Case(MixedPrecisionPolicy(FP16), MixedPrecisionPolicy(BF16)),
    "fp16, reduced in fp32": Case(MixedPrecisionPolicy(FP16, FP32), MixedPrecisionPolicy(FP16)),
    "fp16, scaled": Case(MixedPrecisionPolicy(FP16), MixedPrecisionPolicy(BF16), scaled=True),
    "bf16, copies": Case(MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(BF16, reduce_dtype=FP32), copies=True),
    "fp16, scaled, copies": Case(MixedPrecisionPolicy(FP16), MixedPrecisionPolicy(BF16), scaled=True, copies=True),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The error is squared in the dtype that the model returns, so that ``output_dtype`` shows."""
    out = model(x)
    return (out - y.to(out.dtype)).square().float().mean() * factor


def build() -> Tower:
    torch.manual_seed(0)
    return Tower()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def batch(case: Case, step: int, rank: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 3, generator=generator)
    odd = case.scaled and step == OVERFLOWS and rank == 1
    return x, y, torch.tensor(1e6 if odd else 0.1)


SCALE = LossScale(init=2.0**12, interval=2)


def ours(case: Case, rank: int) -> tuple[Run, dict[str, Any]]:
    model = build()
    scale = SCALE if case.scaled else None
    policy = Policy(precision=case.precision, loss_scale=scale, copies=case.copies, bucket_mb=0, lower="eager")
    sharded = compile_sharded(model, optimizer_of(model), loss=loss_of, policy=policy)
    losses, scales = [], []
    for step in range(STEPS):
        losses.append(sharded.step(*batch(case, step, rank)).item())
        scales.append(sharded.loss_scale.item() if case.scaled else 1.0)
    wire = {"all_gather": 0, "reduce_scatter": 0}
    for node in sharded.program.graph.nodes:
        if node.op == "call_function" and is_collective(node):
            for kind in wire:
                if kind in str(node.target):
                    wire[kind] += sum(source.meta["val"].nbytes for source in node.all_input_nodes)
    shards = sum(shard.numel() for shard in sharded.state.parameters.values())
    acted = {"wire": wire, "shards": shards, "overflows": int(sharded.overflows) if case.scaled else 0}
    return Run(losses, scales, sharded.full_state_dict()), acted


def fsdp2(case: Case, rank: int, policy: MixedPrecisionPolicy) -> Run:
    model = build()
    for block in model.blocks:
        fully_shard(block, mp_policy=replace(policy, output_dtype=None))  # of the model, not of each block
    fully_shard(model, mp_policy=policy)
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", SCALE.init, growth_interval=SCALE.interval, enabled=case.scaled)
    losses, scales = [], []
    for step in range(STEPS):
        loss = loss_of(model, *batch(case, step, rank))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
        scales.append(scaler.get_scale())
    return Run(losses, scales, {name: full(value) for name, value in model.state_dict().items()})


def measure(case: Case, rank: int) -> dict[str, Any]:
    mine, acted = ours(case, rank)
    right, wrong = fsdp2(case, rank, case.precision), fsdp2(case, rank, case.control)
    if rank != 0:
        return {}
    return {**acted, "reference": compare(mine, right), "control": compare(mine, wrong), "losses": mine.losses}


def main(*names: str) -> dict[str, Any]:
    return {name: measure(CASES[name], dist.get_rank()) for name in names or CASES}


if __name__ == "__main__":
    answer(main)
