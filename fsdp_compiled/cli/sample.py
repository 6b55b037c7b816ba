"""Text from the model, one byte at a time.

The model runs on a window of one fixed shape [rows, context], so it is compiled once; a prediction reads only
what stands before it, so what fills the window up does not matter. Rows continue the same prompt, each with
its own draws.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor

TEMPERATURE = 0.8
LETTERS = re.compile(rb"[A-Za-z\x80-\xff]")  # beyond ASCII, any byte of a UTF-8 letter


def generate(
    forward: Callable[[Tensor], Tensor], prompt: bytes, shape: tuple[int, int], length: int, seed: int
) -> list[bytes]:
    """`shape[0]` continuations of the prompt, `length` bytes each. Collective, as `forward` is.

    forward: tokens [rows, context] int64 -> logits [rows, context, 256].
    """
    rows, context = shape
    if not prompt:
        raise ValueError("the prompt is empty; give at least one byte")
    draws = torch.Generator().manual_seed(seed)
    text = torch.tensor(list(prompt)).repeat(rows, 1)  # [rows, bytes so far]
    for _ in range(length):
        window = torch.zeros(shape, dtype=torch.long)
        seen = text[:, -context:]
        window[:, : seen.shape[1]] = seen
        logits = forward(window)[:, seen.shape[1] - 1].float().cpu()
        following = torch.multinomial(torch.softmax(logits / TEMPERATURE, -1), 1, generator=draws)
        text = torch.cat((text, following), dim=1)
    return [bytes(row) for row in text.tolist()]


def first_line(held_out: Tensor) -> bytes:
    """The first line of the held-out text with at least ten letters in it, cut to 40 bytes: a prompt in the
    text's own manner. held_out [bytes] uint8."""
    start = bytes(held_out[:10_000].tolist())
    lines = (line.rstrip()[:40] for line in start.splitlines())
    return next((line for line in lines if len(LETTERS.findall(line)) >= 10), start[:40])
