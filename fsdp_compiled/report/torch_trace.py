"""Programs as artefacts in the log that ``TORCH_TRACE=folder`` has PyTorch write, for tlparse.

    fsdp_compiled_1_program      the first program, as ``print(sharded.program)`` shows it, under the call's label
    fsdp_compiled_1_00_capture   every node of it as it was captured
    fsdp_compiled_1_01_clip      and after each pass and fusion that changed it; the last is what runs

Where no such log is written, no text is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from fsdp_compiled.analysis.best_effort import attempt
from fsdp_compiled.ir.program import Program
from fsdp_compiled.torch_private.names import broken, find, there

USE, EMIT = "artefacts for tlparse", "torch._logging.trace_structured"


def emit(label: str, number: int, program: Program, stages: Callable[[], Sequence[Program]]) -> None:
    """Writes what a program is, and how it came to be. A text that cannot be made says why."""
    # PyTorch's logger has other handlers too: pytest's ask for every text.
    if "TORCH_TRACE" not in os.environ or not there(USE):
        return

    def artefact(name: str, text: str) -> None:
        metadata = {"name": f"fsdp_compiled_{number}_{name}", "encoding": "string"}
        try:
            find(EMIT)("artifact", metadata_fn=lambda: metadata, payload_fn=lambda: text, expect_trace_id=False)
        except Exception as error:
            broken(USE, EMIT, error)

    artefact("program", _told(lambda: f"{label}\n{program}"))

    def untold(why: str) -> Sequence[Program]:
        artefact("stages", f"could not be told: {why}")
        return ()

    text = ""
    for index, stage in enumerate(attempt(stages, untold)):
        before, text = text, _told(stage.text)
        if text != before:
            artefact(f"{index:02d}_{stage.history[-1]}", text)


def _told(text: Callable[[], str]) -> str:
    return attempt(text, lambda why: f"could not be told: {why}")
