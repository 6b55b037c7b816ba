"""Sizes that may change from call to call without another program: `Policy.dynamic`.

    batch                 with dynamic=True                one program for

    tokens int64[8, 64]   tokens int64[rows, 64]           every number of rows from 2 on
    lengths int64[8]      lengths int64[rows]

Under ``"auto"`` that program is made for the second size (`runtime.programs.request`). A dim moves in every tensor of
the batch whose size there equals the first tensor's. Sizes 0 and 1 do not move and get programs of their own: PyTorch
treats them differently (broadcasting, contiguity), so one program cannot serve them too.

The program keeps each condition on a size that the code checked in the trace (``if len(x) % 2``), and checks it again
for each new size: a program never runs on a size that it was not traced for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fsdp_compiled.ir.nodes import fake_mode
from fsdp_compiled.ir.program import Program

Sizes = Mapping[int, int]  # dim -> the size that it has now, for the dims that move


def sizes_of(dims: Iterable[int], tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The dims among ``dims`` that move in this batch, with their sizes."""
    tensors = list(tensors)
    found = {}
    for dim in dims:
        size = next((tensor.shape[dim] for tensor in tensors if tensor.dim() > dim), 0)
        if size > 1:
            found[dim] = size
    return found


def moving(tensor: torch.Tensor, sizes: Sizes) -> tuple[int, ...]:
    """The dims of this tensor that move."""
    return tuple(
        dim
        for dim, size in sizes.items()
        if tensor.dim() > dim and tensor.shape[dim] == size and (dim == 0 or tensor.is_contiguous())
    )


def traceable(tensor: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The tensor as a program reads it: with its actual values in memory, and with strides that follow from its sizes.

    Compiled code cannot handle a lazy negation or conjugation, so it is resolved here. Where a size moves, the strides
    may be those of any order of the dims, or zero (expanded). A tensor with other strides (``x[:, ::2]``), which follow
    from no size, is copied. Raises ``ValueError`` for a nested or quantized tensor.
    """
    if tensor.is_nested or tensor.is_quantized:
        kind, cure = ("nested", "to_padded_tensor(0.0)") if tensor.is_nested else ("quantized", "dequantize()")
        raise ValueError(f"The batch holds a {kind} tensor, which cannot be traced. Pass tensor.{cure}.")
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_neg().resolve_conj()
    if sizes and moving(tensor, sizes) and not _follow(tensor):
        tensor = tensor.contiguous()
    return tensor


def _follow(tensor: torch.Tensor) -> bool:
    """Whether the strides follow from the sizes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride and size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def layout(tensor: torch.Tensor, sizes: Sizes) -> tuple[object, ...]:
    """The properties of this tensor of a batch that a program depends on."""
    dims = moving(tensor, sizes) if sizes else ()
    if not dims:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    shape = tuple("moves" if dim in dims else size for dim, size in enumerate(tensor.shape))
    return shape, None if tensor.is_contiguous() else tensor.stride(), tensor.dtype, tensor.device


def name_of(dim: int) -> str:
    return "rows" if dim == 0 else f"size{dim}"


def shape_text(tensor: torch.Tensor, sizes: Sizes) -> str:
    """``[rows, 64]``."""
    dims = moving(tensor, sizes)
    return f"[{', '.join(name_of(dim) if dim in dims else str(size) for dim, size in enumerate(tensor.shape))}]"


def traced_with(sizes: Sizes) -> dict[int, int]:
    """The sizes to trace with: all different, since a tracer treats equal sizes as one symbol."""
    found: dict[int, int] = {}
    for dim, size in sizes.items():
        while size in found.values():
            size += 1
        found[dim] = size
    return found


def stay_open(program: Program, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> bool:
    """Whether the program leaves all of these sizes open. Code that needs one certain size fixes it in the program."""
    env = fake_mode(program.graph).shape_env
    asked = [
        node.meta["val"].shape[dim]
        for port, node in program.inputs.items()
        if port.kind == "batch"
        for dim in moving(tensors[port.name], sizes)
    ]
    return env is not None and all(isinstance(size, torch.SymInt) and not _is_one(size, env) for size in asked)


def _is_one(size: torch.SymInt, env: ShapeEnv) -> bool:
    bounds = env.var_to_range.get(size.node.expr)
    return bool(size.node.expr.is_number or (bounds is not None and bounds.is_singleton()))


def unfit(program: Program, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """A condition that the program relies on and that this batch does not meet, such as ``Eq(Mod(s0, 2), 0)``."""
    values = {}
    for port, node in program.inputs.items():
        if port.kind == "batch":
            for given, size in zip(node.meta["val"].shape, tensors[port.name].shape, strict=True):
                if isinstance(given, torch.SymInt):
                    values[given.node.expr] = size
                elif given != size:
                    return f"{given} in the place of {size}"
    env = fake_mode(program.graph).shape_env
    if not values or env is None:
        return None
    for symbol, size in values.items():
        if symbol in env.var_to_range and size not in env.var_to_range[symbol]:
            return f"{symbol} in {env.var_to_range[symbol]}, got {size}"
    now = ", ".join(f"{symbol} = {size}" for symbol, size in values.items())
    for symbol, same in env.replacements.items():
        values.setdefault(symbol, same.xreplace(values))
    for guard in env.guards:
        if guard.expr.xreplace(values) == False:  # noqa: E712, sympy's own false
            return f"{guard.expr}, got {now}"
    return None
