"""Gives each tensor that the traced function returned its port: the loss, aux, a result, a buffer or a constant.

Models of transformers use hooks to collect some outputs of their layers (``output_router_logits``,
``output_hidden_states``). transformers (5.0 and later) installs these hooks on the first call that wants such outputs,
under a lock that Dynamo cannot trace. If a trace fails at that lock, `put_hooks` installs them, and the trace is made
again.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_compiled.capture.aot import CaptureError, unwritable
from fsdp_compiled.capture.captured import Opaque
from fsdp_compiled.capture.captured import inside as inside_of
from fsdp_compiled.capture.dynamo_run import Trace
from fsdp_compiled.ir.program import LOSS, Port, PortKind


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
    """The port of each result of the traced function, by its identity. Results without a port are not in the program.

    ``opened``: whether tensors may be inside of objects; calls then return copies of these objects.
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
    """A returned value that is no tensor: an `Opaque` if it has tensors inside, else the value as it is."""
    if not trace.inside or not _open(leaf):
        return leaf
    ports = {id(tensor): trace.outputs[id(tensor)] for tensor in inside_of(leaf) if id(tensor) in trace.outputs}
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


MODULE = "transformers.utils.output_capturing"


def put_hooks(model: nn.Module, error: Exception) -> bool:
    """If the trace failed at the lock, installs the hooks; returns whether it installed any."""
    transformers = sys.modules.get(MODULE)
    if transformers is None or "_hook_installation_lock" not in str(error):
        return False
    found = [one for one in model.modules() if getattr(one, "_can_record_outputs", None)]
    found = [one for one in found if not getattr(one, "_output_capturing_hooks_installed", False)]
    for one in found:
        transformers.maybe_install_capturing_hooks(one)
    return bool(found)
