"""`torch.nn.SyncBatchNorm`: statistics over the batches of all ranks, as operators of the program.

    each rank                  mine: float32[2 C + 1] = cat(mean(x), var(x), n)
    along each axis            all: float32[W, 2 C + 1] = all_gather(mine); wait
                               share = all[:, n] / sum of all[:, n]
                               mean = sum over W of share * all[:, mean]
                               var = sum over W of share * (all[:, var] + (all[:, mean] - mean)^2)
    each rank                  y = (x - mean) * rsqrt(var + eps) * weight + bias

Every rank's loss depends on every rank's batch, so backward of the all-gather is a reduce-scatter of the gradients by
``mine``. For each norm and axis the traced program has one more collective in forward and one in backward; no other
code knows of them. The variances are combined as by Chan, Golub and LeVeque (1983): unlike a mean of squares, this
loses no digits if the mean is large.

PyTorch's own refuses CPUs and holds a process group; this one runs wherever the program does, on the mesh's axes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_compiled.policy import Policy

c10d = torch.ops._c10d_functional
Axes = Sequence[tuple[str, int]]


class AllGather(torch.autograd.Function):
    """``[n] -> [size * n]``: all ranks' parts in order. Backward sums all ranks' gradients of a part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, axis: str, size: int) -> torch.Tensor:
        ctx.axis, ctx.size = axis, size
        return c10d.wait_tensor(c10d.all_gather_into_tensor(part, size, axis))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        parts = c10d.reduce_scatter_tensor(gradient.contiguous(), "sum", ctx.size, ctx.axis)
        return c10d.wait_tensor(parts), None, None


def joint_moments(x: torch.Tensor, axes: Axes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel over all ranks, ``[C]`` each, and the number of elements of one."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    channels = x.shape[1]
    var, mean = torch.var_mean(x, dims, correction=0)
    count = mean.new_full((1,), x.numel() // channels)
    for axis, size in axes:
        parts = AllGather.apply(torch.cat([mean, var, count]), axis, size).view(size, 2 * channels + 1)
        means, variances, counts = parts.split([channels, channels, 1], 1)
        count = counts.detach().sum(0)
        fraction = counts.detach() / count  # [size, 1]
        mean = (fraction * means).sum(0)
        var = (fraction * (variances + (means - mean).square())).sum(0)
    return mean, var, count


def _normalise(norm: nn.SyncBatchNorm, x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Forward of a SyncBatchNorm on ranks along these axes."""
    norm._check_input_dim(x)
    tracked = norm.training and norm.track_running_stats
    if not (norm.training and axes):
        if tracked:
            norm.num_batches_tracked.add_(1)
        momentum = 0.0 if norm.momentum is None else norm.momentum
        own = norm.training or norm.running_mean is None
        mean, var = (norm.running_mean, norm.running_var) if tracked or not norm.training else (None, None)
        return F.batch_norm(x, mean, var, norm.weight, norm.bias, own, momentum, norm.eps)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean, var, count = joint_moments(wide, axes)
    if tracked:
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
