"""What kind of operator is called on parameters in shards, of which depends how it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_compiled.runtime.parameters.sharded_tensor import is_sharded

# Element by element, or of values that do not matter, but without PyTorch's tag that says so.
ALIKE = {
    "copy_", "fill_", "zero_", "clone", "_to_copy", "detach", "detach_", "alias", "empty_like", "zeros_like",
    "ones_like", "full_like", "masked_fill", "masked_fill_", "isclose", "lift_fresh", "copy",
}  # fmt: skip
REDUCING = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


def is_elementwise(func: Any, name: str) -> bool:
    if name.startswith("_foreach_"):
        return not name.startswith(REDUCING)
    returns = [str(one.type) for one in func._schema.returns]  # ``equal`` has the tag, and returns a bool
    return returns == ["Tensor"] and (torch.Tag.pointwise in func.tags or name in ALIKE)


def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def written_by(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> set[int]:
    """The tensors that it writes, by ``id``."""
    found: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else named.get(argument.name))
    return {id(one) for one in pytree.tree_leaves(found)}


def in_one_place(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether each row of arguments is stretches in one place, whole tensors of its shape, and single numbers.

    A row: all arguments, or the n-th of each list.
    """
    values = [*args, *named.values()]
    lists = [one for one in values if isinstance(one, list | tuple) and any(isinstance(x, torch.Tensor) for x in one)]
    single = [one for one in values if isinstance(one, torch.Tensor)]
    rows: list[list[torch.Tensor]] = [single]
    if lists:
        if any(one.dim() for one in single) or len({len(one) for one in lists}) > 1:
            return False
        rows = [[x for x in row if isinstance(x, torch.Tensor)] for row in zip(*lists, strict=True)]
    written = written_by(func, args, named)
    return all(_is_row(row, written) for row in rows)


def _is_row(row: Sequence[torch.Tensor], written: set[int]) -> bool:
    cut = [one for one in row if is_sharded(one) and not one._sharded.whole]  # type: ignore[attr-defined]
    if not cut:
        return not any(is_sharded(one) for one in row)
    first = cut[0]._sharded.place  # type: ignore[attr-defined]
    if any(one._sharded.place.slot is not first.slot or one._sharded.place.layout is not first.layout for one in cut):  # type: ignore[attr-defined]
        return False
    others = [one for one in row if not any(one is x for x in cut)]
    if any(id(one) in written for one in others):  # a whole one is written: it wants the whole
        return False
    try:
        return torch.broadcast_shapes(first.shape, *(one.shape for one in others)) == first.shape
    except RuntimeError:
        return False
