"""The state of an optimizer over flat shards, of which ``optimizer.state`` shows each parameter's part.

    flat                     exp_avg [n] of each buffer; step, one number a group
    optimizer.state[p]       {"step": one place of a vector, "exp_avg": a DTensor over a slice of the flat one}

The views are what checkpoints, schedulers and the optimizer's own code read and write. Whoever puts other tensors
there (``load_state_dict``), or counts the steps of some parameters alone, is noticed: see `FlatState.current`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_compiled.ir.program import Port
from fsdp_compiled.optim.rule import Rule, StateTensor
from fsdp_compiled.plan.plan import Buffer
from fsdp_compiled.runtime.loop.merged_units import Row
from fsdp_compiled.runtime.loop.parameter_group import Entry
from fsdp_compiled.torch_private.dtensor import over_slices

FLAGS = ("first", "undamped")  # numbers of a rule's own: 0 once there is state


@dataclass(frozen=True)
class Part:
    """A buffer that is updated. ``places``: of its parameters, where each begins in the flat shard."""

    buffer: Buffer
    row: Row
    rule: Rule

    def places(self) -> Iterator[tuple[Entry, int, int]]:
        for flat, start in self.row.starts:
            for entry in flat.entries:
                yield entry, start + entry.first, start + entry.last


@dataclass
class FlatState:
    """``tensors``: by the port of the program that reads them."""

    optimizer: Optimizer
    tensors: dict[Port, torch.Tensor] = field(default_factory=dict)
    _shown: list[tuple[dict[str, Any], str, torch.Tensor]] = field(default_factory=list)
    _counts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # a vector, and the number
    _versions: list[int] = field(default_factory=list)
    _holders: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)

    def current(self) -> bool:
        """Whether ``optimizer.state`` shows these tensors still, and nobody else has counted a step."""
        return (
            bool(self.tensors)
            and all(state.get(name) is tensor for state, name, tensor in self._shown)
            and [vector._version for vector, _ in self._counts] == self._versions
            and all(self.optimizer.state.get(one) is state for one, state in self._holders.items())
        )

    def counted(self) -> None:
        """After a step: each parameter's numbers are the group's."""
        for vector, number in self._counts:
            vector.copy_(number)
        self._versions = [vector._version for vector, _ in self._counts]

    @torch.no_grad()
    def adopt(self, parts: Sequence[Part]) -> bool:
        """Moves what ``optimizer.state`` holds into flat tensors; False, with nothing changed, where parameters of a
        group have made different steps."""
        state = self.optimizer.state
        rules = {part.rule.key: part.rule for part in parts}
        members = {key: [part for part in parts if part.rule.key == key] for key in rules}
        numbers: dict[tuple[str, str], torch.Tensor] = {}
        for key, rule in rules.items():
            entries = [entry for part in members[key] for entry, _, _ in part.places()]
            own = [state.get(entry.parameter, {}) for entry in entries]
            began = any(own)
            for kept in rule.state:
                if kept.place == "ours":
                    numbers[key, kept.name] = _number(kept, parts[0], 0.0 if began else kept.initial)
                    continue
                found = [one.get(kept.name) for one in own]
                there = [one for one in found if one is not None]
                if there and len(there) < len(found):
                    return False
                if kept.scalar:
                    values = {float(one) for one in there} or {kept.initial}
                    if len(values) > 1:
                        return False
                    numbers[key, kept.name] = _number(kept, parts[0], values.pop())
        self.tensors, self._shown, self._counts = {}, [], []
        for key, rule in rules.items():
            for kept in rule.state:
                if kept.scalar:
                    number = self.tensors[Port("in", "state", key, kept.name)] = numbers[key, kept.name]
                    if kept.place == "parameter":
                        self._show_number(kept.name, number, members[key])
                else:
                    for part in members[key]:
                        self._show(kept, part)
        self._versions = [vector._version for vector, _ in self._counts]
        self._holders = {entry.parameter: state[entry.parameter] for part in parts for entry, _, _ in part.places()}
        return True

    def _show_number(self, name: str, number: torch.Tensor, parts: Sequence[Part]) -> None:
        entries = [entry for part in parts for entry, _, _ in part.places()]
        vector = torch.empty(len(entries), dtype=number.dtype, device=number.device)  # nothing waits for a GPU
        vector.copy_(number)
        self._counts.append((vector, number))
        for entry, place in zip(entries, vector.unbind(), strict=True):
            self._put(entry, name, place)

    def _show(self, kept: StateTensor, part: Part) -> None:
        like = part.row.tensor
        flat = torch.full((like.numel(),), kept.initial, dtype=kept.dtype or like.dtype, device=like.device)
        self.tensors[Port("in", "state", part.buffer.key, kept.name)] = flat
        for entry, first, last in part.places():
            assert entry.local is not None
            view = flat[first:last].view(entry.local.shape)
            before = self.optimizer.state.get(entry.parameter, {}).get(kept.name)
            if before is not None:
                view.copy_(before._local_tensor)
            (shown,) = over_slices([(view, _spec(entry, flat.dtype))])
            self._put(entry, kept.name, shown)

    def _put(self, entry: Entry, name: str, tensor: torch.Tensor) -> None:
        state = self.optimizer.state[entry.parameter]
        state[name] = tensor
        self._shown.append((state, name, tensor))


def refusal(rule: Rule) -> str | None:
    """Why this rule's state cannot be kept so, if it cannot."""
    if rule.eagerly is not None:
        return rule.eagerly
    for kept in rule.state:
        ours = kept.place == "ours" and kept.scalar and kept.name in FLAGS
        if not ours and (kept.place != "parameter" or kept.container is not None or kept.number):
            return f"it keeps {kept.name} where one number or tensor a parameter is expected, in optimizer.state"
    return None


def _number(kept: StateTensor, part: Part, value: float) -> torch.Tensor:
    return torch.full((), value, dtype=kept.dtype, device=part.row.tensor.device)


def _spec(entry: Entry, dtype: torch.dtype) -> Any:
    spec, meta = entry.spec, entry.spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return type(spec)(spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=dtype))
