"""A run that some ranks save and others load: what is equal, written by rank 0 as JSON.

torchrun --nproc-per-node N checkpoints.py RESULT FOLDER save|load
"""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.runtime.checkpoint import data_file
from fsdp_compiled.runtime.checkpoint import folder as folders
from fsdp_compiled.runtime.checkpoint.chunks import Place, held
from fsdp_compiled.runtime.checkpoint.saving import Image
from tests import generated_models
from tests.chosen import examples
from tests.launch import answer, of_all, told
from tests.parts import Seen, parts

SEEDS = range(examples(3, 5))  # of generated models
SAVED, LAST = 4, examples(10, 24)  # steps before the checkpoint, and in all
WORDS, WIDTH, ROWS = 13, 5, 12  # odd sizes: nothing is a multiple of anything; rows are shared by 1 to 4 ranks
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PARTS = Seen()


class Model(nn.Module):
    """Ties, a frozen weight, two dtypes, a transposed weight, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[1].weight.requires_grad_(False)
        self.layers[2].bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.seen += words.sum()  # every rank's own
        x = self.embed(words) * self.gain
        for layer in self.layers[:2]:
            x = x + torch.tanh(layer(x) @ self.turned)
        return self.head(x + F.linear(x, self.layers[2].weight) + self.layers[2].bias.float())


def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words), (words + 1) % WORDS)


def build(seed: int, mesh: Any = None, **policy: Any) -> Sharded:
    torch.manual_seed(seed)
    model = Model()
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)
    with parts(PARTS):
        return compile_sharded(model, optimizer, loss=loss, mesh=mesh, policy=Policy(lower="eager", **policy))


def train(sharded: Sharded, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        words = torch.randint(0, WORDS, (ROWS,), generator=torch.Generator().manual_seed(step))
        losses.append(sharded.step(words.chunk(WORLD)[RANK]).item())
    return losses


def by_name(sharded: Sharded) -> dict[str, list[float]]:
    """Every element of parameters and optimizer state, in order, by the model's names, from all ranks."""
    programs, state = PARTS(sharded).programs, sharded.state
    place = Place(programs.mesh.shard_rank)
    own = [
        (
            one.name,
            one.part_of(torch.arange(math.prod(one.shape)).view(one.shape)).flatten().tolist(),
            one.values.flatten().tolist(),
        )
        for one in held(sharded.plan, programs.rules, place, state.parameters, state.optimizer)
    ]
    every: list[Any] = [own]
    if WORLD > 1:
        every = of_all(own)
    found: dict[str, dict[int, float]] = {}
    for name, places, values in (one for rank in every for one in rank):
        found.setdefault(name, {}).update(zip(places, values, strict=True))
    scalars = {name: [t.item()] for name, t in state.optimizer.items() if name.startswith("group")}
    return {name: [values[i] for i in sorted(values)] for name, values in found.items()} | scalars


class Count:
    """A state that the ranks share, and one of each rank's own."""

    def __init__(self, value: int, fails: bool = False) -> None:
        self.value, self.fails = value, fails

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            raise ArithmeticError("odd")
        self.value = state["value"]


class Dealt(Count):
    """Whose state is the same on all ranks, and says what one of so many has taken, as a loader's does."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.batch_sampler = SimpleNamespace(sampler=SimpleNamespace(num_replicas=WORLD))


def save_generated(folder: Path) -> None:
    expected = {}
    for seed in SEEDS:
        with parts(PARTS):
            sharded = generated_models.build(seed, 0, WORLD)
        generated_models.train(sharded, RANK, WORLD)
        sharded.save(folder / f"generated {seed}", wait=True)
        expected[seed] = by_name(sharded)
    if RANK == 0:
        (folder / "generated.json").write_text(json.dumps(expected))


def load_generated(folder: Path) -> dict[str, list[bool]]:
    """Of each model: whether it is as it was saved, and the control, whether it was before."""
    expected = json.loads((folder / "generated.json").read_text())
    found: dict[str, list[bool]] = {}
    for seed in SEEDS:
        with parts(PARTS):
            sharded = generated_models.build(seed, 1, WORLD)
        before = by_name(sharded) == expected[str(seed)]
        sharded.load(folder / f"generated {seed}")
        found[str(seed)] = [by_name(sharded) == expected[str(seed)], before]
    return found


def save(folder: Path) -> dict[str, Any]:
    sharded = build(0)
    train(sharded, 0, SAVED)
    torch.manual_seed(100 + RANK)
    future = sharded.save(folder, extra={"all": Count(7), "own": Count(RANK), "dealt": Dealt(5)})
    state, drawn, seen = by_name(sharded), torch.get_rng_state(), sharded.model.seen.item()
    losses = train(sharded, SAVED, LAST)
    future.result()
    if RANK == 0:
        (folder / "expected.json").write_text(json.dumps({"state": state, "losses": losses}))
    dist.barrier()
    again = build(1)
    own, dealt = Count(-1), Dealt(0)
    again.load(folder, extra={"own": own, "dealt": dealt})
    found = {
        "dealt": dealt.value == 5,
        "losses": train(again, SAVED, LAST) == losses,  # bit for bit
        "own": own.value == RANK,
    }
    again.load(folder, extra={"own": own})
    found |= {"random": torch.equal(torch.get_rng_state(), drawn), "buffer": again.model.seen.item() == seen}
    shapes: dict[str, dict[str, Any]] = {"ddp": {"shard": "ddp"}, "zero1": {"shard": "zero1", "bucket_mb": 0}}
    if WORLD == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        shapes["2 x 2"] = {"mesh": mesh}
    for name, options in shapes.items():
        other = build(2, **options)
        other.load(folder)
        found[name] = by_name(other) == state
        other.export(folder / f"export {name}")
        if name == "zero1":  # in the background, while the state is overwritten
            group, place = dist.new_group(backend="gloo"), folder / f"dcp {name}"
            future = dcp.async_save({"app": other}, checkpoint_id=place, process_group=group)
            train(other, SAVED, SAVED + 1)
            future.result()
            found["overwritten"] = by_name(other) != state
        else:
            dcp.save({"app": other}, checkpoint_id=folder / f"dcp {name}")
        if name == "2 x 2":  # each element is written once there too
            other.save(folder / "square", wait=True)
            third = build(3)
            third.load(folder / "square")
            found["from 2 x 2"] = by_name(third) == state
    save_generated(folder)
    return found


def load(folder: Path) -> dict[str, Any]:
    expected = json.loads((folder / "expected.json").read_text())
    sharded = build(1)
    control = by_name(sharded) == expected["state"]
    count = Count(-1)
    step = sharded.load(folder, extra={"all": count})
    equal = by_name(sharded) == expected["state"]
    drawn = torch.get_rng_state().sum().item()
    refused = told(lambda: sharded.load(folder, extra={"own": Count(0)}))
    dealt = [
        told(lambda: sharded.load(folder, extra={"dealt": Dealt(0)})),
        told(lambda: sharded.load(folder, extra={"dealt": Count(0)})),
        told(lambda: sharded.load(folder, extra={"all": Dealt(0)})),
    ]
    from_dcp, exported = {}, {}
    for name in ("ddp", "zero1", "2 x 2"):
        other = build(2)
        place = {"app": other}
        dcp.load(place, checkpoint_id=folder / f"dcp {name}")
        from_dcp[name] = by_name(other) == expected["state"]
        weights = other.full_state_dict()
        other.load_state_dict(sharded.state_dict())
        other = build(2)
        other.import_weights(folder / f"export {name}")
        again = other.full_state_dict()
        exported[name] = all(torch.equal(again[key], weights[key]) for key in weights if key != "seen")  # rank 0's
    optimizer = sharded.full_optimizer_state_dict()
    other.load_full_state_dict(weights)
    other.load_full_optimizer_state_dict(optimizer)
    exported["whole"] = by_name(other) == expected["state"]
    losses = train(sharded, SAVED, LAST)
    far = max(abs(a - b) for a, b in zip(losses, expected["losses"]))
    found = {"control": control, "step": step, "equal": equal, "far": far, "count": count.value, "refused": refused,
             "drawn": drawn, "from dcp": from_dcp, "exported": exported,
             "generated": load_generated(folder), "dealt": dealt}  # fmt: skip
    return found | (failures(sharded, folder.parent / "failures") if WORLD == 2 else {})


def failures(sharded: Sharded, folder: Path) -> dict[str, Any]:
    """What fails on rank 1 alone."""
    found: dict[str, Any] = {}
    place = sharded.save(folder, wait=True).result()
    state = by_name(sharded)
    found["steps"] = told(lambda: sharded.save(folder, step=50 + RANK))
    found["extra"] = told(lambda: sharded.save(folder, step=60, extra={"x": Count(RANK and object())}))  # type: ignore[arg-type]
    one = Count(-1, fails=RANK == 1)
    found["load"] = told(lambda: sharded.load(folder, extra={}, strict=bool(RANK)))
    write = os.write
    if RANK == 1:

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        data_file.os.write = full  # type: ignore[assignment]
    found["result"] = told(lambda: sharded.save(folder, step=70, wait=True))
    future = sharded.save(folder, step=71)
    future.exception()
    found["next step"] = told(lambda: train(sharded, 0, 1))
    os.write = write
    fill = Image.fill
    if RANK == 1:

        def none(*_: Any) -> Any:
            raise MemoryError("no host memory")

        Image.fill = none  # type: ignore[method-assign]
    found["copying"] = told(lambda: sharded.save(folder, step=72).result())
    Image.fill = fill  # type: ignore[method-assign]
    found["after"] = told(lambda: train(sharded, 0, 1))
    found["left"] = sorted(path.name for path in folder.iterdir())
    sharded.load(folder)
    found["back"] = by_name(sharded) == state
    sharded.save(folder, step=80, extra={"one": Count(3)}, wait=True)
    found["undone"] = told(lambda: sharded.load(folder, extra={"one": one}))
    found["kept"] = one.value == -1 and by_name(sharded) == state
    if RANK == 0:
        (place.with_name("step-80") / "manifest.json").write_text("")
    dist.barrier()
    found["damaged"] = told(lambda: sharded.load(folder))
    return found | at_once(folder.with_name("at once"))


def at_once(folder: Path) -> dict[str, Any]:
    """Two that save the same step in one folder, and a folder that rank 0 cannot sync once it has its name."""
    found: dict[str, Any] = {}
    one, other = build(5), build(6)
    one.save(folder, step=1, wait=True)
    write, sync, go = data_file.write, folders.sync, threading.Event()
    data_file.write = lambda *given: (go.wait(60), write(*given))[1]
    future = one.save(folder, step=2)
    found["twice"] = told(lambda: other.save(folder, step=2, replace=True))
    go.set()
    future.result()
    data_file.write = write
    state = by_name(one)
    other.load(folder)
    found["first"] = by_name(other) == state

    def broken(place: Path) -> None:
        if place == folder:
            raise OSError(5, "Input/output error")
        sync(place)

    folders.sync = broken
    found["synced"] = told(lambda: one.save(folder, step=3, wait=True))
    folders.sync = sync
    found["newest"] = other.load(folder)
    return found


def main(folder: str, what: str) -> list[Any]:
    return of_all({"save": save, "load": load}[what](Path(folder)))


if __name__ == "__main__":
    answer(main)
