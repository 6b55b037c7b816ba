"""Stacks of equal blocks that hold objects (`things`), which are replaced, shared and changed between steps.

A trace of one block stands for its equals, and a program for all calls in which nothing that its trace read has
changed: both are believed on guards alone, and here guards are tried. A case is made of its seed; it is one model in
two copies, which hold the same objects: plain PyTorch's, and one that `compile_sharded` or `fully_shard` took.
"""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_compiled import Policy, compile_sharded, fully_shard
from tests.fuzz.sides import REFUSED
from tests.fuzz.things import FIRST, GLOBALS, KINDS, WIDTH, factor, restore
from tests.toys import squares

STEPS = 6
PLAIN = (False, True, None, "tanh", 0, 2, 0.5, "")


class Block(nn.Module):
    common: Any = None  # a thing of the class

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kinds: tuple[str, ...] = ()

    def forward(self, x: torch.Tensor, given: Any = None, how: Any = None) -> torch.Tensor:
        y = self.linear(x)
        for place, kind in enumerate(self.kinds):
            y = KINDS[kind].use(y, getattr(self, f"thing{place}"))
        if self.common is not None:
            y = KINDS[self.common[0]].use(y, self.common[1])
        if given is not None:
            y = KINDS[given[0]].use(y, given[1])
        if how:
            y = y.tanh() if isinstance(how, str) else y * (how + 1)
        return x + 0.3 * y


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.reads: tuple[str, ...] = ()  # kinds of globals that forward reads
        self.order = list(range(layers))
        self.given: list[Any] = []  # for each block: what it is called with
        self.how: dict[int, Any] = {}  # for each block: a plain value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for kind in self.reads:
            x = KINDS[kind].use(x, FIRST[kind])
        for place in self.order:
            block = self.layers[place]
            if self.how:
                x = block(x, how=self.how[place])
            else:
                x = block(x, self.given[place]) if self.given else block(x)
        return x


class Trial:
    """One seed's models, and what is done to both."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        restore()
        Block.common = None
        self.layers = rng.choice((3, 8, 11))
        self.models = Stack(self.layers), Stack(self.layers)
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.kinds = tuple(rng.choice(list(KINDS)) for _ in range(rng.randint(1, 3)))
        reads = tuple(rng.sample(list(KINDS), rng.randint(0, 2)))
        if rng.random() < 0.4:
            reads += (self.kinds[0],)
        given = [self._given(kind) for kind in rng.choices(list(KINDS), k=1) for _ in range(self.layers)]
        given = given if rng.random() < 0.25 else []
        if rng.random() < 0.2:
            kind = rng.choice(list(KINDS))
            Block.common = (kind, self.new(kind))
        how = dict.fromkeys(range(self.layers), rng.choice(PLAIN)) if rng.random() < 0.3 else {}
        for model in self.models:
            model.reads, model.given, model.how = reads, given, how
        for place, kind in enumerate(self.kinds):
            how = rng.choice(("global", "shared", "own", "mixed", "mixed"))
            one = GLOBALS[kind][0] if how == "global" else self.new(kind)
            for index in range(self.layers):
                thing = one
                if how == "own":
                    thing = self.new(kind)
                elif how == "mixed" and rng.random() < 0.4:
                    thing = rng.choice((one, one, *GLOBALS[kind], self.new(kind)))
                self.put(index, place, thing)
        for model in self.models:
            for block in model.layers:
                block.kinds = self.kinds
        self.fully_shard = rng.random() < 0.35
        self.done: list[str] = []

    def _given(self, kind: str) -> Any:
        return (kind, self.new(kind))

    def new(self, kind: str) -> Any:
        return KINDS[kind].make(factor(self.rng))

    def put(self, index: int, place: int, thing: Any) -> None:
        for model in self.models:
            setattr(model.layers[index], f"thing{place}", thing)

    def change(self) -> None:
        """One of what a person does between steps, to both models."""
        rng, models = self.rng, self.models
        index, place = rng.randrange(self.layers), rng.randrange(len(self.kinds))
        kind = self.kinds[place]
        held = getattr(models[0].layers[index], f"thing{place}")
        action = rng.choice(
            ("replace", "replace", "alias", "inside", "inside", "global", "read", "given", "how", "how", "common",
             "swap", "order", "evaluate", "hook", "forward", "kinds", "class")
        )  # fmt: skip
        self.done.append(f"{action} {kind} of block {index}")
        if action == "replace":
            self.put(index, place, self.new(kind))
        elif action == "alias":
            other = getattr(models[0].layers[rng.randrange(self.layers)], f"thing{place}")
            self.put(index, place, rng.choice((*GLOBALS[kind], FIRST[kind], other)))
        elif action == "inside":
            if (change := KINDS[kind].change) is not None:
                change(held, factor(rng))
        elif action == "global":
            FIRST[kind] = rng.choice((*GLOBALS[kind], self.new(kind), held))
        elif action == "read" and models[0].reads:
            kind = rng.choice(models[0].reads)
            if (change := KINDS[kind].change) is not None:
                change(FIRST[kind], factor(rng))
        elif action == "given" and models[0].given:
            kind = models[0].given[index][0]
            models[0].given[index] = self._given(kind)  # one list of both
        elif action == "how" and models[0].how:
            models[0].how[index] = rng.choice(PLAIN)
        elif action == "common" and Block.common is not None:
            Block.common = (Block.common[0], self.new(Block.common[0]))
        elif action == "swap":
            other = rng.randrange(self.layers)
            for model in models:
                blocks = model.layers
                for name in (f"thing{number}" for number in range(len(self.kinds))):
                    mine, theirs = getattr(blocks[index], name), getattr(blocks[other], name)
                    setattr(blocks[index], name, theirs)
                    setattr(blocks[other], name, mine)
        elif action == "order":
            for model in models:
                model.order.insert(place, index)
                model.order.pop()
        elif action == "evaluate":
            for model in models:
                model.layers[index].train(not model.layers[index].training)
        elif action == "hook":
            by = factor(rng)
            for model in models:
                model.layers[index].register_forward_hook(lambda module, given, found, by=by: found * by)
        elif action == "forward":
            by = factor(rng)
            for model in models:
                block = model.layers[index]
                block.forward = lambda x, *rest, block=block, by=by, **named: (
                    Block.forward(block, x, *rest, **named) * by
                )
        elif action == "kinds":
            kinds = self.kinds[: rng.randrange(len(self.kinds) + 1)]
            for model in models:
                model.layers[index].kinds = kinds
        elif action == "class":
            for model in models:
                model.layers[index].__class__ = Doubled


class Doubled(Block):
    def forward(self, x: torch.Tensor, given: Any = None, how: Any = None) -> torch.Tensor:
        return 2 * super().forward(x, given, how)


def stepping(trial: Trial) -> tuple[Callable[[torch.Tensor], float], Callable[[torch.Tensor], float]]:
    """One step of plain PyTorch's, and one of ours."""

    def loop(model: nn.Module) -> Callable[[torch.Tensor], float]:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = squares(model, x)
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    ours, plain = trial.models
    policy = Policy(lower="eager")
    if trial.fully_shard:
        for block in ours.layers:
            fully_shard(block, policy=policy)
        fully_shard(ours, policy=policy)
        return loop(plain), loop(ours)
    sharded = compile_sharded(ours, torch.optim.SGD(ours.parameters(), 0.01), loss=squares, policy=policy)
    return loop(plain), lambda x: float(sharded.step(x))


def run(seed: int) -> tuple[str, str]:
    """What became of it, and what is to say: "right", "refused", "differs" or "crashed"."""
    trial = Trial(seed)
    about = f"{trial.layers} blocks of {trial.kinds}, globals {trial.models[0].reads}, own loop: {trial.fully_shard}"
    try:
        plain, ours = stepping(trial)
        for step in range(STEPS):
            x = torch.randn(2, WIDTH)
            if step >= 2 and trial.rng.random() < 0.8:
                trial.change()
            expected = plain(x)
            if (found := ours(x)) != expected and not (math.isnan(found) and math.isnan(expected)):
                return "differs", f"step {step}: {found}, expected {expected}: {about}, {trial.done}"
    except REFUSED as error:
        return "refused", str(error).splitlines()[0]
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}: {about}, {trial.done}\n{traceback.format_exc()}"
    return "right", ""
