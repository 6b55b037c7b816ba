"""Steps that run the model: forwards, backwards, evaluations."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.fuzz.loops.model import LENGTH, WIDTH, hidden_of, logits_of
from tests.fuzz.loops.sides import Side, loss_of, whole
from tests.fuzz.loops.steps import step


def _train(side: Side, rng: random.Random, rows: int | None = None, share: float = 1.0) -> torch.Tensor:
    loss = side.loss(*side.batch(rng, rows))
    side.backward(loss * share)
    return loss.detach()


@step(9)
def train(side: Side, rng: random.Random) -> Any:
    return _train(side, rng)


@step(5)
def update(side: Side, rng: random.Random) -> Any:
    for optimizer in side.optimizers:
        optimizer.zero_grad()
    loss = _train(side, rng)
    for optimizer in side.optimizers:
        optimizer.step()
    return loss


@step()
def rows_of_each_rank(side: Side, rng: random.Random) -> Any:
    return _train(side, rng, 1 + side.rank)


@step()
def accumulate(side: Side, rng: random.Random) -> Any:
    """Uneven microbatches, each by its share."""
    rows = [rng.choice((1, 2, 3)) for _ in range(rng.choice((2, 3)))]
    losses = []
    for place, count in enumerate(rows):
        side.synchronise(place == len(rows) - 1)
        losses.append(_train(side, rng, count, count / sum(rows)))
    return losses


@step()
def two_forwards(side: Side, rng: random.Random) -> Any:
    first, second = side.loss(*side.batch(rng)), side.loss(*side.batch(rng))
    side.backward(first + second)
    return first.detach()


@step()
def two_forwards_of_one_input(side: Side, rng: random.Random) -> Any:
    x, y = side.batch(rng)
    first, second = logits_of(side.model(x)), logits_of(side.model(x))
    loss = loss_of(first, y) + (first - second).square().mean()
    side.backward(loss)
    return loss.detach()


@step()
def backwards_in_reverse(side: Side, rng: random.Random) -> Any:
    first, second = side.loss(*side.batch(rng)), side.loss(*side.batch(rng))
    side.backward(second)
    side.backward(first)
    return first.detach()


@step()
def one_of_two_backwards(side: Side, rng: random.Random) -> Any:
    first, second = side.loss(*side.batch(rng)), side.loss(*side.batch(rng))
    side.backward(second)
    return first.detach()


@step()
def retained(side: Side, rng: random.Random) -> Any:
    loss = side.loss(*side.batch(rng))
    side.backward(loss, retain_graph=True)
    side.backward(loss)
    return loss.detach()


@step()
def two_losses(side: Side, rng: random.Random) -> Any:
    x, y = side.batch(rng)
    result = side.model(x)
    hidden = hidden_of(result)
    other = logits_of(result).logsumexp(-1).mean() if hidden is None or side.hooked else hidden.square().mean()
    side.backward(other, retain_graph=True)
    side.backward(loss_of(result, y))
    return other.detach()


@step()
def hidden_alone(side: Side, rng: random.Random) -> Any:
    result = side.model(side.batch(rng)[0])
    hidden = hidden_of(result)
    if hidden is None or side.hooked:  # a hook of what is not reached is refused
        return None
    side.backward(hidden.square().mean())
    return hidden.detach()


@step()
def forward_that_is_dropped(side: Side, rng: random.Random) -> Any:
    return side.loss(*side.batch(rng)).detach()


@step()
def beside_a_constant(side: Side, rng: random.Random) -> Any:
    loss = side.loss(*side.batch(rng)) * 2 + side.loss(*side.batch(rng)).detach()
    side.backward(loss)
    return loss.detach()


@step()
def input_with_a_gradient(side: Side, rng: random.Random) -> Any:
    generator = torch.Generator().manual_seed(rng.randrange(10**6) + side.rank)
    x = torch.randn(side.rows, LENGTH, WIDTH, generator=generator, dtype=side.shape.dtype, requires_grad=True)
    loss = side.loss(x, side.batch(rng)[1])
    side.backward(loss)
    return x.grad


@step()
def gradient_of_the_input_beside(side: Side, rng: random.Random) -> Any:
    """`torch.autograd.grad` of an input, and then a backward through the same graph."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6) + side.rank)
    x = torch.randn(side.rows, LENGTH, WIDTH, generator=generator, dtype=side.shape.dtype, requires_grad=True)
    loss = side.loss(x, side.batch(rng)[1])
    if side.model.checkpointed == "reentrant":  # which refuses it
        return None
    (found,) = torch.autograd.grad(loss, x, retain_graph=True)
    side.backward(loss)
    return [found, x.grad]


@step()
def behind_another_module(side: Side, rng: random.Random) -> Any:
    """A layer of the user's that is not sharded, before the model."""
    torch.manual_seed(rng.randrange(10**6) + side.rank)
    before = torch.nn.Linear(WIDTH, WIDTH, dtype=side.shape.dtype)
    x = torch.randn(side.rows, LENGTH, WIDTH, dtype=side.shape.dtype)
    side.backward(side.loss(before(x), side.batch(rng)[1]))
    return before.weight.grad


@step()
def gradients_by_autograd(side: Side, rng: random.Random) -> Any:
    of = [one for _, one in side.named() if one.requires_grad]
    loss = side.loss(*side.batch(rng))
    if not of or not side.synchronises or side.hooked or side.model.checkpointed == "reentrant":
        return loss.detach()
    again = rng.random() < 0.5
    of = rng.sample(of, rng.randint(1, len(of)))
    found = side.gradients(loss, of) if not again else _and_backward(side, loss, of)
    return [torch.zeros(()) if one is None else one for one in found]


def _and_backward(side: Side, loss: torch.Tensor, of: list[Any]) -> Any:
    kept = loss * 1.0
    side.backward(kept, retain_graph=True)
    return side.gradients(loss, of)


@step()
def a_part_of_the_results(side: Side, rng: random.Random) -> Any:
    x, y = side.batch(rng)
    logits = logits_of(side.model(x))
    loss = loss_of(logits[:, :2], y[:, :2])
    side.backward(loss)
    return loss.detach()


@step()
def results_changed_in_place(side: Side, rng: random.Random) -> Any:
    x, y = side.batch(rng)
    logits = logits_of(side.model(x))
    logits.mul_(0.5)
    side.backward(loss_of(logits, y))
    return logits.detach()


@step()
def hook_on_a_result(side: Side, rng: random.Random) -> Any:
    x, y = side.batch(rng)
    logits = logits_of(side.model(x))
    logits.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    logits.retain_grad()
    side.backward(loss_of(logits, y))
    return logits.grad


@step()
def by_name(side: Side, rng: random.Random) -> Any:
    x, y = side.batch(rng)
    loss = loss_of(side.model(mask=None, x=x), y)
    side.backward(loss)
    return loss.detach()


@step()
def checkpointed_model(side: Side, rng: random.Random) -> Any:
    if side.model.carried:  # eager PyTorch computes again from the state of after
        return None
    x, y = side.batch(rng)
    loss = loss_of(checkpoint(lambda given: logits_of(side.model(given)), x, use_reentrant=False), y)
    side.backward(loss)
    return loss.detach()


@step()
def autocast(side: Side, rng: random.Random) -> Any:
    side.loose |= side.shape.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = side.loss(*side.batch(rng))
    side.backward(loss)
    return loss.detach()


@step()
def scaled(side: Side, rng: random.Random) -> Any:
    scaler = side.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=4.0))
    for optimizer in side.optimizers:
        optimizer.zero_grad()
    loss = side.loss(*side.batch(rng)) * (float("inf") if rng.random() < 0.2 and side.rank == 0 else 1.0)
    side.backward(scaler.scale(loss))
    ready = [o for o in side.optimizers if any(p.grad is not None for g in o.param_groups for p in g["params"])]
    for optimizer in ready:
        if rng.random() < 0.5:
            scaler.unscale_(optimizer)
    for optimizer in ready:
        scaler.step(optimizer)
    if ready:
        scaler.update()
    return torch.tensor(scaler.get_scale())


def _no_gradients(side: Side, rng: random.Random) -> Any:
    """FSDP2 cannot have its first call in inference mode."""
    return torch.inference_mode() if rng.random() < 0.5 and not side.shape.precision else torch.no_grad()


@step(2)
def evaluate(side: Side, rng: random.Random) -> Any:
    side.model.eval()
    with _no_gradients(side, rng):
        found = side.loss(*side.batch(rng)).clone()
    side.model.train()
    return found


@step()
def without_gradients(side: Side, rng: random.Random) -> Any:
    with _no_gradients(side, rng):
        return side.loss(*side.batch(rng)).clone()


@step()
def between_forward_and_backward(side: Side, rng: random.Random) -> Any:
    loss = side.loss(*side.batch(rng))
    with torch.no_grad():
        found = side.loss(*side.batch(rng))
    side.backward(loss)
    return found


@step()
def evaluations_at_once(side: Side, rng: random.Random) -> Any:
    side.model.eval()
    with side.gathered(), torch.no_grad():
        found = [logits_of(side.model(side.batch(rng, rows)[0])) for rows in (1, 3)]
    side.model.train()
    return found


@step()
def a_block_alone(side: Side, rng: random.Random) -> Any:
    if side.shape.root_alone:
        return None
    with torch.no_grad():
        return whole(side.model.layers[0](torch.ones(1, 2, WIDTH, dtype=side.shape.dtype)))
