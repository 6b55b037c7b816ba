"""Runs a worker script under torchrun and reads what its rank 0 wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
SHOWN = 6000  # characters of a failed run's output


def launch(script: Path, world: int, *arguments: str, timeout: float = 300) -> Any:
    """The JSON that rank 0 of ``script RESULT arguments...`` wrote to the file RESULT.

    Raises ``RuntimeError`` with the end of the output if a rank fails, nothing is written, or time runs out.
    """
    with TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(script), str(result), *arguments],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(timeout)
                reason = f"exit code {code}" if code else "nothing was written"
            except subprocess.TimeoutExpired:
                code, reason = None, f"no end after {timeout:.0f} s"
            finally:
                _end(process)
        if code != 0 or not result.exists():
            end = log.read_text(errors="replace")[-SHOWN:]
            raise RuntimeError(f"{script.name} on {world} ranks: {reason}. Its output ended with:\n{end}")
        return json.loads(result.read_text())


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # torchrun then ends its ranks; killed, it would leave them behind
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
