"""A call of a module that was sharded with `fully_shard`: its forward is one program, and backward another.

    loss = loss_fn(model(tokens), targets)     forward: gathers and compute; keeps what backward reads
    loss.backward()                            backward: gathers, compute and reductions; leaves ``parameter.grad``

The module that is called is the root: these two programs gather and reduce all that was sharded inside it. The first
call of each kind captures and compiles, on all ranks together.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.batch_objects import closed, contents, leave
from fsdp_compiled.capture.global_modes import check_transforms, outside_modes, untraced
from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.mesh import ENDED, Mesh, RankError
from fsdp_compiled.ir.program import SILENT, Port
from fsdp_compiled.lower import bundle
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.autograd_hooks import check_module_hooks
from fsdp_compiled.runtime.eager_comparison import ProgramDiffers
from fsdp_compiled.runtime.fsdp.extended_parameter import Extended
from fsdp_compiled.runtime.fsdp.module_plan import ModulePlan, make
from fsdp_compiled.runtime.fsdp.module_run import Run, run_program
from fsdp_compiled.runtime.fsdp.module_state import ModuleState, lay_out, states_in, traced
from fsdp_compiled.runtime.fsdp.parameter_group import ParameterGroup
from fsdp_compiled.runtime.fsdp.verified_call import Verified, VerifiedCalls
from fsdp_compiled.runtime.programs.compile import PLAIN, Compiled
from fsdp_compiled.runtime.programs.program_cache import Programs
from fsdp_compiled.runtime.programs.request import Request
from fsdp_compiled.runtime.programs.result_aliases import shared

# Eager kernels, as FSDP2 runs them, bit for bit, unless the user asks for more.
DEFAULT = Policy(lower="eager", cuda_graph=False)
log = logging.getLogger("fsdp_compiled")
_calls: list[tuple[weakref.ref[Any], Calls]] = []


def shared_calls(mesh: Mesh) -> Calls:
    """The call log of this process. All modules share it, since ranks must make all calls in the same order."""
    world = dist.group.WORLD
    for known, calls in _calls:
        if known() is world:
            return calls
    if world is None:
        for _, calls in _calls:
            calls.check_open()  # raises, with the reason why the log was ended
        raise RankError(ENDED)
    check_transforms("forward")  # inside such a transform, ranks could not even meet
    _calls.clear()
    _calls.append((weakref.ref(world), Calls(mesh)))
    return _calls[0][1]


class ModuleCall:
    """What runs one method of one module."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.module = module
        self._function = function  # calls the model, in the trace
        self._tables: list[Any] = []
        self._before: list[Any] = []
        self._states: list[ModuleState] = []
        self._groups: list[ParameterGroup] = []
        self._known: dict[tuple[Any, ...], ModulePlan] = {}  # by signature; the last is the one used last
        self._signature: tuple[Any, ...] = ()
        self._mesh = states_in(module)[0].group.mesh
        self._verifying: dict[ModulePlan, VerifiedCalls] = {}  # under `Policy.verify`
        self._carried: dict[str, torch.Tensor] = {}  # state that a forward stored; in eager PyTorch it has a graph
        self._said = False  # whether the warning was given that further kinds of inputs run eagerly

    @untraced
    def __call__(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        carried = self._carried
        try:
            return self._call(args, named)
        except ProgramDiffers as error:
            self._carried = carried
            if not self._verifying[self._made].programs.goes_on(error):
                raise
        return self._call(args, named)

    def _call(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._calls = shared_calls(self._mesh)  # another log if the process group has changed
        self._calls.check_open()
        if bundle.COMPILES_ONLY:
            bundle.end_if_compiled(self._mesh)
        with self._calls.refusing():
            self._follow()
            made, lent = self._made, self._made.lent
            args, named = closed(self._moved(args, named)) if _holds_objects(args, named) else self._moved(args, named)
            leaves = [leaf for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
            given = [leaf for leaf in leaves if leaf.requires_grad]
            gradient = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            trains = gradient and (any(self._trainable) or bool(given))
            request = None
            if trains or not _holds_objects(args, named):
                request = made.programs.find("training" if trains else "forward", args, named)
                made.programs.module_buffers.take(lent.buffers)
            lent.take_again()
        eager = f"eager {type(self.module).__name__}"
        if request is None:
            self._calls.begin(eager, made.gathers)
            return self._eagerly(args, named)
        gathered = self._gathered(made) if made.extended else {}
        if not trains and self._is_one_more(request):
            if self._mesh.tp > 1:  # ranks along tp make the same calls
                self._calls.begin(eager, made.gathers)
                return self._eagerly(args, named)
            if self._calls.undecided(eager, made.gathers):
                return self._eagerly(args, named)
            request.posted = True
        with outside_modes(watched=True):
            with self._calls.refusing():
                lent.take(gathered)
            with self._calls.naming():
                compiled = made.programs.get(request, lent.buffers)
            made.programs.read_closed(compiled, request, lent)
            inputs = compiled.input_binding.inputs(request.leaves, lent, lambda: lent.holders(compiled))
            lent.drop(gathered)
            if self._carried or compiled.capture.carried:
                self._check_carried(compiled, trains)
            verifies = made.plan.policy.verify and (trains or compiled.wire != SILENT or self._mesh.world == 1)
            verified = self._verified(compiled, request, args, named) if verifies else None
            ports: Sequence[Port] = compiled.outputs
            if trains:
                run = Run(made, compiled, self._calls, inputs, verified)
                outputs, ports = run.apply(), run.training.results
            else:
                with made.drawing(compiled):
                    outputs = run_program(partial(compiled.runner, *inputs), self._calls)
            found = shared(dict(zip(ports, outputs, strict=True)), inputs, compiled.aliases)
            result, changes = compiled.capture.rebuild(found)
            if verified is not None:
                with self._calls.together(f"{verified.label}, compared"):
                    verified.compare(result, found, ports)
            if changes:
                leave(contents(args, named), changes)
            return result

    def _check_carried(self, compiled: Compiled, trains: bool) -> None:
        """Raises ``RuntimeError``, on every rank, where eager PyTorch would differentiate through the previous forward
        too: this forward reads a tensor that the previous one stored with its graph, and that nobody has replaced."""
        held = {**self._made.lent.buffers, **compiled.capture.guards.closed.tensors}
        read = {port.name for port in compiled.inputs if port.kind in ("buffer", "constant")}
        if (
            trains
            and (name := next((one for one, left in self._carried.items() if held.get(one) is left), None)) in read
        ):
            with self._calls.refusing():
                raise RuntimeError(
                    f"{type(self.module).__name__} reads {name}, which its forward before this one left there with its "
                    "graph: eager PyTorch would differentiate through both calls, and a program ends at its inputs. "
                    "Keep it without in forward, self.h = h.detach(), or between calls, model.h = model.h.detach(). To "
                    "differentiate through several calls, return the state and pass it to the next one."
                )
        written = {port.name for port in compiled.outputs if port.kind in ("buffer", "constant")}
        written |= {*compiled.capture.written_constants}
        self._carried = {one: left for one, left in self._carried.items() if one not in written}
        self._carried |= {one: held[one] for one in compiled.capture.carried if trains and one in held}

    def _verified(
        self, compiled: Compiled, request: Request, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Verified | None:
        """Eager PyTorch's results, if this call is verified. Runs after the call is posted and before its program."""
        made = self._made
        if made not in self._verifying:
            known = {one: calls for one, calls in self._verifying.items() if one in self._known.values()}
            self._verifying = {**known, made: VerifiedCalls(made, self.module, self._function)}
        calls = self._verifying[made]
        with self._calls.naming():
            due = calls.due(compiled)
        if not due:
            return None
        self._calls.returned()
        with self._calls.together(calls.label):
            found = calls.run(compiled, request, args, named)
        self._calls.post(request.said(compiled.label), compiled.wire)
        return found

    def _gathered(self, made: ModulePlan) -> dict[str, torch.Tensor]:
        """The gathered parameters of FSDP2's extension protocol, by each of their names."""
        self._calls.post(f"gathers of {type(self.module).__name__}", made.gathers)
        found: dict[Extended, torch.Tensor] = {}

        def gather() -> Sequence[torch.Tensor]:
            found.update({one: one.gathered() for _, one in made.apart})
            return ()

        with outside_modes(watched=True):
            run_program(gather, self._calls, torch.no_grad())
        return {name: found[one] for name, one in made.extended.items()}

    @untraced
    def eagerly(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs the method's own code without gradients, after one gather of all parameters. Collective."""
        self._calls = shared_calls(self._mesh)
        self._calls.check_open()
        with self._calls.refusing():
            self._follow()
        self._calls.begin(f"eager {type(self.module).__name__}", self._made.gathers)
        with torch.no_grad():
            return self._eagerly(args, named)

    def _is_one_more(self, request: Request) -> bool:
        """Whether this call without gradients runs eagerly instead of compiling one more program; the same on all
        ranks. It does where there are many programs (growing lengths make them), and where only a Python float differs
        (a time)."""
        if request.compiled is not None:
            return False
        made = [one for one in self.programs.cached if one.kind == "forward"]
        if len(made) < self.plan.policy.programs // 2 and not self.programs.has_other_floats(request):
            return False
        if not self._said and self._mesh.rank == 0:
            log.warning(
                "%s was called without gradients on %d kinds of inputs: on others, and with other Python floats, it "
                "runs eagerly, with all of its parameters gathered. Policy(programs=...) says how many programs are "
                "kept; a tensor in the place of a float needs no other program.",
                type(self.module).__name__, len(made),
            )  # fmt: skip
        self._said = True
        return True

    def _eagerly(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs the model's own code with all parameters gathered. Collective; the call has been posted."""
        try:
            for group in self._groups:
                group.unshard()
            with traced():
                return self._function(self.module, *args, **named)
        finally:
            self._calls.returned()
            for group in self._groups:
                group.reshard()

    @property
    def programs(self) -> Programs:
        return self._made.programs

    @property
    def plan(self) -> Plan:
        return self._made.plan

    # Before a call.

    def _follow(self) -> None:
        """Looks for parameters that were replaced. A program belongs to a plan, and a plan to certain parameters."""
        if self._unchanged():
            return
        self._before = []  # stays empty until all checks have passed
        states = states_in(self.module)
        groups = list(dict.fromkeys(state.group for state in states))
        if states != self._states:
            self._policy = _policy(states)
            _check_same(groups, type(self.module).__name__)
            _adopt_optimizers(groups)
        before = [group.version for group in groups]
        _check_untied(groups)
        for group in groups:
            group.reshard()
            group.follow()
        if [group.version for group in groups] != before:
            lay_out(self.module)
        self._states, self._groups = states, groups
        self._look()
        check_module_hooks(self.module, inside=True)
        signature = self._now()
        if signature != self._signature:
            self._switch(signature)
        self._made.lent.take(self._plain)
        self._before = _held(self._tables)

    def _switch(self, signature: tuple[Any, ...]) -> None:
        """Switches to the plan and programs for these parameters, on all ranks. Earlier ones are kept, for loops that
        alternate."""
        self._signature = ()  # stays empty until all checks have passed
        made = self._known.pop(signature, None)
        if made is None:
            made = make(self.module, self._function, self._groups, self._policy, self._plain, self._calls)
        made.programs.maker.meet(f"parameters of {made.trained}")
        self._calls.returned()
        self._known = {key: one for key, one in self._known.items() if one.current}
        self._known[signature] = self._made = made
        if len(self._known) > made.plan.policy.programs:
            del self._known[next(iter(self._known))]
        self._signature = signature

    def _unchanged(self) -> bool:
        """Whether the modules' tables, the parameters and the set of trained ones are the same as at the last call."""
        names, sizes, values = _held(self._tables)
        return (
            bool(self._before)
            and self._before[:2] == [names, sizes]
            and all(map(is_, values, self._before[2]))  # not ==: tensors of one element may be equal
            and bool(self._groups)
            and all(group.same() and not group.unsharded for group in self._groups)
            and [one.requires_grad for one in self._flags] == self._trainable
            and [group.treated for group in self._groups] == self._versions
        )

    def _look(self) -> None:
        """Finds the parameters of the model. Raises ``ValueError`` for DTensors that `fully_shard` did not make."""
        modules = list(self.module.modules())
        self._tables = [table for module in modules for table in (module._parameters, module._modules)]
        entries = [entry for group in self._groups for entry in group.entries]
        known = {id(entry.parameter): place for place, entry in enumerate(entries)}
        named = list(named_parameters(self.module, remove_duplicate=False))
        self._names = tuple((name, known[id(one)]) for name, one in named if id(one) in known)
        self._plain = {name: one for name, one in named if id(one) not in known}
        if sharded := [name for name, one in self._plain.items() if isinstance(one, DTensor)]:
            raise ValueError(
                f"{sharded[0]} is a DTensor that fully_shard does not know. Parameters of other kinds of parallelism "
                "are not supported together with it yet: call fully_shard on plain parameters."
            )
        self._flags = [*(entry.parameter for entry in entries), *dict.fromkeys(self._plain.values())]
        self._trainable = [one.requires_grad for one in self._flags]
        self._versions = [group.treated for group in self._groups]

    def _now(self) -> tuple[Any, ...]:
        """The signature of the parameters: what a plan depends on."""
        first: dict[int, int] = {}
        plain = [
            (name, tuple(one.shape), one.stride(), one.dtype, one.device, first.setdefault(id(one), place))
            for place, (name, one) in enumerate(self._plain.items())
        ]
        return tuple(self._groups), tuple(self._versions), tuple(self._trainable), self._names, tuple(plain)

    def _moved(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch, moved to the device as FSDP2 does."""
        device = self._mesh.device
        if device.type == "cpu":
            return args, named
        return pytree.tree_map_only(
            torch.Tensor, lambda one: one if one.device == device else one.to(device), (args, named)
        )


def _held(tables: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """For these tables: all their names, the number of names in each, and all their values."""
    return [list(chain(*tables)), list(map(len, tables)), list(chain(*map(methodcaller("values"), tables)))]


def _holds_objects(args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether an input is an object that a program cannot take, such as a cache."""
    return any(not isinstance(leaf, torch.Tensor | PLAIN) for leaf in pytree.tree_leaves((args, named)))


def _policy(states: Sequence[ModuleState]) -> Policy:
    given = list(dict.fromkeys(state.policy for state in states if state.policy is not None))
    if len(given) > 1:
        raise ValueError("fully_shard was given different policies inside one model. Give one, to the root's call.")
    return given[0] if given else DEFAULT


def _check_untied(groups: Sequence[ParameterGroup]) -> None:
    """Raises ``ValueError`` where one parameter replaced two that were sharded separately."""
    known: dict[int, str] = {}
    for module, name in (entry.holders[0] for group in groups for entry in group.entries):
        where = f"{type(module).__name__}.{name}"
        now = module._parameters.get(name)
        if now is not None and (other := known.setdefault(id(now), where)) is not where:
            raise ValueError(f"{where} and {other} were tied after fully_shard. Tie them before it is called.")


def _check_same(groups: Sequence[ParameterGroup], name: str) -> None:
    """Raises ``ValueError`` for calls of `fully_shard` with different meshes in one model."""
    if odd := next((one for one in groups if one.device_mesh != groups[0].device_mesh), None):
        raise ValueError(
            f"fully_shard was called with different meshes inside one {name}: "
            f"{groups[0].device_mesh} and {odd.device_mesh}. Give all of them the same."
        )


def _adopt_optimizers(groups: Sequence[ParameterGroup]) -> None:
    """Replaces plain parameters in optimizers that were made before `fully_shard` by the sharded ones.

    Raises ``ValueError``, with nothing changed, for an optimizer that has state for them, whose shapes would be wrong,
    and for a module that shares one of them and was in no call of `fully_shard`: it would keep the plain parameter.
    """
    new = {id(old): made for group in groups for ref, made in group.replaced if (old := ref()) is not None}
    found = []
    objects = gc.get_objects() if new else []
    for module in [one for one in objects if issubclass(type(one), nn.Module)]:
        for name, parameter in vars(module).get("_parameters", {}).items():
            if id(parameter) in new:
                raise ValueError(
                    f"{type(module).__name__}.{name} is tied to a parameter that fully_shard has sharded, in a module "
                    "that no call of fully_shard holds: it would be trained apart. Call fully_shard on a module that "
                    "holds both."
                )
    for optimizer in [one for one in objects if issubclass(type(one), Optimizer)]:
        groups_of = getattr(optimizer, "param_groups", ())  # a wrapper round another may have none
        holding = [held for held in groups_of if any(id(one) in new for one in held["params"])]
        if any(optimizer.state.get(one) for held in holding for one in held["params"] if id(one) in new):
            raise ValueError(
                f"{type(optimizer).__name__} has state of parameters that fully_shard has sharded since. Make the "
                "optimizer after fully_shard, and load its state then: "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
            )
        found += holding
    for held in found:
        held["params"] = [new.get(id(one), one) for one in held["params"]]
    for group in groups:
        group.replaced.clear()
