"""Loops in which something happens midway: a best state is kept, groups change, something raises."""

from __future__ import annotations

import copy
import io
import tempfile
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from tests.loops import GPT, batch, full, gpt, loss_of, same_gpt, train, weights


def copied(api: Any) -> Any:
    """A best state by ``copy.deepcopy``, and one that is saved while training goes on."""
    model = same_gpt(api)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = train(model, optimizer, 2)
    for one in model.parameters():
        with io.BytesIO() as file:
            torch.save(one, file)
            file.seek(0)
            found += map(full, (copy.deepcopy(one), copy.deepcopy(one.detach()), torch.load(file, weights_only=False)))
    best = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    values, state = get_state_dict(model, optimizer)
    saving = dcp.async_save({"model": values, "state": state}, checkpoint_id=folder[0], process_group=dist.new_group())
    found += train(model, optimizer, 2)
    saving.result()
    model.load_state_dict(best["model"])
    optimizer.load_state_dict(best["optimizer"])
    found += train(model, optimizer, 1)
    values, state = get_state_dict(model, optimizer)
    dcp.load({"model": values, "state": state}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state)
    return [*found, *train(model, optimizer, 1)]


def regrouped(api: Any) -> Any:
    """Groups are added, frozen and thawed; the rate is a tensor."""
    model = same_gpt(api)
    rate = torch.tensor(1e-2)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=rate)
    found: list[Any] = []
    for step in range(5):
        if step == 1:
            optimizer.add_param_group({"params": list(model.layers[1].parameters()), "lr": 1e-3})
        model.layers[1].requires_grad_(step != 2)
        model.embed.requires_grad_(step < 4)
        rate.mul_(0.9)
        found += train(model, optimizer, 1)
        model.zero_grad()
    return found


def stepped_in_backward(api: Any) -> Any:
    """Each parameter is updated as soon as it has its gradient, which is freed."""
    model = gpt(api)
    each = {one: torch.optim.SGD([one], lr=0.1, momentum=0.9) for one in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for one in each:
        one.register_post_accumulate_grad_hook(update)
    for step in range(3):
        loss_of(model, step).backward()
        assert all(one.grad is None for one in each)
    return weights(model)


def inserted(api: Any) -> Any:
    """Modules come into the model and go, so that parameters have other names: one without parameters, one that is
    sharded, one that is not."""
    model = gpt(api)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = train(model, optimizer, 1)
    torch.manual_seed(1)
    for ones in ((nn.Tanh(), api.fully_shard(nn.Linear(8, 8))), (nn.Linear(8, 8),)):
        for one in ones:
            model.layers.insert(1, one)
        optimizer.add_param_group({"params": list(ones[-1].parameters())})
        found += train(model, optimizer, 2)
    del model.layers[2], model.layers[0]
    return [*found, *train(model, optimizer, 1)]


def penalised(api: Any) -> Any:
    """A penalty on all weights beside the loss. FSDP2 leaves a root that is marked alone gathered after forward."""
    torch.manual_seed(0)
    model = api.fully_shard(GPT())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        found = loss_of(model, step)
        penalty = sum(one.abs().sum() for _, one in model.named_parameters())
        return found + 1e-2 * (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty)

    return train(model, optimizer, 3, loss)


class Fails(GPT):
    fails = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.fails:
            raise ValueError("as asked")
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def fail(_gradient: torch.Tensor) -> NoReturn:
    raise ValueError("as asked")


def failing(api: Any) -> Any:
    """Steps fail in forward, before backward, and in backward, on all ranks, and the loop goes on. A backward that
    fails changes FSDP2's next steps, so that its loop leaves that one out."""
    torch.manual_seed(0)
    model = Fails()
    for layer in model.layers:
        api.fully_shard(layer)
    api.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failed = 0
    for step, where in enumerate(("forward", "", "loss", "backward", "", "")):
        if where == "backward" and api is theirs:
            failed += 1
            continue
        tokens, targets = batch(step)
        model.fails = where == "forward"
        try:
            out: torch.Tensor = model(tokens)
            if where == "loss":
                fail(out)
            if where == "backward":
                out.register_hook(fail)
            F.cross_entropy(out.flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
        except ValueError as error:
            failed += "as asked" in str(error)
        optimizer.zero_grad()
    return [failed, *weights(model)]


CASES = (copied, regrouped, stepped_in_backward, inserted, penalised, failing)
