"""What would do nothing after compile_sharded is refused at the call, or by name at the next."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.live_parameters import X
from tests.taken_over import Case, same, taken, trained_as_eager


@pytest.fixture
def case() -> Case:
    return taken()


def assign(owner: Callable[[Case], Any], name: str, value: Any) -> Callable[[Case], Any]:
    return lambda case: setattr(owner(case), name, value)


WEIGHT = r"^layers\.0\.weight is in shards since compile_sharded"
ANY = r"is in shards since compile_sharded|was taken over by compile_sharded"
REFUSED: dict[str, tuple[Callable[[Case], Any], str]] = {
    # converted, or other memory in their place
    "load_state_dict assign": (lambda c: c.model.load_state_dict(c.eager.state_dict(), assign=True), "without assign"),
    "share_memory": (lambda c: c.model.share_memory(), ANY),
    "half": (lambda c: c.model.half(), "Convert the model before compile_sharded"),
    "double": (lambda c: c.model.double(), "Convert the model before compile_sharded"),
    "to_empty": (lambda c: c.model.to_empty(device="cpu"), ANY),
    "data = ...": (assign(lambda c: c.weight, "data", torch.ones(4, 4)), WEIGHT + ".*in place"),
    "vector_to_parameters": (lambda c: nn.utils.vector_to_parameters(torch.ones(99), c.model.parameters()), ANY),
    "a parametrization": (
        lambda c: parametrize.register_parametrization(c.model.layers[0], "weight", nn.Identity()),
        WEIGHT + ".*Register parametrizations before compile_sharded",
    ),
    "spectral_norm": (lambda c: nn.utils.parametrizations.spectral_norm(c.model.layers[0]), WEIGHT + ".*before"),
    # hooks
    "register_hook": (lambda c: c.weight.register_hook(lambda g: g), WEIGHT + ".*parametriz"),
    "register_post_accumulate_grad_hook": (
        lambda c: c.weight.register_post_accumulate_grad_hook(lambda p: None),
        WEIGHT,
    ),
    # the optimizer
    "optimizer.step": (lambda c: c.optimizer.step(), r"sharded\.step"),
    "optimizer.state_dict": (lambda c: c.optimizer.state_dict(), r"sharded\.state\.optimizer"),
    "optimizer.load_state_dict": (lambda c: c.optimizer.load_state_dict({}), r"sharded\.state\.optimizer"),
    "optimizer.state[p]": (lambda c: c.optimizer.state[c.weight], r"sharded\.state\.optimizer"),
    "optimizer.state.clear": (lambda c: c.optimizer.state.clear(), r"sharded\.state\.optimizer"),
    "len(optimizer.state)": (lambda c: len(c.optimizer.state), r"sharded\.state\.optimizer"),
    "iterating over optimizer.state": (lambda c: list(c.optimizer.state.items()), r"sharded\.state\.optimizer"),
    "add_param_group": (lambda c: c.optimizer.add_param_group({"params": [c.model.frozen]}), "before compile_sharded"),
    "a parameter appended": (lambda c: c.optimizer.param_groups[0]["params"].append(c.model.frozen), "before compile"),
    "a group emptied": (lambda c: c.optimizer.param_groups[0]["params"].clear(), "before compile_sharded"),
    "deepcopy of the optimizer": (lambda c: copy.deepcopy(c.optimizer), ANY),
}

# What no call could refuse, and the words of the next call's error.
NOTICED: dict[str, tuple[Callable[[Case], Any], str]] = {
    "weight = ...": (
        lambda c: setattr(c.model.layers[0], "weight", nn.Parameter(torch.ones(4, 4))),
        r"layers\.0\.weight was replaced"
    ),
    "weight = None": (lambda c: setattr(c.model.layers[0], "bias", None), r"layers\.0\.bias was removed"),
    "del": (lambda c: delattr(c.model.layers[0], "weight"), r"layers\.0\.weight was removed"),
    "register_parameter": (
        lambda c: c.model.register_parameter("more", nn.Parameter(torch.ones(2))),
        "more was added after compile_sharded"
    ),
    "a new module": (lambda c: c.model.add_module("adapter", nn.Linear(4, 4)), r"adapter\.weight was added"),
    "a replaced module": (lambda c: setattr(c.model, "norm", nn.LayerNorm(4)), r"norm\.weight was replaced"),
    "weights tied later": (
        lambda c: setattr(c.model.layers[1], "weight", c.model.layers[0].weight), r"layers\.1\.weight was replaced"
    ),
    "weights untied": (lambda c: setattr(c.model.head, "weight", nn.Parameter(torch.ones(4, 4))), r"head\.weight was"),
    "functional_call's tables": (lambda c: c.model.layers[0]._parameters.clear(), r"layers\.0\.weight was removed"),
    "an empty entry filled with nothing": (
        lambda c: c.model.norm.register_parameter("scale", None), r"norm\.scale was added"
    ),
    "a backward hook": (lambda c: c.model.head.register_full_backward_hook(lambda *_: None), "head .* has a backw"),
    "a backward-pre hook": (lambda c: c.model.register_full_backward_pre_hook(lambda *_: None), "The model .* has a"),
    "a group's parameters": (
        lambda c: c.optimizer.param_groups[0].update(params=[c.weight]), "optimizer's groups were changed"
    ),
    "a group removed": (lambda c: c.optimizer.param_groups.clear(), "group"),
    "optimizer.state = ...": (lambda c: setattr(c.optimizer, "state", {}), r"optimizer\.state was replaced"),
    "requires_grad_": (lambda c: c.model.requires_grad_(False), r"requires_grad of scale was changed"),
    "requires_grad = ...": (assign(lambda c: c.weight, "requires_grad", False), r"layers\.0\.weight was changed"),
    "to another device": (lambda c: c.model.to("meta"), "scale was replaced"),
    "thawed": (lambda c: c.model.frozen.requires_grad_(), r"of frozen was changed.*it was frozen, and is trainable"),
    "replaced by an equal one": (
        lambda c: setattr(c.model, "scale", nn.Parameter(torch.tensor(1.5))), "scale was replaced"
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED)
def test_what_would_do_nothing_is_refused_at_the_call(case: Case, call: str) -> None:
    act, words = REFUSED[call]
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        act(case)


def test_a_model_trains_on_after_every_refusal_as_if_there_had_been_none(case: Case) -> None:
    for act, _ in REFUSED.values():
        with pytest.raises(RuntimeError):
            act(case)
    trained_as_eager(case)


@pytest.mark.parametrize("change", NOTICED)
def test_what_no_call_could_refuse_is_refused_by_name_at_the_next(case: Case, change: str) -> None:
    act, words = NOTICED[change]
    parameters = case.sharded.state.parameters
    before = {name: value.clone() for name, value in parameters.items()}
    act(case)
    for call in (case.sharded.step, case.sharded.value_and_grad, case.sharded):
        with pytest.raises(ValueError, match=words):
            call(X)
    assert same(parameters, before) and case.sharded.captures == 0  # type: ignore[arg-type]
