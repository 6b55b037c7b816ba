"""Steps that change the model, its weights, its hooks and what `fully_shard` was told."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from tests.fuzz.loops.sides import Side, whole
from tests.fuzz.loops.steps import step


def _one(side: Side, rng: random.Random) -> Any:
    return rng.choice(side.named())[1]


def _block(side: Side, rng: random.Random) -> Any:
    return rng.choice(list(side.model.layers))


# Weights and buffers.


@step(2)
def write_weight(side: Side, rng: random.Random) -> None:
    one, how = _one(side, rng), rng.choice(("mul", "copy", "constant", "data", "clamp", "lerp"))
    with torch.no_grad():
        if how == "mul":
            one.mul_(1.1)
        elif how == "copy":
            one.copy_(one * 2 - 0.1)
        elif how == "constant":
            nn.init.constant_(one, 0.1)
        elif how == "data":
            one.data.mul_(0.9)
        elif how == "clamp":
            one.clamp_(-0.2, 0.2)
        else:
            one.lerp_(torch.zeros_like(one), 0.3)


@step()
def average(side: Side, rng: random.Random) -> Any:
    held = side.kept.setdefault("average", {name: one.detach().clone() for name, one in side.named()})
    with torch.no_grad():
        for name, one in side.named():
            held[name].lerp_(one, 0.1)
    return whole(held[rng.choice(side.named())[0]])


@step()
def swap_in_the_average(side: Side, rng: random.Random) -> None:
    if (held := side.kept.get("average")) is not None:
        with torch.no_grad():
            for name, one in side.named():
                before = one.detach().clone()
                one.copy_(held[name])
                held[name].copy_(before)


@step()
def save(side: Side, rng: random.Random) -> None:
    side.kept["state"] = {name: one.detach().clone() for name, one in side.model.state_dict().items()}


@step(2)
def load(side: Side, rng: random.Random) -> Any:
    if (state := side.kept.get("state")) is not None:
        return str(side.model.load_state_dict({name: one.clone() for name, one in state.items()}))
    return None


@step()
def read_weight(side: Side, rng: random.Random) -> Any:
    return whole(_one(side, rng))


@step()
def write_buffer(side: Side, rng: random.Random) -> None:
    block = _block(side, rng)
    if rng.random() < 0.5:
        block.seen.fill_(3)
    else:
        block.seen = torch.full((), 5.0, dtype=block.seen.dtype)
    if side.model.statistics is not None:
        side.model.statistics.momentum = rng.choice((0.1, 0.3))


# The model.


@step()
def freeze(side: Side, rng: random.Random) -> None:
    if rng.random() < 0.7:
        _one(side, rng).requires_grad_(False)
    else:
        _block(side, rng).requires_grad_(False)


@step(2)
def thaw(side: Side, rng: random.Random) -> None:
    side.model.requires_grad_(True)


@step()
def leave_a_block_out(side: Side, rng: random.Random) -> None:
    side.model.left_out = rng.choice((None, 0, 1))


@step()
def scale(side: Side, rng: random.Random) -> None:
    _block(side, rng).scale = rng.choice((1.0, 1.25, 0.0, -0.0, 1, True, 0.5))


@step()
def swap_scales(side: Side, rng: random.Random) -> None:
    first, last = side.model.layers[0], side.model.layers[-1]
    first.scale, last.scale = last.scale, first.scale


@step()
def dropout(side: Side, rng: random.Random) -> None:
    _block(side, rng).drop.p = rng.choice((0.0, 0.1, 0.3))


@step()
def modes(side: Side, rng: random.Random) -> None:
    what = rng.choice((_block(side, rng), _block(side, rng).drop, side.model, side.model.statistics or side.model))
    what.train(rng.random() < 0.5)


@step()
def kind_of_result(side: Side, rng: random.Random) -> None:
    side.model.returns = rng.choice(("tensor", "tuple", "dict", "named"))


@step()
def checkpointing(side: Side, rng: random.Random) -> None:
    side.model.checkpointed = rng.choice(("", "new", "reentrant"))


@step()
def rows(side: Side, rng: random.Random) -> None:
    side.rows = rng.choice((1, 2, 3))


@step()
def mask(side: Side, rng: random.Random) -> None:
    side.masked = not side.masked


@step()
def seed(side: Side, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(10**6) + side.rank)


@step()
def order(side: Side, rng: random.Random) -> None:
    """The same blocks in another order."""
    if side.shape.root_alone:
        return
    layers = list(side.model.layers)
    rng.shuffle(layers)
    for place, one in enumerate(layers):
        side.model.layers[place] = one


# Hooks.


@step()
def hook_on_a_parameter(side: Side, rng: random.Random) -> None:
    name, one = rng.choice(side.named())
    if not one.requires_grad:
        return
    side.hooked = True
    how = rng.choice(("scale", "clamp", "see", "after"))
    if how == "after":
        side.hook(name, one, lambda p: side.seen.append((name, whole(p.grad))), True)
    elif how == "see":
        side.hook(name, one, lambda g: side.seen.append((name, whole(g))), False)
    else:
        side.hook(name, one, lambda g: g * 1.5 if how == "scale" else g.clamp(-0.01, 0.01), False)


@step()
def hook_on_a_module(side: Side, rng: random.Random) -> None:
    what = rng.choice((_block(side, rng), side.model.head, side.model.layers[0].norm))
    before = rng.random() < 0.3
    if before:
        side.handles.append(what.register_forward_pre_hook(lambda module, given: (given[0] * 1.01,)))
    else:
        side.handles.append(what.register_forward_hook(lambda module, given, found: found * 1.01))


@step()
def hook_on_the_model(side: Side, rng: random.Random) -> None:
    how = rng.choice(("before", "after", "gradient"))
    if how == "before":
        side.handles.append(side.model.register_forward_pre_hook(lambda module, given: None))
    elif how == "after":

        def after(module: Any, given: Any, found: Any) -> None:
            side.seen.append(("model", torch.ones(())))

        side.handles.append(side.model.register_forward_hook(after))
    else:

        def gradient(module: Any, given: Any, found: Any) -> None:
            side.seen.extend(("model", one.detach().clone()) for one in found if one is not None)

        side.handles.append(side.model.register_full_backward_hook(gradient))


@step(2)
def remove_hooks(side: Side, rng: random.Random) -> None:
    for handle in side.handles:
        handle.remove()
    side.handles, side.hooked = [], False


# What `fully_shard` is told.


@step(2)
def synchronise(side: Side, rng: random.Random) -> None:
    side.synchronise(rng.random() < 0.6)


@step()
def divide(side: Side, rng: random.Random) -> None:
    side.divide(rng.choice((1.0, 2.0, 3.0)))


@step()
def keep_gathered(side: Side, rng: random.Random) -> None:
    wanted = rng.random() < 0.5
    side.module(lambda model: model.set_reshard_after_forward(wanted))
    side.module(lambda model: model.set_reshard_after_backward(wanted))
    side.module(lambda model: model.set_is_last_backward(wanted))


@step()
def prefetch(side: Side, rng: random.Random) -> None:
    if not side.shape.root_alone:
        side.module(lambda model: model.set_modules_to_forward_prefetch(list(model.layers)))


@step()
def reshard(side: Side, rng: random.Random) -> None:
    side.module(lambda model: model.reshard())


@step()
def unshard(side: Side, rng: random.Random) -> Any:
    """Whole parameters are read; and put back by hand, or by the next call."""
    side.module(lambda model: model.unshard())
    found = whole(side.model.gain)
    if rng.random() < 0.5:
        side.module(lambda model: model.reshard())
    return [found, side.loss(*side.batch(rng)).detach()]
