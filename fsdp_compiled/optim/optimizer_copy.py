"""A copy of the user's optimizer over other parameters, with its class, options and attributes; and its state by name.

Updates are traced with a copy, and tried on one. A copy shares nothing: nothing that it does reaches the user's
optimizer, its hooks or the model. Attributes are copied, and in the copies small stand-ins without a gradient replace
the parameters.

State may be in containers: dictionaries, lists, tuples and deques, also inside one another. Each value in them gets a
name of its own. If a container does not keep its form from step to step, the optimizer is not traced.

    state["momentum_buffer"] = {0.9: a, 0.99: b}        momentum_buffer_0_9: a, momentum_buffer_0_99: b
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

MISSING = object()
PLAIN = (bool, int, float, str, type(None), torch.dtype)
# Attributes of every optimizer, or set by schedulers and by us: they have no part in how it updates.
OWN = ("state", "param_groups", "step", "state_dict", "load_state_dict", "add_param_group", "_opt_called",
       "_step_count", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured")  # fmt: skip
WRAPS = "it wraps another optimizer, and changes what that one does: pass that one itself"
# These choose between implementations of one formula; the plain one is traced, tried and run.
IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable", "triton")


class Refused(Exception):
    """Why an optimizer cannot be used, to be completed by its name."""


def copy_of(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], state: Any, attributes: Mapping[str, Any] | None = None
) -> Optimizer:
    """The optimizer over these groups, each with its ``"params"``; ``attributes`` take the place of its own."""
    made: Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): made, id(optimizer.state): state}
    attributes_now = attributes_of(optimizer)
    if not all(map(is_plain, attributes_now.values())):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                memo[id(parameter)] = nn.Parameter(torch.zeros(()), requires_grad=False)
    for name, value in attributes_now.items():
        try:
            made.__dict__[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise Refused(f"its attribute {name!r}, a {type(value).__name__}, cannot be copied: {error}") from error
    for hooks in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre",
                  "load_state_dict_post"):  # fmt: skip
        made.__dict__[f"_optimizer_{hooks}_hooks"] = OrderedDict()
    made.__dict__.update(attributes or {})
    try:
        made.param_groups = list(map(dict, groups))
        made.state = state
    except AttributeError as error:
        raise Refused(WRAPS) from error
    return made


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Its attributes as they are, without those that every optimizer has."""
    return {
        name: value for name, value in vars(optimizer).items() if name not in OWN and not name.startswith("_optimizer_")
    }


def is_plain(value: Any) -> bool:
    """Whether it is a number, a word or a dtype, or a container of these: no parameter can be inside, and its text says
    all of it."""
    if type(value) is dict:
        return all(map(is_plain, (*value, *value.values())))
    return all(map(is_plain, value)) if type(value) in (tuple, list) else isinstance(value, PLAIN)


# Of PyTorch's wrapper alone: `functools.wraps` copies its marks to others.
PROFILED = Optimizer.profile_hook_step(lambda _: None).__code__


def step_of(kind: type[Optimizer]) -> Callable[..., Any]:
    """The class's ``step`` without the wrapper that runs hooks, including those of all optimizers of the process."""
    step: Callable[..., Any] = kind.step
    while getattr(step, "__code__", None) is PROFILED:
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def code_of(optimizer: Optimizer) -> tuple[Any, ...]:
    """What identifies the code of its update: its class, the class's step, and functions that were put on it."""
    put = [(name, value) for name, value in vars(optimizer).items() if callable(value) and name not in OWN]
    return type(optimizer), step_of(type(optimizer)), *put


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the plain implementation of the formula chosen."""
    known = {name: False for name in IMPLEMENTATIONS if name in options}
    return {**options, **known, "foreach": False}


def fresh_of(optimizer: Optimizer, options: Mapping[str, Any], parameter: nn.Parameter) -> Optimizer | None:
    """The class called as the user did, as far as the options tell; None if they do not tell."""
    kind = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    try:
        return kind([parameter], **{name: value for name, value in options.items() if name in known})
    except Exception:
        return None


def meaning(error: Exception, otherwise: str) -> Refused:
    """Explains what it means that the optimizer's step failed with this error."""
    text = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
    if "closure" in text:
        return Refused("its step needs a closure that computes the loss again, and here loss and step are one program")
    if "does not require grad" in text:
        return Refused("its step differentiates gradients again, and here they have no graph")
    if isinstance(error, NotImplementedError):
        return Refused("its class has no step: it updates in another way")
    if "'NoneType' object is not callable" in text:
        return Refused("its step calls a function that it was not given, such as a closure")
    return Refused(f"{otherwise} ({text})")


def state_of(optimizer: Optimizer) -> Mapping[Any, Any]:
    """Its state; empty if that was taken over and can no longer be read."""
    state = optimizer.state
    return state if type(state) in (dict, defaultdict) else {}


def named_state(optimizer: Optimizer) -> dict[str, Any]:
    """State that belongs to no parameter, and goes by a name."""
    return {name: copy.deepcopy(value) for name, value in state_of(optimizer).items() if isinstance(name, str)}


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether it brings along the state of parameters."""
    return any(isinstance(key, torch.Tensor) and value for key, value in state_of(optimizer).items())


def all_leaves(state: Mapping[Any, Any]) -> dict[str, Any]:
    """What a parameter's state holds, by name."""
    return {label: leaf for name, value in state.items() for label, leaf in named_leaves(str(name), value).items()}


def named_leaves(name: str, value: Any) -> dict[str, Any]:
    """The values in the container of this name, in order; a value that is no container has its own name."""
    if not is_container(value):
        return {name: value}
    found: dict[str, Any] = {}
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        place = re.sub(r"\W+", "_", pytree.keystr(path)).strip("_")
        label = f"{name}_{place}"
        while label in found:  # -1 and 1, for one
            label += "_"
        found[label] = leaf
    return found


def is_container(value: Any) -> bool:
    """Whether it is a container that can be looked into, and made again."""
    return type(value) in (dict, OrderedDict, defaultdict, list, tuple, deque)


def copied(value: Any) -> Any:
    """The value with copies of its tensors, in containers of its own."""
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.copy(leaf), value
    )
