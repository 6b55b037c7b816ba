"""Training with what is sent in one byte an element, beside the same done by hand with eager PyTorch and its own
rounding: per parameter, in blocks of 128, with a hash in plain Python integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.ir.nodes import purpose_of
from tests.launch import answer, of_all
from tests.toys import Batch, build, mse

STEPS = 3
EAGER = {"lower": "eager", "bucket_mb": 0}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "zero3": ({}, (2,)),
    "zero3 fp8": ({"wire": "fp8"}, (2,)),
    "zero2": ({"shard": "zero2", "prefetch": 1}, (2,)),
    "zero1": ({"shard": "zero1"}, (2,)),
    "ddp": ({"shard": "ddp"}, (2,)),
    "replicas": ({}, (2, 1)),
    "limit": ({"limit": 1, "prefetch": 0}, (2,)),
    "verified": ({"verify": True, "verify_difference": "recapture"}, (2,)),
    "forward verified": ({"verify": True, "verify_gradients": False}, (2,)),
    "measured": ({"network": "measure"}, (2,)),
    "little memory": ({"memory_gb": 1e-6}, (2,)),
    "sizes that move": ({"dynamic": True}, (2,)),
    "few programs": ({"programs": 1}, (2,)),
    "bfloat16": ({"precision": BF16}, (2,)),
    "inductor": ({"lower": "inductor"}, (2,)),
}


def noise(first: int, numel: int, seed: int, salt: int) -> torch.Tensor:
    """By a hash of 32 bits, element by element."""
    mask = np.uint64(0xFFFFFFFF)

    def mixed(x: Any) -> Any:
        x = (x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D) & mask
        x = (x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B) & mask
        return x ^ (x >> np.uint64(16))

    key = mixed(np.array([(seed + salt) & 0xFFFFFFFF], dtype=np.uint64))
    key = mixed(key ^ np.uint64(seed >> 32))
    places = np.arange(first, first + numel, dtype=np.uint64)
    x = mixed((places * np.uint64(0x9E3779B9) + key) & mask) >> np.uint64(8)
    return torch.from_numpy(x.astype(np.float32) / np.float32(2**24))


def rounded(value: torch.Tensor, form: str, up: torch.Tensor | float = 0.5) -> torch.Tensor:
    """The value after the wire: each 128 of its elements by their largest."""
    flat = nn.functional.pad(value.flatten().float(), (0, -value.numel() % 128)).view(-1, 128)
    largest = 127.0 if form == "int8" else 448.0
    scale = flat.abs().amax(1, keepdim=True) / largest
    parts = torch.where(scale == 0, 0.0, flat / scale)
    step = torch.tensor(1.0)
    if form == "fp8":
        step = torch.exp2(parts.abs().clamp(min=2.0**-6).log2().floor() - 3)
    if isinstance(up, torch.Tensor):
        up = nn.functional.pad(up, (0, flat.numel() - up.numel())).view(-1, 128)
    parts = ((parts / step + up).floor() * step).clamp(-largest, largest)
    if form == "fp8":
        assert torch.equal(parts.to(torch.float8_e4m3fn).float(), parts)
    return (parts * scale).flatten()[: value.numel()].view(value.shape).to(value.dtype)


def batches(rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(6, 24, generator=generator), torch.randn(6, 2, generator=generator)) for _ in range(STEPS)]


def seeds_of(sharded: Sharded) -> dict[str, list[int]]:
    """By buffer, the salts of its packed gradients: of the parts that are exchanged, and of their sums."""
    found: dict[str, list[int]] = {}
    for node in sharded.program.marked("pack"):
        if "pack" in str(node.target) and len(node.args) == 4:
            found.setdefault(node.meta["mark"].buffer, []).append(node.args[3])
    return found


def by_hand(
    sharded: Sharded, policy: Policy, mesh: tuple[int, ...], random: bool = True, weights: bool = True
) -> dict[str, torch.Tensor]:
    """The same training in eager PyTorch, all ranks' batches in each process."""
    form, world, shard = policy.wire, dist.get_world_size(), mesh[-1]
    assert form is not None
    model = build(width=24)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    salts, plan = seeds_of(sharded), sharded.plan
    slots = {slot.name: (buffer, slot.offset) for buffer in plan.buffers for slot in buffer.slots}
    data = [batches(rank) for rank in range(world)]
    cut = plan.placement.parameter and shard > 1
    for step in range(STEPS):
        master = {name: one.detach().clone() for name, one in model.named_parameters()}
        sums = {name: torch.zeros_like(one) for name, one in master.items()}
        for rank in range(world):
            place = rank % shard
            compute = plan.compute_dtype(plan.buffers[0])
            sent = {name: one.to(compute) for name, one in master.items()}
            if cut and weights:
                sent = {name: rounded(one, form) for name, one in sent.items()}
            sent = {name: one.requires_grad_() for name, one in sent.items()}
            x, y = data[rank][step]
            loss = mse(lambda x, sent=sent: torch.func.functional_call(model, sent, (x,)), x.to(compute), y)  # type: ignore[arg-type, misc]
            gradients = torch.autograd.grad(loss, list(sent.values()))
            for name, gradient in zip(sent, gradients, strict=True):
                buffer, offset = slots[name]
                up: torch.Tensor | float = 0.5
                if random:
                    up = noise(offset, gradient.numel(), (step << 20) * shard + place, salts[buffer.key][0])
                sums[name] += rounded(gradient.float(), form, up)
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / world
            if not plan.placement.gradient or len(mesh) == 2:
                buffer, offset = slots[name]
                parameter.grad = sum_sent(parameter.grad, buffer, offset, step, world, shard, salts, form)
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.detach() for name, one in model.named_parameters()}


def sum_sent(
    mean: torch.Tensor, buffer: Any, offset: int, step: int, world: int, shard: int, salts: Any, form: str
) -> torch.Tensor:
    """The mean as ranks send each other their parts of it: its places count from the start of a part."""
    part = -(-buffer.numel // world)
    up = []
    for rank in range(world):
        seed = (step << 20) * shard + rank % shard
        up.append(noise(0, part, seed, salts[buffer.key][1]))
    return rounded(mean, form, torch.cat(up)[offset : offset + mean.numel()])


def trained(policy: Policy, mesh: tuple[int, ...]) -> Sharded:
    model = build(width=24)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    names = ("shard",) if len(mesh) == 1 else ("replicate", "shard")
    sharded = compile_sharded(
        model, optimizer, loss=mse, policy=policy, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names)
    )
    for batch in batches(dist.get_rank()):
        sharded.step(*batch)
    return sharded


def compared(given: dict[str, Any], mesh: tuple[int, ...]) -> dict[str, Any]:
    policy = Policy(**{**EAGER, "wire": "int8", **given})
    sharded = trained(policy, mesh)
    expected = by_hand(sharded, policy, mesh)
    with sharded.gathered() as model:
        mine = {name: one.detach().clone() for name, one in model.named_parameters()}
    controls = {
        "nearest": by_hand(sharded, policy, mesh, random=False),
        "own weights": by_hand(sharded, policy, mesh, weights=False),
    }
    whole = sharded.full_state_dict() or expected  # which rank 0 alone has, in the dtype of the shards

    def off(other: dict[str, torch.Tensor]) -> float:
        return max((whole[name] - one).abs().max().item() for name, one in other.items())

    everyone = of_all({name: one.tolist() for name, one in mine.items()})
    return {
        "off": off(expected),
        "size": max(one.abs().max().item() for one in expected.values()),
        "controls": {name: off(other) for name, other in controls.items()},
        "alike": everyone[0] == everyone[-1],
        "gathers that end sums": sum(purpose_of(node) == "gather" for node in sharded.program.marked("reduce")),
        "collectives": sharded.program.collectives,
    }


def main(*names: str) -> dict[str, Any]:
    return {name: compared(*CASES[name]) for name in names or CASES}


if __name__ == "__main__":
    answer(main)
