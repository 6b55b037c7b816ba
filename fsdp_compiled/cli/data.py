"""Text as bytes: where it comes from, which part is held out, and the windows a rank trains on.

A *corpus* is two 1-d uint8 tensors. *Held-out* bytes are never trained on: every tenth file when there are at
least ten files, else the last tenth of the bytes. A *window* is `context` bytes and, one further, their
targets.

`Loader` gives a step the same windows whatever the number of ranks, from a position that can be saved:

    epoch 0               epoch 1
    7 2 9 | 0 5 1 | 8 3   6 | 4 1 0 | ...       the order of windows, from the seed alone; | where a step begins
            ^ position 3

*Position* counts the windows that the steps of all ranks together have taken since the run began. A step takes the next
``batch`` windows, across the end of an epoch too, so that in each epoch every window is seen once. Only the dealing out
of a step's windows to ranks depends on the number of ranks: `Share`.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_compiled.cli.gpt import VOCABULARY

EVERY = 10  # one file, or one byte, in this many is held out
IGNORED = -100  # cross_entropy's own mark for a target that does not count


@dataclass(frozen=True)
class Corpus:
    train: Tensor  # [bytes] uint8
    held_out: Tensor  # [bytes] uint8
    source: str
    files: int
    skipped: int  # files left out because they hold a NUL byte, so are not text

    def __str__(self) -> str:
        skipped = f", {self.skipped} not text and skipped" if self.skipped else ""
        return (
            f"{self.source}: {self.files} files{skipped}; {self.train.numel() / 1e6:.1f} MB to train on, "
            f"{self.held_out.numel() / 1e6:.1f} MB held out"
        )


def load_corpus(source: Path | None) -> Corpus:
    """Every text file of a file or folder, in sorted order; with None, the Python standard library."""
    if source is None:
        name, paths = "the Python standard library", _standard_library()
    else:
        name, paths = str(source), _files(source)
    texts, skipped = [], 0
    for path in paths:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"--data: cannot read {path}: {error.strerror}; make it readable or leave it out"
            ) from error
        if b"\0" in text:
            skipped += 1
        elif text:
            texts.append(text)
    if not texts:
        found = f"{len(paths)} files, {skipped} of them not text" if paths else "no files"
        raise ValueError(f"--data: no text in {name}: found {found}, the rest empty; give a file or folder of text")
    train, held_out = _split(texts)
    return Corpus(train, held_out, name, len(texts), skipped)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in _files(root) if path.suffix == ".py"] if root.is_dir() else []
    if not paths:
        raise ValueError(f"no Python sources under {root}, which this job reads by default; give text with --data")
    return paths


def _files(source: Path) -> list[Path]:
    if not source.exists():
        raise ValueError(f"--data: {source} does not exist; give a file or folder of text")
    if not source.is_dir():
        return [source]
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(path for path in paths if path.is_file())


def _split(texts: list[bytes]) -> tuple[Tensor, Tensor]:
    if len(texts) >= EVERY:
        held_out = bytearray().join(texts[EVERY - 1 :: EVERY])
        train = bytearray().join(text for index, text in enumerate(texts, 1) if index % EVERY)
        return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)
    whole = torch.frombuffer(bytearray().join(texts), dtype=torch.uint8)
    cut = whole.numel() - whole.numel() // EVERY
    return whole[:cut], whole[cut:]


class Windows:
    """Windows side by side: window i holds bytes [i * context, (i + 1) * context) as int64, targets one further."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context
        count = max(0, (text.numel() - 1) // context)
        self._tokens, self._targets = (text[at : at + count * context].view(count, context) for at in (0, 1))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int | Tensor) -> tuple[Tensor, Tensor]:
        return self._tokens[index].long(), self._targets[index].long()


def padded(tokens: Tensor, targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Pads to so many rows. The new rows have `IGNORED` targets, so nothing of them counts."""
    spare = (0, 0, 0, rows - len(tokens))
    return F.pad(tokens, spare), F.pad(targets, spare, value=IGNORED)


def train_windows(corpus: Corpus, context: int, batch: int) -> Windows:
    """Windows to train on, at least the ``batch`` that one step of all ranks takes."""
    windows = Windows(corpus.train, context)
    if len(windows) < batch:
        raise ValueError(
            f"--data: too little text: {corpus.source} gives {len(windows)} training windows of {context} "
            f"bytes, and one step of all ranks takes {batch}; give more text or a smaller --batch, --global-batch or "
            "--context"
        )
    return windows


def held_out_windows(corpus: Corpus, context: int, count: int) -> tuple[Tensor, Tensor]:
    """At most `count` windows, evenly spread over the held-out text: tokens and targets [windows,
    context]."""
    windows = Windows(corpus.held_out, context)
    if not len(windows):
        raise ValueError(
            f"--data: too little text: {corpus.source} leaves {corpus.held_out.numel()} bytes held out, and "
            f"validation needs at least {context + 1}; give more text or a smaller --context"
        )
    count = min(count, len(windows))
    return windows[torch.arange(count) * len(windows) // count]


def rank_batches(tokens: Tensor, targets: Tensor, batch: int, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's share of the held-out windows, in batches of one fixed shape [batch, context].

    Every rank gets the same number of batches, because the forward is collective; the last ones are `padded`.
    """
    tokens, targets = padded(tokens, targets, -(-len(tokens) // (batch * world)) * batch * world)
    return list(zip(tokens[rank::world].split(batch), targets[rank::world].split(batch), strict=True))


def unigram_loss(train: Tensor, targets: Tensor) -> float:
    """Nats a byte of a model that knows only how often each byte occurs in `train`, with add-one
    smoothing."""
    counts = torch.bincount(train, minlength=VOCABULARY).double() + 1
    return -(counts / counts.sum()).log()[targets].mean().item()


@dataclass(frozen=True)
class Share:
    """How ``batch`` windows are dealt out: each rank takes ``parts`` microbatches of ``rows`` windows.

        batch 12, world 3, at most 2 rows       batch 8, world 3, at most 4 rows
        rank 0:  0  1 |  2  3                   rank 0:  0  1  2
        rank 1:  4  5 |  6  7                   rank 1:  3  4  5
        rank 2:  8  9 | 10 11                   rank 2:  6  7  -      -: a row whose targets do not count

    On fewer ranks a rank takes more microbatches (`Sharded.accumulate`), in the memory of one; on more ranks it takes
    fewer rows.
    """

    batch: int
    world: int
    rows: int
    parts: int

    @property
    def padded(self) -> bool:
        """Whether some rows do not count."""
        return self.rows * self.parts * self.world != self.batch


def share(batch: int, world: int, most: int) -> Share:
    """The share with at most ``most`` windows on a rank at once."""
    of_a_rank = -(-batch // world)
    parts = -(-of_a_rank // most)
    return Share(batch, world, -(-of_a_rank // parts), parts)


class Loader:
    """This rank's microbatches, step after step. Its state is the position of all ranks, the same on each of them."""

    def __init__(self, windows: Windows, how: Share, seed: int, rank: int) -> None:
        self.position = 0
        self._windows, self._how, self._seed, self._rank = windows, how, seed, rank
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._source = {  # what a position depends on
            "text": zlib.crc32(windows.text.numpy().data),
            "bytes": windows.text.numel(),
            "context": windows.context,
            "seed": seed,
            "batch": how.batch,
        }

    def __next__(self) -> list[tuple[Tensor, Tensor]]:
        """``how.parts`` pairs of tokens and targets [rows, context]; the position moves on."""
        indices, rows = self.windows_at(self.position), self._how.rows
        self.position += self._how.batch
        own = rows * self._how.parts
        mine = indices[self._rank * own : (self._rank + 1) * own]
        tokens, targets = padded(*self._windows[mine], own)
        return list(zip(tokens.split(rows), targets.split(rows), strict=True))

    def windows_at(self, position: int) -> Tensor:
        """The windows [batch] that a step at this position trains on, all ranks together."""
        found, needed = [], self._how.batch
        while needed:
            epoch, start = divmod(position, len(self._windows))
            piece = self._permutation(epoch)[start : start + needed]
            found.append(piece)
            position, needed = position + len(piece), needed - len(piece)
        return torch.cat(found)

    def _permutation(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            # The generator uses 32 bits of a seed; this spreads both numbers over them.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {epoch}".encode()))
            self._epoch, self._order = epoch, torch.randperm(len(self._windows), generator=generator)
        return self._order

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, **self._source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` for a position in another order: that of another text, seed, context or batch."""
        for name, meaning in MEANINGS.items():
            if state.get(name) != self._source[name]:
                raise ValueError(
                    f"the checkpoint's position is in other data: {meaning} is {self._source[name]}, and was "
                    f"{state.get(name)} when it was saved. Give the same --data, --context, --seed and --global-batch, "
                    "or an empty --checkpoint folder"
                )
        self.position = int(state["position"])


MEANINGS = {
    "bytes": "the number of bytes to train on",
    "text": "the checksum of the text to train on",
    "context": "--context",
    "seed": "--seed",
    "batch": "the number of windows in a step",
}
