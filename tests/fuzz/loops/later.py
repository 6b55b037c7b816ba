"""Steps of what a model carries from call to call, and of what only some ranks or calls reach."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.fuzz.loops.model import WIDTH, logits_of
from tests.fuzz.loops.sides import Side, loss_of, whole
from tests.fuzz.loops.steps import step


@step(later=True)
def bank_that_the_loop_writes(side: Side, rng: random.Random) -> Any:
    """What is returned of a buffer is the buffer: the next call reads what was written to it."""
    x, y = side.batch(rng)
    result = side.model(x)
    if not side.shape.bank:
        return None
    bank = result["bank"]
    side.backward(loss_of(result, y))
    with torch.no_grad():
        bank.mul_(0.5).add_(0.01 * (1 + rng.randrange(3)))
    return side.loss(*side.batch(rng)).detach()


@step(later=True)
def state_anew(side: Side, rng: random.Random) -> Any:
    if side.model.carried:
        how = rng.choice(("bind", "fill", "inside"))
        if how == "bind":
            side.model.state = torch.full((2, WIDTH), 0.3, dtype=side.shape.dtype)
        elif how == "fill":
            side.model.state.fill_(0.2)
        else:
            side.model.state[1].mul_(2)
    return None


@step(later=True)
def two_forwards_that_carry(side: Side, rng: random.Random) -> Any:
    """Each backward reads the state that its own forward read."""
    first, second = side.loss(*side.batch(rng)), side.loss(*side.batch(rng))
    if not first.requires_grad:
        return None
    side.backward(first if rng.random() < 0.5 else first + second)
    return side.model.state.clone() if side.model.carried else second.detach()


@step(later=True)
def method_of_other_arguments(side: Side, rng: random.Random) -> Any:
    x, _ = side.batch(rng)
    loss = side.model.encode(x, by=rng.choice((1.0, 0.5))).square().mean()
    if loss.requires_grad and rng.random() < 0.7 and not side.hooked:  # a hook of what is not reached is refused
        side.backward(loss)
    return loss.detach()


@step(later=True)
def gain_of_one_rank(side: Side, rng: random.Random) -> Any:
    """A batch of one rank does not reach a parameter, which the other's does."""
    if not side.shape.unreached:
        return None
    side.model.skips_gain = side.rank == rng.randrange(side.world)
    loss = side.loss(*side.batch(rng))
    side.backward(loss)
    side.model.skips_gain = False
    return [loss.detach(), None if side.model.gain.grad is None else whole(side.model.gain.grad)]


@step(later=True)
def result_written_through_a_view(side: Side, rng: random.Random) -> Any:
    """A view of a result is written, and read through the result."""
    logits = logits_of(side.model(side.batch(rng)[0])).detach()
    logits[:, 0].zero_()
    return logits
