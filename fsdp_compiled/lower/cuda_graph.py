"""Runner -> runner that is one launch: the step as a CUDA graph over fixed addresses.

    calls 1, 2                        call 3                              calls 4, 5, ...

    on the graph's stream, with       held = memory like the batch's
    memory of the graph's pool:       capture: runner(shards, ..., held)  held <- batch
    runner(shards, ..., batch)        as on every call after it  -------> launch
    copies of the results                                                 copies of the results

Every call is a step of the training, the first ones too: they load kernels, choose algorithms and connect the ranks,
which may not happen during a capture. A capture runs nothing, so there is no state to put back.

A graph holds addresses. The state's tensors, the scheduled rates and the call's number are tensors that keep their
addresses, and are written in place. The batch is copied into tensors that are held for it. Results are handed out as
copies, the small ones with one launch. Before each launch, torch writes the generator's seed and offset where the
graph's random operators read them, and advances the generator by what the graph draws; so a graph draws the same
numbers as the program. The first launch is compared with the program itself (`trials`).

A graph belongs to the tensors that it was captured on. Called with another `State`, the program is captured again on
that state's tensors. The test is identity, not addresses: NCCL needs all ranks to agree on whether a collective is
captured, and identity is the same on all ranks.

All graphs of a `Sharded` take their memory from one pool, since a graph needs its memory only while it runs. So several
shapes, and `accumulate` beside `step`, need no more than the largest of them. Forward alone and `value_and_grad`, which
run without a graph, use that memory too. When no graph is left, because each was refused or all were closed, the pool
is given back: programs that run without a graph then take their memory elsewhere.

The CUDA calls are in `cuda_device`.
"""

from __future__ import annotations

import atexit
import logging
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, Literal

import torch

from fsdp_compiled.distributed.mesh import Unanimous
from fsdp_compiled.distributed.process_group import before_end
from fsdp_compiled.ir.nodes import is_collective
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.lower.capturable import Held, Results, obstacles, sentence
from fsdp_compiled.lower.cuda_device import CudaGraphs, environment
from fsdp_compiled.lower.trials import attempt, snapshot, tried

Runner = Callable[..., Sequence[torch.Tensor]]
Wanted = bool | Literal["auto"]
Everywhere = Callable[[str], list[str]]

WARM = 2  # calls before the one that captures: the first compiles, the second finds everything in place
RESTARTS = 3  # new states in a row, none of which stayed long enough for a capture
log = logging.getLogger("fsdp_compiled")


def make_device(device: torch.device, wanted: Wanted) -> CudaGraphs | None:
    """The device that captures, for this torch device; None where nothing is to be captured."""
    return CudaGraphs(device) if device.type == "cuda" and wanted is not False else None


class Replays:
    """The graphs of one `Sharded`: what they share, and how often they were launched."""

    def __init__(self, device: CudaGraphs | None, wanted: Wanted) -> None:
        self.device = device
        self.wanted = wanted
        self.launches = 0
        self._replays: weakref.WeakSet[Replay] = weakref.WeakSet()

    def obstacles(self, program: Program, device: torch.device, backends: Mapping[str, str]) -> str:
        """Why this program cannot be captured; raises ``ValueError`` with it where a graph was asked for."""
        if self.device is None:
            return ""
        found = obstacles(program, device, backends, self.device.capturable)
        if obstacle := self.device.obstacle(any(map(is_collective, program.graph.nodes))):
            found.append(obstacle)
        if found and self.wanted is True:
            raise ValueError(
                f"Policy.cuda_graph is True, but the program cannot be captured:\n{sentence(found)}\n"
                'With cuda_graph="auto" it runs without a graph.'
            )
        return sentence(found) if found else ""

    def wrap(self, runner: Runner, inputs: Sequence[Port], label: str, everywhere: Everywhere) -> Replay:
        """The runner, launched as a graph from its third call on. ``everywhere`` exchanges a text among the ranks."""
        replay = Replay(self, runner, inputs, label, everywhere)
        if not self._replays:
            # Runs before Python and the process groups end: a process group's end waits for the graphs that use it.
            known = weakref.WeakMethod(self.close)

            def close() -> None:
                if (end := known()) is not None:
                    end()

            atexit.register(close)
            before_end(close)
        self._replays.add(replay)
        return replay

    def beside(self, runner: Runner) -> Runner:
        """A runner for a program that is not captured (forward alone, a gradient). While there are graphs, it uses
        their memory, which is free while none is launched: elsewhere, the same amount would be held once more."""

        def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
            if self.device is None or not any(replay.captured for replay in self._replays):
                return runner(*given)
            return _copies(self.device.warm(lambda: runner(*given)))

        return run

    def close(self) -> None:
        """Destroys the graphs; calls after this warm up and capture again."""
        for replay in list(self._replays):
            replay.drop()
        self.release()

    def release(self) -> None:
        """Gives back the graphs' memory, if there is no graph."""
        if self.device is not None and not any(replay.captured for replay in self._replays):
            self.device.release()


def _copies(results: Sequence[Any]) -> list[Any]:
    """Copies of the results, which the next launch does not overwrite."""
    return [result.clone() if isinstance(result, torch.Tensor) else result for result in results]


class Replay:
    """Captures the given runner, and from then on launches the graph."""

    def __init__(
        self, shared: Replays, runner: Runner, inputs: Sequence[Port], label: str, everywhere: Everywhere
    ) -> None:
        self.runner, self.label = runner, label
        self._shared, self._everywhere = shared, everywhere
        self._fed = [index for index, port in enumerate(inputs) if port.kind == "batch"]
        self._kept = [index for index, port in enumerate(inputs) if port.kind != "batch"]
        self._tensors: list[torch.Tensor] | None = None  # the tensors of the last call, without the batch
        self._calls = 0  # calls with these tensors
        self._restarts = 0
        self._graph: Any = None  # what was captured
        self._held: list[Held] = []
        self._results = Results([])
        self._refused = False
        self._ports = inputs
        self._tried = False  # whether a launch was compared with the program itself

    def __call__(self, *given: torch.Tensor) -> Sequence[torch.Tensor]:
        kept = [given[index] for index in self._kept]
        if self._tensors is None or not all(map(is_, kept, self._tensors)):
            self._move(kept)
        if self._refused:
            return self.runner(*given)
        if self._graph is None:
            self._calls += 1
            if self._calls <= WARM:
                return self._warm(given)
            self._capture(given)
            if self._graph is None:
                return self.runner(*given)
        if not self._tried:
            return self._try(given)
        return self._launch(given)

    def _launch(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert self._graph is not None
        if self._fed:  # one launch, if all have the same dtype
            torch._foreach_copy_(
                [held.target for held in self._held],
                [held.source(given[index]) for held, index in zip(self._held, self._fed, strict=True)],
                non_blocking=True,
            )
        self._graph.replay()
        self._shared.launches += 1
        self._restarts = 0
        return self._results.copies()

    def _try(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compares the first launch with the program itself. If they differ on any rank, all ranks drop the graph. If
        one rank cannot compare, no rank does."""
        assert self._shared.device is not None
        self._tried = True
        host = socket.gethostname()
        ranks = self._everywhere(host).count(host)
        kept, failed = attempt(lambda: snapshot(self._ports, given, ranks))
        if (found := self._said(failed)) or kept is None:
            self._warn_untried(found)
            return self._launch(given)
        # In the graphs' memory, which is free while none runs: other memory would be held in addition from here on.
        device, program = self._shared.device, lambda: self.runner(*given)
        trial = tried(lambda: device.warm(program), kept, device.random_state())
        if found := self._said(trial.failed):
            self._warn_untried(found)
            return self._launch(given)
        results = self._launch(given)
        odd, failed = attempt(lambda: trial.difference(results))
        if found := self._said(odd or ""):
            self._shared.launches -= 1
            trial.undo()
            self._release()
            self._refuse(
                f"its first launch gave other numbers than the program itself {found}. Nothing of that launch is kept. "
                f"Please report it, with the folder that sharded.dump writes, and: {environment()}"
            )
            return self.runner(*given)
        if found := self._said(failed):
            self._warn_untried(found)
        return results

    def _warn_untried(self, reason: str) -> None:
        log.warning("%s: its graph is not compared with the program, for want of memory %s", self.label, reason)

    def _said(self, reason: str) -> str:
        """The reason of the first rank that has one, and that rank's number; empty where none has one. Collective."""
        reasons = self._everywhere(reason)
        rank = next((rank for rank, text in enumerate(reasons) if text), None)
        return "" if rank is None else f"(rank {rank}: {reasons[rank]})"

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def drop(self) -> None:
        """Returns to the state before the first call."""
        self._release()
        self._tensors, self._calls, self._tried = None, 0, False

    def _release(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._held, self._results = None, [], Results([])

    def _move(self, kept: list[torch.Tensor]) -> None:
        """Runs on these tensors from now on."""
        if self._tensors is not None and not self._refused:
            self._restarts += self._graph is None
            log.info("%s: another state; a graph is captured on its tensors", self.label)
        self.drop()
        self._tensors = kept
        if self._restarts >= RESTARTS:
            self._restarts = 0
            self._refuse(
                "each call comes with another State, and a graph belongs to the tensors that it was captured on. Keep "
                "to one State, and copy the numbers of the others into its tensors."
            )

    def _warm(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert self._shared.device is not None
        if self._calls == 1:
            self._shared.device.make_room()
        return _copies(self._shared.device.warm(lambda: self.runner(*given)))

    def _capture(self, given: Sequence[torch.Tensor]) -> None:
        """Captures on all ranks, or on none."""
        assert self._shared.device is not None
        inputs = list(given)
        self._held = [Held(given[index]) for index in self._fed]
        for held, index in zip(self._held, self._fed, strict=True):
            inputs[index] = held.tensor
        reason, graph = "", None
        try:
            self._results, graph = self._shared.device.capture(lambda: Results(self.runner(*inputs)))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        if found := self._said(reason):
            if graph is not None:
                graph.reset()
            self._held, self._results = [], Results([])
            self._refuse(f"to capture it failed {found}")
            return
        self._graph = graph
        log.info("captured %s as a CUDA graph", self.label)

    def _refuse(self, reason: str) -> None:
        self._shared.release()
        if self._shared.wanted is True:
            raise Unanimous(
                f"Policy.cuda_graph is True, but {self.label} cannot run as a graph: {reason}\n"
                'With cuda_graph="auto" it runs without a graph.'
            )
        self._refused = True
        log.warning("%s runs without a CUDA graph: %s", self.label, reason)
