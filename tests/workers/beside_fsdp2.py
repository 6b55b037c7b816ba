"""What loops may say to a sharded model beside training it, with FSDP2 and with this package, on real ranks.

torchrun --nproc-per-node 2 beside_fsdp2.py RESULT NAME...; four ranks for what needs replicas
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.fsdp as theirs
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import fsdp_compiled as ours
from tests.loops import different, full, gradients, weights

WIDTH = 8
Call = Callable[[nn.Module, int], torch.Tensor]
CASES: dict[str, Callable[[Any], Any]] = {}
GROUPS: list[Any] = []
REDUCED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def rows(step: int) -> torch.Tensor:
    """Another batch on each rank."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def mark(api: Any, net: Any, parts: dict[str, Any] | None = None, **options: Any) -> Any:
    for name in ("a", "b", "c"):
        api.fully_shard(getattr(net, name), **(options | (parts or {}).get(name, {})))
    return api.fully_shard(net, **(options | (parts or {}).get("", {})))


def trained(net: Any, call: Call) -> list[Any]:
    optimizer, found = torch.optim.AdamW(net.parameters(), lr=1e-2), list[Any]()
    for step in range(3):
        loss = call(net, step).float().square().mean()
        loss.backward()
        found += [loss.detach(), *gradients(net)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *weights(net)]


def case(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    CASES[function.__name__] = function
    return function


def forward(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A case: a net with this forward is trained."""

    def run(api: Any) -> Any:
        torch.manual_seed(0)
        own = type("Own", (Net,), {"forward": function})
        return trained(mark(api, own()), lambda net, step: net(rows(step)))

    CASES[function.__name__] = run
    return function


def arguments(function: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
    """A case: a net is called with what this gives, step by step, beside its rows."""

    def run(api: Any) -> Any:
        torch.manual_seed(0)
        return trained(mark(api, Takes()), lambda net, step: net(*function(step)[0], **function(step)[1]))

    CASES[function.__name__] = run
    return function


class Stop(Exception):
    """What a user's own code raises and catches."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped at step {step}")
        self.step = step


@case
def stopped(api: Any) -> Any:
    """Forward raises at the second step; the loop catches it, and trains on."""

    class Stops(Net):
        step = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if self.step == 1:
                raise Stop(self.step)
            return y

    def call(net: Any, step: int) -> torch.Tensor:
        net.step = step
        return net(rows(step))

    torch.manual_seed(0)
    net = mark(api, Stops())
    try:
        trained(net, call)
    except Stop as error:
        return [torch.tensor(float(error.step)), *weights(net), *trained(net, lambda net, step: call(net, 2 * step))]


@case
def sampled(api: Any) -> Any:
    """A time that is a Python float moves from call to call, in the end each rank's own: one program is made."""
    torch.manual_seed(0)
    own = type("Own", (Net,), {"forward": lambda self, x, time: x + self.inner(x) * time})
    net, x, found = mark(api, own()), rows(0), []
    with torch.no_grad():
        for step in range(8):
            x = net(x, 1 - step / 8 if step < 6 else 1 / (step + dist.get_rank()))
            found.append(x)
    if api is ours:
        assert net._fsdp_compiled.calls["forward"].programs.captures == 1
    return found


# Collectives in forward.


@forward
def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Of all ranks; one buffer counts on."""
    count = torch.tensor(float(x.shape[0]))
    dist.all_reduce(count)
    self.seen.add_(count)
    return self.inner(x) * count / self.seen


@forward
def means_and_most(self: Any, x: torch.Tensor) -> torch.Tensor:
    mean, most = x.mean(), x.max()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return self.inner(x) * mean / most


@forward
def features_of_all_ranks(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A contrastive loss, as open_clip gathers: derivatives come back through this rank's own rows alone."""
    y = self.inner(x)
    every = [torch.zeros_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(every, y)
    every[dist.get_rank()] = y
    return y @ torch.cat(every).t()


@forward
def features_with_derivatives(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.inner(x)
    return y @ torch.cat(differentiable.all_gather(y)).t() * differentiable.all_reduce(y.mean(0)).mean()


@forward
def functional_collectives(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.inner(x)
    return y * functional.all_reduce(y, "sum", dist.group.WORLD)


@forward
def into_one_tensor(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.inner(x)
    whole, half = torch.empty(dist.get_world_size() * len(y), WIDTH), torch.empty(WIDTH // dist.get_world_size())
    dist.all_gather_into_tensor(whole, y.detach())
    dist.reduce_scatter_tensor(half, y.detach().mean(0))
    return y @ whole.t() * half.mean()


@forward
def within_groups(self: Any, x: torch.Tensor) -> torch.Tensor:
    total = x.sum()
    dist.all_reduce(total, group=GROUPS[dist.get_rank()])
    return self.inner(x) * total


@forward
def in_a_checkpoint(self: Any, x: torch.Tensor) -> torch.Tensor:
    def inside(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        every = [torch.zeros_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(every, y)
        return y @ torch.cat(every).t() @ torch.cat(differentiable.all_gather(y))

    return self.c(checkpoint(inside, x, use_reentrant=False))


@forward
def rank_of(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x)[dist.get_rank() :] * (1 + dist.get_rank())


@case
def accumulated_and_evaluated(api: Any) -> Any:
    torch.manual_seed(0)
    net: Any = mark(api, type("Own", (Net,), {"forward": functional_collectives})())
    found: list[Any] = []
    for step in range(4):
        with torch.no_grad():
            found.append(net(rows(9)))
        net.set_requires_gradient_sync(step % 2 == 1)
        loss = net(rows(step)).square().mean()
        loss.backward()
        found += [loss.detach(), *(gradients(net) if step % 2 else ())]
    return found


# Arguments of forward.


@dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0


@dataclass(frozen=True)
class Outer:
    batch: Batch
    names: frozenset[str]


class Takes(Net):
    def forward(self, given: Any, *more: Any, by: Any = None) -> torch.Tensor:
        if isinstance(given, Outer):
            return self.inner(given.batch.x) * (given.batch.scale if "a" in given.names else 1.0)
        if isinstance(given, Batch):
            return self.inner(given.x) * given.scale
        if isinstance(given, list):
            return self.inner(given[0].x + given[1].x)
        factor = torch.from_numpy(by) if isinstance(by, np.ndarray) else 1.0
        return self.inner(given) * factor * (2 if more and "a" in more[0] else 1)


@arguments
def dataclasses(step: int) -> Any:
    return (Batch(rows(step), 1.0 + step),), {}


@arguments
def nested_dataclasses(step: int) -> Any:
    return (Outer(Batch(rows(step)), frozenset("ab" if step < 2 else "b")),), {}


@arguments
def lists_of_dataclasses(step: int) -> Any:
    return ([Batch(rows(step)), Batch(rows(step + 1))],), {}


@arguments
def sets(step: int) -> Any:
    return (rows(step), {"a", "b"} if step < 2 else {"b"}), {}


@arguments
def arrays(step: int) -> Any:
    return (rows(step),), {"by": np.full((2 * WIDTH,), step + 1.0, np.float32)[::2]}


# Dtypes of parts.


def precision(name: str, parts: dict[str, MixedPrecisionPolicy], **options: Any) -> None:
    def run(api: Any) -> Any:
        torch.manual_seed(0)
        own = {part: {"mp_policy": policy} for part, policy in parts.items()}
        return trained(mark(api, Net(), own, **options), lambda net, step: net(rows(step)))

    CASES[name] = run


precision("reduced_otherwise", {"b": REDUCED}, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
precision("reductions_alone", {"b": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)})
precision("root_apart", {"": MixedPrecisionPolicy()}, mp_policy=REDUCED)
precision("three_dtypes", {"a": REDUCED, "b": MixedPrecisionPolicy(torch.float16),
                           "c": MixedPrecisionPolicy(torch.float32)})  # fmt: skip
precision("uniform", {}, mp_policy=REDUCED)
precision("kept", {}, reshard_after_forward=False)


# What is said to a part, and to replicas.


def told(name: str, tell: Callable[[Any, int], None], hybrid: bool = False, **options: Any) -> None:
    """A case: before each of six steps; the third and the last reduce all, and update."""

    def run(api: Any) -> Any:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
        net = mark(api, Net(), **(options | {"mesh": mesh} if hybrid else options))
        optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), list[Any]()
        for step in range(6):
            tell(net, step)
            loss = net(rows(step)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
            if step % 3 == 2:
                found += gradients(net)
                optimizer.step()
                optimizer.zero_grad()
        return [*found, *weights(net)]

    CASES[name] = run


def _part(net: Any, step: int) -> None:
    net.b.set_requires_gradient_sync(step % 3 == 2)


def _all_reduce(net: Any, step: int) -> None:
    net.set_requires_all_reduce(step % 3 == 2)


def _both(net: Any, step: int) -> None:
    net.set_requires_gradient_sync(step % 3 != 0)
    net.set_requires_all_reduce(step % 3 == 2)


def _parts(net: Any, step: int) -> None:
    net.b.set_requires_all_reduce(step % 3 == 2)
    net.c.set_requires_gradient_sync(step % 3 == 2)


def _divide(net: Any, step: int) -> None:
    for one in (net.a, net.b, net.c):
        one.set_force_sum_reduction_for_comms(True)
        one.set_gradient_divide_factor(3.0)


told("a_part_waits", _part)
told("replicas_wait", _all_reduce, hybrid=True)
told("replicas_wait_in_bfloat16", _all_reduce, hybrid=True, mp_policy=REDUCED)
told("ranks_and_replicas_wait", _both, hybrid=True)
told("parts_wait", _parts, hybrid=True)
told("divided_by_three", _divide, hybrid=True)


@case
def neighbours_wait(api: Any) -> Any:
    """Of many small modules, which lie side by side, some wait."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(12)))
    for one in net:
        api.fully_shard(one)
    api.fully_shard(net)
    found: list[Any] = []
    for step in range(4):
        for place in (2, 5, 6):
            net[place].set_requires_gradient_sync(step % 2 == 1)
        loss = net(rows(step)).square().mean()
        loss.backward()
        others = (one for place in (0, 1, 3, 4, 7, 8) for one in net[place].parameters())
        found += [loss.detach(), *(gradients(net) if step % 2 else [full(one.grad) for one in others])]
    return found


@case
def watched(api: Any) -> Any:
    """CommDebugMode round each step, which sees collectives."""
    torch.manual_seed(0)
    net, found = mark(api, Net()), list[Any]()
    for step in range(3):
        with CommDebugMode() as mode:
            loss = net(rows(step)).square().mean()
            loss.backward()
        found += [loss.detach(), mode.get_total_counts() > 0, *gradients(net)]
    if api is ours:
        assert net._fsdp_compiled.calls["forward"].programs.captures == 1  # hooks of the mode are no new ones
    return found


@case
def broken(api: Any) -> Any:
    """A control: what must be noticed."""
    torch.manual_seed(0)
    return trained(mark(api, Net()), lambda net, step: net(rows(step)) * (1.0 if api is theirs else 1.0001))


def refused() -> dict[str, str]:
    """What each of these says here, at the first call."""

    def written(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.inner(x).square().mean()
        dist.all_reduce(loss)
        return loss

    def changed(self: Any, given: Any) -> torch.Tensor:
        given.scale = 3.0
        return self.inner(given.x)

    found: dict[str, str] = {}
    for name, function, given in (
        ("written", written, lambda: rows(0)),
        ("changed", changed, lambda: Batch(rows(0))),
        ("scalar", Net.forward, lambda: np.float32(1)),
    ):
        net = mark(ours, type("Own", (Net,), {"forward": function})())
        try:
            net(given())
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main(result: str, names: list[str]) -> None:
    GROUPS.extend(dist.new_group([rank]) for rank in range(dist.get_world_size()))
    found: dict[str, Any] = {}
    for name in names:
        if name == "refused":
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, refused())
            found[name] = everyone
            continue
        try:
            said = different(CASES[name](theirs), CASES[name](ours))
        except Exception:
            said = traceback.format_exc()[-3000:]
            print(name, said, file=sys.stderr, flush=True)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, said)
        found[name] = next((f"rank {rank}: {one}" for rank, one in enumerate(everyone) if one), "")
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1], sys.argv[2:])
    dist.destroy_process_group()
