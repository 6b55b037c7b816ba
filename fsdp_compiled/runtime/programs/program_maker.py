"""Makes a program: all ranks of the mesh make the same one together. If one rank fails, it is an error on all.

In a loop of the user's that holds for the first program. A rank makes later ones by itself (`ProgramMaker.alone`), and
ranks compare what they communicate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp_compiled.capture import global_modes
from fsdp_compiled.capture.across_tp import check_same, differing, digests, mark_random
from fsdp_compiled.capture.captured import Capture
from fsdp_compiled.capture.dynamic_shapes import traced_with
from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.device_mesh import connect_neighbours
from fsdp_compiled.distributed.mesh import (
    Interrupted,
    Mesh,
    agree,
    among,
    any_rank,
    exchange,
    from_first,
    said_by,
)
from fsdp_compiled.distributed.process_group import backends
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.trial import use_reference
from fsdp_compiled.lower import bundle
from fsdp_compiled.lower.cuda_device import environment
from fsdp_compiled.lower.cuda_graph import Replays, make_device
from fsdp_compiled.lower.inductor import cache_place, chooses_products, compile_all, divide
from fsdp_compiled.lower.lowering import Bind, Lowering, Runner
from fsdp_compiled.lower.pending_collectives import PendingCollectives
from fsdp_compiled.lower.piece import Call
from fsdp_compiled.lower.split_forward_backward import reached, whole_gradients
from fsdp_compiled.lower.trials import calls_kernels, failures
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.report import torch_trace
from fsdp_compiled.runtime.programs.compile import (
    Compiled,
    ProgramSpec,
    capture,
    check_devices,
    describe,
    fit_to_memory,
    fuse,
    memory_later,
    transform,
)
from fsdp_compiled.runtime.programs.no_collection import no_collection
from fsdp_compiled.runtime.programs.request import Request, mismatch
from fsdp_compiled.runtime.programs.training import Backward, backward_of
from fsdp_compiled.runtime.rng import check_random

Buffers = Mapping[str, torch.Tensor]  # the model's buffers, by name, as the state holds them
Room = Callable[[], None]  # drops a program to make room for the new one
T = TypeVar("T")
log = logging.getLogger("fsdp_compiled")


class ProgramMaker:
    """Makes the programs of one model."""

    def __init__(
        self,
        model: nn.Module,
        opened: Callable[[], AbstractContextManager[object]],
        loss: Callable[..., Any] | None,
        plan: Plan,
        mesh: Mesh,
        calls: Calls,
        bind: Bind | None = None,
        called: Callable[..., Any] | None = None,
        replays: Replays | None = None,
        plain: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """``opened``: the context in which the model is traced. ``bind``: what replaces a random operator; None:
        nothing, so it draws from PyTorch's default generator. ``called``: in a loop of the user's, the function that
        calls the model, instead of ``loss``. ``replays``: the graphs to use instead of those of the plan's device.
        ``plain``: parameters of the model that are not in the plan, by name.
        """
        bundle.load_named_bundle(mesh.world)
        self.captures = 0
        graphs = plan.policy.cuda_graph
        self.replays = replays or Replays(make_device(plan.device, graphs), graphs)
        self.model, self.plan, self.mesh, self.calls, self.called = model, plan, mesh, calls, called
        self.loss, self._opened, self._bind, self._plain = loss, opened, bind, {} if plain is None else plain
        self._tuned: bool | None = None  # `ProgramSpec.tuned`, if it was decided for all programs
        self._begun = False  # whether all ranks have a program
        self._idle: set[str] = set()  # parameters that a warning has named as not reached by the loss
        self.ranks = mesh  # the ranks that make a program now

    def compile(self, request: Request, buffers: Buffers, rules: Sequence[Rule], room: Room) -> Compiled:
        """Makes a program for all sizes that the request leaves open; if any rank fails, all do so for their sizes."""
        try:
            return self._compile(request, buffers, rules, room)
        except Interrupted:
            raise
        except Exception as error:
            if request.instead is None:
                raise
            what = str(error).strip().partition("\n")[0]
        log.info("%s cannot be made (%s): each size has a program of its own", request.label, what)
        request.give_up_sizes()
        return self._compile(request, buffers, rules, room)

    def _compile(self, request: Request, buffers: Buffers, rules: Sequence[Rule], room: Room) -> Compiled:
        """capture -> passes -> fit to memory -> fusions -> check -> agree -> partition -> compile -> graph"""
        begun = time.perf_counter()
        label = request.label
        connect_neighbours(self.mesh, self.plan.neighbours.values())
        spec = self._spec(request, buffers, rules)

        def trace() -> Capture:
            check_devices(spec.batch, spec.named, spec.plan.device)
            with self._opened():
                return capture(self.model, spec)

        captured = self.together(trace)
        if self.mesh.tp > 1:
            self.compare_along_tp(captured)

        def build() -> Compiled:
            moving = reached(captured.program) if spec.kind == "training" else {}  # before the passes consume it
            made = transform(captured, spec)  # and checked
            later = memory_later(captured, spec)
            made = fit_to_memory(made, later, spec)
            program, known = fuse(made, spec)  # and checked again
            return describe(captured, program, known, later, spec, moving)

        uneven = self.plan.uneven
        compiled = self.together(build, self._compared, lambda made: made.program.outline(uneven))
        torch_trace.emit(label, compiled.number, compiled.program, lambda: compiled.stages)
        replayed = self.can_replay(compiled)
        room()
        compiled.runner, compiled.lowered = self.lower(compiled.split.forward if compiled.split else compiled.program)
        if compiled.split is not None:
            compiled.backward, text = self.lower(compiled.split.backward, boxed=True)
            compiled.lowered = f"{compiled.lowered}\nbackward, {text}"
        compiled.pending = PendingCollectives(compiled.runner)
        if request.sizes:
            self.together(lambda: self._check_fit(compiled, request))
        if replayed:  # as a CUDA graph
            compiled.runner = self.replays.wrap(compiled.runner, compiled.inputs, label, partial(self._all_say, label))
        elif compiled.kind in ("gradient", "forward"):
            compiled.runner = self.replays.beside(compiled.runner)
        self.captures += 1
        self._say_idle(compiled)
        bundle.note_program(self.mesh)
        log.info("compiled %s in %.1f s (program %d)", label, time.perf_counter() - begun, self.captures)
        return compiled

    def compile_in_loop(self, request: Request, buffers: Buffers, rules: Sequence[Rule], room: Room) -> Compiled:
        """All ranks make the first program at the same time, and together where their calls are alike.

        A rank makes later ones by itself: other ranks may have theirs already, or batches of other lengths. Ranks
        compare only what these communicate. Ranks along tp, whose programs are parts of one, make all programs
        together.
        """
        if self.mesh.tp > 1:
            self.meet(request.label)
            return self.compile(request, buffers, rules, room)
        if self._begun:
            if request.posted:
                try:
                    compiled = self._by_itself(request, buffers, rules, room)
                except BaseException as error:
                    self.calls.abandon(f"It said:\n{type(error).__name__}: {error}")
                    raise
            else:
                with self.calls.refusing(own=True):
                    compiled = self._by_itself(request, buffers, rules, room)
            self.calls.enter(compiled.label, compiled.wire, request.posted)
            return compiled
        self.calls.post(request.label)
        alike = self.calls.meet(request.label, lambda label: label.partition(" (")[0])
        self._tuned = any_rank(chooses_products(), self.mesh)
        if alike:
            compiled = self.compile(request, buffers, rules, room)
        else:
            compiled = self.together(lambda: self._by_itself(request, buffers, rules, room), self._compared)
        self._begun = True
        return compiled

    def captured_again(self, request: Request, buffers: Buffers) -> Capture:
        """Captures a call that has a program, on this rank alone, and makes no other program of it."""
        with no_collection(), global_modes.outside_modes(), self.alone():
            spec = self._spec(request, buffers, ())
            with self._opened():
                return capture(self.model, spec)

    def _by_itself(self, request: Request, buffers: Buffers, rules: Sequence[Rule], room: Room) -> Compiled:
        with self.alone():
            return self.compile(request, buffers, rules, room)

    def _compared(self, made: Compiled) -> str:
        """The text that ranks must share: the whole program or, in a loop of the user's, what it communicates; code
        there may ask which rank it runs on, as under FSDP2."""
        if self.called is None or self.mesh.tp > 1:
            return made.program.text()
        parts = (made.split.forward, made.split.backward) if made.split is not None else (made.program,)
        return "\nbackward\n".join("\n".join(part.collectives) for part in parts)

    def _spec(self, request: Request, buffers: Buffers, rules: Sequence[Rule]) -> ProgramSpec:
        """What is to be compiled, after ranks exchanged what they must know of each other."""
        # Sizes may differ between ranks; all trace with those of rank 0.
        hints = traced_with(from_first(request.sizes, self.ranks)) if request.sizes else {}
        tuned = any_rank(chooses_products(), self.ranks) if self._tuned is None else self._tuned
        gloo = tuple(axis for axis, name in backends(self.mesh).items() if name == "gloo")
        return ProgramSpec(
            request.kind, self.loss, self.plan, tuple(rules), buffers, batch=request.batch, named=request.named,
            label=request.label, number=self.captures + 1, sizes=request.sizes, hints=hints, modes=request.modes,
            gloo=gloo, tuned=tuned, called=self.called, plain=self._plain,
            tp_mesh=self.mesh.tp_mesh, groups=self.mesh.groups, added=request.added,
        )  # fmt: skip

    def whole(self, compiled: Compiled) -> Backward:
        """The program's backward without communication. Each rank makes it when it first needs it."""
        if compiled.whole is None:
            assert compiled.split is not None
            program = whole_gradients(compiled.split.backward)
            with no_collection(), global_modes.outside_modes(), self.alone():
                compiled.whole = backward_of(program, self.lower(program, boxed=True)[0])
        return compiled.whole

    def _check_fit(self, compiled: Compiled, request: Request) -> None:
        """Checks the sizes again after lowering, which may have added conditions on them."""
        if (reason := mismatch(compiled, request)) is not None:
            raise ValueError(
                f"The model or the loss asks for certain sizes: the program, traced with rank 0's, is for {reason} on "
                f"rank {self.mesh.rank}. Give all ranks sizes that agree in it, or set Policy(dynamic=False)."
            )

    def _say_idle(self, compiled: Compiled) -> None:
        """Warns of parameters that the loss does not reach, once for each."""
        found = [name for name in compiled.idle if name not in self._idle]
        self._idle.update(found)
        if found and self.called is None and self.mesh.rank == 0:
            log.warning("the loss does not reach %s: no gradient, and no update, for them", ", ".join(found))

    def meet(self, label: str) -> None:
        """Begins something rare and collective (compiling, collecting the model): all ranks do it, or none."""
        self.calls.post(label)
        self.calls.meet(label)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which this rank makes a program without the others."""
        self.ranks = Mesh(self.mesh.device)
        try:
            yield
        finally:
            self.ranks = self.mesh

    def compare_along_tp(self, captured: Capture) -> None:
        """Checks that ranks along tp trace alike, and that what is computed of a rank's parts stays with them."""
        program, plan = captured.program, self.plan
        self.together(lambda: None, outline=lambda _: program.outline(plan.uneven))
        own = self.together(lambda: digests(program, captured.constants))
        found = exchange(own, Mesh(self.mesh.device, tp=self.mesh.tp, everyone=self.mesh.groups["tp"]))

        def check() -> None:
            different = differing(program, plan, own, found)
            check_same(program, plan, different, captured.layouts, self.called is not None)
            mark_random(program, plan, different)
            if self.called is not None:
                check_random(program, plan.device)

        self.together(check)

    def lower(
        self, program: Program, boxed: bool = False, groups: Mapping[str, str] | None = None
    ) -> tuple[Runner, str]:
        """Lowers the program. ``boxed``: to a function of one list, which it empties of its inputs; ``groups``: the
        process group along each axis, other than the mesh's."""
        groups, how, blocks = groups or self.mesh.groups, self.plan.policy.lower, self.plan.blocks
        lowering = self.together(lambda: Lowering(program, groups, how, blocks, self._bind))
        self._try_kernels(program)
        pieces: dict[str, Call] = {}
        if lowering.pieces and self.ranks.world > 1:  # each on one of the ranks that share code; others wait for it
            place, count = among(self.together(lambda: str(cache_place(self.plan.device))), self.ranks)
            pieces = self.together(lambda: compile_all(divide(lowering.pieces, count)[place]))
        pieces |= self.together(lambda: compile_all(lowering.pieces))
        return lowering.runner(pieces, boxed), lowering.text(pieces)

    def _try_kernels(self, program: Program) -> None:
        """Where a kernel fails or is wrong on any rank's device, all ranks use its reference, and so round alike."""
        device = self.plan.device
        if not calls_kernels(program):
            return
        found = said_by(self.together(lambda: failures(program, device)) or None, self.ranks)
        for rank, failed in enumerate(found):
            for name, reason in (failed or {}).items():
                if use_reference(name, device) and self.mesh.rank == 0:
                    log.warning(
                        "the kernel of %s is not used: on rank %d %s. Plain PyTorch does its work. Please report it, "
                        "with: %s", name, rank, reason, environment(),
                    )  # fmt: skip

    def can_replay(self, compiled: Compiled) -> bool:
        """Whether every rank can launch this program as a graph; if not, rank 0 says why."""
        if self.replays.device is None or compiled.kind not in ("step", "last", "accumulate"):
            return False
        program, device = compiled.program, self.plan.device
        found = self.together(lambda: self.replays.obstacles(program, device, backends(self.mesh)))
        reason = next(filter(None, said_by(found or None, self.mesh)), "")
        if reason and self.mesh.rank == 0:
            log.warning("%s runs without a CUDA graph:\n%s", compiled.label, reason)
        return not reason

    def _all_say(self, label: str, text: str) -> list[str]:
        """One text of each rank, by rank, about a call that all ranks make."""
        self.calls.meet(label)
        return exchange(text, self.mesh)

    def together(
        self,
        make: Callable[[], T],
        text: Callable[[T], str] = lambda made: "",
        outline: Callable[[T], str] | None = None,
    ) -> T:
        """Runs ``make`` on every rank and returns its result. Raises on every rank if one fails, or results differ.

        Ranks along the tp axis compare only the outline, since their parts begin at different places.
        """
        made: list[T] = []
        failure: BaseException | None = None
        try:
            made.append(make())
        except BaseException as error:  # interrupts too: the other ranks would wait
            failure = error
        if outline is None or self.mesh.tp == 1:
            agree(self.ranks, "The program", text(made[0]) if made and self.ranks.world > 1 else "", failure)
        else:
            agree(self.mesh, "The program", outline(made[0]) if made else "", failure, lambda: text(made[0]))
        return made[0]
