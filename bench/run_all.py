"""Measures everything that bench/results holds of `fsdp-compiled bench`, and makes the tables anew.

    python -m bench.run_all [NAME ...]

Every result if none is named (--help lists them). On a machine with nothing else to do: the
load average is written beside the figures. A result takes the place of an older one once it is complete.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import RESULTS

NODES = "--inner-gbps 10 --node 2 --nproc 4 --preset llama --rounds 6 --steps 1 --lower eager"
NODES += " --rivals fsdp2 ours-eager ours-tp-eager"
HOSTS = "--hosts 2 --nproc 4 --node 2 --latency-ms 0.5 --rounds 6 --steps 1 --rivals ddp fsdp2 fsdp2-hsdp fsdp2-bf16"
HOSTS += " fsdp2-hsdp-bf16 ours ours-hsdp ours-hsdp-bf16 ours-int8 ours-hsdp-int8"
COMMANDS = {
    "thin": "--preset thin",
    "small": "--preset small",
    "large": "--preset large",
    "llama": "--preset llama",
    "thin-first-step": "--preset thin --measure first-step --rivals ddp-compile fsdp2-compile ours",
    "thin-4-first-step": "--preset thin --layers 4 --measure first-step --rivals fsdp2-compile ours",
    "loop-thin": "--preset thin --rivals fsdp2 ours-loop-eager ours-loop",
    "loop-small": "--preset small --rivals fsdp2 ours-loop-eager ours-loop",
    "loop-first-step": "--preset thin --layers 4 --measure first-step --rivals ours ours-loop fsdp2-compile",
    "checkpoint": "--preset large --width 1024 --heads 16 --measure checkpoint --rounds 8",
    "priced-thin": "--preset thin --rivals ours-eager ours",
    "priced-small": "--preset small --rivals ours-eager ours",
    "priced-llama": "--preset llama --rivals ours-eager ours",
    "priced-large": "--preset large --rivals ours-eager ours",
    "far-nodes": f"--network-gbps 0.1 {NODES}",
    "near-nodes": f"--network-gbps 10 {NODES}",
    "hosts-llama": f"--preset llama --network-gbps 1 {HOSTS}",
    "hosts-large": f"--preset large --network-gbps 1 {HOSTS}",
    "hosts-llama-slow": f"--preset llama --network-gbps 0.1 {HOSTS}",
    "muon-256": "--preset small --measure muon",
    "muon-slow": "--preset small --measure muon --network-gbps 0.25",
    "muon-768": "--preset large --width 768 --heads 12 --layers 3 --measure muon --rounds 8",
}


def measure(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        command = [sys.executable, "-m", "fsdp_compiled", "bench", *COMMANDS[name].split(), "--out", str(out)]
        code = subprocess.run(command).returncode
        if code:
            raise SystemExit(code)
        RESULTS.mkdir(exist_ok=True)
        result = json.loads((out / "result.json").read_text())
        result["command"] = f"fsdp-compiled bench {COMMANDS[name]}"  # where it was written first is gone
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMMANDS))
    names = parser.parse_args().names or list(COMMANDS)
    if unknown := sorted(set(names) - set(COMMANDS)):
        parser.error(f"unknown: {', '.join(unknown)}; there is {', '.join(COMMANDS)}")
    for name in names:
        measure(name)
    subprocess.run([sys.executable, "-m", "bench.tables"], check=True)
