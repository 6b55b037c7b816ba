"""The GPU benchmark on a machine without one: its plan, its arguments, and a tiny run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench import gpu_kernels, gpu_models, gpu_rivals, gpu_step

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"
FIRST = ["check", "graphs", "kernel-tests"]  # the riskiest first
PARTS = [*FIRST, "kernels", "step-thin", "step-gpt2", "step-llama"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        env=os.environ | {"OTHERS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_plan_fits_into_nine_minutes_and_its_files_exist() -> None:
    answer = run("--dry-run")
    *parts, total = answer.stdout.splitlines()
    assert answer.returncode == 0 and not answer.stderr
    assert [line.split(",")[0] for line in parts] == PARTS
    assert int(total.split()[0]) <= 540
    named = {word for line in parts for word in line.split() if word.startswith("bench.")}
    assert named == {gpu_step.__name__, gpu_kernels.__name__}
    assert run("--wrong").returncode == 2


def test_the_page_for_those_who_have_a_gpu_says_what_runs() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert "bench/gpu.sh" in page and "bench/results/gpu.tar.gz" in page
    assert all(f"`{part}`" in page for part in PARTS)


def test_parts_that_fail_are_named_at_the_end_and_the_others_run(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *import*) ;; *thin*) echo fine ;; *) exit 3 ;; esac\n')
    python.chmod(0o755)
    answer = run(str(tmp_path / "out"), PYTHON=str(python), OTHERS=str(python))
    assert answer.returncode == 1
    summary = (tmp_path / "out" / "summary.txt").read_text()
    rows = [line.split() for line in summary.splitlines() if " held " in line or "exit code" in line]
    assert [row[0] for row in rows] == [*PARTS, *(f"{name}-2" for name in FIRST)]
    assert [row[0] for row in rows if "held" in row] == ["step-thin"]
    assert "exit code 3" in summary and f"report {tmp_path}/out/graphs.log" in summary
    assert summary in answer.stdout and "9 failed: please report them" in answer.stdout
    assert (tmp_path / "out" / "step-thin.log").read_text() == "fine\n"
    with tarfile.open(tmp_path / "out.tar.gz") as file:
        assert {"out/summary.txt", "out/graphs.log", "out/graphs-2.log"} <= set(file.getnames())
    fine = tmp_path / "fine"
    fine.write_text("#!/bin/sh\nexit 0\n")
    fine.chmod(0o755)
    answer = run(str(tmp_path / "out"), PYTHON=str(fine))
    assert answer.returncode == 0 and "all parts held" in answer.stdout


def test_a_part_that_lacks_a_package_says_which_and_the_others_run(tmp_path: Path) -> None:
    python = tmp_path / "python"
    says = "transformers: ModuleNotFoundError: No module named 'transformers'"
    python.write_text(f'#!/bin/sh\ncase "$*" in *import*transformers*) echo "{says}" ;; esac\n')
    python.chmod(0o755)
    answer = run(str(tmp_path / "out"), PYTHON=str(python))
    assert answer.returncode == 1
    rows = [line.split() for line in answer.stdout.splitlines() if " held " in line or " not set up " in line]
    assert [row[0] for row in rows] == PARTS
    assert [row[0] for row in rows if "held" not in row] == ["step-gpt2", "step-llama"]
    assert (tmp_path / "out" / "step-llama.log").read_text() == says + "\n"


def test_the_trial_of_imports_names_what_is_missing_and_nothing_else() -> None:
    code = SCRIPT.read_text().split("imports='")[1].split("'")[0]
    answer = subprocess.run(
        [sys.executable, "-P", "-c", code, "pytest", "json", "no_such_package"], capture_output=True, text=True
    )
    assert answer.returncode == 0
    assert answer.stdout == "no_such_package: ModuleNotFoundError: No module named 'no_such_package'\n"


@pytest.mark.parametrize("fails", [False, True])
def test_without_a_python_it_sets_up_what_all_parts_need_and_goes_on_where_that_fails(
    tmp_path: Path, fails: bool
) -> None:
    """In a tree of its own, with a set-up that makes a Python which does nothing, or fails."""
    for name in (".ci/setup", "bench/gpu.sh", "path/python3"):
        (tmp_path / name).parent.mkdir()
    (tmp_path / "bench" / "gpu.sh").write_text(SCRIPT.read_text())
    (tmp_path / "path" / "python3").write_text('#!/bin/sh\necho "python3 of the path"\n')
    (tmp_path / "path" / "python3").chmod(0o755)
    made = 'mkdir -p .venv/bin; printf "#!/bin/sh\\n" >.venv/bin/python; chmod +x .venv/bin/python; echo "set up $*"\n'
    (tmp_path / ".ci" / "setup").write_text("echo no network >&2; exit 1\n" if fails else made)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"} | {"OTHERS": ""}
    environment["PATH"] = f"{tmp_path / 'path'}:{environment['PATH']}"
    answer = subprocess.run(
        ["sh", str(tmp_path / "bench" / "gpu.sh"), str(tmp_path / "out")],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if fails:
        assert "no network\n== the set-up failed" in answer.stderr
        assert (tmp_path / "out" / "check.log").read_text() == "python3 of the path\n"
    else:
        assert answer.returncode == 0 and answer.stdout.startswith("set up test\n")
        assert "all parts held" in answer.stdout


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # before torch 2.13
def test_where_our_own_step_fails_the_rivals_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: gpu_models.Setting) -> gpu_rivals.Step:
        raise RuntimeError("no graph")

    monkeypatch.setitem(gpu_rivals.RIVALS, "ours", ("ours", fails, False))
    setting = gpu_models.Setting(gpu_models.PRESETS["thin"], torch.device("cpu"), tiny=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = gpu_step.contest(setting, ["ours", "fsdp2"], 1, 1, lambda results: None)
    finally:
        dist.destroy_process_group()
    assert found["ours"]["error"] == "RuntimeError: no graph"
    assert "error" not in found["fsdp2"], found["fsdp2"]
    assert found["fsdp2"]["milliseconds"] > 0 and "times_ours" not in found["fsdp2"]


def test_tensors_are_rotated_until_they_do_not_fit_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[gpu_kernels.Contest] = []

    def make() -> gpu_kernels.Contest:
        contest = gpu_kernels.Contest("copy", 30_000_000)
        contest.runs["a"] = partial(order.append, len(made))
        made.append(contest)
        return contest

    order: list[int] = []
    contests = gpu_kernels.rotated(make)
    assert len(contests) == 7 and sum(contest.nbytes for contest in contests) >= gpu_kernels.OUTSIDE
    gpu_kernels.in_turn([contest.runs["a"] for contest in contests])()
    assert order == list(range(7))
    assert len(gpu_kernels.rotated(lambda: gpu_kernels.Contest("small", 10))) == gpu_kernels.MOST


@pytest.mark.exhaustive  # the contest is run in this process above
def test_a_tiny_run_checks_losses_and_writes_what_it_has(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "bench.gpu_step",
        str(tmp_path),
        "--preset",
        "thin",
        "--tiny",
    ]
    subprocess.run(
        [*command, "--rounds", "1", "--steps", "1", "--rivals", "ours", "fsdp2", "fsdp2-graph", "ours-casts"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}, check=True, timeout=200,
        capture_output=True,
    )  # fmt: skip
    record = json.loads((tmp_path / "thin.json").read_text())
    assert (tmp_path / "thin.svg").exists()
    assert "ours-casts" not in record["results"], "nothing is cast in float32"
    assert record["results"]["fsdp2-graph"]["error"] == "needs a GPU"
    for name in ("ours", "fsdp2"):
        found = record["results"][name]
        assert found["distance"] <= gpu_step.BOUND[torch.float32] and found["milliseconds"] > 0
    assert record["results"]["fsdp2"]["times_ours"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_step.main([str(tmp_path)]) == 2
    assert "needs a GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_step.main([str(tmp_path), "--preset", "huge"])


@pytest.mark.parametrize("preset", ["gpt2", "llama"])
def test_the_presets_of_transformers_train(preset: str) -> None:
    pytest.importorskip("transformers")
    setting = gpu_models.Setting(gpu_models.PRESETS[preset], torch.device("cpu"), tiny=True)
    model = setting.model()
    step = gpu_rivals.eager_step(model)
    losses = [float(step(tokens)) for tokens in setting.batches(5)]
    assert losses[4] < losses[0] and len(setting.blocks(model)) == 2


@pytest.mark.parametrize("name", ["ours", pytest.param("ours-casts", marks=pytest.mark.exhaustive)])
def test_in_bfloat16_losses_are_near_those_in_float32(name: str) -> None:
    pytest.importorskip("transformers")
    setting = gpu_models.Setting(gpu_models.PRESETS["llama"], torch.device("cpu"), tiny=True)
    losses = gpu_step.first_losses(gpu_rivals.RIVALS[name][1](setting), setting)
    reference = gpu_step.first_losses(gpu_rivals.eager_step(setting.model()), setting)
    assert 0 < gpu_step.distance(losses, reference) <= gpu_step.BOUND[torch.bfloat16]


def test_a_rival_with_other_losses_is_found_out() -> None:
    assert gpu_step.distance([2.0, 1.0, 1.5], [2.0, 1.0, 1.0]) == 0.5
    assert gpu_step.distance([2.0, float("nan"), 1.0], [2.0, 1.0, 1.0]) == float("inf")
    with pytest.raises(ValueError, match="hardly move"):
        gpu_step.distance([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])


def test_time_that_overlaps_counts_once() -> None:
    assert gpu_step.busy([(5, 8), (0, 4), (1, 2), (7, 10)]) == 9
    assert gpu_step.busy([]) == 0
