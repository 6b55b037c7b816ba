"""What loops may say to a sharded model beside training it, with FSDP2 and with this package, on real ranks.

torchrun --nproc-per-node 2 beside_fsdp2.py RESULT NAME...; four ranks for what needs replicas
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp_compiled as ours
from fsdp_compiled.ir.nodes import role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.lower.split_forward_backward import whole_gradients
from fsdp_compiled.runtime.programs import program_maker
from tests import launch
from tests.launch import of_all
from tests.loops import beside, full, gradients, same, weights

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
        net.step = int(step == 1)
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
def totals(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Of all ranks, which one buffer counts on; a mean and the most; this rank's own rows."""
    count, mean, most = torch.tensor(float(x.shape[0])), x.mean(), x.max()
    dist.all_reduce(count)
    self.seen.add_(count)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    y = self.inner(x)[dist.get_rank() :] * (1 + dist.get_rank())
    return y * count / self.seen * mean / most


@forward
def within_groups(self: Any, x: torch.Tensor) -> torch.Tensor:
    total = x.sum()
    dist.all_reduce(total, group=GROUPS[dist.get_rank()])
    most = x.max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return self.inner(x) * total / most


@forward
def features_of_all_ranks(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A contrastive loss, as open_clip gathers: derivatives come back through this rank's own rows alone."""
    y = self.inner(x)
    every = [torch.zeros_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(every, y)
    every[dist.get_rank()] = y
    whole, half = torch.empty(dist.get_world_size() * len(y), WIDTH), torch.empty(WIDTH // dist.get_world_size())
    dist.all_gather_into_tensor(whole, y.detach())
    dist.reduce_scatter_tensor(half, y.detach().mean(0))
    return y @ torch.cat(every).t() * (y @ whole.t()) * half.mean()


@forward
def features_with_derivatives(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.inner(x)
    return y @ torch.cat(differentiable.all_gather(y)).t() * differentiable.all_reduce(y.mean(0)).mean()


@forward
def in_a_checkpoint(self: Any, x: torch.Tensor) -> torch.Tensor:
    def inside(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        every = [torch.zeros_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(every, y)
        return y @ torch.cat(every).t() @ torch.cat(differentiable.all_gather(y))

    return self.c(checkpoint(inside, x, use_reentrant=False))


def functional_collectives(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.inner(x)
    return y * functional.all_reduce(y, "sum", dist.group.WORLD)


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
    return (Batch(rows(step), 2.0 if step else 1.0),), {}


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
precision("each_its_own", {"a": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
                           "b": MixedPrecisionPolicy(torch.float16), "c": REDUCED})  # fmt: skip
precision("root_apart", {"": MixedPrecisionPolicy()}, mp_policy=REDUCED)
precision("kept", {}, reshard_after_forward=False)


# What is said to a part, and to replicas.


def new_net(api: Any, hybrid: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    if hybrid:
        shape = (2, dist.get_world_size() // 2)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return mark(api, Net(), **options)


def same_net(api: Any, hybrid: bool = False) -> Any:
    return same(api, f"hybrid {hybrid}", lambda: new_net(api, hybrid))


def in_threes(net: Any, tell: Callable[[Any, int], None], found: list[Any], steps: int = 6) -> list[Any]:
    """``found``, with what a loop leaves that says something before each step; each third reduces all, and updates."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        tell(net, step)
        loss = net(rows(step)).float().square().mean()
        loss.backward()
        found.append(loss.detach())
        if step % 3 == 2:
            found += gradients(net)
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *weights(net)]


def told(name: str, tell: Callable[[Any, int], None], net: Callable[[Any], Any]) -> None:
    """A case: six such steps."""
    CASES[name] = lambda api: in_threes(net(api), tell, [])


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


told("a_part_waits", _part, same_net)
told("replicas_wait", _all_reduce, partial(same_net, hybrid=True))
told("replicas_wait_in_bfloat16", _all_reduce, partial(new_net, hybrid=True, mp_policy=REDUCED))
told("ranks_and_replicas_wait", _both, partial(same_net, hybrid=True))
told("parts_wait", _parts, partial(same_net, hybrid=True))
told("divided_by_three", _divide, partial(new_net, hybrid=True))


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


class Heads(Net):
    def forward(self, x: torch.Tensor, head: str = "b") -> torch.Tensor:
        return getattr(self, head)(torch.tanh(self.a(x)))


def new_heads(api: Any) -> Any:
    torch.manual_seed(0)
    return mark(api, Heads())


def held(name: str, *calls: tuple[Callable[[Any, int], torch.Tensor], Callable[[Any], Any] | None]) -> None:
    """A case: backwards hold gradients back, and the last one reduces. ``calls``: what is called, and what is done to
    the net before."""

    def run(api: Any) -> Any:
        net, found = same(api, "heads", lambda: new_heads(api)), list[Any]()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(3):
            for place, (call, before) in enumerate(calls):
                if before is not None:
                    before(net)
                net.set_requires_gradient_sync(place == len(calls) - 1)
                call(net, 3 * step + place).square().mean().backward()
                found += gradients(net)
            net.requires_grad_(True)
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *weights(net)]

    CASES[name] = run


held(
    "held_for_another_head",
    (lambda net, step: net(rows(step), "b"), None),
    (lambda net, step: net(rows(step), "c"), None),
)
held("held_for_a_part", (lambda net, step: net(rows(step), "c"), None), (lambda net, step: net.a(rows(step)), None))
held(
    "held_and_frozen",
    (lambda net, step: net(rows(step)), None),
    (lambda net, step: net(rows(step)), lambda net: net.b.requires_grad_(False)),
)
held(
    "held_and_a_bias_frozen",
    (lambda net, step: net(rows(step)), None),
    (lambda net, step: net(rows(step)), lambda net: net.b.bias.requires_grad_(False)),
)


@case
def never_called(api: Any) -> Any:
    """Parts that no forward has gathered yet have no gradient, and later ones zeros, from where these are asked for."""
    found = list[Any]()
    for asked in (0, 1):  # before this step
        net = new_heads(api)
        for step, head in enumerate("bcb"):
            if step == asked:
                net.set_reduce_scatter_unused_params(True)
            net(rows(step), head).square().mean().backward()
            found += gradients(net)
            net.zero_grad()
    return found


@case
def dropout_in_bfloat16(api: Any) -> Any:
    """Of which 1 / (1 - p) is another number than in float32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    return trained(api.fully_shard(net, mp_policy=REDUCED), lambda net, step: net(rows(step)))


@case
def watched(api: Any) -> Any:
    """CommDebugMode round each step, which sees collectives."""
    net, found = new_net(api), list[Any]()
    for step in range(3):
        with CommDebugMode() as mode:
            loss = net(rows(step)).square().mean()
            loss.backward()
        found += [loss.detach(), mode.get_total_counts() > 0, *gradients(net)]
    if api is ours:
        assert net._fsdp_compiled.calls["forward"].programs.captures == 1  # hooks of the mode are no new ones
    return found


# Hooks of all-reductions.


def together(api: Any) -> dict[str, Any]:
    """Has small neighbours sent together."""
    return {"policy": ours.Policy(lower="eager", cuda_graph=False, bucket_mb=1)} if api is ours else {}


def hooked(name: str, hybrid: bool = False, steps: int = 6, factor: float = 1.7, **options: Any) -> None:
    """A case: hooks note what they are given, of which module and dtype, and change it; one is there from the start."""

    def run(api: Any) -> Any:
        found: list[Any] = []

        def hook(name: str, reduced: torch.Tensor) -> None:
            found.extend((name, reduced.clone()))
            reduced.mul_(1.7 if api is theirs else factor).add_(0.01)

        def tell(net: Any, step: int) -> None:
            for name in {0: "b", 3: "ac"}.get(step, ""):
                getattr(net, name).set_all_reduce_hook(partial(hook, name))
            _both(net, step)

        return in_threes(new_net(api, hybrid, **options), tell, found, steps)

    CASES[name] = run


HALVES = {"a": {"mp_policy": REDUCED}, "b": {"mp_policy": MixedPrecisionPolicy(torch.float16)},
          "c": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}}  # fmt: skip
hooked("hooked_in_halves", parts=HALVES)
hooked("hooked_broken", steps=3, factor=1.7001)
hooked("hooked_replicas", hybrid=True, mp_policy=MixedPrecisionPolicy(torch.bfloat16))


@case
def hooked_neighbours(api: Any) -> Any:
    """Small modules, which lie side by side."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(12)))
    found: list[Any] = []
    for one in net:
        api.fully_shard(one, **together(api))
    api.fully_shard(net, **together(api))
    for place in (1, 2, 3, 9):
        net[place].set_all_reduce_hook(lambda one, place=place: found.extend((place, one.mul_(2).clone())))
    for step in range(2):
        loss = net(rows(step)).square().mean()
        loss.backward()
        found += [loss.detach(), *gradients(net)]
    if api is ours:
        units = [unit.members for unit in net._fsdp_compiled.calls["forward"].plan.units]
        assert ("1", "2", "3") in units, units
    return found


# Parameters of which ranks divide another dim than the first.


class Experts(nn.Module):
    """More ranks than experts, in a larger world: their weights are divided along another dim."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, 4, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, 4) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = torch.tanh(torch.einsum("rw,ehw->erh", self.norm(x), self.up))
        return x + torch.einsum("erh,ewh,re->rw", inside, self.down, self.router(x).softmax(-1))


def divided_at(parameter: nn.Parameter) -> Shard | None:
    """Of experts the second dim or the last, of weights the second; of the rest rows, which may be uneven."""
    if parameter.dim() == 3:
        return Shard(1) if parameter.shape[1] == WIDTH else Shard(-1)
    return Shard(1) if parameter.dim() == 2 else None


def mixture(api: Any, experts: int = 3, units: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(*(Experts(experts) for _ in range(units)), nn.Linear(WIDTH, 5))
    for one in net[:units]:
        api.fully_shard(one, shard_placement_fn=divided_at, **options, **(together(api) if units > 2 else {}))
    return api.fully_shard(net, shard_placement_fn=divided_at, **options)


def lying(net: Any) -> list[Any]:
    """What a loop sees of the parameters: placements, and this rank's parts of them and of their gradients."""
    found = list[Any]()
    for one in net.parameters():
        for tensor in (one, one.grad) if one.grad is not None else (one,):
            local = tensor.to_local().detach()
            found += [str(tensor.placements), local.stride(), local.clone()]
    return found


def other_dims(name: str, hybrid: bool = False, **options: Any) -> None:
    """A case: of three steps the last two reduce, the third over replicas too; gradients are clipped."""

    def run(api: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
        net = mixture(api, **(options | {"mesh": mesh} if hybrid else options))
        optimizer, found = torch.optim.AdamW(net.parameters(), lr=1e-2), lying(net)
        for step in range(3):
            _both(net, step)
            loss = net(rows(step)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
            if step == 2:
                found += [*lying(net), full(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))]
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    found.append(net(rows(9)))
        if "merged" in name and api is ours:
            units = net._fsdp_compiled.calls["forward"].plan.units
            assert any(len(unit.members) > 1 for unit in units), [unit.name for unit in units]
        return [*found, *weights(net)]

    CASES[name] = run


other_dims("other_dims")
other_dims("other_dims_merged", units=3, mp_policy=REDUCED)
other_dims("other_dims_on_replicas", hybrid=True, units=1)


@case
def other_dims_saved(api: Any) -> Any:
    """By DCP, and whole; what is unsharded, written and assigned."""
    net, again = mixture(api, units=1), mixture(api, units=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        net(rows(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save({"net": net.state_dict(), "state": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder[0])
    with torch.no_grad():
        for one in again.parameters():
            one.zero_()
    taken = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    state = {"net": again.state_dict(), "state": get_optimizer_state_dict(again, taken)}
    dcp.load(state, checkpoint_id=folder[0])
    set_optimizer_state_dict(again, taken, state["state"])
    again(rows(5)).square().mean().backward()
    found = lying(again)
    taken.step()
    again[0].unshard()
    found += [one.detach().clone() for one in (again[0].up, again[0].down, again[0].router.weight)]
    again[0].reshard()
    values = {name: distribute_tensor(full(one) * 2, one.device_mesh, one.placements) for name, one in
              again.state_dict().items()}  # fmt: skip
    again.load_state_dict(values, assign=True)
    again.zero_grad()
    again(rows(6)).square().mean().backward()
    return [*found, *lying(again)]


@case
def other_dims_cut(api: Any) -> Any:
    """Beside a tp axis, which cuts the same dim or another."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net: Any = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
    )
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    api.fully_shard(net, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
    found = lying(net)
    for step in range(2):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp")))
        loss = net(x).square().mean()
        loss.backward()
        found += [loss.detach()]
    return [*found, *lying(net)]


@case
def other_dims_uneven(api: Any) -> Any:
    """Refused by both; ours leaves the model as it was."""
    net = nn.Linear(5, 4)
    before = dict(net.named_parameters())
    try:
        api.fully_shard(net, shard_placement_fn=lambda one: Shard(one.dim() - 1))
    except NotImplementedError as error:
        assert api is theirs or (type(net) is nn.Linear and dict(net.named_parameters()) == before)
        return [str(error).split(":")[0].partition(" ")[2].partition(" ")[2]]
    return ["nothing"]


@case
def other_dims_broken(api: Any) -> Any:
    """A control: gradients are laid out by rows, whatever dim it is that ranks divide."""
    reduce: Any = importlib.import_module("fsdp_compiled.passes.reduce")
    known = reduce._by_rank

    def by_rows(edit: Any, slot: Any, gradient: Any, *more: Any) -> Any:
        return gradient if slot.leaf.shape == (4, WIDTH, 4) else known(edit, slot, gradient, *more)

    reduce._by_rank = by_rows if api is ours else known
    try:
        net = mixture(api, experts=4)
        net(rows(0)).square().mean().backward()
        return lying(net)
    finally:
        reduce._by_rank = known


@case
def broken(api: Any) -> Any:
    """A control: what must be noticed."""
    return trained(same_net(api), lambda net, step: net(rows(step)) * (1.0 if api is theirs else 1.0001))


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
        found[name] = launch.told(lambda net=net, given=given: net(given()))
    first = dist.get_rank() == 0
    for name in ("hook_of_one", "dim_of_one"):
        dim = int(first and name == "dim_of_one")
        net = mark(ours, Net(), shard_placement_fn=lambda one, dim=dim: Shard(dim * (one.dim() - 1)))
        if first and name == "hook_of_one":
            net.b.set_all_reduce_hook(print)
        found[name] = launch.told(lambda net=net: net(rows(0)))
    return found


REDUCTIONS: list[list[str]] = []  # that each backward without communication starts


def recorded(backward: Program) -> Program:
    made = whole_gradients(backward)
    REDUCTIONS.append([node.name for node in made.graph.nodes if role_of(node) == "reduce"])
    return made


def main(*names: str) -> dict[str, Any]:
    program_maker.whole_gradients = recorded
    made = [dist.new_group([*range(first, dist.get_world_size(), 2)]) for first in range(2)]  # on four, 0 and 2
    GROUPS.extend(made * (dist.get_world_size() // 2))
    found = {name: of_all(refused()) if name == "refused" else beside(CASES[name], theirs, ours) for name in names}
    return found | {"reductions": REDUCTIONS}


if __name__ == "__main__":
    launch.answer(main)
