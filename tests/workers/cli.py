"""`fsdp-compiled` on ranks that something else has started: ``cli.py RESULT COMMAND...``; the result is its status."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from fsdp_compiled.cli import main

status = main(sys.argv[2:])
if os.environ["RANK"] == "0":
    Path(sys.argv[1]).write_text(json.dumps(status))
