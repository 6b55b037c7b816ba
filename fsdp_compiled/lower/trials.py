"""Tries a captured CUDA graph, and the kernels that a program calls, before they are trusted.

A kernel is tried on this device before the program runs (`fsdp_compiled.kernels.trial`). `Trial` compares a captured
CUDA graph's first launch with the program itself, run from the same state, before it is trusted.

    program, ungraphed     state, results -> checksums
    graph, launched        state, results -> checksums      on the same state, put back in between

A graph holds addresses, and nothing at capture shows that they are the right ones. Memory that was freed meanwhile, a
batch that is not copied in, or a collective that was left out would give wrong numbers, and no error. A tensor's
checksums are its sum and the sum of its magnitudes, in float64: wrong numbers change them, while atomics that add in
another order from run to run hardly do. The tensors that the program writes are first copied to host memory, once a
program, as far as the ranks of a host have room there.

A trial that fails (most likely for lack of memory, since the graphs' pool is held beside it) stops nothing: the program
is undone, all ranks are told, and the graph is launched without a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from fsdp_compiled.ir.nodes import calls
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.kernels import host_copies
from fsdp_compiled.kernels.operators import IMPLEMENTATIONS, KERNELS, RUNS
from fsdp_compiled.kernels.trial import Like, failure

WRITTEN = ("shard", "copy", "buffer", "state", "constant", "sum", "scale", "step")  # kinds of ports a program writes
BOUND = 1e-4  # of the sum of magnitudes; float32 sums in another order differ by 1e-6 of it, a wrong tensor by half
SLICE = 2**20  # elements that are summed at a time
ROOM = 0.5  # the part of free host memory that all its ranks' copies may take

Checksum = tuple[float, float]
T = TypeVar("T")


def attempt(make: Callable[[], T]) -> tuple[T | None, str]:
    """The result of ``make``; or, if it fails, the reason in one line."""
    try:
        return make(), ""
    except (RuntimeError, MemoryError) as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


@dataclass(frozen=True)
class Snapshot:
    """The tensors that a program may write, by name, and copies of what they held."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    before: tuple[torch.Tensor, ...]

    def put_back(self) -> None:
        host_copies.finish()
        for tensor, before in zip(self.tensors, self.before, strict=True):
            tensor.copy_(before)

    def checksums(self) -> dict[str, Checksum]:
        return {name: checksum(tensor) for name, tensor in zip(self.names, self.tensors, strict=True)}


def snapshot(ports: Sequence[Port], given: Sequence[Any], ranks: int) -> Snapshot:
    """The tensors that a call of a program with these inputs may write, with copies in host memory, shared by ``ranks``
    ranks. Raises ``MemoryError`` if there is no room: Linux gives out more than there is, and ends processes later."""
    host_copies.finish()
    found = {
        str(port): value
        for port, value in zip(ports, given, strict=True)
        if port.kind in WRITTEN and isinstance(value, torch.Tensor)
    }
    needed, room = sum(tensor.nbytes for tensor in found.values()), free_memory() * ROOM / ranks
    if needed > room:
        raise MemoryError(f"copies take {needed / 2**30:.1f} GiB of host memory, and there are {room / 2**30:.1f}")
    before = tuple(tensor.detach().to("cpu", copy=True) for tensor in found.values())
    return Snapshot(tuple(found), tuple(found.values()), before)


def free_memory() -> float:
    """Bytes of this host, or this container, that can be had; infinite where Linux does not say."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return math.inf
    own = Path("/sys/fs/cgroup")
    try:
        limit, used = (float((own / name).read_text()) for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (own / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # ValueError: "max"
        return free
    return min(free, limit - used + float(kept.get("inactive_file", 0)))  # files that it lets go of


def checksum(tensor: torch.Tensor) -> Checksum:
    """``(sum, sum of magnitudes)`` of the elements, in float64. Waits for the device.

    A slice at a time: a sum in another dtype first copies what it adds, 8 bytes an element.
    """
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sums = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for part in values.detach().reshape(-1).split(SLICE):
        magnitudes = part.abs() if part.dtype != torch.bool else part
        sums[0] += part.sum(dtype=torch.float64)
        sums[1] += magnitudes.sum(dtype=torch.float64)
    total, size = sums.tolist()
    return total, size


def of_results(results: Sequence[Any]) -> dict[str, Checksum]:
    return {f"result {index}": checksum(one) for index, one in enumerate(results) if isinstance(one, torch.Tensor)}


def difference(expected: dict[str, Checksum], got: dict[str, Checksum]) -> str:
    """The first tensor whose checksums show different numbers; empty where there is none."""
    for name, wanted in expected.items():
        within = BOUND * max(abs(wanted[1]), 1e-30)
        if not all(_close(left, right, within) for left, right in zip(wanted, got[name], strict=True)):
            return f"{name} has the sums {got[name]} after the launch, and {wanted} after the program itself"
    return ""


def _close(left: float, right: float, within: float) -> bool:
    if not (math.isfinite(left) and math.isfinite(right)):
        return left == right or (math.isnan(left) and math.isnan(right))
    return abs(left - right) <= within


@dataclass(frozen=True)
class Trial:
    """What a launch is compared with: the program's checksums, and the way back to before it."""

    kept: Snapshot
    rewind: Callable[[], None]  # restores the random generator's state
    expected: dict[str, Checksum]
    failed: str  # why there are no checksums

    def undo(self) -> None:
        self.kept.put_back()
        self.rewind()

    def difference(self, results: Sequence[Any]) -> str:
        """How what a launch returned and wrote differs from the program's."""
        return difference(self.expected, of_results(results) | self.kept.checksums())


def tried(program: Callable[[], Sequence[Any]], kept: Snapshot, rewind: Callable[[], None]) -> Trial:
    """Runs the program itself, and goes back to before it."""
    results = program()
    expected, failed = attempt(lambda: of_results(results) | kept.checksums())
    trial = Trial(kept, rewind, expected or {}, failed)
    trial.undo()
    return trial


_failure, _copies_failure = cache(failure), cache(host_copies.failure)


def calls_kernels(program: Program) -> bool:
    return bool(calls(program.graph, lambda node: node.target in (*KERNELS, *host_copies.COPIES)))


def failures(program: Program, device: torch.device) -> dict[str, str]:
    """What is wrong with each operator of the program that has a kernel on this device, by the operator's name.

    Waits for the device, so do not call it during a capture. Each form of a kernel is tried once a process.
    """
    found = {}
    for like in dict.fromkeys(map(_like, (node for node in program.graph.nodes if node.target in KERNELS))):
        if RUNS[like.name, device.type] is not IMPLEMENTATIONS[like.name] and (said := _failure(like, device)):
            found[like.name] = said
    copies = any(node.target in host_copies.COPIES for node in program.graph.nodes)
    if copies and device.type not in host_copies.IN_ORDER and (said := _copies_failure(device)):
        found[host_copies.NAME] = said
    return found


def _like(node: fx.Node) -> Like:
    schema = node.target._schema  # type: ignore[union-attr]
    lists: dict[str, list[torch.dtype]] = {}
    scalars: dict[str, torch.dtype] = {}
    numbers: dict[str, Any] = {}
    for index, argument in enumerate(schema.arguments):
        given = node.kwargs.get(argument.name, node.args[index] if index < len(node.args) else None)
        if isinstance(given, list | tuple) and any(isinstance(one, fx.Node) for one in given):
            lists[argument.name] = [one.meta["val"].dtype for one in given]  # type: ignore[union-attr]
        elif isinstance(given, fx.Node):
            scalars[argument.name] = given.meta["val"].dtype
        elif argument.kwarg_only or argument.name == "dtype":
            numbers[argument.name] = given
    rows = dict.fromkeys(zip(*lists.values(), strict=True))  # each combination of dtypes once
    dtypes = tuple(zip(lists, zip(*rows, strict=True), strict=True))
    return Like(schema.name.removeprefix("fsdp_compiled::"), dtypes, tuple(scalars.items()), tuple(numbers.items()))
