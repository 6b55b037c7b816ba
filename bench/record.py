"""Writes what a training run reached, with its conditions, as one JSON file: what the README's figures are read from.

    python -m bench.record RUN bench/results/train.json

RUN is a folder that `fsdp-compiled train` left. A run that has not reached its last step, or whose validation loss is
not below the byte-unigram model's, is refused.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fsdp_compiled.cli.machine import hardware


def record(run: Path) -> dict[str, Any]:
    config = json.loads((run / "config.json").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = steps[-1]
    result = json.loads((run / "result.json").read_text())
    if last["step"] != config["options"]["steps"]:
        raise SystemExit(f"{run} stopped at step {last['step']} of {config['options']['steps']}")
    if not result["validation_loss"] < result["unigram_loss"]:
        raise SystemExit(f"{run} did not get below the unigram model: {result}")
    return {
        "command": "make train",
        "hardware": hardware(),
        "versions": config["versions"],
        "options": config["options"],
        "result": result,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    arguments.out.write_text(json.dumps(record(arguments.run), indent=2) + "\n")
