"""`fsdp-compiled bench`: what it is asked, what it refuses, how it counts, and one small contest of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import report, start
from bench.hosts import missing
from bench.measure import BOUND, CHECKED, Contest, WrongLoss, compare, wire
from bench.network import Transfer
from bench.observe import MARK, Event, Observer, read
from bench.options import BenchOptions, bench_options
from bench.plot import plot
from bench.presets import PRESETS, rows_of_rank
from bench.rivals import ADAMW, REFERENCE, RIVALS, Rival, Setting, Step, plain
from bench.screen import Silent
from bench.summary import BASELINE, Spread, ratio, rows
from fsdp_compiled.cli import main, parser
from fsdp_compiled.cli.rank import RankInfo, Ranks
from fsdp_compiled.cli.simulate import sized
from tests.launch import launch

ROOT = Path(__file__).parents[2]
TINY = sized(PRESETS["thin"], layers=2, width=16, heads=2, context=8, batch=2)
HERE = RankInfo(0, 1, torch.device("cpu"))


# What it is asked, and refuses.


def options(text: str) -> BenchOptions:
    return bench_options(parser("bench").parse_args(["bench", *text.split()]))


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, in a process that no launcher started."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_everything_is_chosen_by_the_preset_unless_given() -> None:
    preset, _ = start.selection(options("--preset large --lower eager"))
    assert preset == PRESETS["large"]
    preset, rivals = start.selection(options("--preset large --rounds 3 --width 64 --rivals ddp fsdp2 ddp"))
    assert (preset.rounds, preset.width, preset.layers) == (3, 64, PRESETS["large"].layers)
    assert [rival.name for rival in rivals] == ["ddp", "fsdp2"]


def test_lower_chooses_among_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "choose_lower", lambda cuda: ("inductor", None))
    for lower, wanted in {"eager": {"ours-eager"}, "inductor": {"ours"}, "both": {"ours-eager", "ours"}}.items():
        _, rivals = start.selection(options(f"--lower {lower}"))
        assert {rival.name for rival in rivals if rival.ours} >= wanted
        assert {rival.name for rival in rivals if not rival.ours} == {
            rival.name for rival in RIVALS.values() if not rival.ours and not rival.nodes and rival.bound == BOUND
        }
        assert all(rival.compiles == (lower == "inductor") for rival in rivals if rival.ours and lower != "both")


def test_without_a_compiler_what_compiles_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "choose_lower", lambda cuda: ("eager", "--lower eager: inductor needs a compiler"))
    _, rivals = start.selection(options(""))
    assert rivals and not any(rival.compiles for rival in rivals)
    with pytest.raises(ValueError, match="ddp-compile cannot be measured here: inductor needs a compiler"):
        start.selection(options("--rivals ddp ddp-compile"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--width 100 --heads 3", "try --width 102"),
        ("--latency-ms 3", "--network-gbps"),
        ("--hosts 2", "--hosts 2 --network-gbps 1"),
        ("--hosts 2 --network-gbps 1 --measure checkpoint", "only --measure steps is measured between hosts"),
        ("--rivals ours-hsdp", "say how many that are: --node 2"),
        ("--lower inductor --rivals ours-eager", "--lower inductor leaves none of --rivals ours-eager"),
        ("--rivals nobody", "invalid choice: 'nobody'"),
        ("--rounds 0", "expected a whole number from 1"),
        ("--out taken", "taken already holds a result"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(
    text: str, said: str, alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (alone / "taken").mkdir()
    (alone / "taken" / "result.json").write_text("{}")
    try:
        assert main(["bench", *text.split()]) == 2
    except SystemExit as error:
        assert error.code == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in alone.iterdir()] == ["taken"]


def test_torchrun_cannot_measure_the_first_step() -> None:
    with pytest.raises(ValueError, match="without torchrun"):
        start._under_torchrun(options("--measure first-step"), HERE)


def test_first_steps_are_cold_and_then_warm_from_the_same_cache(tmp_path: Path) -> None:
    chosen = BenchOptions(out=tmp_path, measure=("first-step", "steps"))
    parts = start.parts(chosen, [RIVALS["fsdp2"], RIVALS["fsdp2-compile"]])
    assert [part.name for part in parts] == [
        "first-step/fsdp2/cold",
        "first-step/fsdp2-compile/cold",
        "first-step/fsdp2-compile/warm",
        "steps",
    ]
    cold, warm = (part.environment["TORCHINDUCTOR_CACHE_DIR"] for part in parts[1:3])
    assert cold == warm and parts[0].environment["TORCHINDUCTOR_CACHE_DIR"] != cold
    assert all(part.environment["TMPDIR"].startswith(cold) for part in parts[1:3])  # where headers are kept


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = "".join(capsys.readouterr().out.split())  # lines break at hyphens too
    for word in ("--preset", "--rivals", "--measure", "--network-gbps", *PRESETS, *RIVALS):
        assert word in text


# What is trained.


@pytest.mark.parametrize("name", ["thin", "llama"])
def test_shares_are_the_whole_batch_and_blocks_the_whole_depth(name: str) -> None:
    if PRESETS[name].llama:
        pytest.importorskip("transformers")
    preset = sized(PRESETS[name], layers=2, width=16, heads=2, context=8, batch=2)
    (tokens, targets), other = preset.batches(3, 0, 2)
    assert tokens.shape == (6, 8) and not torch.equal(tokens, other[0])
    assert torch.equal(torch.cat([rows_of_rank((tokens, targets), rank, 2)[0] for rank in range(3)]), tokens)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    model = preset.model()
    assert len(preset.blocks(model)) == 2
    # the mean over ranks of their losses is the whole batch's
    parts = [preset.loss(model, *rows_of_rank((tokens, targets), rank, 2)) for rank in range(3)]
    torch.testing.assert_close(torch.stack(parts).mean(), preset.loss(model, tokens, targets))


# How it counts.


def result() -> dict[str, Any]:
    """Two rivals, three rounds, two ranks."""
    base = {"collectives": 8, "operators": 1000, "peak_bytes": 4 * 2**20}
    return {
        "command": "fsdp-compiled bench",
        "hardware": "2 cores",
        "versions": {"torch": "2.13.0"},
        "preset": {**dict.fromkeys(("layers", "width", "context", "batch", "rounds", "steps"), 1), "llama": False},
        "conditions": {
            "world": 2,
            "device": "cpu",
            "threads a rank": 1,
            "load average before and after": [0.1, 0.2],
            "network": None,
        },
        "rivals": {
            "fsdp2": {
                "title": "FSDP2",
                "cpu": [[0.010, 0.030], [0.040, 0.040], [0.020, 0.020]],  # 20, 40, 20 ms
                "wall": [[0.1, 0.2], [0.2, 0.2], [0.2, 0.1]],
                **base,
            },
            "ours": {
                "title": "this package",
                "cpu": [[0.005, 0.005], [0.010, 0.010], [0.015, 0.005]],  # 5, 10, 10 ms: ratios 1/4, 1/4, 1/2
                "wall": [[0.1, 0.1], [0.1, 0.1], [0.1, 0.3]],
                **base,
                "peak_bytes": 3 * 2**20,
                "first_step": {"cold": 20.0, "warm": 5.0},
            },
        },
    }


def test_a_ratio_is_the_median_of_the_rounds_own() -> None:
    assert ratio(result(), "ours", "fsdp2") == pytest.approx(0.25)
    assert ratio(result(), "ours", "fsdp2", "wall") == pytest.approx(0.5)  # 0.1/0.2, 0.1/0.2, 0.3/0.2
    first, second = rows(result())
    assert (first.cpu_ratio, first.wall_ratio, first.peak_ratio) == (1, 1, 1)
    assert second.cpu is not None and second.cpu.middle == pytest.approx(0.010)
    assert second.peak_ratio == 0.75
    assert second.cpu_ratio != pytest.approx(second.cpu.middle / 0.020), "here the ratio of medians is another number"


def test_quartiles_enclose_the_median() -> None:
    spread = Spread.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (spread.low, spread.middle, spread.high) == (2, 3, 4)
    assert Spread.of([7.0]) == Spread(7, 7, 7)


def test_a_table_shows_what_was_measured_and_nothing_else() -> None:
    text = report.markdown(result())
    assert text.splitlines()[-1] == (
        "| this package | 10.0 (7.5 to 10.0) | 0.25 | 100 (100 to 200) | 0.50 "
        "| 3.0 | 0.75 | 8 | 1,000 | 20.0 s | 5.0 s |"
    )
    assert "| – | – |" in text  # FSDP2 has no first step
    only = result()
    for facts in only["rivals"].values():
        facts.pop("first_step", None)
    assert "cold" not in report.markdown(only)
    del only["rivals"]["fsdp2"]
    assert "×" not in report.markdown(only).splitlines()[0], "a ratio to nobody"
    assert "2 ranks × 1 thread" in report.describe(only)


def test_on_a_network_what_was_waited_for_is_told_from_what_was_hidden() -> None:
    hidden = Transfer("a", 1, issued=0.0, start=0.0, end=2.0, waited=3.0)
    partly = Transfer("b", 1, issued=0.5, start=2.0, end=4.0, waited=3.5)
    assert wire([hidden, partly], 2) == (2.0, 0.25)
    assert wire([hidden, Transfer("c", 1, 0.0, 0.0, 2.0)], 2) == (2.0, None), "who waited for c is not known"
    on = result()
    on["rivals"]["ours"]["wire"] = [[0.010, 0.001], [0.010, 0.003], [0.012, 0.002]]
    on["rivals"]["fsdp2"]["wire"] = [[0.010, None]] * 3
    header, (fsdp2, ours) = report.grid(on)
    column = header.index("wire ms")
    assert header[column : column + 2] == ["wire ms", "waited for"]
    assert (ours[column], ours[column + 1], fsdp2[column + 1]) == ("10.0", "2.0", report.MISSING)


def test_between_hosts_there_is_what_their_network_cards_sent() -> None:
    between = result()
    between["rivals"]["ours"]["sent"] = [3e6, 1e6, 2e6]
    header, (fsdp2, ours) = report.grid(between)
    column = header.index("MB sent")
    assert (ours[column], fsdp2[column]) == ("2.0", report.MISSING)
    network = {"gigabits per second": 1.0, "latency ms": 0.5, "hosts": 2}
    between["conditions"] = {**between["conditions"], "network": network}
    assert "in 2 hosts with network cards of 1.0 Gbit/s and 0.5 ms between them" in report.describe(between)


@pytest.mark.exhaustive
@pytest.mark.skipif(missing() is not None, reason=f"no hosts can be made here: {missing()}")
def test_ranks_in_hosts_are_measured_as_others(tmp_path: Path) -> None:
    command = "bench --preset thin --layers 2 --width 32 --heads 2 --rounds 2 --steps 1 --hosts 2 --network-gbps 1"
    command += f" --latency-ms 1 --lower eager --rivals fsdp2 ours-eager --out {tmp_path / 'run'}"
    subprocess.run([sys.executable, "-m", "fsdp_compiled", *command.split()], check=True, cwd=ROOT)
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["conditions"]["network"]["hosts"] == 2 and found["conditions"]["world"] == 2
    assert all(sent > 0 for sent in found["rivals"]["ours-eager"]["sent"] + found["rivals"]["fsdp2"]["sent"])


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    assert plot([("one", result()), ("two", result())], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_is_read_off_the_profilers_events() -> None:
    def memory(at: int, size: int) -> Event:
        return Event("[memory]", at, at, size)

    events = [
        memory(1, 100),  # weights
        Event(MARK, 10, 20),
        memory(12, 50),  # the optimizer's state, which stays
        memory(13, 7),
        memory(15, -7),
        memory(22, 30),  # between the steps, and for the last one only
        Event("c10d::allreduce_", 25, 26),
        Event(MARK, 30, 40),
        Event("c10d::barrier", 31, 31),
        Event("c10d::_allgather_base_", 32, 33),
        Event("c10d::_allgather_base_", 32, 32),  # within the one before: the same on its way
        Event("c10d::allreduce_", 34, 35),
        Event("aten::mm", 33, 34),
        memory(33, 40),
        memory(34, 2),
        memory(35, -40),
        memory(36, 20),
        memory(45, 1000),
    ]
    seen = read(reversed(events))
    assert (seen.held_bytes, seen.peak_bytes, seen.grown_bytes) == (180, 222, 80)
    assert (seen.collectives, seen.operators) == (2, 1)
    with pytest.raises(ValueError, match="two steps"):
        read(events[:3])


def test_observed_memory_is_what_the_tensors_take() -> None:
    observer = Observer(torch.device("cpu"))
    with observer.watching():
        model = nn.Linear(256, 256, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step() -> torch.Tensor:
            loss = model(torch.ones(1, 256)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(3):
            observer.step(step).item()
    weight = 256 * 256 * 4
    assert observer.seen is not None
    assert observer.seen.held_bytes == 2 * weight and observer.seen.grown_bytes == 0
    assert 3 * weight < observer.seen.peak_bytes < 3.1 * weight  # and the gradient
    assert observer.seen.collectives == 0 and observer.seen.operators > 0


# A wrong rival stops it.


def test_losses_are_compared_step_by_step() -> None:
    reference = [5.0, 4.0, 3.0]
    assert compare("x", [5.0, 4.0 * (1 + BOUND / 2), 3.0], reference) == pytest.approx(BOUND / 2, rel=1e-3)
    for wrong in ([5.0, 4.0 * (1 + 2 * BOUND), 3.0], [5.0, 4.0, float("nan")]):
        with pytest.raises(WrongLoss, match="x has a wrong loss at step"):
            compare("x", wrong, reference)
    with pytest.raises(ValueError, match="hardly move"):
        compare("x", [5.0, 5.0], [5.0, 5.0])


def test_losses_that_are_held_to_nothing_are_still_numbers() -> None:
    assert compare("x", [5.0, 8.0, 3.0], [5.0, 4.0, 3.0], None) == 1
    with pytest.raises(WrongLoss, match="x has a wrong loss at step 2"):
        compare("x", [5.0, float("nan"), 3.0], [5.0, 4.0, 3.0], None)


def wrong_rate(setting: Setting) -> Step:
    """Plain PyTorch whose rate is half a percent off: its first loss is right."""
    model = setting.model()
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, "lr": ADAMW["lr"] * 1.005})

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = setting.preset.loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def contest(*rivals: Rival) -> Contest:
    return Contest(TINY, rivals, HERE, Ranks(), 0, Silent())


def test_a_broken_rival_stops_the_run_and_is_named() -> None:
    right, wrong = Rival("right", "", plain), Rival("broken", "", wrong_rate)
    with pytest.raises(WrongLoss, match=r"broken has a wrong loss at step [2-5]: .* Leave broken out"):
        contest(right, wrong).check()


def test_right_rivals_pass_and_leave_what_was_seen_of_them() -> None:
    checked = contest(Rival("right", "", plain))
    checked.check()
    assert set(checked.steps) == {"right"}, "the reference goes, where nobody asked for it"
    assert len(checked.losses[REFERENCE]) == CHECKED
    assert checked.distances["right"] <= BOUND
    assert 0 < checked.seen["right"].held_bytes < checked.seen["right"].peak_bytes


def test_the_names_fit_each_other() -> None:
    assert REFERENCE in RIVALS and RIVALS[REFERENCE].ours and not RIVALS[REFERENCE].compiles
    assert BASELINE in RIVALS and RIVALS[BASELINE].shards
    assert [name for name, rival in RIVALS.items() if rival.name != name] == []


# The whole of it.


def test_a_contest_leaves_everything_in_the_folder_it_names_last(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = "bench --layers 2 --width 16 --heads 2 --context 8 --batch 2 --rounds 2 --steps 1".split()
    command += ["--rivals", "eager", "fsdp2", "ours-eager", "--network-gbps", "1", "--out", str(out)]
    (status, printed), _ = launch(ROOT / "tests" / "workers" / "cli.py", 2, *command)
    assert status == 0 and printed.splitlines()[-1] == str(out), printed
    assert {path.name for path in out.iterdir()} >= {"plot.png", "result.json", "table.md"}
    found = json.loads((out / "result.json").read_text())
    assert list(found["rivals"]) == ["eager", "fsdp2", "ours-eager"]
    assert found["conditions"]["world"] == 2 and found["conditions"]["network"]["gigabits per second"] == 1
    for facts in found["rivals"].values():
        assert facts["distance"] <= BOUND
        assert [len(turn) for turn in facts["cpu"]] == [2, 2] and all(cpu > 0 for cpu, _ in facts["cpu"])
        assert facts["grown_bytes"] == 0
    facts = found["rivals"]
    counted = {name: rival["collectives"] for name, rival in facts.items()}
    assert counted["eager"] == 0
    assert counted["fsdp2"] == 5 + 3, "three units: gathers, without the root's second, and reductions"
    assert 3 <= counted["ours-eager"] <= 5 + 3 + 1, "as few units, merged or not, and the mean loss"
    assert all(sent > 0 and waited >= 0 for sent, waited in facts["fsdp2"]["wire"])  # a busy host may wait for nothing
    assert facts["eager"]["wire"] == [[0, 0], [0, 0]]
    assert facts["fsdp2"]["held_bytes"] < 0.7 * facts["eager"]["held_bytes"]
    assert (out / "table.md").read_text().startswith("| rival | CPU ms | × fsdp2 |")


def test_what_ddp_sends_is_compressed(tmp_path: Path) -> None:
    """By what is on a simulated wire, which takes nearly nothing a message."""
    out = tmp_path / "run"
    command = "bench --layers 1 --width 64 --heads 2 --context 8 --batch 2 --rounds 1 --steps 1".split()
    command += ["--rivals", "ddp", "ddp-bf16", "ddp-powersgd", "--network-gbps", "1", "--out", str(out)]
    (status, printed), _ = launch(ROOT / "tests" / "workers" / "cli.py", 2, *command)
    assert status == 0, printed
    found = json.loads((out / "result.json").read_text())["rivals"]
    sent = {name: facts["wire"][0][0] for name, facts in found.items()}
    assert sent["ddp-bf16"] == pytest.approx(0.5 * sent["ddp"], rel=0.01)
    assert sent["ddp-powersgd"] < 0.5 * sent["ddp"]
    assert found["ddp"]["distance"] <= BOUND < found["ddp-bf16"]["distance"] <= RIVALS["ddp-bf16"].bound
    assert found["ddp-powersgd"]["distance"] > BOUND, "it began within the first steps"


def test_an_installed_package_says_where_the_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fsdp_compiled.cli._benchmarks", lambda: False)
    assert main(["bench", "--preset", "thin"]) == 2
    assert "run `make bench` in a clone" in capsys.readouterr().err
