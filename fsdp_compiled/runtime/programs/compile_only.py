"""Runs a script only to compile its programs: `fsdp-compiled compile`, which tells its ranks by their environment.

Each rank notes what its code depends on. The script ends, as by ``sys.exit(0)``, after a number of calls in a row that
compile nothing. All ranks end before the same call.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from fsdp_compiled.distributed.mesh import Mesh, any_rank
from fsdp_compiled.lower.bundle import here

FOLDER, CALLS = "FSDP_COMPILED_COMPILE_INTO", "FSDP_COMPILED_COMPILE_CALLS"
ASKED = FOLDER in os.environ
_calls = 0  # calls since the last program was compiled


def compiled(mesh: Mesh) -> None:
    """Notes that a program was made."""
    global _calls
    _calls = 0
    if ASKED:
        Path(os.environ[FOLDER], f"rank{mesh.rank}.json").write_text(json.dumps(here(mesh.world)))


def begin_call(mesh: Mesh) -> None:
    """Ends the script if it has nothing more to compile. Collective."""
    global _calls
    if not ASKED or not (limit := int(os.environ[CALLS])):
        return
    if not any_rank(_calls < limit, mesh):
        raise SystemExit(0)
    _calls += 1
