"""Steps that fail, caught by the user, who goes on."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.fuzz.loops.model import Stop, logits_of
from tests.fuzz.loops.sides import Side, loss_of
from tests.fuzz.loops.steps import step


class Deliberate(Exception):
    pass


def _failing(*_: Any) -> None:
    raise Deliberate


def _fails(side: Side, call: Callable[[], Any]) -> str:
    """That it failed; gradients are those of a new row."""
    try:
        call()
    except Exception:
        side.model.zero_grad()
        return "failed"
    return "went through"


@step(makes_noise=True)
def forward_that_fails(side: Side, rng: random.Random) -> Any:
    side.model.fails = "begin"
    found = _fails(side, lambda: side.loss(*side.batch(rng)))
    side.model.fails = ""
    return found


@step(makes_noise=True, later=True)
def exception_of_the_users_own(side: Side, rng: random.Random) -> Any:
    """By which a loop may be left: it comes out as what it is."""
    side.model.fails = "stop"
    try:
        side.loss(*side.batch(rng))
    except Exception as error:
        return type(error) is Stop
    finally:
        side.model.fails = ""


@step(makes_noise=True)
def input_of_a_wrong_dtype(side: Side, rng: random.Random) -> Any:
    return _fails(side, lambda: side.model(torch.ones(2, 3, dtype=torch.bool)))


@step()
def second_backward(side: Side, rng: random.Random) -> Any:
    loss = side.loss(*side.batch(rng))
    if not loss.requires_grad:
        return None
    side.backward(loss)
    return _fails(side, lambda: side.backward(loss))


@step()
def backward_that_fails(side: Side, rng: random.Random) -> Any:
    x, y = side.batch(rng)
    logits = logits_of(side.model(x))
    if not logits.requires_grad:
        return None
    logits.register_hook(_failing)
    return _fails(side, lambda: side.backward(loss_of(logits, y)))


@step()
def stale_weights(side: Side, rng: random.Random) -> Any:
    """An update between a forward and its backward."""
    loss = side.loss(*side.batch(rng))
    if not loss.requires_grad:
        return None
    with torch.no_grad():
        side.model.head.weight.mul_(1.0)
    return _fails(side, lambda: side.backward(loss))
