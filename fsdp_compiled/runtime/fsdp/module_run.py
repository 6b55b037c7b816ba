"""One forward of a module in a loop of the user's, and the backwards through it, as autograd calls them.

    run.apply()                    forward: gathers and compute; keeps what backward reads
    loss.backward()                backward: gathers, compute and reductions; leaves ``parameter.grad``
    without synchronisation        backward: no communication; leaves whole gradients with the flat shards (``held``)

A run uses the parameters that were there when it was made: they may be frozen, thawed or replaced before its backward.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_compiled.capture.global_modes import outside_modes
from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.mesh import RankError
from fsdp_compiled.ir.nodes import OTHER_BATCHES
from fsdp_compiled.ir.reduction import finish
from fsdp_compiled.lower.lowering import below_autograd
from fsdp_compiled.plan.plan import Buffer
from fsdp_compiled.runtime.autograd_hooks import hook_on
from fsdp_compiled.runtime.fsdp.extended_parameter import Extended
from fsdp_compiled.runtime.fsdp.gradients import leave, mean_of, parts, reductions
from fsdp_compiled.runtime.fsdp.module_plan import ModulePlan
from fsdp_compiled.runtime.fsdp.parameter_group import Entry, FlatShard
from fsdp_compiled.runtime.fsdp.verified_call import Verified
from fsdp_compiled.runtime.programs.compile import Compiled
from fsdp_compiled.runtime.programs.failed_calls import SAME_BATCHES
from fsdp_compiled.runtime.programs.training import Backward
from fsdp_compiled.torch_private.modes import will_run


def run_program(
    run: Callable[[], Sequence[torch.Tensor]], calls: Calls, around: AbstractContextManager[Any] | None = None
) -> Sequence[torch.Tensor]:
    """Runs a program and returns its results. A failure is an error on every rank."""
    try:
        with around or below_autograd():
            return run()
    except BaseException as error:
        if isinstance(error, RankError):
            raise
        if (lost := calls.parting(error)) is not None:
            raise RankError(lost) from error
        if isinstance(error, RuntimeError) and OTHER_BATCHES in str(error):  # every rank raises it
            raise RankError(f"In a forward, {OTHER_BATCHES}. {SAME_BATCHES}") from error
        if isinstance(error, RuntimeError) and (other := calls.reason(error)) is not None:
            raise RankError(other) from error
        if calls.mesh.world > 1:
            calls.abandon(f"It said:\n{type(error).__name__}: {error}")
        raise
    finally:
        calls.returned()


# A plan, its buffer and a flat shard; a reduced gradient, the parameters that get it, where the shard begins in it.
Reduced = tuple[ModulePlan, Buffer, FlatShard, torch.Tensor, list[Entry], int]
Waiting = tuple[ModulePlan, Buffer, list[FlatShard]]


class Run:
    """What a forward leaves for its backwards."""

    def __init__(
        self,
        made: ModulePlan,
        compiled: Compiled,
        calls: Calls,
        inputs: Sequence[Any],
        verified: Verified | None = None,
    ) -> None:
        self.made, self.compiled, self.calls = made, compiled, calls
        self.verified = verified  # None once a backward was compared
        self.training = compiled.training
        self.inputs = inputs
        # Autograd's inputs are only the tensors that get a gradient: it calls hooks of its other inputs too, with None.
        moved = self.training.moved
        late = any(not (group.synchronise and group.all_reduces) for group in made.groups)
        held = {entry for entry in made.names if late and self._waits(entry)}
        given = [
            entry.parameter
            for entry, name in made.names.items()
            if name in moved and entry.parameter.requires_grad and not (entry in held and hook_on(entry.parameter))
        ]
        self._hooked = [group.all_reduce_hook is not None for group in made.groups]
        self._trained = tuple(given)  # keeps them alive, since `place` goes by their ids
        self.place = {id(one): place for place, one in enumerate(given)}
        # Inputs that have gradients beside the sharded parameters; some of them are parameters that are not sharded.
        self.others: list[tuple[str, int]] = []  # the name, and the place among autograd's inputs
        for name, place in self.training.others:
            if name in made.extended:
                continue
            one = made.lent.plain.get(name, inputs[place])
            if (found := self.place.get(id(one))) is None:
                found = len(given)
                given.append(one)
            self.others.append((name, found))
        self.given: Sequence[torch.Tensor] = given
        self.count = len(given)
        read = dict.fromkeys(made.flats[name] for name in self.training.read)
        self.written = [(flat, flat.written) for flat in read]

    def apply(self) -> Sequence[torch.Tensor]:
        """Runs forward. Returns its results, for autograd to differentiate."""
        given, self.given = self.given, ()
        for group in self.made.groups:
            if not group.gathered:
                group.gathered = any(self.made.names[entry] in self.training.gathered for entry in group.entries)
        return _Function.apply(self, torch.zeros((), requires_grad=True), *given)

    def verify(
        self, verified: Verified, tangents: Sequence[torch.Tensor | None], everything: bool
    ) -> Callable[[Mapping[Entry, DTensor]], None] | None:
        """Runs eager PyTorch's backward, once. Returns a function that compares this backward's gradients with its
        own."""
        self.verified = None
        if not everything or self.made.waits:
            return None
        if not all(group.synchronise and group.all_reduces for group in self.made.groups):
            return None
        label = f"{verified.label}, backward"
        with self.calls.together(label):
            if not verified.backward(tangents):
                return None

        def compare(found: Mapping[Entry, DTensor]) -> None:
            with self.calls.together(f"{label}, compared"):
                verified.compare_gradients(found)

        return compare

    def backward(
        self, kept: list[Any], reached: Collection[str], everything: bool
    ) -> tuple[dict[Entry, DTensor], dict[str, torch.Tensor]]:
        """Gradients of the sharded parameters, unless they are held back, and of other inputs, by name.

        ``kept``: the tensors that backward reads; they are taken out of this list, so that each is freed after its last
        use. ``reached``: the names of the parameters that have gradients. ``everything``: whether gradients go to
        ``grad``; if not, they go to the caller of ``torch.autograd.grad``, for example, and nothing is held back.
        """
        made = self.made
        with self.calls.refusing():
            self._check_versions()
            self._check_hooked()
            if everything:
                self._check_hooks(reached)
        if everything:
            waiting, others = self._waiting()
            if waiting or others or made.waits or not all(one.synchronise and one.all_reduces for one in made.groups):
                return self._held_back(kept, reached, waiting, others)
        return self._reduced(kept, reached, everything)

    def _reduced(
        self, kept: list[Any], reached: Collection[str], everything: bool
    ) -> tuple[dict[Entry, DTensor], dict[str, torch.Tensor]]:
        """The way of most backwards: the program reduces the gradients, and none are held back."""
        made, backward = self.made, self.training.backward
        flats = tuple(flat for key in backward.gradients for flat in made.rows[key].flats)
        missed = self._missed([(made, flats)], reached)
        self.calls.begin(f"backward of {self.compiled.label}", backward.wire, missed)
        found: dict[Entry, DTensor] = {}
        outputs = run_program(partial(self._run, backward, kept, reached, everything, found), self.calls)
        self.calls.reached(missed)
        for key, place in backward.gradients.items():
            for flat, start in reversed(made.rows[key].starts):
                buffer, wanted = made.plan.buffer(key), self._wanted(flat, reached)
                found |= self._parts(made, buffer, flat, outputs[place], wanted, start)
        found |= self._zeros(flats)
        return found, {name: outputs[place] for name, place in backward.others.items()}

    def _held_back(
        self,
        kept: list[Any],
        reached: Collection[str],
        waiting: list[Waiting],
        others: list[tuple[ModulePlan, Extended]],
    ) -> tuple[dict[Entry, DTensor], dict[str, torch.Tensor]]:
        """The way where gradients are held back, by this backward or an earlier one: the program gives whole gradients.
        They are added to those that are held back, and then reduced where this backward is to.

        ``waiting``, ``others``: what earlier backwards of modules around this one held back: see `_waiting`.
        """
        made = self.made
        with self.calls.refusing():
            whole = made.programs.maker.whole(self.compiled)
        reduced: list[Waiting] = []
        for buffer in reversed(made.plan.buffers):  # in backward's order, for hooks
            flats_of = [flat for flat in made.rows[buffer.key].flats if flat.group.synchronise]
            if flats_of and (buffer.key in whole.gradients or any(flat.held is not None for flat in flats_of)):
                reduced.append((made, buffer, flats_of))
        reduced += waiting
        missed = self._missed([(of, own) for of, _, own in reduced], reached)
        sent = [
            (buffer.key, [(flat in own, flat.group.all_reduces) for flat in of.rows[buffer.key].flats])
            for of, buffer, own in reduced
        ]
        text = repr((whole.wire, sent, [tuple(one.entry.parameter.shape) for _, one in others]))
        quiet = " without synchronisation" * (not any(group.synchronise for group in made.groups))
        label = f"backward of {self.compiled.label}{quiet}"
        self.calls.begin(label, hashlib.sha256(text.encode()).hexdigest()[:8], missed)
        found: dict[Entry, DTensor] = {}
        shards: list[Reduced] = []

        def run() -> Sequence[torch.Tensor]:
            outputs = self._run(whole, kept, reached, True, found)
            for of, one in others:
                found.update(_of_extended(one, mean_of(one, None, False, True, of.plan, of.mesh)))
            for key, place in whole.gradients.items():
                gradient = outputs[place].view(made.plan.shard, -1)
                for flat, start in made.rows[key].starts:
                    flat.hold(gradient[:, start : start + flat.tensor.numel()], self._wanted(flat, reached))
            for of, buffer, own in reduced:
                shards.extend(self._reduce(of, buffer, own))
            for group in made.groups:
                group.holding = list(dict.fromkeys([*group.holding, made]))
            return outputs

        outputs = run_program(run, self.calls)
        self.calls.reached(missed)
        for one in shards:
            found |= self._parts(*one)
        found |= self._zeros([flat for _, _, own in reduced for flat in own])
        return found, {name: outputs[place] for name, place in whole.others.items()}

    def _waiting(self) -> tuple[list[Waiting], list[tuple[ModulePlan, Extended]]]:
        """The gradients that backwards of modules around this one held back, and that this one is to reduce, as FSDP2
        does: in flat shards, and in none."""
        made = self.made
        for group in made.groups:
            group.holding = [of for of in group.holding if of.waits]
        around = [of for of in dict.fromkeys(of for group in made.groups for of in group.holding) if of is not made]
        flats: list[Waiting] = []
        seen = {flat for row in made.rows.values() for flat in row.flats}
        for of in around:
            for buffer in reversed(of.plan.buffers):
                held = [flat for flat in of.rows[buffer.key].flats if flat.held is not None and flat not in seen]
                if own := [flat for flat in held if flat.group.synchronise]:
                    flats.append((of, buffer, own))
                    seen.update(own)
        mine = set(made.extended.values())
        extended = {one: of for of in around for one in of.extended.values() if one not in mine}
        return flats, [(of, one) for one, of in extended.items() if one.held is not None and one.group.synchronise]

    @property
    def _extended(self) -> list[tuple[str, Extended]]:
        """The trained parameters that lie in no flat shard, by name. Each backward reduces all their gradients, so that
        ranks communicate alike even where their batches reach different ones."""
        return [(name, one) for name, one in self.made.apart if one.entry.parameter.requires_grad]

    def _run(
        self,
        backward: Backward,
        kept: list[Any],
        reached: Collection[str],
        everything: bool,
        found: dict[Entry, DTensor],
    ) -> Sequence[torch.Tensor]:
        """Runs the backward program. Puts the gradients of parameters that lie in no flat shard into ``found``."""
        outputs = backward.runner(kept)
        for name, one in self._extended:
            own = outputs[backward.others[name]] if name in backward.others else None
            shard = mean_of(one, own, name in reached, everything, self.made.plan, self.made.mesh)
            found |= _of_extended(one, shard)
        return outputs

    def _reduce(self, of: ModulePlan, buffer: Buffer, flats: Collection[FlatShard]) -> Iterator[Reduced]:
        """Reduces the gradients that these flat shards of one row held back; over replicas too, unless that waits."""
        gradients, released = of.rows[buffer.key].release(of.plan.shard, flats)
        along_shard, over_replicas = reductions(buffer, gradients.dtype, of.plan, of.mesh)
        shard = along_shard(gradients)
        whole = all(flat.group.all_reduces and flat.partial is None for flat, *_ in released)
        if whole:
            shard = over_replicas(shard)
        for flat, start, members in reversed(released):
            entries, own, begin = {**flat.partial_of, **dict.fromkeys(members)}, shard, start
            if not whole:
                own, begin = shard[start : start + flat.tensor.numel()], 0
                own = own.clone() if flat.partial is None else own + flat.partial
                waits = not flat.group.all_reduces
                flat.partial, flat.partial_of = (own, entries) if waits else (None, {})
                if waits:
                    continue
                own = over_replicas(own)
            yield of, buffer, flat, own, list(entries), begin

    def _parts(
        self, of: ModulePlan, buffer: Buffer, flat: FlatShard, gradient: torch.Tensor, entries: list[Entry], start: int
    ) -> dict[Entry, DTensor]:
        """`parts`, after the user's all-reduce hook got this flat shard's reduced gradient, as FSDP2 calls it."""
        if (hook := flat.group.all_reduce_hook) is None or not entries:
            return parts(gradient, entries, start)
        dtype = of.plan.reduce_dtype(buffer)
        own = gradient[start : start + flat.tensor.numel()].to(dtype)
        with self.calls.refusing():
            hook(own)
        for call in finish(buffer, dtype, of.plan):
            own = call.target(own, *call.arguments, **call.options)
        return parts(own, entries, 0)

    def _waits(self, entry: Entry) -> bool:
        """Whether this parameter's gradient is held back for a later backward."""
        group = self.made.group_of[entry]
        return not (group.synchronise and group.all_reduces)

    def _wanted(self, flat: FlatShard, reached: Collection[str]) -> list[Entry]:
        """The parameters of a flat shard that have gradients and are still trained."""
        names, every = self.made.names, flat.group.pads and flat.group.gathered
        return [entry for entry in flat.entries if (every or names[entry] in reached) and entry.parameter.requires_grad]

    def _missed(
        self, reduced: Iterable[tuple[ModulePlan, Collection[FlatShard]]], reached: Collection[str]
    ) -> list[str]:
        """The trained parameters, among those that are reduced, that get no gradient, from this backward or an earlier
        one."""
        missed = []
        for of, flats in reduced:
            here = reached if of is self.made else ()
            for flat in [one for one in flats if not one.group.pads]:
                without = [one for one in flat.entries if of.names[one] not in here and one not in flat.held_of]
                missed += [of.names[one] for one in without if one.parameter.requires_grad]
        own = [name for name, one in self._extended if not (name in reached or one.counts or one.group.pads)]
        return missed + own

    def _zeros(self, reduced: Collection[FlatShard]) -> dict[Entry, DTensor]:
        """Gradients of zeros for flat shards that no rank reduces, where the user asked for them
        (`set_reduce_scatter_unused_params`) and a forward gathered them, this one or an earlier one, as in FSDP2."""
        found: dict[Entry, DTensor] = {}
        made = self.made
        for key, row in made.rows.items() if any(group.pads for group in made.groups) else ():
            for flat in [one for one in row.flats if one.group.pads and one.group.gathered and one not in reduced]:
                if flat.group.synchronise and flat.group.all_reduces:
                    trained = [entry for entry in flat.entries if entry.parameter.requires_grad]
                    found |= self._parts(made, made.plan.buffer(key), flat, torch.zeros_like(flat.tensor), trained, 0)
        return found

    def _check_hooked(self) -> None:
        """Raises ``RuntimeError`` where an all-reduce hook was set or removed since forward."""
        for group, hooked in zip(self.made.groups, self._hooked, strict=True):
            if (group.all_reduce_hook is not None) != hooked:
                raise RuntimeError(
                    f"set_all_reduce_hook was called on a {type(group.modules[0]).__name__} between this forward and "
                    "its backward. Call it before forward."
                )

    def _check_hooks(self, reached: Collection[str]) -> None:
        """Raises ``RuntimeError`` where autograd would call the hook of a parameter that gets no gradient."""
        for entry, name in self.made.names.items():
            parameter = entry.parameter
            if (kind := hook_on(parameter)) is None or id(parameter) not in self.place or not parameter.requires_grad:
                continue
            if self._waits(entry):
                raise RuntimeError(
                    f"{name} has a hook ({kind}), and set_requires_gradient_sync(False) was called between this "
                    "forward and its backward. Call it before forward: then the hook is called when gradients are "
                    "reduced."
                )
            if name in reached or self.made.group_of[entry].pads:
                continue
            if not any(entry in flat.held_of for flat in self.made.flats.values()):
                raise RuntimeError(
                    f"{name} has a hook ({kind}), and none of the results that this backward begins at depends on it: "
                    "autograd would call the hook all the same. Remove it for this backward; or let it begin at the "
                    "other results too, times zero."
                )

    def _check_versions(self) -> None:
        """Raises ``RuntimeError`` where weights that backward reads were written since forward, as autograd does."""
        for flat, written in self.written:
            if flat.written != written or not flat.current:
                name = self.made.names[flat.entries[0]]
                raise RuntimeError(
                    f"{name}, or a parameter beside it, was modified by an inplace operation between this forward and "
                    "its backward, which needs the old value. Call backward before optimizer.step(), or run forward "
                    "again."
                )


def _of_extended(one: Extended, shard: torch.Tensor | None) -> dict[Entry, DTensor]:
    return parts(shard, [one.entry], 0) if shard is not None else {}


class _Function(torch.autograd.Function):
    # Backward gets its gradients as one list, and each is freed after its last use. A torch without this attribute
    # (2.11) gives a tuple, and holds all of them until backward is over.
    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, run: Run, token: torch.Tensor, *given: torch.Tensor) -> Any:
        training, inputs = run.training, run.inputs
        run.inputs = ()
        with run.made.drawing(run.compiled):
            outputs = run_program(partial(run.compiled.runner, *inputs), run.calls)
        everything = [*inputs, *outputs]
        kept = [everything[source] for source in training.sources]
        # Autograd would miss writes to shards through other tensors; `_check_versions` sees them all.
        own = [not isinstance(value, torch.Tensor) or place in training.shards
               for value, place in zip(kept, training.sources, strict=True)]  # fmt: skip
        ctx.save_for_backward(*(value for value, apart in zip(kept, own, strict=True) if not apart))
        ctx.others = [(value, apart) if apart else (None, apart) for value, apart in zip(kept, own, strict=True)]
        ctx.run = run
        ctx.set_materialize_grads(False)
        results = tuple(outputs[: len(training.results)])
        ctx.results = [weakref.ref(one) if isinstance(one, torch.Tensor) else None for one in results]
        ctx.shapes = [getattr(result, "shape", None) for result in results]  # None: a size that depended on the data
        constant = [results[place] for place in training.constant]
        ctx.mark_non_differentiable(*(one for one in constant if isinstance(one, torch.Tensor)))
        return results

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        run: Run = ctx.run
        tangents: list[torch.Tensor | None] = given[0] if given and isinstance(given[0], list) else list(given)
        training = run.training
        if torch.is_grad_enabled():
            with run.calls.refusing():
                raise RuntimeError(
                    f"backward(create_graph=True) through {run.compiled.label}, which fully_shard compiled: there is "
                    "no derivative of its backward program. Take the gradient inside of forward, where "
                    "torch.autograd.grad is traced with the model; or use compile_sharded with that loss."
                )
        if any(isinstance(one, DTensor) for one in tangents):
            with run.calls.refusing():
                raise RuntimeError(
                    f"backward of {run.compiled.label} was given a DTensor: the loss was added to, or multiplied by, "
                    "what is computed from sharded parameters outside of forward, which is one tensor over all ranks. "
                    "Make that a plain tensor first: loss + 1e-4 * sum(p.abs().sum() for p in "
                    "model.parameters()).full_tensor()."
                )
        if len(tangents) > 1:
            with run.calls.refusing():
                training.check_watched(ctx.results, tangents)
        saved = iter(ctx.saved_tensors)
        kept = [value if apart else next(saved) for value, apart in ctx.others]
        del saved
        ctx.maybe_clear_saved_tensors()  # frees them, unless the graph is retained
        reached = training.reached(frozenset(place for place, one in enumerate(tangents) if one is not None))
        kept += [one.laid_out(tangents[one.place], ctx.shapes[one.place]) for one in training.tangents]
        # A plain backward() reaches the token. For a call that asks for some gradients alone, such as
        # torch.autograd.grad, and for parameters with hooks, the gradients are returned to autograd.
        everything = will_run(ctx.next_functions[0][0])
        with outside_modes(watched=True):
            compare = run.verify(run.verified, tangents, everything) if run.verified is not None else None
            tangents.clear()
            found, others = run.backward(kept, reached, everything)
            if compare is not None:
                compare(found)
        gradients: list[torch.Tensor | None] = [None] * run.count
        direct: dict[Entry, DTensor] = {}
        for entry, gradient in found.items():
            if everything and (hook_on(entry.parameter) is None or not entry.parameter.requires_grad):
                direct[entry] = gradient
            elif (place := run.place.get(id(entry.parameter))) is not None:
                gradients[place] = gradient
            elif everything:  # its gradient was held back, or was to be when forward ran
                entry.parameter.backward(gradient)
        leave(direct)
        for name, place in run.others:
            if name in reached:
                before = gradients[place]
                gradients[place] = others[name] if before is None else before + others[name]
        return None, None, *gradients
