"""The fuzzer's programs on real ranks: each rank's own batch, beside plain PyTorch on the batches of all.

torchrun --nproc-per-node 2 fuzz.py RESULT FIRST COUNT
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.fuzz.cases import Case, make_case
from tests.fuzz.parts import LAYERS, OUT, RANDOM, WIDTH
from tests.fuzz.sides import REFUSED, Differs, Ours, Plain
from tests.fuzz.trial import CLOSE, HALF, compare
from tests.launch import answer, of_all

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ALONE = ("gradient", "draw", "replace buffer")  # of one process: flat shards, and a generator that each rank mixes
# What draws has other numbers on each rank, and a batch's statistics are a rank's own.
PLAIN = [name for name in LAYERS if name not in (*RANDOM, "batch norm", "count")]

Batch = tuple[torch.Tensor, torch.Tensor]


def case_of(seed: int) -> Case:
    """The case of this seed, of what several ranks and one process have in common."""
    case = make_case(seed)
    layers = tuple(name if name in PLAIN else PLAIN[len(name) % len(PLAIN)] for name in case.layers)
    actions = tuple("step" if action in ALONE else action for action in case.actions)
    return replace(case, layers=layers, actions=(*actions, "one rank fails", "step"))


class Ranks(Plain):
    """Plain PyTorch on every rank's batch, one after the other; gradients and losses are means."""

    def step(self, batches: Sequence[Batch]) -> Any:
        mine: Any = None
        self.optimizer.zero_grad()
        losses, own = [], []
        for index, _ in enumerate(batches):
            for rank in range(WORLD):
                loss, aux = self._value(self.of(rank, index, len(batches)))
                with torch.autocast("cpu", enabled=False):
                    (loss / (len(batches) * WORLD)).backward()
                losses.append(loss.detach())
                own += [aux] if rank == RANK else []
        mine = own[-1]
        self.update()
        return torch.stack(losses).mean(), mine

    def of(self, rank: int, index: int, count: int) -> Batch:
        """The batch that another rank has in the same place."""
        call = self.call + 100 if count > 1 and index == 1 else self.call
        return batch_of(self.case, rank, call)


def batch_of(case: Case, rank: int, call: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * case.seed + call + 7919 * rank)
    rows = case.rows[call % len(case.rows)]
    sizes = (WIDTH, OUT)
    return tuple(torch.randn(rows, size, generator=generator, dtype=torch.float32) for size in sizes)  # type: ignore[return-value]


def own(side: Any) -> Any:
    """The side with this rank's batches, and with a call that fails on rank 1 alone."""

    def batch(call: int) -> Batch:
        side.call = call % 100
        return batch_of(side.case, RANK, call)

    side.batch = batch
    return side


class Sharded(Ours):
    def one_rank_fails(self, batch: Batch) -> None:
        x = batch[0][:, :2] if RANK == 1 else batch[0]
        try:
            self.sharded.step(x, batch[1])
        except (*REFUSED, RuntimeError):
            return
        raise Differs("a call that failed on rank 1 went on here")


def run(case: Case) -> str:
    """How the two differ on this rank, or that the case is refused; empty where they agree."""
    bound = HALF if case.autocast or "autocast step" in case.actions else CLOSE
    try:
        plain, ours = own(Ranks(case)), own(Sharded(case))
        plain.one_rank_fails = lambda batch: None
        for call, action in enumerate(case.actions):
            state = torch.get_rng_state()
            expected = plain.act(action, call)
            torch.set_rng_state(state)
            compare(ours.act(action, call), expected, bound, f"call {call} ({action})")
            torch.manual_seed(case.seed + call)
        weights = ours.weights()
        if RANK == 0:
            compare(weights, plain.weights(), bound, "the state at the end")
    except Differs as error:
        return f"differs: {error}"
    except REFUSED as error:
        return f"refused: {str(error).splitlines()[0]}"
    except Exception as error:
        return f"crashed: {type(error).__name__}: {error}".splitlines()[0]
    return ""


def main(first: str, count: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for seed in range(int(first), int(first) + int(count)):
        with contextlib.redirect_stderr(None):
            said = run(case_of(seed))
        every = of_all(said)
        if any(every):
            found[f"{seed} {case_of(seed)}"] = every
    return found


if __name__ == "__main__":
    answer(main)
