"""One run of Dynamo: its graph of the objective, ports for what goes in and comes out, and the program made of it.

A tensor that the traced function returned is the loss, aux, a result, or the new value of a buffer or a constant.
"""

from __future__ import annotations

import functools
import logging
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.aot import CaptureError, unwritable
from fsdp_compiled.capture.blocks.equal_stretches import differentiate
from fsdp_compiled.capture.blocks.written_blocks import with_own_tensors
from fsdp_compiled.capture.captured import CURE, Opaque, Tensors, inside
from fsdp_compiled.capture.closure_values import Numbers
from fsdp_compiled.capture.guards import Guards
from fsdp_compiled.capture.model_collectives import without_derivatives
from fsdp_compiled.capture.model_tensors import Place, is_wrapped
from fsdp_compiled.capture.mutations import Mutations
from fsdp_compiled.capture.refusals import check_graphs, seeding
from fsdp_compiled.capture.side_effects import WRAPPED, Meaning, SideEffects
from fsdp_compiled.capture.source_lines import cure, user_line
from fsdp_compiled.capture.tensor_parallel import Layout, is_mesh
from fsdp_compiled.ir.program import LOSS, Port, PortKind, Program
from fsdp_compiled.plan.leaf import check_class
from fsdp_compiled.torch_private.dynamo import TracingContext, tracing

log = logging.getLogger("fsdp_compiled")
NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool)


class Trace:
    """One run of Dynamo, and then of AOTAutograd on what is kept of it."""

    mutations: Mutations
    guards: Guards
    side_effects: SideEffects
    touched: list[str]  # containers of the batch that a loss changes; buffers that a forward replaces with a graph
    flat: list[Any]  # what the function returned, and its structure
    spec: pytree.TreeSpec
    outputs: dict[int, Port]  # the port of each result that the program returns, by identity
    layouts: list[Layout | None]  # for each result, its layout along tp

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
        self.inside: set[int] = set()  # results that are inside of returned objects, by identity
        self.replaced: set[str] = set()  # buffers that get another tensor, and are not written in place
        self.module: fx.GraphModule | None = None

    def backend(self, module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """The backend that `torch.compile` calls with the traced graph. The compiled function returns fake results."""
        results = [node.meta["example_value"] for node in module.graph.output_node().args[0]]  # type: ignore[union-attr]
        if (node := seeding(module.graph)) is not None:
            raise CaptureError(
                f"A program cannot seed a generator.\n{user_line(RuntimeError(node.stack_trace))}\n"
                f"  Cure: {cure('manual_seed')}"
            )
        without_derivatives(module)
        self.mutations = Mutations()
        self.module, self.inputs, self.results = module, inputs, results
        self.context = TracingContext.try_get()
        self.code = set(TracingContext.get_traced_code() or ())
        return lambda *_: tuple(results)  # Dynamo keeps this function forever, so it holds only these

    def complete(self) -> None:
        """Puts all inputs into the graph, in order, with ports. Runs after Dynamo, whose code finds its own inputs."""
        assert self.module is not None
        self.inputs = self._in_order(self.module, with_own_tensors(self.module.graph, self.inputs))
        self.given = self._input_ports(self.module, self.inputs)

    def _in_order(self, module: fx.GraphModule, inputs: list[Any]) -> list[Any]:
        """Sorts the inputs and their placeholders: the batch's tensors, the model's as registered, then other tensors
        in the order in which the graph reads them."""
        ranks: dict[int, int] = {}
        for tensor in [*self.batch, *(self.tensors[place.name] for place in self.places)]:
            ranks.setdefault(id(tensor), len(ranks))
        places = module.graph.find_nodes(op="placeholder")
        last = len(ranks)
        others = {node for node, value in zip(places, inputs, strict=True) if id(value) not in ranks}
        reads = ((one, place) for place, node in enumerate(module.graph.nodes) for one in node.all_input_nodes)
        read = dict(reversed([(one, place) for one, place in reads if one in others])) if len(others) > 1 else {}

        def rank(place: int) -> tuple[int, int]:
            last_rank = last if isinstance(inputs[place], torch.Tensor) else -1
            return ranks.get(id(inputs[place]), last_rank), read.get(places[place], 0)

        order = sorted(range(len(places)), key=rank)
        for place in reversed(order):
            module.graph._root.append(places[place])
        return [inputs[place] for place in order]

    def check_numbers(self) -> None:
        """Raises `CaptureError` if the code returns or keeps a number that it read out of a tensor."""
        assert self.module is not None
        kept = [self.flat, *(entry.new for entry in self.side_effects.entries)]
        if any(isinstance(leaf, NUMBERS) for leaf in pytree.tree_leaves(kept)):
            for read in filter(None, map(_read_off, self.module.graph.output_node().all_input_nodes)):
                raise CaptureError(
                    "A number that is read off a tensor is kept or returned, and a program gives tensors alone.\n"
                    f"{user_line(RuntimeError(read.stack_trace))}\n  Cure: leave .item() and float() out of it; return "
                    "the tensor, a loss as (loss, aux), forward beside its output; and read the number off what the "
                    "call gives."
                )

    def undo(self) -> None:
        """Restores the Python objects that the traced code changed."""
        if self.module is not None:
            self.mutations.undo()

    @functools.cached_property
    def meaning(self) -> Meaning:
        """The meaning of all results that have a port."""
        return self.meaning_after(None)

    def meaning_after(self, before: Trace | None) -> Meaning:
        """The same; ``before``: the trace whose results this one may find."""
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
        """The results that are computed from no input, by identity, with the hash of each."""
        constant = self.meaning.constant
        return {id(result): constant[node] for node, result in self._ends() if node in constant}

    def _ends(self) -> list[tuple[fx.Node, Any]]:
        assert self.module is not None
        return list(zip(self.module.graph.output_node().args[0], self.results, strict=True))  # type: ignore[arg-type]

    def program(self) -> Program:
        """The joint program of the results that have a port. It differentiates only the loss or ports of kind
        ``result``."""
        assert self.module is not None
        graph = self.module.graph
        end = graph.output_node()
        wanted: dict[Port, fx.Node] = {}
        for node, result in self._ends():
            port = self.outputs.get(id(result))
            if port is None:
                continue
            if port == LOSS:
                node = node.args[0]  # what the objective detached
                _check_loss(node.meta["example_value"])
            elif isinstance(result, torch.Tensor) and result.requires_grad and port.kind != "result":
                with graph.inserting_before(end):
                    node = graph.call_method("detach", (node,))
                node.meta["example_value"] = result.detach()
            if id(result) in self.inside:  # the others were copied where they were returned
                with graph.inserting_before(end):
                    node = graph.call_method("clone", (node,))
                node.meta["example_value"] = result
            wanted[port] = node
        end.args = (tuple(wanted.values()),)
        check_graphs(self.module, self.code)
        _without_empty_literals(graph)
        self.module.recompile()
        with tracing(self.context):
            found = differentiate(self.module, self.inputs, self.given, list(wanted))
        self.constants |= found.literals
        return found.program

    def numbers(self, scope: Mapping[str, Any]) -> Numbers:
        """The conditions on closed-over tensors, read as numbers, that Dynamo and AOTAutograd relied on."""
        mode = self.context.fake_mode if self.context is not None else None
        return Numbers(mode.shape_env if mode is not None else None, scope)

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
                    name = _source(node)
                    port = Port("in", "constant", name if name not in self.constants else _name(node))
                    if is_wrapped(value):
                        check_class(port.name, value, parameter=False)
                    self.constants[port.name] = value.detach()
                    self.closed[id(value)] = port.name
                    self.sources[port.name] = value, node._dynamo_source  # type: ignore[attr-defined]
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


def output_ports(
    trace: Trace,
    value: Any,
    buffers: Mapping[str, torch.Tensor],
    replaced: Mapping[str, torch.Tensor],
    gradient: bool,
    opened: bool,
) -> dict[int, Port]:
    """The port of each result of the traced function, by its identity. Results without a port are not in the program.

    ``opened``: whether tensors may be inside of objects; calls then return copies of these objects.
    """
    results = {id(result) for result in trace.results}
    kind: PortKind = "aux" if gradient else "result"
    ports: dict[int, Port] = {}
    for index, leaf in enumerate(trace.flat):
        if id(leaf) in results:
            ports[id(leaf)] = LOSS if gradient and leaf is value else Port("out", kind, str(index))
        elif isinstance(leaf, NUMBERS):
            raise CaptureError(
                "What is returned holds a number that was worked out from a size that moves (Policy.dynamic). Return "
                "it as a tensor, torch.tensor(number), or work it out outside."
            )
        elif opened and _open(leaf) and (found := list(inside(leaf))):
            for place, tensor in enumerate(found):
                if isinstance(tensor, torch.Tensor):
                    _take_out(trace, ports, tensor, Port("out", kind, str(index), part=str(place)), results)
        elif hidden := [name for name, value in vars(leaf).items() if id(value) in results] if _open(leaf) else []:
            raise CaptureError(
                f"A {type(leaf).__qualname__} was returned, which hides its tensors ({', '.join(hidden)}). Return "
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
        trace.replaced.add(port.name)
    for name, new in trace.side_effects.state.items():
        ports[id(new)] = Port("out", "constant", name)
    return ports


def closed(leaf: Any, trace: Trace) -> Any:
    """A returned value that is no tensor: an `Opaque` if it has tensors inside, else the value as it is."""
    if not trace.inside or not _open(leaf):
        return leaf
    ports = {id(tensor): trace.outputs[id(tensor)] for tensor in inside(leaf) if id(tensor) in trace.outputs}
    return Opaque(leaf, ports) if ports else leaf


def _take_out(trace: Trace, ports: dict[int, Port], tensor: torch.Tensor, port: Port, results: Collection[int]) -> None:
    """Makes a tensor inside of a returned object a result of its own."""
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


def _read_off(node: fx.Node) -> fx.Node | None:
    """The ``.item()`` that a number comes from; None for tensors, and for their sizes. Dynamo returns a float as a
    ``torch.scalar_tensor``."""
    if not isinstance(node.meta.get("example_value"), NUMBERS) and node.target is not torch.scalar_tensor:
        return None
    if node.target == "item":
        return node
    return next(filter(None, map(_read_off, node.all_input_nodes)), None)


def _without_empty_literals(graph: fx.Graph) -> None:
    """Replaces ``torch.tensor([])``, the start of a cache of keys, by `torch.empty`: it has no values to pass in."""
    for node in graph.find_nodes(op="call_function", target=torch.tensor):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and not value.numel() and node.kwargs.keys() <= {"dtype", "device"}:
            node.target = torch.empty
            node.args, node.kwargs = (tuple(value.shape),), {"dtype": value.dtype, "device": value.device}


def _name(node: fx.Node) -> str:
    """Where Dynamo found an input."""
    return node._dynamo_source.name  # type: ignore[attr-defined, no-any-return]


def _source(node: fx.Node) -> str:
    """Where Dynamo found a closed-over tensor, as the user would write it."""
    text = _name(node).replace("L['objective']", "objective").replace("._modules['model']", ".model")
    return re.sub(r"^objective\.model\.", "model.", re.sub(r"\._modules\['([^']+)'\]", r".\1", text))


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
