"""Context parallelism: attention over sequences that are split among the ranks along an axis of the mesh.

    tokens [rows, time]                       each rank along the axis has its part of the time
    q, k, v [rows, heads, own time, size]
    k, v = all_gather(k), all_gather(v)       this layer's keys and values; backward is a reduce-scatter
    y = attention(q, k, v)                    [rows, heads, own time, size]; positions behind one's own are left out

Everything else works on tokens one by one, and the mean of the ranks' losses is the loss of the whole sequences. So
along the shard axis a stretch is a batch like any other, and no other code knows of sequences. Llama 3 was trained with
keys and values gathered, and not passed on in a ring (Llama Team, 2024, section 3.3.2). Each rank has a piece from the
beginning and one from the end, as there and in PyTorch's ``context_parallel``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Literal
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compiled.capture.sync_batchnorm import AllGather, Axes
from fsdp_compiled.policy import Policy

c10d = torch.ops._c10d_functional
ALONG = ("shard", "replicate")


class SequenceAttention(nn.Module):
    """Causal attention over sequences that are split among the ranks along ``axis``.

    axis
        ``"shard"`` or ``"replicate"``: each rank along it has its own stretch of the same sequences, all equally long.
    scale
        The factor for the products of queries and keys; None: one over the square root of a head's size.

    Outside of a compiled step, or if the mesh does not have several ranks along this axis, its inputs count as the
    whole sequences.
    """

    def __init__(self, axis: Literal["shard", "replicate"], scale: float | None = None) -> None:
        if axis not in ALONG:
            raise ValueError(f"SequenceAttention: axis is {axis!r}; expected one of {', '.join(map(repr, ALONG))}.")
        super().__init__()
        self.axis, self.scale = axis, scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        """``q``, ``k``, ``v``: ``[rows, heads, own time, size]``; keys and values may have fewer heads than queries.

        ``positions``: the integer positions of these tokens in their sequences, ``[own time]`` or ``[rows, own time]``.
        """
        return _attention(q, k, v, positions, positions, self.scale)

    def extra_repr(self) -> str:
        return f"axis={self.axis!r}"


def stretch(tensor: torch.Tensor, axis: DeviceMesh, dim: int = 1) -> torch.Tensor:
    """This rank's part of the time: a piece from the beginning and one from the end, so that all have as much to do.

    ``axis``: one axis of the mesh, ``mesh["shard"]``. ``dim``: the time.
    """
    return part_of(tensor, axis.get_local_rank(), axis.size(), dim)


def part_of(tensor: torch.Tensor, rank: int, ranks: int, dim: int) -> torch.Tensor:
    time = tensor.shape[dim]
    if time % (2 * ranks):
        raise ValueError(
            f"A sequence of {time} is given to {ranks} ranks in two pieces each, which {2 * ranks} does not divide. "
            f"Pad it to a multiple of {2 * ranks}."
        )
    pieces = tensor.chunk(2 * ranks, dim)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]], dim)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: torch.Tensor, there: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """``own``, ``there``: the positions of queries and of keys."""
    own, there = (one if one.dim() == 2 else one[None] for one in (own, there))
    mask = own[:, None, :, None] >= there[:, None, None, :]  # [rows or 1, 1, own time, time]
    groups = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=groups)


def _gathered(value: torch.Tensor, axis: str, ranks: int) -> torch.Tensor:
    """``[rows, heads, own time, size]`` -> ``[rows, heads, time, size]``."""
    rows, heads, _, size = value.shape
    flat = value.permute(2, 0, 1, 3).flatten(1).contiguous()
    whole: torch.Tensor = AllGather.apply(flat, axis, ranks)
    return whole.unflatten(1, (rows, heads, size)).permute(1, 2, 0, 3)


def _attend(
    module: SequenceAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, axes: Axes
) -> torch.Tensor:
    """Forward on ranks along these axes."""
    ranks = dict(axes).get(module.axis, 1)
    if ranks == 1:
        return _attention(q, k, v, positions, positions, module.scale)
    time_first = positions.movedim(-1, 0).contiguous()
    there = c10d.wait_tensor(c10d.all_gather_into_tensor(time_first, ranks, module.axis)).movedim(0, -1)
    k, v = (_gathered(one, module.axis, ranks) for one in (k, v))
    return _attention(q, k, v, positions, there, module.scale)


@contextlib.contextmanager
def along_sequences(axes: Axes) -> Iterator[None]:
    """Inside, SequenceAttention gathers keys and values along these axes."""
    forward = lambda module, q, k, v, positions: _attend(module, q, k, v, positions, axes)  # noqa: E731
    with mock.patch.object(SequenceAttention, "forward", forward):
        yield


def check_attention(modules: Iterable[tuple[str, nn.Module]], policy: Policy) -> None:
    """Raises ``ValueError`` if the losses of ranks would not have equal weights."""
    for name, module in modules:
        if isinstance(module, SequenceAttention) and policy.weigh == "rows":
            raise ValueError(
                f'{name} is a SequenceAttention, which takes losses of ranks as equal; Policy.weigh is "rows". Use '
                'weigh="ranks", and give ranks stretches of one length.'
            )
