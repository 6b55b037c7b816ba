"""Model + loss + batch -> Program: the joint forward-and-backward ATen graph of a pure objective.

    objective(tensors, args, kwargs) = loss(model that holds these tensors, args, kwargs)

`torch.compile` traces the objective whole, on fake tensors, so that capturing costs no memory for the weights; the
program taken is AOTAutograd's joint graph, before any partitioner. The graph is differentiated with respect to the
loss alone (``aux`` is detached), and the loss's tangent becomes the constant 1.

This is the only file that touches private surfaces of Dynamo, but for its door to AOTAutograd (`aot`).
"""

from __future__ import annotations

import contextlib
import logging
import re
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, Unsupported, UserError
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.ambient import Ambient
from fsdp_compiled.capture.aot import CaptureError, unwritable
from fsdp_compiled.capture.aot_cache import traced
from fsdp_compiled.capture.dynamic_shapes import Sizes, moving
from fsdp_compiled.capture.guards import Guards, Recorder
from fsdp_compiled.capture.loss_parallel import loss_parallel
from fsdp_compiled.capture.model_tensors import Place, check_parameters, in_place, places_of, put_back
from fsdp_compiled.capture.mutations import Mutations
from fsdp_compiled.capture.next_call import Meaning
from fsdp_compiled.capture.opaque_results import Opaque
from fsdp_compiled.capture.opaque_results import inside as inside_of
from fsdp_compiled.capture.random_calls import refused, seeding
from fsdp_compiled.capture.side_effects import WRAPPED, SideEffects, inside, speech, unwrapped
from fsdp_compiled.capture.source_lines import cure, explanation, reason, user_line
from fsdp_compiled.capture.sync_batchnorm import synchronised
from fsdp_compiled.capture.tensor_parallel import (
    Layout,
    Parts,
    is_mesh,
    layout_of,
    layouts,
    name_axes,
    own_part,
    parts_of,
    whole,
)
from fsdp_compiled.ir.nodes import fake_tensor
from fsdp_compiled.ir.program import LOSS, Port, PortKind, Program
from fsdp_compiled.plan.plan import Plan, contiguous_stride

CURE = "Return one floating-point number that depends on the parameters, such as `errors.mean()`, or (scalar, aux)."


@dataclass(frozen=True)
class Tensors:
    """What the objective is a function of, as real or fake tensors, by the model's own names.

    Tied parameters appear under each of their names with the same tensor.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    plain: Mapping[str, torch.Tensor] = field(default_factory=dict)  # parameters that are not sharded


@dataclass(frozen=True)
class Capture:
    """A captured program, the tensors it closes over, and how its outputs make what the user's function returned."""

    program: Program
    constants: dict[str, torch.Tensor]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # a `Port` for each tensor that the function returned, other values as they are
    guards: Guards
    layouts: Mapping[Port, Layout] = field(default_factory=dict)  # of results that are DTensors

    @property
    def written_constants(self) -> tuple[str, ...]:
        """The names of the constants that the function updates."""
        return tuple(port.name for port in self.program.ports if port.side == "out" and port.kind == "constant")

    def rebuild(self, outputs: Mapping[Port, torch.Tensor]) -> Any:
        """The structure that the user's function returned, with these tensors in it."""
        filled = [
            outputs[leaf] if isinstance(leaf, Port) else leaf.filled(outputs) if isinstance(leaf, Opaque) else leaf
            for leaf in self.leaves
        ]
        if self.layouts:
            filled = [
                self.layouts[leaf].filled(value) if isinstance(leaf, Port) and leaf in self.layouts else value
                for leaf, value in zip(self.leaves, filled, strict=True)
            ]
        return pytree.tree_unflatten(filled, self.spec)


class _Objective(nn.Module):
    """Calls the user's loss on the model, as one module that Dynamo traces."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs) if self.loss is None else self.loss(self.model, *args, **kwargs)


def _find_loss(result: Any, first: bool) -> Any:
    """The loss in what was returned: itself, ``.loss``, ``["loss"]`` or, of a model, the ``first`` of a tuple."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, Mapping) and "loss" in result:
        return result["loss"]
    if getattr(result, "loss", None) is not None:
        return result.loss
    return result[0] if first and isinstance(result, tuple | list) and result else result


def _own(value: Any) -> Any:
    """Copies of the tensors, so that no output shares memory with an input or another output."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: whole(tensor).detach().clone(), value)


def _apart_from_others(value: Any) -> Any:
    """The same without `detach`: what is made of it is differentiated outside. Of a DTensor, this rank's part."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: own_part(tensor).clone(), value)


def _apart(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The same tensors as nodes of the trace: `requires_grad_` is traced for those alone, not for its inputs.

    One tensor that is given twice stays one, so that ``x is y`` is what it is in eager PyTorch.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    apart: list[Any] = []
    for place, leaf in enumerate(leaves):
        first = next((other for other in range(place) if leaves[other] is leaf), None)
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.requires_grad:
            apart.append(leaf)
        else:
            apart.append(apart[first] if first is not None else leaf.detach())
    return pytree.tree_unflatten(apart, spec)


def batch_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a batch by their place in it, such as ``"[0]"`` and ``"['labels']"``."""
    leaves = [*pytree.tree_flatten_with_path(args)[0], *pytree.tree_flatten_with_path(dict(kwargs))[0]]
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def capture(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    tensors: Tensors,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    gradient: bool,
    results: bool = False,
    ambient: Ambient | None = None,
    parts: Parts | None = None,
) -> Capture:
    """Traces ``loss(model, *args, **kwargs)`` with its gradient, or, without, the model's forward alone.

    ``results``: what ``loss`` returns is no loss, but any structure. Each tensor in it is differentiated, by a
    derivative that is an input of the program (``tangent``); tensors of the batch that require gradients get them.
    ``tensors`` and the tensors of the batch are fake tensors of one mode; which parameters require gradients is read
    off them. ``ambient``: the modes to trace under, where they are not those of the moment. ``parts``: which tensors
    are parts of DTensors. Raises `CaptureError` with the user's line and the cure.
    """
    parts = _placed(parts or Parts())
    objective = _Objective(inside(model), loss)
    wrapped = any(inside(module) is not module for module in objective.modules())
    scalar = gradient and not results

    def function(named: dict[str, torch.Tensor], args: Any, kwargs: Any, buffers: list[Any]) -> Any:
        args, kwargs = _apart(args, kwargs)
        if parts.mesh is None:
            result = objective(*args, **kwargs)
        else:
            result = torch.func.functional_call(objective, parts.joined(named), args, kwargs, tie_weights=False)
        replaced = {}
        for name, table, key, before in buffers:
            if table[key] is not before:
                replaced[name] = _own(table[key])
                table[key] = before
        said = [layout_of(leaf) for leaf in pytree.tree_leaves(result)] if results and parts.mesh is not None else []
        if not gradient:
            return _own(_apart_from_others(result) if results else result), None, False, replaced, said
        if results:
            return _apart_from_others(result), None, False, replaced, said
        pair = loss is not None and isinstance(result, tuple) and len(result) == 2
        value, aux = result if pair else (_find_loss(result, first=loss is None), None)
        if isinstance(value, torch.Tensor):
            value = whole(value).clone().detach()  # `_Trace.program` differentiates what is detached here
        return value, _own(aux), pair, replaced, said

    def trace(symbolic: Collection[str] = ()) -> _Trace:
        """One run of Dynamo, with these sources of integers as unknowns. What it changed is not undone yet."""
        made = _Trace(tensors, batch_tensors(args, kwargs), list(places_of(objective.model)), symbolic)
        # Dynamo keeps its cache, and counts recompilations, by code object: each trace brings one of its own.
        fresh = types.FunctionType(
            function.__code__.replace(), function.__globals__, "objective", None, function.__closure__
        )
        recorder = Recorder(objective.model, wrapped, taken=not results)
        options = {"guard_filter_fn": recorder.select}
        compiled = torch.compile(fresh, backend=made.backend, fullgraph=True, dynamic=False, options=options)
        places = made.places
        cut = {name for names, _ in parts.placements for name in names}
        named = {name: made.tensors[place.name] for place in places if (name := f"model.{place.name}") in cut}
        buffers = [
            (f"model.{place.name}", place.table, place.key, made.tensors[place.name])
            for place in places
            if place.name in tensors.buffers
        ]
        try:
            with torch.compiler.config.patch(unbacked_sources=",".join(symbolic)), in_place(places, made.tensors):
                value, aux, pair, replaced, said = compiled(named, args, dict(kwargs), buffers)
                check_parameters(places, made.tensors)
                made.side_effects = SideEffects(made.mutations, made.closed, {id(result) for result in made.results})
            scope = dict(zip(fresh.__code__.co_freevars, (cell.cell_contents for cell in fresh.__closure__ or ())))
            recorder.code = made.code
            made.guards = recorder.guards(fresh.__code__, scope, made.sources)
            made.flat, made.spec = pytree.tree_flatten((value, aux) if gradient and pair else value)
            made.layouts = layouts(said, parts.mesh)
            made.outputs = _output_ports(
                made,
                {name: before for name, _, _, before in buffers},
                value,
                made.flat,
                replaced,
                made.side_effects.state,
                scalar,
                results,
            )
        except BaseException:
            made.undo()
            raise
        if scalar and LOSS not in made.outputs.values():
            made.undo()
            raise CaptureError(f"The loss returned a {type(value).__name__} in the place of a scalar. {CURE}")
        return made

    around = ambient.entered() if ambient is not None else contextlib.nullcontext()
    classes = loss_parallel() if parts.mesh is not None else contextlib.nullcontext()
    with (
        _explained(model, parts.hint),
        around,
        classes,
        torch.set_grad_enabled(gradient),
        _dynamo(),
        unwrapped(objective),
        put_back(objective.model),  # after all that is undone, which knows the tensors of the trace alone
    ):
        made = trace()
        try:
            if not made.outputs:
                raise CaptureError(f"{type(model).__name__} returned no tensor. {CURE}")
            if made.side_effects.doubtful:
                _check_next(made, trace)
        finally:
            made.undo()
        if made.side_effects.rest:
            made.side_effects.tell(model, made.tables())
        program = made.program()
        name_axes(program, parts.mesh)
    leaves = tuple(made.outputs.get(id(leaf)) or _closed(leaf, made) for leaf in made.flat)
    made.results.clear()  # Dynamo's code, which the guards keep, holds the function that returned them
    lain = {leaf: one for leaf, one in zip(leaves, made.layouts) if one is not None and isinstance(leaf, Port)}
    return Capture(program, made.constants, made.spec, leaves, made.guards, lain)


def _check_next(made: _Trace, trace: Callable[[Collection[str]], _Trace]) -> None:
    """Raises `CaptureError` if the next call, which finds what this one has left, would compute something else."""
    left = made.side_effects
    made.mutations.go_far()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute")  # Dynamo looks at it, of what the first trace left
            again = trace(left.symbolic)
    except (Unsupported, UserError, TorchDynamoException, RuntimeError, ValueError) as error:
        raise CaptureError(f"{left.refusal()}\n{user_line(error)}\n  Why: {reason(error)}") from error
    again.undo()
    if not again.meaning(made).same(made.meaning()):
        raise CaptureError(left.refusal())
    left.check(again.closed, again.side_effects.entries, made.tables())


def _placed(parts: Parts) -> Parts:
    """By the names in the objective, without the wrappers of `unwrapped`."""
    return replace(
        parts,
        placements=tuple(
            (tuple(f"model.{WRAPPED.sub('', name)}" for name in names), placement)
            for names, placement in parts.placements
        ),
    )


def _output_ports(
    trace: _Trace,
    buffers: Mapping[str, torch.Tensor],
    value: Any,
    flat: list[Any],
    replaced: Mapping[str, torch.Tensor],
    kept: Mapping[str, Any],
    gradient: bool,
    opened: bool,
) -> dict[int, Port]:
    """What each result of the traced function is, by its identity; the rest of them are left out of the program.

    ``opened``: whether tensors may be inside of objects, which are returned as copies then.
    """
    results = {id(result) for result in trace.results}
    kind: PortKind = "aux" if gradient else "result"
    ports: dict[int, Port] = {}
    for index, leaf in enumerate(flat):
        if id(leaf) in results:
            ports[id(leaf)] = LOSS if gradient and leaf is value else Port("out", kind, str(index))
        elif isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CaptureError(
                "What is returned holds a number that was worked out from a size that moves (Policy.dynamic). Return "
                "it as a tensor, torch.tensor(number), or work it out outside."
            )
        elif opened and _open(leaf) and (found := list(inside_of(leaf))):
            for place, tensor in enumerate(found):
                if isinstance(tensor, torch.Tensor):
                    _take_out(trace, ports, tensor, Port("out", kind, str(index), part=str(place)), results)
        elif inside := [name for name, value in vars(leaf).items() if id(value) in results] if _open(leaf) else []:
            raise CaptureError(
                f"A {type(leaf).__qualname__} was returned, which hides its tensors ({', '.join(inside)}). Return "
                "tensors in tuples, lists and dictionaries, or register the class with torch.utils._pytree."
            )
    for name, new in replaced.items():
        before = buffers[name]
        port = trace.ports[id(before)]
        if port.kind != "buffer":
            raise CaptureError(unwritable(port))
        if before.shape != new.shape or before.dtype != new.dtype:
            raise CaptureError(
                f"Forward replaces {port}, {before.dtype} {list(before.shape)}, by a tensor of another kind, "
                f"{new.dtype} {list(new.shape)}. A buffer keeps its shape and dtype."
            )
        ports[id(new)] = Port("out", "buffer", port.name)
    for name, new in kept.items():
        ports[id(new)] = Port("out", "constant", name)
    return ports


def _closed(leaf: Any, trace: _Trace) -> Any:
    """What is returned and no tensor: an object with tensors inside, or anything else as it is."""
    if not trace.inside or not _open(leaf):
        return leaf
    ports = {id(tensor): trace.outputs[id(tensor)] for tensor in inside_of(leaf) if id(tensor) in trace.outputs}
    return Opaque(leaf, ports) if ports else leaf


def _take_out(
    trace: _Trace, ports: dict[int, Port], tensor: torch.Tensor, port: Port, results: Collection[int]
) -> None:
    """A tensor inside of an object that is returned becomes a result of its own."""
    if id(tensor) not in results:
        raise CaptureError(
            f"What is returned holds, inside of an object, a tensor of shape {list(tensor.shape)} that forward was "
            "given or found, and did not compute. Return it in a tuple, list or dictionary, or a clone() of it."
        )
    if id(tensor) not in ports:
        ports[id(tensor)] = port
        trace.inside.add(id(tensor))


def _open(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) and hasattr(leaf, "__dict__")


class _Trace:
    """One run of Dynamo, and then of AOTAutograd on what is kept of it."""

    mutations: Mutations
    guards: Guards
    side_effects: SideEffects
    flat: list[Any]  # what the function returned, and its structure
    spec: pytree.TreeSpec
    outputs: dict[int, Port]  # what of it is which result, by identity
    layouts: list[Layout | None]  # of each of it, how it lies along tp

    def __init__(
        self,
        tensors: Tensors,
        batch: Mapping[str, torch.Tensor],
        places: Sequence[Place],
        symbolic: Collection[str] = (),
    ) -> None:
        self.symbolic = symbolic
        # By their names in the model as it is traced, without the wrappers of `unwrapped`.
        values = {**tensors.parameters, **tensors.plain, **tensors.buffers}
        self.tensors = {WRAPPED.sub("", name): tensor for name, tensor in values.items()}
        self.places = [place for place in places if place.name in self.tensors]
        self.batch = list(batch.values())
        self.ports: dict[int, Port] = {}
        groups: dict[PortKind, Mapping[str, torch.Tensor]]
        groups = {"parameter": tensors.parameters, "plain": tensors.plain, "buffer": tensors.buffers, "batch": batch}
        for kind, group in groups.items():
            for name, tensor in group.items():
                self.ports.setdefault(id(tensor), Port("in", kind, name))
        self.constants: dict[str, torch.Tensor] = {}
        self.closed: dict[int, str] = {}  # the tensors that the function closes over, by identity
        self.sources: dict[str, tuple[torch.Tensor, Any]] = {}  # the same by name, with where Dynamo found them
        self.code: set[types.CodeType] = set()
        self.results: list[Any] = []
        self.inside: set[int] = set()  # those that are inside of returned objects, by identity
        self.module: fx.GraphModule | None = None

    def backend(self, module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """What `torch.compile` calls with the traced function; its results come back as they are."""
        results = [node.meta["example_value"] for node in module.graph.output_node().args[0]]  # type: ignore[union-attr]
        if (node := seeding(module.graph)) is not None:
            raise CaptureError(
                f"A program cannot seed a generator.\n{user_line(RuntimeError(node.stack_trace))}\n"
                f"  Cure: {cure('manual_seed')}"
            )
        self.mutations = Mutations()
        self.module, self.inputs, self.results = module, self._in_order(module, inputs), results
        self.context = TracingContext.try_get()
        self.code = set(TracingContext.get_traced_code() or ())
        self.given = self._input_ports(module, self.inputs)
        return lambda *_: tuple(self.results)

    def _in_order(self, module: fx.GraphModule, inputs: list[Any]) -> list[Any]:
        """The inputs, and their placeholders: the batch's, the model's as it registers them, others as they came."""
        model = [self.tensors[place.name] for place in self.places]
        ranks: dict[int, int] = {}
        for tensor in [*self.batch, *model]:
            ranks.setdefault(id(tensor), len(ranks))
        places = module.graph.find_nodes(op="placeholder")
        last = len(ranks)
        order = sorted(
            range(len(places)),
            key=lambda place: ranks.get(id(inputs[place]), last if isinstance(inputs[place], torch.Tensor) else -1),
        )
        for place in reversed(order):
            module.graph._root.append(places[place])
        return [inputs[place] for place in order]

    def undo(self) -> None:
        """Python objects are as they were before."""
        if self.module is not None:
            self.mutations.undo()

    def meaning(self, before: _Trace | None = None) -> Meaning:
        """What is computed of that which has a port; ``before``: the trace whose results this one may find."""
        assert self.module is not None
        ends = self._ends()
        wanted = [(str(self.outputs[id(result)]), node) for node, result in ends if id(result) in self.outputs]
        places = self.module.graph.find_nodes(op="placeholder")
        known: dict[fx.Node, str] = {}
        if before is not None:
            tables = before.tables()
            known = {
                place: tables[id(value)]
                for place, value in zip(places, self.inputs, strict=True)
                if id(value) in tables
            }
        return Meaning(self.module, wanted, dict(zip(places, map(str, self.given), strict=True)), known)

    def tables(self) -> dict[int, str]:
        """The results that are computed from nothing, by identity, and what they are."""
        constant = self.meaning().constant
        return {id(result): constant[node] for node, result in self._ends() if node in constant}

    def _ends(self) -> list[tuple[fx.Node, Any]]:
        assert self.module is not None
        return list(zip(self.module.graph.output_node().args[0], self.results, strict=True))  # type: ignore[arg-type]

    def program(self) -> Program:
        """The joint program of the results that have a port; of these, the loss alone is differentiated."""
        assert self.module is not None
        end = self.module.graph.output_node()
        wanted: dict[Port, fx.Node] = {}
        for node, result in self._ends():
            port = self.outputs.get(id(result))
            if port is None:
                continue
            if port == LOSS:
                node = node.args[0]  # what the objective detached
                _check_loss(node.meta["example_value"])
            elif isinstance(result, torch.Tensor) and result.requires_grad and port.kind != "result":
                with self.module.graph.inserting_before(end):
                    node = self.module.graph.call_method("detach", (node,))
                node.meta["example_value"] = result.detach()
            if id(result) in self.inside:  # the others were copied where they were returned
                with self.module.graph.inserting_before(end):
                    node = self.module.graph.call_method("clone", (node,))
                node.meta["example_value"] = result
            wanted[port] = node
        end.args = (tuple(wanted.values()),)
        self.module.recompile()
        with tracing(self.context):
            found = traced(self.module, self.inputs, self.given, list(wanted))
        self.constants |= found.literals
        return found.program

    def _input_ports(self, module: fx.GraphModule, inputs: list[torch.Tensor]) -> list[Port]:
        found = []
        for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            port = self.ports.get(id(value))
            if port is None:
                if isinstance(value, torch.SymInt) and _name(node) in self.symbolic:
                    port = Port("in", "size", _name(node))
                elif isinstance(value, torch.SymInt):
                    port = self._size_port(module, inputs, value)
                elif is_mesh(value):
                    port = Port("in", "mesh", node.name)
                elif isinstance(value, torch.Tensor):
                    port = Port("in", "constant", _source(node))
                    self.constants[port.name] = value.detach()
                    self.closed[id(value)] = port.name
                    self.sources[port.name] = value, node.meta["grapharg"].source
                else:
                    raise CaptureError(
                        f"{node.name} is a {type(value).__name__} that varies from call to call. Pass numbers that "
                        "change as tensors."
                    )
            found.append(port)
        return found

    def _size_port(self, module: fx.GraphModule, inputs: list[Any], size: torch.SymInt) -> Port:
        """``size [0] dim 0``: the first tensor of the batch that has this size, and where."""
        for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            port = self.ports.get(id(value))
            if port is not None and port.kind == "batch":
                for dim, own in enumerate(node.meta["example_value"].shape):
                    if isinstance(own, torch.SymInt) and own.node.expr == size.node.expr:
                        return Port("in", "size", port.name, dim=dim)
        raise CaptureError(f"{size} is a size that varies from call to call, and of no tensor of the batch.")


@contextlib.contextmanager
def _dynamo() -> Iterator[None]:
    """Dynamo as capturing needs it.

    nn.LSTM and its kin are traced: Dynamo steps aside for them unless told not to, and the fused CPU operator that
    they would become cannot be traced with its gradient. `torch.autograd.grad` inside the loss is traced too. A stance
    or setting of the user's that turns `torch.compile` off is for the user's own functions. What PyTorch logs of an
    operator that fails on fake tensors, twenty lines, is in the error that follows.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    loud = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, loud.disabled = loud.disabled, loud.disabled or not loud.isEnabledFor(logging.INFO)
    wanted = {"allow_rnn": True, "trace_autograd_ops": True, "ignore_logging_functions": speech(), "disable": False}
    wanted["skip_nnmodule_hook_guards"] = False
    wanted["run_gc_after_compile"] = False  # up to a tenth of a small capture; garbage is collected in its own time
    try:
        with torch.compiler.set_stance("default"), torch._dynamo.config.patch(wanted), refused():
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)
        loud.disabled = disabled


def _name(node: fx.Node) -> str:
    """Where Dynamo found an input."""
    source = node.meta["grapharg"].source.name
    return source() if callable(source) else source


def _source(node: fx.Node) -> str:
    """Where Dynamo found a closed-over tensor, as the user would write it."""
    text = _name(node).replace("L['objective']", "objective").replace("._modules['model']", ".model")
    return re.sub(r"\._modules\['([^']+)'\]", r".\1", text).replace("objective.model.", "model.")


def _check_loss(loss: torch.Tensor) -> None:
    if loss.numel() != 1 or loss.dim() != 0:
        raise CaptureError(f"The loss has shape {list(loss.shape)}; expected a scalar, shape []. {CURE}")
    if not loss.dtype.is_floating_point:
        raise CaptureError(f"The loss has dtype {loss.dtype}; expected a floating-point dtype. {CURE}")
    if not loss.requires_grad:
        raise CaptureError(
            "The loss does not depend on any parameter that requires a gradient (it was detached, computed under "
            f"no_grad, or every parameter is frozen). {CURE}"
        )


@contextlib.contextmanager
def _explained(model: nn.Module, hint: str = "") -> Iterator[None]:
    """Turns what Dynamo raises into one `CaptureError` with the user's line, the cure, and the hint."""
    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, CaptureError):
            raise error.inner_exception from None
        raise
    except CaptureError:
        raise
    except (TorchDynamoException, RuntimeError, AssertionError, TypeError, AttributeError, ArithmeticError) as error:
        raise CaptureError(explanation(type(model).__name__, error) + hint) from error


def capture_on(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    plan: Plan,
    buffers: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    gradient: bool,
    results: bool = False,
    plain: Mapping[str, torch.Tensor] | None = None,
    sizes: Sizes | None = None,
    hints: Sizes | None = None,
    ambient: Ambient | None = None,
    tp_mesh: DeviceMesh | None = None,
) -> Capture:
    """`capture` on fake tensors of the plan's parameters, the model's buffers and a real batch.

    ``plain``: the model's parameters that the plan does not have, by each of their names.

    ``sizes``: the dims of the batch's tensors that may change (see `dynamic_shapes`), and
    ``hints``, the sizes to trace them with. ``ambient``: as of `capture`. ``tp_mesh``: where parameters that are cut
    along the tp axis are DTensors.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    seen: dict[int, torch.Tensor] = {}

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in seen:
            seen[id(tensor)] = fake_tensor(mode, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        return seen[id(tensor)]

    parameters: dict[str, torch.Tensor] = {}
    own = dict(model.named_parameters())
    for buffer in plan.buffers:
        for slot in buffer.slots:
            leaf = slot.leaf
            if leaf.names[0] not in own:  # a parameter of the unit's, outside of the model that is called
                continue
            fake = fake_tensor(mode, leaf.shape, leaf.stride, plan.compute_dtype(buffer), plan.device)
            fake = nn.Parameter(fake, requires_grad=gradient and leaf.trainable)  # models ask with isinstance
            fake.__dict__.update(vars(own[leaf.names[0]]))  # and for what they noted on it
            parameters |= dict.fromkeys(leaf.names, fake)
    whole: dict[str, torch.Tensor] = {}
    for name, parameter in (plain or {}).items():
        known = id(parameter) in seen
        fake = twin(parameter)
        whole[name] = fake if known else nn.Parameter(fake, requires_grad=gradient and parameter.requires_grad)
        seen[id(parameter)] = whole[name]
    for place, tensor in {**batch_tensors(args, kwargs), **buffers}.items():
        if isinstance(tensor, DTensor):
            raise CaptureError(
                f"{'batch' if place.startswith('[') else 'buffer '}{place} is a DTensor. Pass a plain tensor, which "
                "all ranks along the tp axis have: tensor.full_tensor()."
            )
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise CaptureError(
                f"{'batch' if place.startswith('[') else 'buffer '}{place} is a {kind} tensor, which cannot be traced. "
                "Pass the dense tensors that it is made of (values, indices, lengths)."
            )
    examples: dict[int, torch.Tensor] = {}  # one for a tensor that is given twice

    def example(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in examples:
            examples[id(tensor)] = _example(mode, tensor, sizes or {}, hints or {})
        return examples[id(tensor)]

    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, example, (args, dict(kwargs)))
    tensors = Tensors(parameters, {name: twin(tensor) for name, tensor in buffers.items()}, whole)
    with _casting(inside(model), plan.policy.precision), synchronised(plan.axes):
        return capture(
            model, loss, tensors, fake_args, fake_kwargs, gradient=gradient, results=results, ambient=ambient,
            parts=parts_of(plan, tp_mesh),
        )  # fmt: skip


def _example(mode: FakeTensorMode, tensor: torch.Tensor, sizes: Sizes, hints: Sizes) -> torch.Tensor:
    """A fake tensor like this one of the batch; the dims that move have a size to trace with, and are marked."""
    dims = moving(tensor, sizes)
    shape = tuple(hints[dim] if dim in dims else size for dim, size in enumerate(tensor.shape))
    stride = contiguous_stride(shape) if dims and tensor.is_contiguous() else tensor.stride()
    fake = fake_tensor(mode, shape, stride, tensor.dtype, tensor.device)
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(fake, dim)
    return fake.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _casting(model: nn.Module, precision: MixedPrecisionPolicy) -> Iterator[None]:
    """Casts what goes into the model and what comes out of it, as FSDP2 does at its root."""

    def cast(value: Any, dtype: torch.dtype) -> Any:
        return pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
        )

    handles = []
    if precision.param_dtype is not None and precision.cast_forward_inputs:
        dtype = precision.param_dtype
        handles.append(
            model.register_forward_pre_hook(
                lambda _, args, kwargs: (cast(args, dtype), cast(kwargs, dtype)), with_kwargs=True
            )
        )
    if precision.output_dtype is not None:
        output = precision.output_dtype
        handles.append(model.register_forward_hook(lambda _, args, result: cast(result, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
