"""Steps of which some are measured, beside the same steps without. torchrun profiled.py RESULT FOLDER"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import Policy, compile_sharded
from tests.launch import answer
from tests.models import Stack

LAYERS, STEPS = 4, 7


class Noisy(Stack):
    """Draws random numbers, which a step that is measured draws as any other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.1))


def trained(lower: str, folder: Path | None) -> dict[str, Any]:
    """``folder``: the third to the fifth step are measured, and written there."""
    torch.manual_seed(dist.get_rank())
    model = Noisy(LAYERS, 64)
    policy = Policy(lower=lower, bucket_mb=0, clip=1.0)  # type: ignore[arg-type]
    sharded = compile_sharded(model, torch.optim.AdamW(model.parameters()), policy=policy)
    batches = [torch.full((32, 64), 0.1 * step + dist.get_rank()) for step in range(STEPS)]
    losses = [sharded.step(x).item() for x in batches[:2]]
    if folder is None:
        return {"losses": losses + [sharded.step(x).item() for x in batches[2:]]}
    with sharded.profile() as profile:
        losses += [sharded.step(x).item() for x in batches[2:5]]
    losses += [sharded.step(x).item() for x in batches[5:]]  # not measured
    if dist.get_rank() == 0:
        sharded.dump(folder, profile)
        profile.trace(folder / "alone.json")
    step = profile.step
    return {
        "losses": losses,
        "steps": len(profile.steps),
        "text": str(profile),
        "seconds": step.end,
        "exposed": step.busy_nodes("wait"),
        "compute": step.busy_nodes("compute"),
        "units": sorted({span.name for span in step.spans}),
        "sent": len([span for span in step.nodes if span.lane == "network"]),
        "collectives": len(sharded.program.collectives),
    }


def main(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for lower in ("eager", "inductor"):
        plain, measured = trained(lower, None), trained(lower, Path(folder) / lower)
        found[lower] = {"plain": plain["losses"], **measured}
    return found


if __name__ == "__main__":
    answer(main)
