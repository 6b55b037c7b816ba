"""Text as bytes: where it comes from, which part is held out, and the windows a rank trains on.

A *corpus* is two 1-d uint8 tensors. *Held-out* bytes are never trained on: every tenth file when there are at
least ten files, else the last tenth of the bytes. A *window* is `context` bytes and, one further, their
targets.
"""

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

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
    """With so many rows, of which those that are new have `IGNORED` targets: nothing of them counts."""
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
