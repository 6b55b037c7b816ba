"""Finds what in a program cannot be part of a CUDA graph, and says where, why and how to avoid it.

A graph holds device work with its addresses. Whatever the host reads, decides or copies while the program runs is
frozen in the graph or forbidden: numbers read back from the device, shapes that depend on values, tensors on the CPU,
generators on the host, and collectives that the CPU carries out. A graph's inputs and outputs lie in memory that keeps
its address (`Held`, `Results`): inputs are written before a launch, outputs are read after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fsdp_compiled.ir.nodes import call_text, is_collective, is_random, is_wait, role_of
from fsdp_compiled.ir.program import Program

HELD = ("room", "shard", "state")
SMALL = 256  # bytes; results up to this are handed out with one copy
ALIGN = 16


class Held:
    """Memory that keeps its address, laid out like one tensor of the batch; each call copies its tensor into it.

    The copy covers the whole stretch of memory that holds the tensor's elements, so that any strides will do: gaps,
    transposed, or one element shown many times.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.plain = like.is_contiguous()
        self.extent = sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True)) + 1
        self.extent = self.extent if like.numel() else 0
        memory = torch.empty(self.extent, dtype=like.dtype, device=like.device)
        self.tensor = memory.as_strided(like.shape, like.stride())
        self.target = self.tensor if self.plain else memory

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of the tensor is copied to ``target``."""
        return tensor if self.plain else tensor.as_strided((self.extent,), (1,))


class Results:
    """A graph's results, laid out in the graph so that one launch copies all the small ones."""

    def __init__(self, results: Sequence[Any]) -> None:
        self.results = list(results)
        self.places: dict[int, tuple[int, int]] = {}
        end = 0
        for index, value in enumerate(self.results):
            if isinstance(value, torch.Tensor) and value.nbytes <= SMALL:
                self.places[index] = end, value.nbytes
                end += -(-value.nbytes // ALIGN) * ALIGN
        self.packed: torch.Tensor | None = None
        if self.places:
            device = self.results[next(iter(self.places))].device
            self.packed = torch.empty(end, dtype=torch.uint8, device=device)
            for index, like in enumerate(self.results):
                if index in self.places:
                    self._view(self.packed, index, like).copy_(like)
                    self.results[index] = torch.empty_like(like, device="meta")  # only the shape is needed

    def copies(self) -> list[Any]:
        """Copies of the results, in tensors that nobody else holds."""
        packed = self.packed.clone() if self.packed is not None else None
        found: list[Any] = []
        for index, value in enumerate(self.results):
            if index in self.places:
                assert packed is not None
                found.append(self._view(packed, index, value))
            else:
                found.append(pytree.tree_map_only(torch.Tensor, torch.clone, value))
        return found

    def _view(self, packed: torch.Tensor, index: int, like: torch.Tensor) -> torch.Tensor:
        start, size = self.places[index]
        return packed[start : start + size].view(like.dtype).view(like.shape)


aten = torch.ops.aten
READS = (aten.is_nonzero.default, aten._assert_scalar.default)  # and all tagged operators
INDEXING = (
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index_put.default,
    aten._index_put_impl_.default,
)
SHOWN = 3


def obstacles(
    program: Program, device: torch.device, backends: Mapping[str, str], capturable: Collection[str]
) -> list[str]:
    """Why the program cannot be captured on this device; empty where it can.

    ``backends`` gives the kind of process group along each axis. ``capturable`` are the kinds whose collectives may be
    part of a graph.
    """
    found = [*_inputs(program, device)]
    for axis in dict.fromkeys(str(node.args[-1]) for node in program.graph.nodes if is_collective(node)):
        if backends.get(axis, "no") not in capturable:
            found.append(
                f"collectives along {axis!r} go through {backends.get(axis, 'no')}, on the host. Start the process "
                f"group with {' or '.join(sorted(capturable))}."
            )
    for node in program.graph.nodes:
        if node.op == "call_function":
            reason = next((reason for applies, reason in RULES if applies(node, device)), None)
            found += [f"{_place(node)}: {reason}"] if reason is not None else []
    return found


def sentence(found: list[str]) -> str:
    """The first obstacle, and how many more there are."""
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return "\n".join(f"  {line}" for line in [*found[:SHOWN], *more])


def _inputs(program: Program, device: torch.device) -> Iterator[str]:
    if any(port.kind == "size" for port in program.inputs):
        yield (
            "sizes of the batch move (Policy.dynamic), and may differ between ranks; a graph has one size on all. "
            "Give batches few shapes (pad, drop_last=True) and set dynamic=False."
        )
    for port, node in program.inputs.items():
        value = node.meta["val"]
        # A room is pinned, and keeps its address; so are shards and state that are kept on the host.
        if isinstance(value, torch.Tensor) and value.device.type != device.type and port.kind not in HELD:
            yield (
                f"{port} is on the {value.device.type}, and would be copied while the graph is made. Move it to the "
                "model's device, or make it a buffer of the model (register_buffer)."
            )


def _masks(node: fx.Node, _: torch.device) -> bool:
    if node.target not in INDEXING:
        return False
    indices = (leaf for leaf in pytree.tree_leaves(node.args[1]) if isinstance(leaf, fx.Node))
    return any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in indices)


def _elsewhere(node: fx.Node, device: torch.device) -> bool:
    if role_of(node) in ("store", "return", "stored"):
        return False
    values = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(value, torch.Tensor) and value.device.type not in (device.type, "meta") for value in values)


def _own_generator(node: fx.Node, _: torch.device) -> bool:
    given = pytree.tree_leaves((node.args, dict(node.kwargs)))
    return is_random(node) and (
        node.kwargs.get("generator") is not None or any(isinstance(one, torch.Generator) for one in given)
    )


def _awaits_outside(node: fx.Node, _: torch.device) -> bool:
    """A wait for a collective that was started before the program."""
    if not is_wait(node):
        return False
    source = node.args[0]
    while isinstance(source, fx.Node) and source.op == "call_function":
        if is_collective(source):
            return False
        source = source.args[0] if source.args else None
    return True


RULES: tuple[tuple[Callable[[fx.Node, torch.device], bool], str], ...] = (
    (
        lambda node, _: node.target in READS or torch.Tag.data_dependent_output in getattr(node.target, "tags", ()),
        "the host reads a number from the device here. Keep it a tensor (no .item(), int(), if on a tensor).",
    ),
    (_masks, "a mask picks elements, and the host must count them. Use torch.where or masked_fill."),
    (
        lambda node, _: (
            torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()) and node.target not in INDEXING
        ),
        "the size of the result depends on values, which the host must read. Use a fixed size.",
    ),
    (_elsewhere, "a value is made on the CPU. Make it on the model's device: torch.tensor(..., device=x.device)."),
    (_own_generator, "it draws from a generator of its own, whose state the host holds. Use the default generator."),
    (
        lambda node, _: "rng_state" in getattr(node.target, "__name__", ""),
        "the generator's state is saved on the host here. Give checkpoint(preserve_rng_state=False).",
    ),
    (_awaits_outside, "a collective is waited for that was started outside of the graph."),
)


def _place(node: fx.Node) -> str:
    path = node.meta.get("path")
    text = call_text(node)
    return (f"{path}: " if path else "") + (text if len(text) < 100 else text[:97] + "...")
