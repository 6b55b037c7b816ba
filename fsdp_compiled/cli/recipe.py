"""What a training job minimizes, and at which rate."""

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compiled.cli.data import IGNORED
from fsdp_compiled.cli.gpt import next_byte_loss
from fsdp_compiled.cli.loader import Share
from fsdp_compiled.cli.options import TrainOptions


def loss_of(how: Share) -> Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The loss of one microbatch, and the same as this rank's own.

    Where some rows do not count, ranks' losses are sums, scaled so that their mean over microbatches and ranks is the
    mean over the windows that do.
    """

    def mean(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = next_byte_loss(model, tokens, targets)
        return loss, loss.detach()

    def scaled(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(tokens).flatten(0, 1)
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = total * (how.world * how.parts / (how.batch * tokens.shape[1]))
        return loss, loss.detach()

    return scaled if how.padded else mean


def rate(step: int, options: TrainOptions) -> float:
    """The learning rate of a step, counted from 0, as a fraction of --lr: a straight rise, then half a cosine
    down to a tenth."""
    warmup = min(50, options.steps // 10) if options.warmup is None else options.warmup
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, options.steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))
