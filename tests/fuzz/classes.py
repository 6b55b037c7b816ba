"""Weights of generated classes, which compute in ways of their own: what eager PyTorch computes, or an error by name.

A class is made of its seed: what it answers (functions, operators, both, or nothing), which function it computes
otherwise, whether FSDP2's two functions say what travels of it, whether it inherits this, and where in the model a
weight of it stands. The model trains on one rank by one of the two faces.
"""

from __future__ import annotations

import random
import traceback
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, compile_sharded, fully_shard
from fsdp_compiled.plan.leaf import own_mathematics
from tests.fuzz.loops.sides import whole
from tests.fuzz.sides import REFUSED

WIDTH, WORDS = 4, 6
FUNCTIONS = {"linear": F.linear, "embedding": F.embedding, "layer_norm": F.layer_norm}
PLACES = {"up": "linear", "embed": "embedding", "norm": "layer_norm"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        return self.down(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]


def made_class(rng: random.Random) -> tuple[type[torch.Tensor], str]:
    """A class, and the function that it computes otherwise."""
    answers = rng.choice(("functions", "operators", "both", "nothing"))
    function = rng.choice(list(FUNCTIONS))
    members: dict[str, Any] = {}

    def of_functions(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is FUNCTIONS[function]:
                place = 2 if function == "layer_norm" else 1
                args = (*args[:place], args[place] * 0.5, *args[place + 1 :]) if len(args) > place else args
            return func(*args, **(kwargs or {}))

    def of_operators(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))

    if answers in ("functions", "both"):
        members["__torch_function__"] = classmethod(of_functions)
    else:
        members["__torch_function__"] = torch._C._disabled_torch_function_impl
    if answers in ("operators", "both"):
        members["__torch_dispatch__"] = classmethod(of_operators)
    protocol = rng.choice(("", "", "before", "both"))
    if protocol:
        members["fsdp_pre_all_gather"] = lambda self, mesh: ((self.as_subclass(torch.Tensor) * 0.5,), None)
    if protocol == "both":

        def after(self: Any, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
            if out is not None:
                with torch.no_grad():
                    out.copy_(outputs[0])
                return None
            return outputs[0], outputs

        members["fsdp_post_all_gather"] = after
    kind = type("Made", (torch.Tensor,), members)
    return (type("Inherited", (kind,), {}) if rng.random() < 0.3 else kind), function


def model_of(seed: int, kind: type[torch.Tensor], place: str) -> Model:
    torch.manual_seed(seed)
    model = Model()
    module = model.get_submodule(place)
    own = module.weight.detach().as_subclass(kind)
    own.requires_grad_()
    own._is_param = True  # what makes it an nn.Parameter, as PyTorch says it
    del module.weight
    module.register_parameter("weight", own)
    return model


def losses(model: nn.Module, step: Any) -> list[torch.Tensor]:
    found = [step(torch.arange(4).view(2, 2) + number % 2).detach().clone() for number in range(3)]
    return [*found, *(whole(one) for _, one in sorted(model.named_parameters()))]


def loop(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(words: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(words).square().mean()
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    return step


def run(seed: int) -> tuple[str, str]:
    """What became of it, and what is to say: "right", "refused", "differs" or "crashed"."""
    rng = random.Random(seed)
    kind, function = made_class(rng)
    place = rng.choice([one for one, name in PLACES.items() if name == function] * 3 + list(PLACES))
    own_loop = rng.random() < 0.5
    about = f"{own_mathematics(kind)}, {function}, {place}, own loop: {own_loop}"
    try:
        plain = model_of(seed, kind, place)
        expected = losses(plain, loop(plain))
    except Exception as error:
        return "right", f"eager PyTorch refuses it: {error}"
    try:
        model = model_of(seed, kind, place)
        policy = Policy(lower="eager")
        if own_loop:
            fully_shard(model, policy=policy)
            found = losses(model, loop(model))
        else:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            loss = lambda model, words: model(words).square().mean()  # noqa: E731
            found = losses(model, compile_sharded(model, optimizer, loss=loss, policy=policy).step)
    except REFUSED as error:
        return "refused", str(error).splitlines()[0]
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}: {about}\n{traceback.format_exc()}"
    for one, other in zip(expected, found, strict=True):
        if not torch.allclose(one.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor), rtol=1e-5, atol=1e-6):
            return "differs", f"{other}, expected {one}: {about}"
    return "right", ""
