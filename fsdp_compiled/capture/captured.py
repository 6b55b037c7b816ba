"""What a capture is made of, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.guards import Guards
from fsdp_compiled.capture.opaque_results import Opaque
from fsdp_compiled.capture.tensor_parallel import Layout
from fsdp_compiled.ir.program import Port, Program

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
