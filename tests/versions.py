"""The suite on each release of PyTorch that the package is for, and docs/versions.md, which says how it went.

python -m tests.versions RELEASE... -- COMMAND...      the module that runs the tests, and its arguments

Each release has an environment of its own, `.venv-2.14` for one, made by `.ci/setup`. Results are kept by release in
bench/results/versions.json, and the page is written from that file after each: one release can be run again alone.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from fsdp_compiled.cli.machine import hardware

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
RESULTS = ROOT / "bench" / "results" / "versions.json"
FIRST_STEPS = [ROOT / "bench" / "results" / f"first-step-versions{kind}.json" for kind in ("", "-inductor")]
PYTORCHS = ("AOTAutograd", "compiling", "compilers, processes of their own")
ASKED = "import platform, torch, triton; print(torch.__version__, triton.__version__, platform.python_version())"
HEAD = """# Versions of PyTorch

The package is for the releases in this table, each with the Triton that it was made for. `make test` runs the suite on
2.13 and a part of it on the newest release; `make test-versions` runs the suite on all of them and writes this page.
"""


@dataclass(frozen=True)
class Suite:
    """How the tests went on one release: by a test's name, why it did not pass."""

    installed: tuple[str, ...]  # versions of torch, Triton and Python
    counts: dict[str, int]  # passed, skipped, failed
    skipped: dict[str, str]
    failed: tuple[str, ...]
    seconds: float
    command: str
    commit: str
    hardware: str


def read(report: Path) -> tuple[dict[str, int], dict[str, str], tuple[str, ...]]:
    """Of pytest's report in JUnit's form: the counts, reasons of skips, and what failed."""
    counts: Counter[str] = Counter()
    skipped, failed = {}, []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(name)
        elif (skip := case.find("skipped")) is not None:
            counts["skipped"] += 1
            skipped[name] = skip.get("message", "")
        else:
            counts["passed"] += 1
    return dict(counts), skipped, tuple(failed)


def run(release: str, command: list[str], said: str) -> Suite:
    """Raises ``CalledProcessError`` where the release cannot be installed, `.ci/setup` having said why, or pytest made
    no report."""
    folder = f".venv-{release.rpartition('.')[0]}"
    subprocess.run(
        ["sh", ".ci/setup", "test", folder], cwd=ROOT, env=os.environ | {"TORCH": f"torch=={release}"}, check=True
    )
    python = [f"{folder}/bin/python", "-P"]
    installed = output_of(*python, "-c", ASKED)
    changed = output_of(
        "git", "diff", "HEAD", "--", ".", f":!{PAGE.relative_to(ROOT)}", f":!{RESULTS.relative_to(ROOT)}"
    )
    commit = output_of("git", "rev-parse", "--short", "HEAD").strip() + "+" * bool(changed)
    with TemporaryDirectory() as place:
        report, since = Path(place, "report.xml"), time.monotonic()
        done = subprocess.run([*python, "-m", *command, f"--junitxml={report}"], cwd=ROOT)
        if not report.exists():
            raise subprocess.CalledProcessError(done.returncode, command)
        return Suite(tuple(installed.split()), *read(report), time.monotonic() - since, said, commit, hardware())


def output_of(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def recorded() -> dict[str, Suite]:
    """By release, what RESULTS holds."""
    if not RESULTS.exists():
        return {}
    return {release: Suite(**fields) for release, fields in json.loads(RESULTS.read_text()).items()}


def keep(results: Mapping[str, Suite]) -> None:
    RESULTS.write_text(json.dumps({one: asdict(results[one]) for one in sorted(results)}, indent=1) + "\n")


def page(suites: Iterable[Suite]) -> str:
    suites = list(suites)
    lines = [
        HEAD,
        "| torch | Triton | Python | passed | skipped | failed | minutes | at commit |",
        "|---|---|---|--:|--:|--:|--:|---|",
    ]
    for suite in suites:
        counts = (suite.counts.get(kind, 0) for kind in ("passed", "skipped", "failed"))
        cells = (*suite.installed, *counts, f"{suite.seconds / 60:.1f}", suite.commit)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    commands = dict.fromkeys(f"`{suite.command}`, {suite.hardware}" for suite in suites)
    lines += ["", f"{'; '.join(commands)}. Builds for CUDA (cu) ran on the processor, too.", ""]
    often = Counter(name for suite in suites for name in suite.skipped)
    for suite in suites:
        torch, here = suite.installed[0], [name for name in suite.skipped if often[name] < len(suites)]
        lines += [f"- On {torch} failed: `{name}`" for name in suite.failed]
        lines += [f"- On {torch} left out: `{name}` ({suite.skipped[name]})" for name in here]
    return "\n".join([*lines, *first_steps()]).rstrip() + "\n"


def first_steps() -> list[str]:
    """What `bench.first_step_parts` measured on two releases, side by side."""
    lines, commands = [], []
    for path in FIRST_STEPS:
        result = json.loads(path.read_text())
        mine, (other, theirs) = result["seconds of processor time"].items()
        commands.append(f"`{result['command']}`, {result['hardware']}")
        if not lines:
            lines += ["", "## First steps", "",
                      "Seconds of processor time until the first step of a GPT of width 32 is done:", "",
                      f"| layers | | torch {result['versions']['torch']} | {other} | without PyTorch's parts |",
                      "|--:|---|--:|--:|--:|"]  # fmt: skip
        for one, two in zip(mine[1], theirs, strict=True):
            lower = "eager" if not one["compiling"] else f"inductor, {one['disk']}"
            rest = " / ".join(f"{row['all'] - sum(row.get(part, 0.0) for part in PYTORCHS):.2f}" for row in (one, two))
            lines.append(f"| {one['layers']} | {lower} | {one['all']:.2f} | {two['all']:.2f} | {rest} |")
    said = f"PyTorch's parts are {', '.join(PYTORCHS[:-1])} and {PYTORCHS[-1]}."
    return [*lines, "", f"{said} {'; '.join(commands)}."]


def main(arguments: list[str]) -> int:
    split = arguments.index("--")
    releases, command = arguments[:split], arguments[split + 1 :]
    said = f'make test-versions VERSIONS="{" ".join(releases)}"'
    if asked := os.environ.get("PYTEST_ARGS"):
        said += f" PYTEST_ARGS={shlex.quote(asked)}"
    for release in releases:
        keep(recorded() | {release: run(release, command, said)})
        PAGE.write_text(page(recorded().values()))
    print(PAGE.read_text())
    return int(any(recorded()[release].failed for release in releases))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
