"""What is saved and loaded, as it is now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.local_steps import LocalSteps
from fsdp_compiled.runtime.state import State
from fsdp_compiled.runtime.whole_update import WholeUpdate


@dataclass(frozen=True)
class Trained:
    """A model in shards with its optimizer."""

    plan: Plan
    state: State
    optimizer: Optimizer | None
    rules: Sequence[Rule]
    updates: Sequence[WholeUpdate] = ()  # of optimizers that keep state in forms of their own, on owners
    local: LocalSteps | None = None

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Flat shards by buffer key, as a checkpoint has the model's."""
        return self.local.weights(self.state) if self.local is not None else self.state.parameters
