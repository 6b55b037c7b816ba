"""Which calls of each program are verified, and what ranks are told of it; for both faces of `Policy.verify`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from fsdp_compiled.capture.mutations import PLAIN
from fsdp_compiled.distributed.mesh import Mesh, RankError, said_by
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.runtime.programs.compile import Compiled
from fsdp_compiled.torch_private.names import there

FIRST = 2  # so many first calls of each program are verified, including the one that compiled it
CURE = (
    "If the code changed since it was traced in a way that is not seen, build and shard the model again, or change a "
    "guarded value; Policy(verify=False) turns the comparison off."
)
log = logging.getLogger("fsdp_compiled")


class VerifiedPrograms:
    """The programs of one plan, by their numbers."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._plan, self._mesh = plan, mesh
        self._traced: dict[int, dict[str, Any]] = {}  # modules' plain attributes at the program's first call
        self._told: set[str] = set()

    def due(self, count: int) -> bool:
        """Whether the call that follows ``count`` good ones is verified."""
        every = self._plan.policy.verify
        return count < FIRST or (every is not True and count % every == 0)

    @property
    def gradients(self) -> bool:
        return self._plan.policy.verify_gradients and there("backward under a mode")

    def draws_otherwise(self, compiled: Compiled) -> bool:
        """Whether the program draws other random numbers than eager PyTorch; the log says so once."""
        if not (compiled.random and (self._plan.device.type == "cuda" or self._mesh.tp > 1)):
            return False
        why = "draws random numbers, which on a GPU, and along tp, are others than in eager PyTorch"
        self.tell(f"{compiled.label} {why}, so it is not compared.")
        return True

    def changed(self, compiled: Compiled, model: torch.nn.Module) -> str:
        """Which plain attributes of modules differ from those at the program's first call, for a message."""
        now = {
            f"{path}.{name}".lstrip("."): value
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, PLAIN)
        }
        found = [f"{name} was {was!r} and is {value!r}"
                 for name, was, value in _differing(self._traced.setdefault(compiled.number, now), now)]  # fmt: skip
        return f" (since the first such call, {'; '.join(found[:3])})" if found else ""

    def agree(self, said: str | None, changed: str, label: str, before: str = "") -> None:
        """Raises `RankError` on every rank if one of them has said that something differs. Collective."""
        own = f"on rank {self._mesh.rank}, {said}{changed}" if said is not None else None
        if (first := next((one for one in said_by(own, self._mesh) if one is not None), None)) is not None:
            raise RankError(f"Policy.verify: in {label}, {first}. {before}{CURE}")

    def alike(self, compiled: Compiled, took: float, more: str = "") -> None:
        """Says once that a call was compared, and what it cost."""
        told = f"{compiled.label} gave in eager PyTorch what its program gives{more}. That took {took:.2f} s."
        self.tell(told, "compared")

    def tell(self, said: str, once: str | None = None) -> None:
        """Writes to the log of rank 0, unless something was told by this name before."""
        if (once or said) not in self._told and self._mesh.rank == 0:
            log.warning("Policy.verify: %s", said)
        self._told.add(once or said)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs = [(name, before.get(name), now.get(name)) for name in sorted({**before, **now})]
    return [one for one in pairs if (one[1], type(one[1])) != (one[2], type(one[2]))]
