"""By whom it is trained: this package, PyTorch's own means, and plain PyTorch on one process.

A rival is built from nothing but a `Setting`, so that each has its own copy of the same weights, and gives a `Step`:
one optimizer step on this rank's batch, which returns the loss. All use AdamW with the same numbers; where the
optimizer is eager, it is the fused one, the fastest that PyTorch has.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import fsdp_compiled
from bench.presets import Preset
from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.cli.rank import RankInfo

Step = Callable[[Tensor, Tensor], Tensor]
BOUND = 1e-5  # of two ways to compute the same in float32
ROUNDED = 3e-2  # where numbers are rounded on their way between ranks
ADAMW: Mapping[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Setting:
    preset: Preset
    here: RankInfo
    seed: int
    node: int = 1  # ranks of a node

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        with self.here.device:
            return self.preset.model()


@dataclass(frozen=True)
class Rival:
    name: str  # as --rivals has it
    title: str
    build: Callable[[Setting], Step]
    shards: bool = True
    compiles: bool = False  # needs a compiler on this machine
    ours: bool = False
    alone: bool = False  # rank 0 takes the whole batch, the others wait
    nodes: bool = False  # needs to know which ranks are of one node
    tp: bool = False  # ranks of a node have one batch, and parts of the model
    bound: float | None = BOUND  # relative, on the losses of its first steps; None: shown, and held to nothing


def _eager_step(setting: Setting, model: nn.Module, parameters: nn.Module) -> Step:
    """The loop that everybody writes, over a model that its wrapper has made parallel."""
    optimizer = AdamW(parameters.parameters(), fused=True, **ADAMW)
    loss_of = setting.preset.loss

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(setting: Setting) -> Step:
    model = setting.model()
    return _eager_step(setting, model, model)


def ddp(compiled: bool, hook: Callable[[], tuple[Any, Any]] | None = None) -> Callable[[Setting], Step]:
    """``hook``: makes what reduces a bucket of gradients, and its state."""

    def build(setting: Setting) -> Step:
        model, device = setting.model(), setting.here.device
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers gets another name in torch 2.13
            parallel = DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,  # half the memory for gradients, and a copy less, than the default
                broadcast_buffers=False,  # the models' are constants, which no other rival sends
            )
        if hook is not None:
            state, reduce = hook()
            parallel.register_comm_hook(state, reduce)
        return _eager_step(setting, torch.compile(parallel) if compiled else parallel, model)

    return build


def bf16_hook() -> tuple[Any, Any]:
    """Under a name of its own: DDP refuses PyTorch's by name except over NCCL, though gloo adds up bfloat16 too."""

    def compressed(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return default_hooks.bf16_compress_hook(state, bucket)

    return None, compressed


def power_sgd_hook() -> tuple[Any, Any]:
    """Matrices of rank 4 in the place of gradients from the third step on, the first that PyTorch allows; what they
    leave out is added to the next gradient."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


def by_units(
    shard: Callable[..., Any], compiled: bool = False, hybrid: bool = False, precision: Any = None, **root: Any
) -> Callable[[Setting], Step]:
    """The script that is written for FSDP2, with its `fully_shard` or ours; ``root``: what the last call is given.

    ``hybrid``: sharded inside of nodes, replicated across them.
    """
    alike: dict[str, Any] = {} if precision is None else {"mp_policy": precision}

    def build(setting: Setting) -> Step:
        model = setting.model()
        mesh = mesh_of(setting, hybrid)
        for block in setting.preset.blocks(model):
            if compiled:
                block.compile()
            shard(block, mesh=mesh, **alike)
        shard(model, mesh=mesh, **alike, **root)
        return _eager_step(setting, model, model)

    return build


def mesh_of(setting: Setting, hybrid: bool) -> DeviceMesh:
    world, device = setting.here.world, setting.here.device.type
    if not hybrid:
        return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (world // setting.node, setting.node), mesh_dim_names=("replicate", "shard"))


def ours(lower: str, hybrid: bool = False, **policy: Any) -> Callable[[Setting], Step]:
    def build(setting: Setting) -> Step:
        model = setting.model()
        optimizer = AdamW(model.parameters(), **ADAMW)
        chosen, mesh = Policy(lower=lower, **policy), mesh_of(setting, True) if hybrid else None
        return compile_sharded(model, optimizer, loss=setting.preset.loss, mesh=mesh, policy=chosen).step

    return build


def ours_cut(lower: str) -> Callable[[Setting], Step]:
    """Tensor parallelism inside of nodes, sharding across them."""

    def build(setting: Setting) -> Step:
        model, here = setting.model(), setting.here
        shape = (here.world // setting.node, setting.node)
        mesh = init_device_mesh(here.device.type, shape, mesh_dim_names=("shard", "tp"))
        policy = Policy(lower=lower, tp=setting.preset.tp)
        optimizer = AdamW(model.parameters(), **ADAMW)
        return compile_sharded(model, optimizer, loss=setting.preset.loss, mesh=mesh, policy=policy).step

    return build


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
REFERENCE = "ours-eager"  # whose losses every rival must have

RIVALS = {
    rival.name: rival
    for rival in (
        Rival("eager", "plain PyTorch, one process", plain, shards=False, alone=True),
        Rival("ddp", "DDP", ddp(False), shards=False),
        Rival("ddp-compile", "DDP + torch.compile", ddp(True), shards=False, compiles=True),
        Rival("ddp-bf16", "DDP, bf16 on the wire", ddp(False, bf16_hook), shards=False, bound=ROUNDED),
        Rival("ddp-powersgd", "DDP, PowerSGD of rank 4", ddp(False, power_sgd_hook), shards=False, bound=None),
        Rival("fsdp2", "FSDP2", by_units(fully_shard)),
        Rival("fsdp2-compile", "FSDP2 + torch.compile per block", by_units(fully_shard, compiled=True), compiles=True),
        Rival("ours-eager", "this package, eager", ours("eager"), ours=True),
        Rival("ours-eager-no-prefetch", "this package, eager, no prefetch", ours("eager", prefetch=0), ours=True),
        Rival("ours", "this package, inductor", ours("inductor"), compiles=True, ours=True),
        Rival(
            "ours-tp-eager",
            "this package, tensor parallelism, eager",
            ours_cut("eager"),
            ours=True,
            nodes=True,
            tp=True,
        ),
        Rival(
            "ours-tp",
            "this package, tensor parallelism, inductor",
            ours_cut("inductor"),
            compiles=True,
            ours=True,
            nodes=True,
            tp=True,
        ),
        Rival(
            "ours-no-prefetch",
            "this package, inductor, no prefetch",
            ours("inductor", prefetch=0),
            compiles=True,
            ours=True,
        ),
        Rival(
            "ours-loop-eager",
            "this package, the user's loop, eager",
            by_units(fsdp_compiled.fully_shard, policy=Policy(lower="eager")),
            ours=True,
        ),
        Rival(
            "ours-loop",
            "this package, the user's loop, inductor",
            by_units(fsdp_compiled.fully_shard, policy=Policy(lower="inductor")),
            compiles=True,
            ours=True,
        ),
        Rival("fsdp2-hsdp", "FSDP2, replicas", by_units(fully_shard, hybrid=True), nodes=True),
        Rival("fsdp2-bf16", "FSDP2, bf16", by_units(fully_shard, precision=BF16), bound=ROUNDED),
        Rival(
            "fsdp2-hsdp-bf16",
            "FSDP2, replicas, bf16",
            by_units(fully_shard, hybrid=True, precision=BF16),
            nodes=True,
            bound=ROUNDED,
        ),
        *(
            Rival(
                f"ours{short}",
                f"this package, inductor{long}",
                ours("inductor", **options),
                compiles=True,
                ours=True,
                nodes="hybrid" in options,
                bound=ROUNDED if {"precision", "wire"} & set(options) else BOUND,
            )
            for short, long, options in (
                ("-hsdp", ", replicas", {"hybrid": True}),
                ("-bf16", ", bf16", {"precision": BF16}),
                ("-hsdp-bf16", ", replicas, bf16", {"hybrid": True, "precision": BF16}),
                ("-int8", ", int8 on the wire", {"wire": "int8"}),
                ("-hsdp-int8", ", replicas, int8 on the wire", {"hybrid": True, "wire": "int8"}),
            )
        ),
    )
}
