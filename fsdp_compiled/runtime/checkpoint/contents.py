"""The small part of a run's state, as values by name: everything that is not a flat shard.

| value | what |
|---|---|
| ``updates`` | how many updates were made |
| ``scale`` | the loss scale: factor, steps since it changed, overflows |
| ``optimizer`` | its class, and its groups' options |
| ``scalars`` | what a group keeps once, such as the step count, with its parameters; apart, those not stepped yet |
| ``owners`` | for each optimizer of whole parameters: the options that its code writes, and its attributes |
| ``owned <parameter>`` | what such an optimizer keeps for a parameter, in its own form; only owners have it |
| ``random`` | this rank's generators: PyTorch's, Python's and NumPy's |
| ``buffer <name>`` | a buffer of the model |
| ``constant <name>`` | a tensor that the loss closes over and updates |
| ``local`` | what a rank has under ``Policy.sync_every`` that other sites do not have |
| ``extra <name>`` | the ``state_dict()`` of an object that the user passed along |

A value is written once if all ranks have the same one. Otherwise it is written for every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from fsdp_compiled.optim.given_optimizer import members
from fsdp_compiled.optim.hyperparameters import options_of
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.checkpoint.chunks import Chunk, Place, held
from fsdp_compiled.runtime.checkpoint.values import Tensors, encode
from fsdp_compiled.runtime.local_steps import LocalSteps
from fsdp_compiled.runtime.param_step_counts import fresh, names_of
from fsdp_compiled.runtime.rng import default_generator, seed
from fsdp_compiled.runtime.state import State
from fsdp_compiled.runtime.whole_update import WholeUpdate

OWNED = "owned "  # the names of values that only owners have begin with this


@dataclass(frozen=True)
class Trained:
    """A model in shards with its optimizer."""

    plan: Plan
    state: State
    optimizer: Optimizer | None
    rules: Sequence[Rule]
    updates: Sequence[WholeUpdate] = ()  # by optimizers that keep state in forms of their own, on owners
    local: LocalSteps | None = None

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Flat shards by buffer key, as a checkpoint has the model's."""
        return self.local.weights(self.state) if self.local is not None else self.state.parameters

    def chunks(self, place: Place) -> Iterator[Chunk]:
        """What the rank at this place holds of parameters and of the optimizer's state."""
        return held(self.plan, self.rules, place, self.state.parameters, self.state.optimizer)


def values_of(trained: Trained, extra: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """The values as JSON, and copies of their tensors in host memory.

    Raises ``ValueError`` by name for what a checkpoint cannot hold.
    """
    state, plan, optimizer, updates = trained.state, trained.plan, trained.optimizer, trained.updates
    values: dict[str, Any] = {"updates": int(state.step)}
    if state.scale:
        values["scale"] = {name: tensor.item() for name, tensor in state.scale.items()}
    if optimizer is not None:
        names = [[parameter._sharded_name for parameter in group["params"]] for group in optimizer.param_groups]
        values["optimizer"] = {"class": class_name(optimizer), "groups": options(optimizer), "parameters": names}
        pairs = [pair for rule in trained.rules for pair in numbers_of(state, plan, rule)]
        values["scalars"] = [{"parameters": names, "scalars": numbers} for names, numbers in pairs]
    if updates:
        values["owners"] = [update.of_all_ranks() for update in updates]
        values |= {OWNED + name: one for update in updates for name, one in update.of_parameters().items()}
    values["random"] = generators(state, plan.device)
    values |= {f"buffer {name}": tensor for name, tensor in state.buffers.items()}
    values |= {f"constant {name}": tensor for name, tensor in state.constants.items()}
    if trained.local is not None:
        values["local"] = trained.local.saved(state)
    for name, holder in extra.items():
        values[f"extra {name}"] = holder.state_dict()
    tensors: Tensors = {}
    return {name: encode(value, name, tensors) for name, value in values.items()}, tensors


def check_extra(extra: Mapping[str, Any] | None, load: bool) -> dict[str, Any]:
    """Raises ``ValueError`` for objects that cannot be asked for their state."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise ValueError(f"extra is {type(extra).__name__}; expected a dictionary of objects by name.")
    wanted = "load_state_dict" if load else "state_dict"
    for name, holder in extra.items():
        if not callable(getattr(holder, wanted, None)):
            raise ValueError(f"extra[{name!r}] is a {type(holder).__name__}, which has no {wanted}().")
    return dict(extra)


def dealt_out(holder: Any) -> bool:
    """Whether a loader deals its examples out to ranks, as `DistributedSampler` does.

    The state of such a loader says how many examples this rank has taken. That is no position for another number of
    ranks, even though the state is the same on all ranks.
    """
    with suppress(Exception):  # an attribute of the user's may raise anything
        batches = getattr(holder, "batch_sampler", None)
        for one in (holder, getattr(holder, "sampler", None), batches, getattr(batches, "sampler", None)):
            if any(type(getattr(one, name, None)) is int for name in ("num_replicas", "num_processes")):
                return True
    return False


def class_name(optimizer: Optimizer) -> str:
    kinds = [type(one) for one in members(optimizer)]
    return " and ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups' options, without those that a checkpoint cannot hold, such as functions."""
    found = []
    for group in optimizer.param_groups:
        kept = {}
        for name, value in options_of(group).items():
            value = plain(value)
            try:
                encode(value, name, {})
            except ValueError:
                continue
            kept[name] = value
        found.append(kept)
    return found


def optimizer_values(
    numbers: Mapping[str, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What a manifest has of an optimizer of another format. ``numbers``: each parameter's, such as its step count;
    ``groups``: options, and parameters' names as ``params``."""
    told = [{name: encode(plain(value), name, {}) for name, value in group.items()} for group in groups]
    names = [group.pop("params", []) for group in told]
    records = [{"parameters": [name], "scalars": encode(dict(own), "", {})} for name, own in numbers.items()]
    values = {"optimizer": {"class": None, "groups": told, "parameters": names}, "scalars": records}
    return {name: {"same": value} for name, value in values.items()}


def plain(value: Any) -> Any:
    """A rate that is a tensor or a NumPy number, as a Python number; also inside a tuple or list."""
    if type(value) in (tuple, list):
        return type(value)(plain(one) for one in value)
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1 else value


def numbers_of(state: State, plan: Plan, rule: Rule) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """What a group keeps once, with the parameters that have it; parameters with no step yet come apart."""
    own = {entry.name: state.optimizer[f"{rule.key}.{entry.name}"].item() for entry in rule.state if entry.scalar}
    names = names_of(plan, rule)
    later = state.step_counts.left(rule, names)
    yield [name for name in names if name not in later], own
    if later:
        yield [name for name in names if name in later], own | fresh(rule)


class _Source(NamedTuple):
    """A source of random numbers: its state, how to set it, and how to seed it."""

    state: Callable[[], Any]
    put: Callable[[Any], Any]
    seed: Callable[[str], Any]


def sources(device: torch.device) -> dict[str, _Source]:
    """This rank's generators, by name."""
    default = torch.default_generator

    def python() -> tuple[Any, ...]:
        version, words, gauss = random.getstate()
        return version, torch.tensor(words, dtype=torch.int64), gauss

    def to_python(saved: Sequence[Any]) -> None:
        version, words, gauss = saved
        random.setstate((version, tuple(words.tolist()), gauss))

    found = {
        "cpu": _Source(default.get_state, default.set_state, partial(seed, default)),
        "python": _Source(python, to_python, random.seed),
    }
    if device.type == "cuda":
        own = default_generator(device)
        found["cuda"] = _Source(own.get_state, own.set_state, partial(seed, own))
    with suppress(ImportError):
        from numpy import random as numpy

        found["numpy"] = _Source(
            numpy.get_state, numpy.set_state, lambda text: numpy.seed(random.Random(text).getrandbits(32))
        )
    return found


def generators(state: State, device: torch.device) -> dict[str, Any]:
    """The states of this rank's random generators."""
    _ = state.random  # what was written into the state goes to the generator first
    return {name: source.state() for name, source in sources(device).items()}


def check_generators(saved: Mapping[str, Any], device: torch.device) -> None:
    """Raises ``ValueError`` where `set_generators` could not take these states. All stay as they are."""
    for name, source in sources(device).items():
        before = source.state()
        try:
            if name in saved or name in ("cpu", "python"):
                source.put(saved[name])
        except Exception as error:
            raise ValueError(
                f"The checkpoint's random state is not one that can be set here ({type(error).__name__}: {error}), so "
                "nothing was loaded. Load another checkpoint: load(folder, step=...)."
            ) from error
        finally:
            source.put(before)


def set_generators(saved: Mapping[str, Any], state: State, device: torch.device) -> None:
    """Sets this rank's generators, so that they go on where the saved ones stood."""
    _ = state.random
    for name, source in sources(device).items():
        if name in saved:
            source.put(saved[name])
        elif name == "cuda":  # the checkpoint was written on CPUs
            source.seed(f"fsdp_compiled cuda {saved['cpu'].tolist()}")


def derive_generators(text: str, state: State, device: torch.device) -> None:
    """Gives this rank new random numbers, which are a function of the text."""
    _ = state.random
    for name, source in sources(device).items():
        source.seed(f"fsdp_compiled {name} {text}")
