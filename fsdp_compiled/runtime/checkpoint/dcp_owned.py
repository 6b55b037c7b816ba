"""For `torch.distributed.checkpoint`: what owners of whole parameters keep, each on its owner alone, as whole tensors.

    {"optim": {"state": {"layers.0.up.weight": {"momentum_buffer": tensor}}, ...}, "optim_stepped": 1}

DCP reads into what it is given, and before a first step nothing is kept: then there are zeros of the form that a step
would make, and ``optim_stepped`` is 0, which says, saved too, that they are none. Only an optimizer whose state is
tensors of the parameter's shape has a form that is known beforehand (Muon); others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_compiled.distributed.lockstep import Exchange, Work
from fsdp_compiled.runtime.checkpoint.match import refusal
from fsdp_compiled.runtime.checkpoint.owned_state import kept_by
from fsdp_compiled.runtime.checkpoint.trained import Trained
from fsdp_compiled.runtime.whole_update import WholeUpdate

States = dict[str, dict[str, torch.Tensor]]  # by parameter's name, and by the name of what is kept
STEPPED = "optim_stepped"
CURE = "Call save and load."


def of_owners(trained: Trained) -> Work[dict[str, Any]]:
    """What goes into the dictionary: of this rank's parameters what is kept, the tensors themselves; ``STEPPED``."""
    found: States = {}
    fresh: States = {}
    for update in trained.updates:
        forms = _forms(update)
        for name, kept in update.of_parameters().items():
            if {key: getattr(value, "dtype", None) for key, value in kept.items()} != forms[name] or any(
                value.shape != update.leaves[name].shape for value in kept.values()
            ):
                update.refuse(
                    "state_dict", f"what it keeps of {name} has another form than after its first step. {CURE}"
                )
            found[name] = kept
        for name in (name for name in update.owned if name not in found):
            fresh[name] = {
                key: torch.zeros(update.leaves[name].shape, dtype=dtype, device=trained.plan.device)
                for key, dtype in forms[name].items()
            }
    said = yield Exchange("which parameters have state", (bool(found), min(fresh, default=None)))
    stepped = any(some for some, _ in said)
    without = [name for _, name in said if name is not None]
    if stepped and without:
        raise ValueError(f"state_dict where {min(without)} has no state of an optimizer, and others have. {CURE}")
    return {"state": found or fresh, STEPPED: torch.tensor(int(stepped))}


def loaded(given: Mapping[str, Any], trained: Trained) -> Callable[[], None]:
    """A function that gives owners what is given of their state. Raises ``ValueError`` for what does not fit."""
    states = given.get("optim", {}).get("state", {})
    stepped = bool(given.get(STEPPED, True))
    wrong: list[str] = []
    put: list[tuple[WholeUpdate, States]] = []
    for update in trained.updates:
        forms, now = _forms(update), update.of_parameters()
        put.append((update, {}))
        for name in update.owned:
            its = states.get(name, {})
            if not stepped and not _is_filled(its):
                continue
            for key, dtype in forms[name].items():
                value = its.get(key)
                if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                    wrong.append(f"optimizer.state.{name}.{key} is not given as a whole tensor")
                elif value.shape != update.leaves[name].shape:
                    wrong.append(f"optimizer.state.{name}.{key} has shape {list(value.shape)}")
                else:
                    own = value is now.get(name, {}).get(key)  # which DCP has written into
                    put[-1][1].setdefault(name, {})[key] = value if own else value.detach().to(dtype, copy=True)
    if wrong:
        raise ValueError(refusal("What load_state_dict was given", wrong))

    def write() -> None:
        for update, own in put:
            update.go_on(own, {"written": [], "attributes": {}})
            update.show(trained.state.optimizer)

    return write


def _is_filled(its: Mapping[str, Any]) -> bool:
    """Whether something was read into these zeros: FSDP2 saves state alone, which does not say that it is some."""
    return any(
        not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.any() for value in its.values()
    )


def _forms(update: WholeUpdate) -> dict[str, dict[str, torch.dtype]]:
    """Of each parameter, what is kept after a step. Raises ``ValueError`` where that is not known beforehand."""
    update.of_all_ranks()  # raises for state that belongs to no parameter
    found = {}
    for name, kept in kept_by(update).items():
        if kept.written or kept.names != kept.shaped.keys():
            update.refuse(
                "state_dict",
                f"it keeps more than tensors of the shape of {name}, and DCP reads only into what is there. {CURE}",
            )
        found[name] = dict(kept.shaped)
    return found
