"""Trains one step on real ranks and says which program, plan and peak rank 0 has.

``torchrun simulated.py RESULT``
"""

from __future__ import annotations

import torch

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss
from tests.launch import answer

CASES = {
    "as it comes": Policy(),  # with the Inductor lowering
    "zero2": Policy(shard="zero2", lower="eager"),
    "8-bit wire": Policy(wire="int8", lower="eager"),
    "clip": Policy(clip=1.0, lower="eager", bucket_mb=0),
}


def model() -> GPT:
    return GPT(GPTConfig(layers=2, width=64, heads=2, context=32))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 32, dtype=torch.int64), torch.zeros(2, 32, dtype=torch.int64)


def told() -> dict[str, dict[str, object]]:
    found = {}
    for name, policy in CASES.items():
        net = model()
        sharded = compile_sharded(net, torch.optim.AdamW(net.parameters()), loss=next_byte_loss, policy=policy)
        sharded.step(*batch())
        found[name] = {
            "program": str(sharded.program),
            "text": sharded.program.text(),
            "plan": str(sharded.plan),
            "peak": sharded.memory.peak.nbytes,
        }
    return found


if __name__ == "__main__":
    answer(told)
