"""Layers that compute over the batches of several ranks: context parallelism, and `torch.nn.SyncBatchNorm`.

They gather by operators of the program (`AllGather`). Every rank's loss then depends on every rank's batch, so backward
is a reduce-scatter of the gradients. No other code knows of it.

**Context parallelism**: attention over sequences that are split among the ranks along an axis of the mesh.

    tokens [rows, time]                       each rank along the axis has its part of the time
    q, k, v [rows, heads, own time, size]
    k, v = all_gather(k), all_gather(v)       this layer's keys and values
    y = attention(q, k, v)                    [rows, heads, own time, size]; positions behind one's own are left out

Everything else works on tokens one by one, and the mean of the ranks' losses is the loss of the whole sequences. So
along the shard axis a stretch is a batch like any other. Llama 3 was trained with keys and values gathered, and not
passed on in a ring (Llama Team, 2024, section 3.3.2). Each rank has a piece from the beginning and one from the end, as
there and in PyTorch's ``context_parallel``.

**SyncBatchNorm**: statistics over the batches of all ranks.

    each rank                  mine: float32[2 C + 1] = cat(mean(x), var(x), n)
    along each axis            all: float32[W, 2 C + 1] = all_gather(mine); wait
                               share = all[:, n] / sum of all[:, n]
                               mean = sum over W of share * all[:, mean]
                               var = sum over W of share * (all[:, var] + (all[:, mean] - mean)^2)
    each rank                  y = (x - mean) * rsqrt(var + eps) * weight + bias

For each norm and axis the traced program has one more collective in forward and one in backward. The variances are
combined as by Chan, Golub and LeVeque (1983): unlike a mean of squares, this loses no digits if the mean is large.
PyTorch's own refuses CPUs and holds a process group; this one runs wherever the program does, on the mesh's axes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compiled.policy import Policy

c10d = torch.ops._c10d_functional
Axes = Sequence[tuple[str, int]]
ALONG = ("shard", "replicate")


class AllGather(torch.autograd.Function):
    """``[n] -> [size * n]``: all ranks' parts in order. Backward sums all ranks' gradients of a part: by a
    reduce-scatter (``scatters``), or here."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: str, size: int, scatters: bool) -> torch.Tensor:
        ctx.group, ctx.size, ctx.scatters = group, size, scatters
        return c10d.wait_tensor(c10d.all_gather_into_tensor(part, size, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gradient = gradient.contiguous()
        if ctx.scatters:
            parts = c10d.wait_tensor(c10d.reduce_scatter_tensor(gradient, "sum", ctx.size, ctx.group))
        else:
            lengths = [gradient.shape[0] // ctx.size] * ctx.size
            parts = c10d.wait_tensor(c10d.all_to_all_single(gradient, lengths, lengths, ctx.group))
            parts = parts.unflatten(0, (ctx.size, -1)).sum(0)
        return parts, None, None, None


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
        return _attend(self, q, k, v, positions, ())

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


def _gathered(value: torch.Tensor, axis: str, ranks: int) -> torch.Tensor:
    """``[rows, heads, own time, size]`` -> ``[rows, heads, time, size]``."""
    rows, heads, _, size = value.shape
    flat = value.permute(2, 0, 1, 3).flatten(1).contiguous()
    whole: torch.Tensor = AllGather.apply(flat, axis, ranks, True)
    return whole.unflatten(1, (rows, heads, size)).permute(1, 2, 0, 3)


def _attend(
    module: SequenceAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, axes: Axes
) -> torch.Tensor:
    """Forward on ranks along these axes."""
    there, ranks = positions, dict(axes).get(module.axis, 1)  # the positions of keys
    if ranks > 1:
        time_first = positions.movedim(-1, 0).contiguous()
        there = c10d.wait_tensor(c10d.all_gather_into_tensor(time_first, ranks, module.axis)).movedim(0, -1)
        k, v = (_gathered(one, module.axis, ranks) for one in (k, v))
    own, there = (one if one.dim() == 2 else one[None] for one in (positions, there))
    mask = own[:, None, :, None] >= there[:, None, None, :]  # [rows or 1, 1, own time, time]
    groups = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=module.scale, enable_gqa=groups)


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


def joint_moments(x: torch.Tensor, axes: Axes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel over all ranks, ``[C]`` each, and the number of elements of one."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    channels = x.shape[1]
    var, mean = torch.var_mean(x, dims, correction=0)
    count = mean.new_full((1,), x.numel() // channels)
    for axis, size in axes:
        parts = AllGather.apply(torch.cat([mean, var, count]), axis, size, True).view(size, 2 * channels + 1)
        means, variances, counts = parts.split([channels, channels, 1], 1)
        count = counts.detach().sum(0)
        fraction = counts.detach() / count  # [size, 1]
        mean = (fraction * means).sum(0)
        var = (fraction * (variances + (means - mean).square())).sum(0)
    return mean, var, count


def _normalise(norm: nn.SyncBatchNorm, x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Forward of a SyncBatchNorm on ranks along these axes."""
    if not (norm.training and axes):
        return nn.BatchNorm1d.forward(norm, x)  # type: ignore[arg-type]  # any BatchNorm's
    norm._check_input_dim(x)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean, var, count = joint_moments(wide, axes)
    if norm.track_running_stats:
        norm.num_batches_tracked.add_(1)
        momentum = 1.0 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
        unbiased = var.detach() * (count / (count - 1).clamp(min=1))
        for running, now in ((norm.running_mean, mean.detach()), (norm.running_var, unbiased)):
            running.copy_(running * (1 - momentum) + now.to(running.dtype) * momentum)
    shape = [1, -1] + [1] * (x.dim() - 2)
    scale = torch.rsqrt(var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shifted = (wide - mean.view(shape)) * scale.view(shape)
    if norm.bias is not None:
        shifted = shifted + norm.bias.view(shape)
    return shifted.to(x.dtype)


@contextlib.contextmanager
def synchronised(axes: Axes) -> Iterator[None]:
    """Inside, SyncBatchNorm modules normalise over the ranks along these axes."""
    with mock.patch.object(nn.SyncBatchNorm, "forward", lambda norm, x: _normalise(norm, x, axes)):
        yield


def check_norms(modules: Iterable[tuple[str, nn.Module]], policy: Policy) -> None:
    """Raises ``ValueError`` for a SyncBatchNorm over only some of the ranks, or if ranks have unequal weights."""
    for name, module in modules:
        if not isinstance(module, nn.SyncBatchNorm):
            continue
        if policy.weigh == "rows":
            raise ValueError(
                f'{name} is a SyncBatchNorm, which takes losses of ranks as equal; Policy.weigh is "rows". Use '
                'weigh="ranks" (statistics count every row already), or BatchNorm.'
            )
        if module.process_group is not None:
            size, world = dist.get_world_size(module.process_group), dist.get_world_size()
            if size != world:
                raise ValueError(
                    f"{name} is a SyncBatchNorm over a process group of {size} of the {world} ranks. Statistics are "
                    "shared by all ranks of the mesh: leave process_group out, or use BatchNorm, which shares none."
                )
