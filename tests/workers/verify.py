"""Steps of two ranks held against eager PyTorch; a case each; see ``ranks.py``.

torchrun --nproc-per-node 2 verify.py RESULT CASE [CASE ...]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compiled import Policy, compile_sharded, fully_shard
from fsdp_compiled.capture.guards import Guards
from fsdp_compiled.distributed import device_mesh
from fsdp_compiled.runtime.eager_run import EagerRun
from tests.cut_models import batch as tokens
from tests.cut_models import loss_fn, net
from tests.launch import told
from tests.stale_models import Backwards, set_scale
from tests.toys import mse as loss_of
from tests.toys import net as small
from tests.workers.ranks import RANK, main, run, unchanged

LARGEST = [0]  # elements of whole buffers that were alive at once


class Gained(nn.Module):
    """Some layers; another way, past the last of them, where ``gain`` is not 1."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(depth))
        self.head, self.gain = nn.Linear(8, 2), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if self.gain == 1.0 else self.layers[:-1]:
            x = layer(x)
        return self.head(x)


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y) + 0.01 * model.head.weight.square().sum()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(RANK)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 2, generator=generator)


def shard(mesh: DeviceMesh | None = None, depth: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Gained(depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = Policy(**{"lower": "eager", "verify": 1, "bucket_mb": 0, **options})
    return compile_sharded(model, optimizer, loss=mse, mesh=mesh, policy=policy)


def same_as_without() -> Any:
    found = []
    for options in ({}, {"shard": "ddp"}):
        pair = []
        for each in (1, False):
            sharded = shard(verify=each, **options)
            pair.append([float(sharded.step(*batch())) for _ in range(4)])
        found.append(pair[0] == pair[1])
    return found


def microbatches_as_without() -> Any:
    """Uneven rows, steps of one microbatch, and an evaluation after each step."""
    found = []
    for options in ({"shard": "zero2", "accumulate": "full"}, {"weigh": "rows"}):
        pair = []
        for each in (1, False):
            sharded, losses = shard(verify=each, **options), []
            for rows in ((2, 2, 4), (4,)):
                x, y = batch()
                for count in rows[:-1]:
                    losses.append(float(sharded.accumulate(x[:count], y[:count])))
                losses.append(float(sharded.step(x[: rows[-1]], y[: rows[-1]])))
                losses.append(float(sharded(x).sum()))
            pair.append(losses)
        found.append(pair[0] == pair[1])
    return found


def as_without(mesh: DeviceMesh | None = None, **options: Any) -> bool:
    """Steps of two microbatches, and what the model has learned."""
    pair = []
    generator = torch.Generator().manual_seed(RANK)
    x, y = torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)
    for each in (1, False):
        model = small()
        policy = Policy(lower="eager", verify=each, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sharded = compile_sharded(model, optimizer, loss=loss_of, mesh=mesh, policy=policy)
        losses = []
        for _ in range(2):
            losses += [sharded.accumulate(x[:3], y[:3]), sharded.step(x, y)]
        pair.append([*map(float, losses), *(float(one.sum()) for one in sharded.state.parameters.values())])
    return pair[0] == pair[1]


def wired() -> Any:
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return [as_without(mesh, wire="int8")]
    return [as_without(wire=form, shard=way, clip=0.5) for form, way in (("int8", "zero3"), ("fp8", "ddp"))]


def wrong_under_a_wire() -> Any:
    """A derivative of the other sign on one rank, of which neither the loss nor the norms of parts tell."""
    torch.manual_seed(0)
    model = Backwards()
    policy = Policy(lower="eager", verify=1, wire="int8")
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss_of, policy=policy)
    given = torch.ones(4, 6), torch.ones(4, 2)
    sharded.step(*given)
    Guards.hold = lambda _: True  # type: ignore[method-assign]
    set_scale(-1.0)
    try:
        return unchanged(sharded, lambda: sharded.step(*given))
    finally:
        set_scale(1.0)


def local_steps() -> Any:
    """Sites of a rank each, or of two; an exchange between them after each second step."""
    two = dist.get_world_size() == 2
    mesh = None if two else init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return as_without(mesh, shard="ddp" if two else "zero3", sync_every=2)


def stale_on_a_site() -> Any:
    """The other one hears of it where sites meet next."""
    sharded = shard(shard="ddp", sync_every=2, verify=2)
    for _ in range(3):
        sharded.step(*batch())
    Guards.hold = lambda _: True  # type: ignore[method-assign]
    if RANK:
        sharded.model.gain = 2.0
        sharded.step(*batch())  # which is not verified
        return unchanged(sharded, lambda: sharded.step(*batch()))
    for _ in range(3):
        sharded.step(*batch())
    return None


def at_once() -> Any:
    flat = EagerRun._flat

    def watched(self: Any, key: str) -> torch.Tensor:
        value = flat(self, key)
        LARGEST[0] = max(LARGEST[0], sum(one.numel() for one in self._alive.values()))
        return value

    EagerRun._flat = watched  # type: ignore[method-assign]
    sharded = shard(depth=8)
    sharded.step(*batch())
    EagerRun._flat = flat  # type: ignore[method-assign]
    return [LARGEST[0], sum(buffer.numel for buffer in sharded.plan.buffers)]


def stale(sharded: Any, call: Callable[..., Any], *ranks: int) -> Any:
    """The call where these ranks' model reads another value, and no guard looks, after a good one."""
    call(*batch())
    with mock.patch.object(Guards, "hold", lambda _: True):
        try:
            sharded.model.gain = 2.0 if RANK in ranks else 1.0
            return unchanged(sharded, lambda: call(*batch()))
        finally:
            sharded.model.gain = 1.0


def raises(sharded: Any) -> Any:
    """On one rank, in eager PyTorch, after some units were gathered, after a good call."""
    sharded.step(*batch())
    with mock.patch.object(Guards, "hold", lambda _: True):
        if RANK:
            sharded.model.layers[1].forward = lambda _: 1 / 0
        try:
            return unchanged(sharded, lambda: sharded.step(*batch()))
        finally:
            sharded.model.layers[1].__dict__.pop("forward", None)


def differences() -> dict[str, Any]:
    """Calls that are not what eager PyTorch does, one after another on the same model, which none of them changes."""
    sharded = shard()
    cases = {
        "stale_on_both": partial(stale, sharded, sharded.step, 0, 1),
        "stale_on_one": partial(stale, sharded, sharded.step, 1),
        "stale_in_an_evaluation_of_one": partial(stale, sharded, lambda x, _: sharded(x), 1),
        "raises_on_one": partial(raises, sharded),
    }
    found = {name: run(cases, name) for name in cases}
    cases = {"stale_in_a_microbatch_of_one": partial(stale, sharded, sharded.accumulate, 1)}
    return found | {name: run(cases, name) for name in cases}


def raises_on_one_along_tp() -> Any:
    """The other rank waits for it in a collective of the model's own."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    model = net(mesh["tp"])
    policy = Policy(lower="eager", verify=1)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss_fn, mesh=mesh, policy=policy)
    sharded.step(*tokens(0, 0))
    Guards.hold = lambda _: True  # type: ignore[method-assign]
    if RANK:
        model.down.forward = lambda _: 1 / 0  # type: ignore[method-assign, return-value]
    return unchanged(sharded, lambda: sharded.step(*tokens(1, 0)))


def different_meshes() -> Any:
    """Each face on a mesh that is another one on the other rank, then on one that is not."""
    mesh = DeviceMesh("cpu", [1, 0] if RANK else [0, 1])
    own = [told(lambda: fully_shard(nn.Linear(4, 4), mesh=mesh)), told(lambda: shard(mesh))]
    other = init_device_mesh("cpu", (1, 2) if RANK else (2, 1), mesh_dim_names=("replicate", "shard"))
    return [*own, told(lambda: shard(other)), float(shard(DeviceMesh("cpu", [0, 1])).step(*batch()))]


def another_order() -> Any:
    device_mesh._check_order = lambda _: None
    return float(shard(DeviceMesh("cpu", [1, 0])).step(*batch()))


def another_order_unseen() -> Any:
    device_mesh._check_order = lambda _: None
    return float(shard(DeviceMesh("cpu", [1, 0]), verify=False).step(*batch()))


main(globals())
