"""Cross-entropy over a large vocabulary whose logits are never whole: a few rows of them at a time.

    hidden [N, width], weight [V, width]     cross_entropy(hidden @ weight.T)    [N, V] logits, three times over
    for each slice of rows [rows, width]     logits [rows, V] -> sum, freed      backward makes them again

Each slice is a region of activation checkpointing: forward keeps its rows of ``hidden`` alone, and backward computes
the slice's logits anew, turns them into gradients, and frees them before the next. That costs the head's product once
more. It is made of PyTorch's own operators, so it is the same function under `compile_sharded`, under `fully_shard` in
the model's forward, and outside of both. Liger-Kernel and torchtune cut the loss so.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

ROWS = 1024


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rows: int = ROWS,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The mean of ``cross_entropy(linear(hidden, weight, bias), targets)`` over the targets that count.

    ``hidden``: what the model's head is given, [..., width]. ``weight``: the head's, [vocabulary, width]; ``bias``:
    [vocabulary]. ``targets``: classes, int64, of ``hidden``'s shape without the last dim. ``rows``: how many have their
    logits at once. Logits of half precision are turned to float32 before the softmax. Loss and gradients are those of
    the uncut loss but for the order of sums over slices (in float32 within 1e-6 of the largest). Returns a 0-d tensor,
    nan where every target is ignored. Raises ``ValueError`` for shapes that do not fit.
    """
    _check(hidden, weight, targets, rows)
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    options = ignore_index, label_smoothing
    sums = [
        checkpoint(_summed, part, weight, bias, classes, options, use_reentrant=False)
        for part, classes in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.stack(sums).sum() / (targets != ignore_index).sum()  # type: ignore[arg-type]


def _summed(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
    options: tuple[int, float],
) -> torch.Tensor:  # fmt: skip
    """Of one slice, over its rows."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ignore_index, smoothing = options
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=ignore_index, label_smoothing=smoothing)


def _check(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, rows: int) -> None:
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ValueError(f"rows is {rows!r}; expected a whole number of at least 1.")
    if isinstance(weight, DTensor) or isinstance(hidden, DTensor):
        raise ValueError(
            "chunked_cross_entropy was given a DTensor, a part of the weight: it multiplies with the whole. With "
            "fully_shard, call it in the model's forward, where weights are whole, and return the loss from there. "
            "A head that tensor parallelism cuts holds a part of the logits on each rank: use F.cross_entropy, or "
            "leave it whole."
        )
    if targets.is_floating_point():
        raise ValueError(f"targets are {targets.dtype}; expected classes, int64. Probabilities are not supported.")
    if hidden.dim() < 1 or targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets have the shape {list(targets.shape)}; expected that of hidden without its last dim, "
            f"{list(hidden.shape[:-1])}."
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight has the shape {list(weight.shape)}; expected [vocabulary, {hidden.shape[-1]}], as in nn.Linear."
        )
