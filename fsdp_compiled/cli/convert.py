"""`fsdp-compiled convert`: a checkpoint into another layout."""

from pathlib import Path

from fsdp_compiled.runtime.checkpoint.convert import To
from fsdp_compiled.runtime.checkpoint.convert import convert as write


def convert(source: Path, target: Path, to: To) -> str:
    """Writes it, and says what was written, and what the other layout has no place for."""
    found = write(source, target, to)
    lines = [f"{len(found.parameters)} parameters, {len(found.buffers)} buffers, step {found.step}: {target}"]
    if found.left_out:
        lines.insert(0, f"left out: {', '.join(found.left_out)}")
    return "\n".join(lines)
