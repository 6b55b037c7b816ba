"""What a run says at its end: a sample of text, its results, where the time went, and what it wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fsdp_compiled.cli import clock
from fsdp_compiled.cli.journal import Journal
from fsdp_compiled.cli.pace import Pace
from fsdp_compiled.cli.report import printable, table


def samples(texts: Sequence[bytes], prompt: bytes, out: Path) -> str:
    """Writes them to ``sample.txt``; the first, to print."""
    written = [text.decode("utf-8", errors="replace") for text in texts]
    rule = "\n\n" + "─" * 40 + "\n\n"
    (out / "sample.txt").write_text(rule.join(written) + "\n")
    lines = "\n".join("    " + line for line in printable(written[0]).split("\n"))
    return f"\na sample, which continues {prompt.decode('utf-8', errors='replace')!r}:\n\n{lines}"


def results(journal: Journal, pace: Pace, unigram: float, memory: int, skipped: int, seconds: float, out: Path) -> str:
    """Writes them to ``result.json``; the table of them, to print. ``memory``: a rank's peak. ``seconds``: of all."""
    result = {
        "validation_loss": journal.val_loss,
        "unigram_loss": unigram,
        "train_loss": journal.train_loss,
        "tokens_per_second": pace.tokens_per_second,
        "first_step_seconds": pace.first,
        "peak_memory_bytes": memory,
        "skipped_steps": skipped,
        "wall_seconds": seconds,
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    rows = [
        ("validation loss", _nats(journal.val_loss)),
        ("byte-unigram model's validation loss", _nats(unigram)),
        ("training loss, last steps", _nats(journal.train_loss)),
        ("speed", f"{pace.tokens_per_second:,.0f} tokens/s"),
        ("first step, with compilation", f"{pace.first:.1f} s"),
        ("peak memory of a rank", f"{memory / 2**30:.2f} GiB"),
        ("wall time", f"{seconds:.0f} s"),
    ]
    return f"\n{table(rows)}\n"


def written(out: Path) -> str:
    """Where the time went, as the journal of attempts has it, and the names of all files."""
    spent = clock.read(out)
    names = ", ".join(sorted(path.name + "/" * path.is_dir() for path in out.iterdir()))
    took = f"where the time went:\n{table(clock.rows(spent))}\n\n" if spent is not None else ""
    return f"{took}wrote {names} in\n{out}"


def _nats(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f} nats/byte"
