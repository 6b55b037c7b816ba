"""What a capture is made of, and what it gives.

Which of the tensors that the traced function returned is what: the loss, aux, a result, a buffer, a constant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.aot import CaptureError, unwritable
from fsdp_compiled.capture.dynamo_run import Trace
from fsdp_compiled.capture.guards import Guards
from fsdp_compiled.capture.opaque_results import Opaque
from fsdp_compiled.capture.opaque_results import inside as inside_of
from fsdp_compiled.capture.tensor_parallel import Layout
from fsdp_compiled.ir.program import LOSS, Port, PortKind, Program

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
    asked: frozenset[str] = frozenset()  # attributes that tensors were asked for, and that are not PyTorch's

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


def batch_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a batch by their place in it, such as ``"[0]"`` and ``"['labels']"``."""
    leaves = [*pytree.tree_flatten_with_path(args)[0], *pytree.tree_flatten_with_path(dict(kwargs))[0]]
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def output_ports(
    trace: Trace,
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


def closed(leaf: Any, trace: Trace) -> Any:
    """What is returned and no tensor: an object with tensors inside, or anything else as it is."""
    if not trace.inside or not _open(leaf):
        return leaf
    ports = {id(tensor): trace.outputs[id(tensor)] for tensor in inside_of(leaf) if id(tensor) in trace.outputs}
    return Opaque(leaf, ports) if ports else leaf


def _take_out(trace: Trace, ports: dict[int, Port], tensor: torch.Tensor, port: Port, results: Collection[int]) -> None:
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
