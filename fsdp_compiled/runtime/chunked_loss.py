"""Cross-entropy over a large vocabulary that computes the logits of a few rows at a time, never all of them.

    hidden [N, width], weight [V, width]     cross_entropy(hidden @ weight.T)    [N, V] logits, three times over
    for each slice of rows [rows, width]     logits [rows, V] -> sum, freed      backward makes them again

Each slice is a region of activation checkpointing. Forward keeps only the slice's rows of ``hidden``. Backward computes
the slice's logits again, turns them into gradients, and frees them before the next slice. This costs the head's matrix
product once more. The function consists of PyTorch's own operators, so it is the same under `compile_sharded`, under
`fully_shard` in the model's forward, and outside of both. Liger-Kernel and torchtune split the loss in the same way.
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

    ``hidden``: the input of the model's head, [..., width]. ``weight``: the head's, [vocabulary, width]; ``bias``:
    [vocabulary]. ``targets``: classes, int64, of ``hidden``'s shape without the last dim. ``rows``: how many rows have
    logits at the same time. Half-precision logits are converted to float32 before the softmax. Loss and gradients equal
    those of the unsplit loss, apart from the order of sums over slices (in float32 within 1e-6 of the largest). Returns
    a 0-d tensor, nan if every target is ignored. Raises ``ValueError`` for shapes that do not fit.
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
    """The sum of one slice's losses over its rows."""
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
