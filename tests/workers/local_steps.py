"""Local steps beside a loop that a person would write: sites of ranks, an optimizer in each, an outer one over them.

``local_steps.py RESULT``: all cases for this number of ranks, each rank's answers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import OuterSGD, Policy, Sharded, compile_sharded
from tests.launch import answer, of_all, told

EVERY, STEPS = 3, 7  # the last step is between exchanges


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.out(self.norm(x))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


@dataclass(frozen=True)
class Case:
    shard: str = "zero3"
    flat: bool = False  # a mesh of one axis
    optimizer: str = "sgd"
    outer: OuterSGD | None = None
    clip: float | None = None
    parts: int = 1  # microbatches
    lower: str = "eager"
    wire: Any = None


TWO = {
    "each rank, ddp": Case("ddp", flat=True, optimizer="adamw"),
    "each rank, a mesh": Case(optimizer="adamw"),
    "means": Case("ddp", flat=True, outer=OuterSGD(1.0, 0.0, False)),
    "heavy ball": Case("ddp", flat=True, outer=OuterSGD(0.5, 0.8, False)),
    "microbatches and clipping": Case(clip=0.5, parts=2),
    "inductor": Case(optimizer="adamw", lower="inductor"),
    "late": Case("ddp", flat=True, optimizer="adamw", outer=OuterSGD(overlap=2)),
    "parts": Case("ddp", flat=True, outer=OuterSGD(parts=3)),
    "late parts": Case("ddp", flat=True, outer=OuterSGD(0.5, 0.8, False, parts=2, overlap=2)),
    "inductor, late": Case(optimizer="adamw", lower="inductor", outer=OuterSGD(overlap=1)),
}
FOUR = {
    "zero3": Case(optimizer="adamw"),
    "zero2": Case("zero2"),
    "zero1": Case("zero1"),
    "ddp": Case("ddp"),
    "clipping": Case(clip=0.5),
    "late parts": Case(optimizer="adamw", outer=OuterSGD(parts=3, overlap=1)),
}


def inner(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), 0.01)
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def batches(parts: int = 1, steps: int = STEPS) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of this rank, by step: its microbatches."""
    numbers = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(steps):
        yield [(torch.randn(4, 8, generator=numbers), torch.randn(4, 3, generator=numbers)) for _ in range(parts)]


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded_of(case: Case, every: int = EVERY) -> Sharded:
    own = model()
    mesh = None if case.flat else init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=AXES)
    policy = Policy(case.shard, lower=case.lower, clip=case.clip, sync_every=every, outer=case.outer, wire=case.wire)
    return compile_sharded(own, inner(case, own), loss=loss_of, mesh=mesh, policy=policy)


AXES = ("replicate", "shard")


def trained(case: Case) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses; after an exchange at the end, weights; and this rank's buffers."""
    sharded = sharded_of(case)
    schedule = torch.optim.lr_scheduler.StepLR(sharded.optimizer, 2, 0.7)
    losses = []
    for *first, last in batches(case.parts):
        for one in first:
            sharded.accumulate(*one)
        losses.append(float(sharded.step(*last)))
        schedule.step()
    sharded.synchronize()
    with sharded.gathered() as whole:
        weights = {name: value.detach().clone() for name, value in whole.named_parameters()}
    return losses, weights, {name: value.clone() for name, value in sharded.model.named_buffers()}


@functools.cache
def parts_of(case: Case) -> list[tuple[int, list[str]]]:
    """The names of the parameters that are exchanged together, each with the step of a round after which."""
    plan = sharded_of(case).plan
    return [(step, [slot.name for buffer in part for slot in buffer.slots]) for step, part in plan.exchanged]


class Sites:
    """The exchange in plain PyTorch. ``lr``: another rate; ``crosses``: whether sites exchange."""

    def __init__(
        self, case: Case, named: dict[str, nn.Parameter], across: Any, lr: float | None, crosses: bool
    ) -> None:
        self.outer, self.named, self.across, self.crosses = case.outer or OuterSGD(), named, across, crosses
        self.parts = parts_of(case)
        self.anchors = {name: nn.Parameter(one.detach().clone()) for name, one in named.items()}
        numbers = {"momentum": self.outer.momentum, "nesterov": self.outer.nesterov}
        self.moves = {
            name: torch.optim.SGD([one], lr or self.outer.lr, **numbers) for name, one in self.anchors.items()
        }
        self.sent: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def send(self, names: list[str]) -> None:
        for name in names:
            own = self.anchors[name].detach() - self.named[name].detach()
            mean = own.clone()
            if self.crosses:
                dist.all_reduce(mean, dist.ReduceOp.AVG, self.across)
            self.sent[name] = own, mean

    @torch.no_grad()
    def arrive(self, names: list[str], late: bool) -> None:
        for name in names:
            before = self.anchors[name].detach().clone()
            own, self.anchors[name].grad = self.sent.pop(name)
            self.moves[name].step()
            anchor, parameter = self.anchors[name], self.named[name]
            parameter.copy_(parameter + ((anchor - before) + own) if late else anchor)

    def after(self, number: int, last: bool) -> None:
        for step, names in self.parts:
            if self.sent.keys() & set(names) and (last or (number - step - self.outer.overlap) % EVERY == 0):
                self.arrive(names, late=True)
        for step, names in self.parts:
            if not last and (number - step) % EVERY == 0 and number >= step:
                self.send(names)
                if not self.outer.overlap:
                    self.arrive(names, late=False)
        if last:
            self.send(list(self.named))
            self.arrive(list(self.named), late=False)


def by_hand(case: Case, lr: float | None = None, crosses: bool = True) -> tuple[list[float], Any, Any]:
    """The same in plain PyTorch."""
    ranks = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, ranks), mesh_dim_names=AXES)
    site, across = mesh.get_group("shard"), mesh.get_group("replicate")
    own = model()
    optimizer = inner(case, own)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    parameters = list(own.parameters())
    sites = Sites(case, dict(own.named_parameters()), across, lr, crosses)
    losses = []
    for number, parts in enumerate(batches(case.parts), 1):
        optimizer.zero_grad()
        total = torch.zeros(())
        for one in parts:
            loss = loss_of(own, *one) / case.parts
            loss.backward()
            total += loss.detach()
        for parameter in parameters:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, site)
        if case.clip:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        optimizer.step()
        schedule.step()
        dist.all_reduce(total, dist.ReduceOp.AVG, site)
        losses.append(float(total))
        sites.after(number, last=False)
        if number == STEPS:
            sites.after(number, last=True)
    return losses, dict(own.named_parameters()), dict(own.named_buffers())


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).detach().abs().max()) for name in other)


def beside(case: Case) -> dict[str, Any]:
    losses, weights, buffers = trained(case)
    expected, others, kept = by_hand(case)
    same = [torch.cat([one.flatten() for one in weights.values()]).double().sum()]
    everyone = of_all(float(same[0]))
    return {
        "losses": [losses, expected],
        "weights": apart(weights, others),
        "buffers": apart(buffers, kept),
        "alike": len(set(everyone)) == 1,
        "alone": apart(weights, by_hand(case, crosses=False)[1]),
        "other rate": apart(weights, by_hand(case, lr=0.65)[1]),
    }


def state_of(sharded: Sharded) -> dict[str, torch.Tensor]:
    state = sharded.state
    return {**{f"weights {k}": v.clone() for k, v in state.parameters.items()},
            **{f"state {k}": v.clone() for k, v in state.optimizer.items()},
            **{f"buffer {k}": v.clone() for k, v in state.buffers.items()}}  # fmt: skip


def shared_folder() -> TemporaryDirectory[str] | str:
    """A folder for all ranks; rank 0 removes it."""
    holder = TemporaryDirectory() if dist.get_rank() == 0 else None
    folder = [holder.name if holder else None]
    dist.broadcast_object_list(folder)
    return holder or str(folder[0])


def cut_anywhere(
    case: Case, folder: str, cuts: tuple[int, ...]
) -> tuple[dict[int, bool], dict[str, torch.Tensor], Sharded]:
    """Whether runs that were cut after these steps go on bit for bit; the final state; and what went on."""
    every = list(batches(steps=STEPS))
    whole = sharded_of(case)
    for number, ((one,)) in enumerate(every, 1):
        whole.step(*one)
        if number in cuts:
            whole.save(folder, wait=True)
    whole.synchronize()
    final, found = state_of(whole), {}
    again = sharded_of(case)
    for cut in cuts:
        again.step(*every[5][0])  # what is loaded replaces it
        again.load(folder, step=cut)
        for one in every[cut:]:
            again.step(*one[0])
        again.synchronize()
        found[cut] = all(torch.equal(value, final[name]) for name, value in state_of(again).items())
    return found, final, again


def resumed(case: Case) -> dict[str, Any]:
    """Whether runs that were cut at each step, also between exchanges, go on bit for bit; and other checkpoints."""
    holder = shared_folder()
    folder = [holder if isinstance(holder, str) else holder.name]
    every = list(batches(steps=STEPS))
    states, final, broken = cut_anywhere(case, f"{folder[0]}/run", (2, 3, 4))
    found: dict[str, Any] = {"bit for bit": states}
    late = Case("ddp", flat=True, optimizer="adamw", outer=OuterSGD(parts=2, overlap=2), wire="int8")
    found["late, int8"] = cut_anywhere(late, f"{folder[0]}/late", (1, 2, 3, 5))[0]
    broken.load(f"{folder[0]}/run", step=2)
    broken._local.steps = 0  # type: ignore[union-attr]  # the control: where in the round it was is lost
    for one in every[2:]:
        broken.step(*one[0])
    broken.synchronize()
    found["control"] = all(torch.equal(value, final[name]) for name, value in state_of(broken).items())
    # Elsewhere: without local steps.
    own = model()
    plain = compile_sharded(own, inner(case, own), loss=loss_of, policy=Policy("ddp", lower="eager"))
    found["elsewhere"] = told(lambda: plain.load(f"{folder[0]}/run", step=4))
    plain.load(f"{folder[0]}/run", step=4, strict=False)
    at_exchange = broken
    at_exchange.load(f"{folder[0]}/run", step=3)
    expected, given = at_exchange.full_state_dict(), plain.full_state_dict()
    found["anchor"] = all(
        torch.equal(value, given[name]) for name, value in expected.items() if not name.startswith(("norm.r", "norm.n"))
    )
    # And from a checkpoint without them.
    plain.save(f"{folder[0]}/plain", step=9, wait=True)
    at_exchange.load(f"{folder[0]}/plain")
    found["from none"] = [
        at_exchange._local.steps,  # type: ignore[union-attr]
        all(not v.any() for k, v in at_exchange.state.optimizer.items() if k.endswith("outer.momentum")),
    ]
    dist.barrier()
    if not isinstance(holder, str):
        holder.cleanup()
    return found


def between(case: Case) -> dict[str, Any]:
    """Calls between exchanges."""
    sharded = sharded_of(case)
    (one,), (two,), *_ = batches()
    sharded.step(*one)
    found = {
        "full_state_dict": told(sharded.full_state_dict),
        "export": told(lambda: sharded.export("/nowhere")),
        "state_dict": told(sharded.state_dict),
        "load_state_dict": told(lambda: sharded.load_state_dict({})),
        "full_optimizer_state_dict": told(sharded.full_optimizer_state_dict),
        "load_full_optimizer_state_dict": told(lambda: sharded.load_full_optimizer_state_dict({})),
        "apply": told(lambda: sharded.apply(sharded.state, *two)),
    }
    # Evaluation is with the weights of the site, which differ.
    sharded.model.eval()
    x = torch.ones(2, 8)
    own = sharded(x)
    with sharded.gathered() as whole:
        found["gathered"] = torch.equal(own, whole(x))
    everyone = of_all(own.sum().item())
    ranks = dist.get_world_size() // 2
    found["sites differ"] = everyone[0] != everyone[ranks]
    sharded.synchronize()
    sharded.synchronize()  # nothing
    found["weights"] = sorted(sharded.full_state_dict())
    # What is loaded in between is where the sites begin.
    sharded.model.train()
    sharded.step(*one)
    whole = {name: value.clone() for name, value in model().state_dict().items()}
    sharded.load_full_state_dict(whole)
    sharded.step(*two)
    begun = sharded_of(case).state.parameters
    found["anchor"] = {
        name: bool(torch.equal(value, begun[name.removesuffix(".outer.anchor")]))
        for name, value in sharded.state.optimizer.items()
        if name.endswith("anchor")
    }
    return found


def disagreeing(case: Case) -> dict[str, Any]:
    found = {"every": told(lambda: sharded_of(case, every=3 + (dist.get_rank() == 0)))}
    one = next(batches())[0]

    def rates() -> None:
        sharded = sharded_of(case, 2)
        for group in sharded.optimizer.param_groups:
            group["lr"] = 0.1 * (1 + (dist.get_rank() >= dist.get_world_size() // 2))
        sharded.step(*one)
        sharded.step(*one)

    found["rates"] = told(rates)

    sharded = sharded_of(case, 3)
    sharded.step(*one)
    earlier = dist.get_rank() < dist.get_world_size() // 2
    found["other call"] = told(sharded.synchronize if earlier else lambda: sharded.step(*one))
    found["other number"] = told(sharded.synchronize)
    return found


def main(*names: str) -> list[Any]:
    torch.set_num_threads(1)
    two = dist.get_world_size() == 2
    found: dict[str, Any] = {name: beside((TWO if two else FOUR)[name]) for name in names}
    found["int8"] = {
        str(late): beside(Case("ddp" if two else "zero3", flat=two, outer=OuterSGD(overlap=late), wire="int8"))
        for late in ((1,) if two else (0,))
    }
    if two:
        case = Case("ddp", flat=True, optimizer="adamw")
        found |= {"resumed": resumed(case), "between": between(case), "disagreeing": disagreeing(case)}
    return of_all(found)


if __name__ == "__main__":
    answer(main)
