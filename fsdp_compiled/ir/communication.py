"""What a collective carries, in bytes: by its tensors, or by what it says of them where padding stays behind.

all_gather_into_tensor(shard, 2, "shard")                  [6] -> [12]         6 -> 12 elements
pairs.all_gather_into_tensor(shard, [6, 4], 2, "shard")    [6] -> [12]    6 or 4 -> 10
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree

UNPADDED = "fsdp_compiled_pairs"  # the operators of `distributed.gloo_gathers`


def carried(node: fx.Node) -> tuple[list[int], list[int]]:
    """Bytes that a rank gives, and gets, its own among them; of each rank, where they differ."""
    given = [source.meta["val"] for source in node.all_input_nodes]
    made = [leaf for leaf in pytree.tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor)]
    if not leaves_padding_out(node):
        return [sum(one.nbytes for one in given)], [sum(one.nbytes for one in made)]
    filled: list[int] = node.args[-3]  # type: ignore[assignment]
    ranks: int = node.args[-2]  # type: ignore[assignment]
    parts = [
        sum(length * one.dtype.itemsize for length, one in zip(filled[rank::ranks], given, strict=True))
        for rank in range(ranks)
    ]
    each = parts[:1] if len(set(parts)) == 1 else parts
    return (each, [sum(parts)]) if made[0].numel() > given[0].numel() else ([sum(parts)], each)


def leaves_padding_out(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == UNPADDED


def most_carried(node: fx.Node) -> int:
    """Bytes of the whole that it brings, or takes."""
    given, got = carried(node)
    return max(*given, *got)
