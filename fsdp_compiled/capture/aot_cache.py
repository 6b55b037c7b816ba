"""What AOTAutograd traced is kept on disk: the second start on the same model reads its program.

    key                                                     file

    what Dynamo traced: operators, arguments, the layout    the program: ports, and for each node its operator by
    of every value, the modules and lines they came from    name, its arguments, the layout of its value, where it
    our ports                                               came from
    versions, modes, our own sources, the machine

Dynamo itself runs at every start: it alone knows what the user's code does. A key must hold all that AOTAutograd's
trace depends on; a setting too many costs a trace that was not needed, and one too few runs the wrong code. So a
program is kept only where that can be said: sizes are fixed, and every operator is PyTorch's
own. Operators and autograd functions of the user's, whose code the key does not see, are traced each time, and so is
what holds values that have no plain text.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import astuple
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import backends, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fsdp_compiled.capture import disk_cache
from fsdp_compiled.capture.aot import Traced, differentiate
from fsdp_compiled.capture.disk_cache import KNOWN, folder
from fsdp_compiled.capture.global_modes import now
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.torch_private.functorch import config
from fsdp_compiled.torch_private.modes import is_in_torch_dispatch_mode, saved_tensors_hooks


def settings() -> str:
    """Equal where tracing or compiling the same would give the same."""
    found = {**versions(), **_modes(), **_machine()}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def others() -> bool:
    """Whether code of the user's takes part in what is traced here: a dispatch mode, or hooks for saved tensors."""
    return is_in_torch_dispatch_mode() or saved_tensors_hooks(True) is not None


@functools.cache
def versions() -> dict[str, Any]:
    root = Path(__file__).parent.parent  # the package
    sources = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *(root / "kernels").glob("*.py")]):  # rglob does not follow the link
        sources.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return {
        "sources": sources.hexdigest(),
        "torch": (torch.__version__, torch.version.git_version),
        "python": sys.version_info[:2],
    }


def _modes() -> dict[str, Any]:
    """How operators are dispatched, differentiated, typed and chosen."""
    einsum = backends.opt_einsum
    return {
        "modes": now(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "functorch": config.get_hash(),
        "einsum": (einsum.is_available(), einsum.enabled, einsum.strategy),  # type: ignore[attr-defined]
        "quantized": backends.quantized.engine,
    }


def _machine() -> dict[str, Any]:
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    return {
        "cpu": (backends.cpu.get_cpu_capability(), torch.get_num_threads()),
        "gpu": None if index is None else (torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)),
    }


TORCH = os.path.dirname(torch.__file__) + os.sep
PLAIN = (FakeTensor, torch.Tensor, nn.Parameter)  # the kinds of tensors that shape, strides and dtype describe
MODULES = ("torch", "_operator", "math", "builtins")
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
# Of a node that Dynamo made: how and when it did so; what is read below; what AOTAutograd notes in checkpointed bodies.
ASIDE = (
    "creation_timestamp", "source_fn_stack", "grapharg", "example_value", "nn_module_stack", "recompute", "ac_graph_id",
)  # fmt: skip
LITERAL = 4096  # elements; a larger literal is not worth a place in the file
TAGS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda name: getattr(torch, name),
    "layout": lambda name: getattr(torch, name),
    "memory_format": lambda name: getattr(torch, name),
    "device": torch.device,
    "complex": lambda parts: complex(*parts),
    "ellipsis": lambda _: ...,
}


class _Unserializable(Exception):
    """Something has no plain text, or not one that says all of it."""


def traced(module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Port], results: Sequence[Port]) -> Traced:
    """`differentiate`, or what it made of the same at another time."""
    where = folder()
    try:
        place = where / "programs" / _key(module, inputs, given, results) if where is not None else None
    except _Unserializable:
        place = None
    if place is None:
        return differentiate(module, inputs, given, results)
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    found = disk_cache.read(place, lambda content: _read(content, mode))
    if found is None:
        found = differentiate(module, inputs, given, results)
        with contextlib.suppress(_Unserializable):
            disk_cache.write(place, _serialized(found))
    return found


def _key(module: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Port], results: Sequence[Port]) -> str:
    if others():
        raise _Unserializable("a mode of the user's takes part")
    if not any(isinstance(value, FakeTensor) for value in inputs):
        raise _Unserializable("nothing is computed from")
    storages: dict[int, int] = {}
    described = [settings(), [str(port) for port in (*given, *results)], [_input(value, storages) for value in inputs]]
    return hashlib.sha256(json.dumps([*described, _module(module)]).encode()).hexdigest()


def _input(value: Any, storages: dict[int, int]) -> list[Any]:
    """All of an input but its numbers; inputs that share memory have the same last entry."""
    if type(value) not in PLAIN:
        raise _Unserializable(type(value))
    storage = value.untyped_storage()
    shared = storages.setdefault(storage._cdata, len(storages))
    flags = [value.is_leaf, value.is_conj(), value.is_neg(), value.is_inference(), isinstance(value, nn.Parameter)]
    return [*_layout(value), value.requires_grad, value.storage_offset(), storage.nbytes(), flags, shared]


def _layout(value: torch.Tensor) -> list[Any]:
    if value.layout != torch.strided or not all(type(size) is int for size in (*value.shape, *value.stride())):
        raise _Unserializable(value)
    return [list(value.shape), list(value.stride()), str(value.dtype).removeprefix("torch."), str(value.device)]


def _module(module: fx.GraphModule) -> list[Any]:
    """What Dynamo traced, with the bodies of its checkpointed regions."""
    if "_checkpoint_context_fn" in module.meta:
        raise _Unserializable("a function of the user's chooses what to compute again")

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"node": value.name}
        if type(value) in PLAIN:  # of a DTensor its mesh and placements would count too
            return {"tensor": [*_layout(value), value.requires_grad]}
        raise _Unserializable(value)

    lines: list[Any] = [sorted(module.meta)]
    for node in module.graph.nodes:
        stack = [[path, kind.__qualname__] for path, kind in node.meta.get("nn_module_stack", {}).values()]
        rest = {key: _plain(value, leaf) for key, value in sorted(node.meta.items()) if key not in ASIDE}
        value = _plain(node.meta.get("example_value"), leaf)
        target = _module(getattr(module, node.target)) if node.op == "get_attr" else _function(node)
        lines.append([node.op, node.name, target, _plain((node.args, dict(node.kwargs)), leaf), value, stack, rest])
    return lines


def _function(node: fx.Node) -> str:
    """The name of an operator that is PyTorch's own, so that the name and PyTorch's version say what it does."""
    target = node.target
    if isinstance(target, str):
        if node.op == "call_module":
            raise _Unserializable(target)
        return target
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        if str(target).split(".")[0] in KNOWN:
            return str(target)
    elif target is CHECKPOINT:
        return "checkpoint"
    elif isinstance(target, types.BuiltinFunctionType | types.FunctionType):
        code = getattr(target, "__code__", None)
        if str(target.__module__).split(".")[0] in MODULES and (code is None or code.co_filename.startswith(TORCH)):
            return f"{target.__module__}.{target.__qualname__}"
    raise _Unserializable(target)


def _plain(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value as JSON has it, which `_made` turns back; ``leaf`` says what is not a number, text or the like."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [_plain(entry, leaf) for entry in value]}
    if isinstance(value, list):
        return [_plain(entry, leaf) for entry in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {"dict": {key: _plain(entry, leaf) for key, entry in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_plain(entry, leaf) for entry in (value.start, value.stop, value.step)]}
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return {kind.__name__: str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if value is ...:
        return {"ellipsis": None}
    return leaf(value)


def _made(described: Any, leaf: Callable[[str, Any], Any]) -> Any:
    """What `_plain` said."""
    if isinstance(described, list):
        return [_made(entry, leaf) for entry in described]
    if not isinstance(described, dict):
        return described
    ((tag, value),) = described.items()
    if tag == "tuple":
        return tuple(_made(entry, leaf) for entry in value)
    if tag == "dict":
        return {key: _made(entry, leaf) for key, entry in value.items()}
    if tag == "slice":
        return slice(*(_made(entry, leaf) for entry in value))
    if tag == "size":
        return torch.Size(value)
    return TAGS[tag](value) if tag in TAGS else leaf(tag, value)


def _serialized(traced: Traced) -> bytes:
    """The program as a file has it."""
    program = traced.program
    places = {node: place for place, node in enumerate(program.graph.nodes)}
    traces: dict[str, int] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"node": places[value]}
        if type(value) is FakeTensor:
            return {"tensor": _layout(value)}
        raise _Unserializable(value)

    def described(node: fx.Node) -> list[Any]:
        meta = dict(node.meta)
        if "stack_trace" in meta:
            meta["stack_trace"] = traces.setdefault(meta["stack_trace"], len(traces))
        return [node.op, node.name, _operator(node.target), _plain((node.args, dict(node.kwargs), meta), leaf)]

    content = {
        "nodes": [described(node) for node in program.graph.nodes],
        "traces": list(traces),
        "ports": [astuple(port) for port in program.ports],
        "history": program.history,
        "literals": {name: _literal(value) for name, value in traced.literals.items()},
    }
    return json.dumps(content).encode()


def _read(content: bytes, mode: FakeTensorMode) -> Traced:
    """The program that `_serialized` put there, its values fake tensors of this mode."""
    found = json.loads(content)
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def leaf(tag: str, value: Any) -> Any:
        if tag == "node":
            return nodes[value]
        shape, stride, dtype, device = value
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)

    with mode:
        for op, name, target, rest in found["nodes"]:
            args, kwargs, meta = _made(rest, leaf)
            if "stack_trace" in meta:
                meta["stack_trace"] = found["traces"][meta["stack_trace"]]
            node = graph.create_node(op, _target(target), args, kwargs, name)
            node.meta.update(meta)
            nodes.append(node)
    program = Program(graph, tuple(Port(*port) for port in found["ports"]), tuple(found["history"]))
    return Traced(program, {name: _tensor(described) for name, described in found["literals"].items()})


def _operator(target: Any) -> Any:
    """An operator's name, from which `_target` finds it again; of a placeholder or the output, its own."""
    if isinstance(target, str):
        return target
    if target is getitem:
        return []
    if isinstance(target, torch._ops.OpOverload):
        return [target.namespace, target._schema.name.split("::")[1], target._overloadname]
    raise _Unserializable(target)


def _target(described: Any) -> Any:
    if isinstance(described, str):
        return described
    if not described:
        return getitem
    namespace, name, overload = described
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _literal(value: torch.Tensor) -> list[Any]:
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.numel() > LITERAL:
        raise _Unserializable(value)
    numbers = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [*_layout(value), base64.b64encode(numbers).decode()]


def _tensor(described: list[Any]) -> torch.Tensor:
    shape, stride, dtype, device, numbers = described
    flat = torch.frombuffer(bytearray(base64.b64decode(numbers)), dtype=getattr(torch, dtype)) if numbers else None
    result = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
    return result if flat is None else result.copy_(flat.reshape(shape))
