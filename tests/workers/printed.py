"""What a script prints on rank 0, as lines: ``printed.py RESULT SCRIPT``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

said = io.StringIO()
with contextlib.redirect_stdout(said):
    runpy.run_path(sys.argv[2], run_name="__main__")
if os.environ["RANK"] == "0":
    Path(sys.argv[1]).write_text(json.dumps(said.getvalue().splitlines()))
