"""Makes a `Program` of Dynamo's graph: AOTAutograd differentiates the graph, and the result gets our ports and marks.

This is the only file that uses private parts of AOTAutograd.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compiled.capture.folded_views import DETACH, fold_views
from fsdp_compiled.capture.mended_layers import misread_layers
from fsdp_compiled.capture.source_lines import is_backward, path_of, stretch_of, user_line
from fsdp_compiled.ir.nodes import Phase, fake_mode, fake_tensor
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.torch_private.dynamo import TensorifyScalarRestartAnalysis, TensorifyState
from fsdp_compiled.torch_private.inductor import config as inductor_config
from fsdp_compiled.torch_private.names import find, there, uses

aten = torch.ops.aten
aot_module_simplified = find("torch._functorch.aot_autograd.aot_module_simplified")
config: Any = find("torch._functorch.config")
# What AOTAutograd says of each input and output of a joint graph.
descriptors: Any = find("torch._functorch._aot_autograd.descriptors")


class CaptureError(ValueError):
    """The model or the loss cannot be traced whole, or the loss is not one that can be differentiated."""


@dataclass(frozen=True)
class Traced:
    """A captured program, and the literal tensors of the model's code, which are inputs of it."""

    program: Program
    literals: Mapping[str, torch.Tensor]


def differentiate(
    module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Port], results: Sequence[Port]
) -> Traced:
    """The program of a module that Dynamo traced, with its gradient. ``given``: the ports of the inputs; ``results``:
    those of the results."""
    joint = _joint(module, inputs)
    ports = _opened(joint, given)
    literals = _lift_literals(joint, ports)
    return Traced(_to_program(joint.graph, ports, given, list(results)), literals)


def _opened(joint: fx.GraphModule, given: Sequence[Port]) -> list[Port]:
    """The port of each placeholder, tangents left out. A tensor subclass has one placeholder for each inner tensor."""
    found = [
        _within(node.meta.get("desc"), descriptors.SubclassGetAttrAOTInput)
        for node in joint.graph.find_nodes(op="placeholder")
    ]
    if not any(part for _, part in found):
        return list(given)
    inputs = [(given[of.idx], part) for of, part in found if isinstance(of, descriptors.PlainAOTInput)]
    return [replace(port, part=part) if part else port for port, part in inputs]


def _within(description: Any, kind: type) -> tuple[Any, str]:
    """The tensor subclass that an inner tensor belongs to, and the path of attributes to the inner tensor."""
    part: list[str] = []
    while isinstance(description, kind):
        part.insert(0, description.attr)  # type: ignore[attr-defined]
        description = description.base  # type: ignore[attr-defined]
    return description, ".".join(part)


def _empty_gradient(gradient: torch.Tensor, value: torch.Tensor, *_options: Any) -> Any:
    """The gradient of a loss by a value without elements. For any other value PyTorch's decomposition is used."""
    return torch.empty_like(value) if value.numel() == 0 else NotImplemented


def _through_dropout(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """The gradient of dropout's input. On CPUs eager PyTorch multiplies by 1 / (1 - p) in the input's own dtype, in
    backward as in forward; the operator that a trace has multiplies by the exact number in backward."""
    if gradient.device.type != "cpu" or gradient.dtype not in (torch.bfloat16, torch.float16):
        return NotImplemented
    return gradient * (mask.to(gradient.dtype) * scale)


DECOMPOSITIONS = {
    # On fake tensors PyTorch computes these with a division by the number of elements, which fails in Python for 0.
    aten.mse_loss_backward.default: _empty_gradient,
    aten.smooth_l1_loss_backward.default: _empty_gradient,
    aten.huber_loss_backward.default: _empty_gradient,
    aten.native_dropout_backward.default: _through_dropout,
}


class _Captured(Exception):
    """Leaves AOTAutograd as soon as it has handed over the joint graph."""


def _joint(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """AOTAutograd's joint graph of what Dynamo traced; its forward graph where nothing requires a gradient."""
    if (why := misread_layers(module.graph)) is not None:
        raise CaptureError(why)
    taken: list[fx.GraphModule] = []

    def take(graph_module: fx.GraphModule, _inputs: Any, **_options: Any) -> Any:
        taken.append(graph_module)
        raise _Captured

    # As `torch._dynamo.backends.common.aot_autograd` calls it, which imports half of Inductor for its log.
    compiler = functools.partial(
        aot_module_simplified, fw_compiler=take, inference_compiler=take, partition_fn=take,
        decompositions=DECOMPOSITIONS, keep_inference_input_mutations=False,
    )  # fmt: skip
    # The setting keeps unused draws of random numbers: eager PyTorch makes them too, which advances its generator.
    draws = inductor_config.patch(fallback_random=True) if there("unused draws") else contextlib.nullcontext()
    # Backward runs as if `loss.backward()` came after the autocast block, as PyTorch recommends: in forward's dtypes.
    backward = config.patch(backward_pass_autocast="off")
    try:
        while not taken:
            # The restart is meant for Dynamo, which would then trace a number that was specialized as a constant. Here
            # the guards (`closure_values`) hold what was asked of the number, and its name is known the second time.
            restart = contextlib.suppress(_Captured, TensorifyScalarRestartAnalysis)
            with restart, draws, backward:
                compiler(module, list(inputs))
                raise AssertionError("AOTAutograd handed over no graph")
    except KeyError as error:
        raise CaptureError(_not_a_number(module, error)) from error
    finally:
        if uses("numbers of tensors"):
            TensorifyState.clear()
    return taken[0]


def _not_a_number(module: fx.GraphModule, error: KeyError) -> str:
    """The message for ``float()`` of a bool that is read out of a tensor: PyTorch (to 2.13) has no operator for it."""
    floats = [node for node in module.graph.nodes if isinstance(node.meta.get("example_value"), torch.SymFloat)]
    node = next((node for node in floats if node.meta["example_value"].node.expr.free_symbols & {*error.args}), None)
    if node is None:
        raise error
    return (
        "A truth value that is read out of a tensor is made a float, which cannot be traced.\n"
        f"{user_line(RuntimeError(node.stack_trace))}\n"
        "  Cure: stay with tensors: `y * mask.to(y.dtype)` in the place of `y * float(mask)`."
    )


def _lift_literals(joint: fx.GraphModule, ports: list[Port]) -> dict[str, torch.Tensor]:
    """Literal tensors of the model's code, such as ``torch.tensor(-1.0)``, become inputs like any other."""
    literals: dict[str, torch.Tensor] = {}
    closed = len({port.name for port in ports if port.kind == "constant"})
    places = joint.graph.find_nodes(op="placeholder")
    for node in joint.graph.find_nodes(op="get_attr"):
        value = getattr(joint, str(node.target))
        if not isinstance(value, torch.Tensor):
            continue  # the body of a higher-order operator; refused where it is used
        name = f"literal {closed + len(literals)}"
        with joint.graph.inserting_before(places[len(ports)] if len(ports) < len(places) else node):
            place = joint.graph.placeholder(node.name)
        place.meta = dict(node.meta)
        mode = fake_mode(joint.graph)
        place.meta["val"] = fake_tensor(mode, tuple(value.shape), value.stride(), value.dtype, value.device)
        node.replace_all_uses_with(place)
        joint.graph.erase_node(node)
        ports.append(Port("in", "constant", name))
        places.insert(len(ports) - 1, place)
        literals[name] = value.detach()
    return literals


def _to_program(joint: fx.Graph, inputs: list[Port], given: Sequence[Port], results: list[Port]) -> Program:
    """The joint graph with our ports and marks, without unused inputs. ``inputs``: the ports of the placeholders;
    ``given``: those of the traced function's inputs.

    The tangent of a loss is a constant. The tangent of a ``result`` is an input: the ``tangent`` port of that name.
    """
    graph = fx.Graph()
    of_no_use = descriptors.GradAOTOutput | descriptors.ForwardTokenAOTOutput | descriptors.BackwardTokenAOTOutput
    mapping: dict[fx.Node, fx.Node] = {}
    placeholders = [
        node
        for node in joint.find_nodes(op="placeholder")
        if not isinstance(node.meta.get("desc"), descriptors.ForwardTokenAOTInput | descriptors.BackwardTokenAOTInput)
    ]
    forward_inputs = placeholders[: len(inputs)]
    by_port: dict[Port, fx.Node] = {}
    for port, node in zip(inputs, forward_inputs, strict=True):
        if port.kind == "mesh":
            continue  # the collectives name its group
        # the same size of several tensors comes as several inputs
        mapping[node] = by_port[port] = by_port.get(port) or graph.node_copy(node)
        mapping[node].meta = {"val": node.meta["val"]}
    tangents = placeholders[len(inputs) :]
    for tangent in tangents:
        output = _result_of(tangent)
        if isinstance(output, descriptors.PlainAOTOutput) and results[output.idx].kind == "result":
            port = Port("in", "tangent", results[output.idx].name, results[output.idx].part)
            mapping[tangent] = by_port[port] = graph.node_copy(tangent)
            mapping[tangent].meta = {"val": tangent.meta["val"]}
    seeds = [tangent for tangent in tangents if tangent not in mapping]
    unread = fold_views(joint)
    phase: Phase = "forward"
    for node in joint.nodes:
        if node.op == "call_function":
            if phase == "forward" and (is_backward(node) or any(source in tangents for source in node.all_input_nodes)):
                phase = "backward"
                mapping |= {tangent: _seed(graph, tangent) for tangent in seeds}
            if node.target is torch.ops.higher_order.with_effects:
                _effect(graph, node, mapping, phase)
            elif node.target is torch.ops.aten.copy_.default and node.args[0] in tangents:
                mapping[node] = mapping[node.args[1]]  # the user's own backward wrote in place to its gradient
            elif node not in mapping and node not in unread:
                mapping[node] = mapping[node.args[0]] if node.target is DETACH else _copy(graph, node, mapping, phase)  # type: ignore[index]
        elif node.op not in ("placeholder", "output"):
            raise CaptureError(
                f"The model uses a higher-order operator ({node.op} {node.target}) that is not supported yet. "
                "Write its body out as ordinary operators."
            )
    mapping |= {tangent: _seed(graph, tangent) for tangent in seeds}  # no backward: the loss is a parameter
    end = joint.output_node()
    values = end.args[0]
    descriptions = end.meta["desc"]
    outputs: dict[Port, fx.Node] = {}
    for value, description in zip(values, descriptions, strict=True):  # type: ignore[arg-type]
        if isinstance(description, descriptors.PlainAOTOutput):
            outputs[results[description.idx]] = mapping[value]  # after a mutation of the same buffer, its last value
        elif isinstance(description, descriptors.InputMutationAOTOutput):
            port = given[_within(description.mutated_input, descriptors.SubclassGetAttrAOTInput)[0].idx]  # type: ignore[attr-defined]
            if port.kind not in ("buffer", "constant"):
                raise CaptureError(unwritable(port))
            outputs.setdefault(Port("out", port.kind, port.name), mapping[value])
        elif isinstance(description, descriptors.GradAOTOutput) and value is not None:
            port = given[description.grad_of.idx]  # type: ignore[attr-defined]
            if port.kind == "constant":
                raise CaptureError(
                    f"The loss differentiates {port.name}, which is not a parameter of the model: its gradient would "
                    "be lost. Make it a parameter of the model, or detach it."
                )
            if value.meta["val"].layout != torch.strided:
                raise CaptureError(
                    f"The gradient of {port.name} is sparse, which a flat buffer cannot hold. Build the embedding with "
                    "sparse=False: during backward its gradient is as large as the parameter."
                )
            if port.kind == "parameter":
                outputs[Port("out", "parameter gradient", port.name)] = mapping[value]
            elif port.kind in ("batch", "plain"):
                outputs[Port("out", "input gradient", port.name)] = mapping[value]
        elif value is not None and isinstance(description, descriptors.SubclassGetAttrAOTOutput):
            of, part = _within(description, descriptors.SubclassGetAttrAOTOutput)
            gradient = isinstance(of, descriptors.GradAOTOutput)
            what = f"The gradient of {given[of.grad_of.idx].name}" if gradient else "What forward returns"  # type: ignore[attr-defined]
            raise CaptureError(
                f"{what} is a tensor of a class of its own, made of {part} and others; expected an ordinary one. Let "
                "what the class makes of operators be ordinary tensors, but for those that only lay it out otherwise."
            )
        elif value is not None and not isinstance(description, of_no_use):
            raise CaptureError(f"The model returns something that cannot be traced yet: {description}.")
    graph.output(list(outputs.values()))
    kept = []
    for port, node in by_port.items():
        if node.users or port.kind in ("batch", "size", "tangent") or Port("out", port.kind, port.name) in outputs:
            kept.append(port)
        else:
            graph.erase_node(node)
    program = Program(graph, (*kept, *outputs), ("capture",))
    graph.lint()
    return program


def _effect(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, fx.Node], phase: Phase) -> None:
    """Copies an operator with an effect, such as the check of a matrix's inverse, without its effect token: a program
    runs in order.

    token', result = with_effects(token, operator, x)   ->   result = operator(x)
    """
    _token, operator, *args = node.args
    copy = graph.call_function(operator, *fx.node.map_arg((tuple(args), node.kwargs), mapping.__getitem__))  # type: ignore[arg-type]
    results = node.meta["val"][1:]
    single = len(results) < 2
    copy.meta = {"val": results[0] if results and single else results or None, "phase": phase, "path": path_of(node)}
    copy.meta |= {"effect": True} | _stretch(node)
    for user in node.users:
        if user.target is getitem and (single or not user.args[1]):  # nothing reads the token
            mapping[user] = copy
        elif user.target is getitem:
            mapping[user] = graph.call_function(getitem, (copy, user.args[1] - 1))  # type: ignore[operator]
            mapping[user].meta = {"val": user.meta["val"], "phase": phase, "path": path_of(node)} | _stretch(node)


def _result_of(tangent: fx.Node) -> Any:
    """The output that this tangent belongs to."""
    return _within(tangent.meta["desc"], descriptors.SubclassGetAttrAOTInput)[0].output


def _seed(graph: fx.Graph, tangent: fx.Node) -> fx.Node:
    """The derivative of the loss by one of the results: 1 for itself, 0 for buffers that forward updated."""
    value = tangent.meta["val"]
    seed = 1.0 if isinstance(_result_of(tangent), descriptors.PlainAOTOutput) else 0.0
    node = graph.call_function(
        torch.ops.aten.full.default, (list(value.shape), seed), {"dtype": value.dtype, "device": value.device}
    )
    node.meta = {"val": value, "phase": "backward", "path": ""} | ({"seed": True} if seed else {})
    return node


def _copy(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, fx.Node], phase: Phase) -> fx.Node:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), mapping.__getitem__)
    copy = graph.create_node(node.op, node.target, args, kwargs, stem(node.name), node.type)
    copy.meta = {"val": node.meta.get("val"), "phase": phase, "path": path_of(node)} | _stretch(node)
    if phase == "forward" and _recomputes(node):
        copy.meta["region"] = node.meta.get("ac_graph_id", 0)
    if "stack_trace" in node.meta:
        copy.meta["stack_trace"] = node.meta["stack_trace"]
    return copy


@functools.lru_cache(1 << 14)
def stem(name: str) -> str:
    """A node's name without the number at its end, which only counts nodes."""
    return re.sub(r"(_\d+)+$", "", name)


def _stretch(node: fx.Node) -> dict[str, Any]:
    found = stretch_of(node)
    return {} if found is None else {"stretch": found}


def _recomputes(node: fx.Node) -> bool:
    """Whether the user's `torch.utils.checkpoint` asks to compute this node again in backward."""
    tag = node.meta.get("recompute")
    return tag is not None and getattr(tag, "name", "") in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE")


def unwritable(port: Port) -> str:
    """Why forward may not write this input, and the cure."""
    if port.kind == "parameter":
        return (
            f"Forward writes {port}. Parameters live in shards, which the optimizer alone updates: compute with a "
            "changed copy instead (`weight.clamp(-1, 1)`), as torch.nn.utils.parametrize does."
        )
    return (
        f"Forward writes {port} in place. Only buffers (register_buffer) may be updated by forward; "
        "clone the tensor before changing it."
    )
