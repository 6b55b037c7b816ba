"""`plan`: what is priced, what wins, what is printed; and `fsdp-compiled plan`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import fsdp_compiled
from bench import RESULTS, published
from fsdp_compiled import Policy, simulate
from fsdp_compiled.analysis.roofline import flops
from fsdp_compiled.cli import main
from fsdp_compiled.cli.plan import LLAMAS, model_of
from fsdp_compiled.plan.hardware import ERROR, GIB, JUDGED, bits, gpus
from fsdp_compiled.runtime import plan_search
from fsdp_compiled.runtime.plan_search import PRECISION, _at, _estimate, _figures, _priced, _Source, of_config
from fsdp_compiled.runtime.plan_table import Plans, Price, Way, policy_text
from fsdp_compiled.runtime.simulate import traced
from tests.chosen import chosen

transformers = pytest.importorskip("transformers")


def llama(layers: int = 3, width: int = 256, vocabulary: int = 512) -> Any:
    return transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=2 * width, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=256,
    )  # fmt: skip


@cache
def found(memory: float | None = None) -> Plans:
    """With less memory, of the ways that need the least of it."""
    made: Plans = fsdp_compiled.plan(  # type: ignore[operator]
        llama(), "16xH100", node=4, nic="100Gb/s", seq=256, batch=32, memory=memory, tokens=1e9, dollars=2.0,
        ways=lambda way: (
            way.tp == way.rows == 1 and not way.policy.offload and way.policy.accumulate == "shards"
            and (way.policy.lower == "inductor" or way.policy.shard == "ddp")
            and (memory is None or (way.policy.shard == "zero3" and way.replicate == 1))
        ),
        picture=memory is None,
    )  # fmt: skip
    return made


def test_the_fastest_that_fits_is_first_and_was_simulated_whole() -> None:
    rates = [float(f"{one.rate(1):.3g}") for one in found().prices if found().fits(one)]
    assert rates == sorted(rates, reverse=True) and found().fits(found().best)
    assert {one.way.microbatches for one in found().prices} == {2}
    assert {one.way.replicate for one in found().prices} == {1, 4}
    assert {one.way.policy.shard for one in found().prices} == {"zero3", "zero2", "ddp"}
    eager, fused = ([one for one in found().prices if one.way.policy.lower == how and one.way.policy.shard == "ddp"]
                    for how in ("eager", "inductor"))  # fmt: skip
    assert min(one.seconds for one in eager) > max(one.seconds for one in fused), "each operator is a launch"
    assert all(0 <= one.exposed < 1 and one.seconds > 0 for one in found().prices)


@pytest.mark.parametrize(("shard", "replicate"), chosen([("zero3", 1), ("zero3", 4), ("ddp", 1)], [("zero3", 4)]))
def test_where_the_network_bounds_a_step_fewer_bytes_are_proposed_with_what_they_save(
    shard: str, replicate: int
) -> None:
    def asked(way: Way) -> bool:
        plain = way.policy.recompute == "auto" and not way.policy.offload and way.tp == way.rows == 1
        return plain and way.policy.lower == "inductor" and way.policy.shard == shard and way.replicate == replicate

    slow, fast = (
        fsdp_compiled.plan(llama(), "16xH100", node=4, nic=nic, seq=256, ways=asked)  # type: ignore[operator]
        for nic in ("1Gb/s", "100000Gb/s")
    )
    assert slow.best.bound == "network" and fast.fewer.get('wire="int8"', 1.0) > 0.9  # latency alone is left there
    whole = "zero3" if shard == "zero3" and replicate == 1 else ""  # of which nothing is a site
    assert {*slow.fewer} == ({'wire="int8"'} if whole else {'wire="int8"', "sync_every=50"})
    assert all(0 < part < 0.6 for part in slow.fewer.values()), slow.fewer
    assert slow.fewer.get("sync_every=50", 0.0) < slow.fewer['wire="int8"']
    assert "# the network bounds it; fewer bytes, for rounding or delay: wire=" in str(slow)
    assert json.loads(slow.json())["fewer bytes"] == slow.fewer


def test_a_price_is_what_simulate_says() -> None:
    """Of the model's whole depth, and of a few blocks continued, in one process or two; under the policy that is
    printed, with which the large matrices at the model's ends are units of their own."""
    config = llama(8, 1024, 32000)

    def asked(way: Way) -> bool:
        plain = way.policy.shard == "zero3" and not way.policy.offload and way.policy.lower == "inductor"
        return plain and way.tp == way.rows == way.replicate == 1

    made: Plans = fsdp_compiled.plan(config, "16xH100", node=4, nic="100Gb/s", seq=256, ways=asked, processes=2)  # type: ignore[operator]
    assert len(made.prices) == 4 and made.best.whole and not made.prices[-1].whole
    assert made.best.way.policy.reshard_onto == 4, "between nodes, the network bounds all of them"
    assert sum(price.way.policy.reshard_onto is None for price in made.prices) == 2
    assert len(made.resident) == 2 and min(made.resident) > 2**27 and " + " in str(made).splitlines()[-1]
    assert [*_priced(_Source(config, 256), [made.prices[-1].way], made.cluster, [])] == [made.prices[-1]]
    policies = [pasted(made, price) for price in made.prices]
    with traced(*of_config(config, 8, 1, 256), {"shard": 16}, made.cluster, policies[0]) as step:  # as `simulate` does
        said = [step.estimate(policy, 16, 1, made.cluster) for policy in policies]
        other = step.estimate(replace(made.best.way.policy, bucket_mb=0.0), 16, 1, made.cluster)
    for price, one in zip(made.prices, said):
        assert "root/0" in [unit.name for unit in one.plan.units]
        assert price.seconds == pytest.approx(one.seconds, rel=1e-9 if price.whole else 0.1)
        assert price.peak == pytest.approx(one.memory.peak.nbytes, rel=1e-9 if price.whole else 0.1)
    assert other.seconds != pytest.approx(made.best.seconds, rel=1e-3), "the control: one unit a block, and the root"


def test_from_four_blocks_on_memory_and_time_are_lines() -> None:
    """Of Llama 405B along tp. The control: three blocks overlap reductions otherwise than more do."""
    config = transformers.LlamaConfig(
        num_hidden_layers=126, hidden_size=16384, intermediate_size=53248, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    source, cluster = _Source(config, 8192), gpus("H100", 8, bits("8x400Gb/s"))
    way = Way(1, 8192, 2, 1, 2, Policy(precision=PRECISION, recompute="unit", tp="auto"))
    made = {}
    for depth in (3, *source.depths, 6):
        made[depth] = _figures(_estimate(source.step(depth, way, cluster), way, cluster))
    few, more = source.depths
    assert _at([made[few], made[more]], (few, more), 6) == pytest.approx(made[6], rel=1e-3)
    assert _at([made[3], made[more]], (3, more), 6)[0] < 0.9 * made[6][0]


def pasted(made: Plans, price: Price) -> Policy:
    """The policy that is printed where this price is the best."""
    text = str(replace(made, prices=(price,)))
    line = next(line for line in text.splitlines() if line.startswith("policy = "))
    names = {"Policy": Policy, "MixedPrecisionPolicy": type(PRECISION), "torch": torch}
    found = eval(line.removeprefix("policy = "), names)
    assert isinstance(found, Policy)
    return found


def test_less_memory_gives_another_way_or_none() -> None:
    least = min(one.peak for one in found().prices)
    tight = found(memory=1.02 * least / GIB)
    assert tight.fits(tight.best) and tight.best.peak < found().best.peak
    assert not all(map(tight.fits, tight.prices))
    none = replace(tight, capacity=1.0)
    assert "nothing fits" in str(none)


def test_what_is_printed_can_be_pasted_and_read() -> None:
    text = str(found())
    assert "16 x h100, nodes of 4" in text and "days" in text and "cost" in text
    assert pasted(found(), found().best) == found().best.way.policy
    read = json.loads(found().json())
    assert read["inputs"]["batch"] == 32 and len(read["ways"]) == len(found().prices)
    assert read["ways"][0]["MFU"] < 1 and read["ways"][0]["cost"] == pytest.approx(read["ways"][0]["days"] * 24 * 32)


def test_each_row_has_its_error_band_where_one_is_known() -> None:
    """And the last line has what the search took."""

    def told(*lines: str) -> list[str]:
        return [line for line in lines if line.startswith(("zero", "ddp"))]

    first, step, peak, *rest, last = str(found()).splitlines()
    assert "ways priced" in first and "median was off by 4%, the worst by 33%; all of these were eager" in step
    assert "within 5%" in peak and "not compared with a GPU" in peak
    assert all(line.split().count("±4%") == 1 for line in told(*rest)) and len(told(*rest)) == 12
    row, best = found().row(found().best), found().best
    assert row["step seconds band"] == pytest.approx([0.96 * best.seconds, 1.04 * best.seconds])
    assert row["peak GiB band"] == pytest.approx([0.95 * best.peak / GIB, 1.05 * best.peak / GIB])
    other = replace(found(), cluster=replace(found().cluster, name="h200"))
    assert "not compared with h200; on a100, a100-40, h100 of published runs" in str(other)
    assert not any("±" in line for line in str(other).splitlines()) and other.row(best)["step seconds band"] is None
    (held,) = found().resident
    assert last == f"# searched in {found().seconds:.0f} s, with {held / GIB:.1f} GiB of memory at most"
    assert found().seconds > 0 and held > 2**27
    assert json.loads(found().json())["search"] == {"seconds": found().seconds, "resident bytes": [held]}


def test_a_slower_network_is_never_faster_and_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert found().networks
    for rates in (found().networks or {}).values():
        assert list(rates) == sorted(rates)
    found().picture(tmp_path / "ways.png")
    assert (tmp_path / "ways.png").stat().st_size > 10_000


def test_state_that_cannot_fit_is_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    source = _Source(llama(), 256)
    way = Way(1, 16, 1, 1, 1, Policy(precision=PRECISION, shard="ddp"))
    assert source.state(way) > 12 * source.parameters
    assert source.state(replace(way, policy=Policy(shard="zero3"))) == 12 * source.parameters / 16


def test_configurations_by_name_by_file_and_of_encoders(tmp_path: Path) -> None:
    config = model_of("meta-llama/Meta-Llama-3-8B".replace("Meta-", ""))
    with torch.device("meta"):
        assert sum(one.numel() for one in of_config(config, 32, 1, 8)[0]().parameters()) == 8_030_261_248
    file = tmp_path / "config.json"
    file.write_text(json.dumps(llama(3).to_dict()))
    assert model_of(str(file)).num_hidden_layers == model_of(str(tmp_path)).num_hidden_layers == 3
    t5 = transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=256)
    model_fn, loss, batch = of_config(t5, 2, 2, 32)
    found = simulate(model_fn, loss, batch, 8, "a100", Policy())
    assert found.seconds > 0 and not found.memory.unknown
    assert len(LLAMAS) > 5


def test_ranks_along_tp_divide_all_of_them_and_a_node() -> None:
    config = llama()
    config.num_key_value_heads = 4
    source = _Source(config, 256)
    assert source.cuts(6, 6) == (1, 2) and source.cuts(8, 12) == (1, 2, 4) and source.cuts(6, 12) == (1, 2)


def test_a_line_is_drawn_through_blocks_that_are_alike() -> None:
    """And masters are float32, whatever dtype the configuration's file says."""
    config = transformers.Qwen2MoeConfig(
        num_hidden_layers=12, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_experts=4,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=64, decoder_sparse_step=2,
    )  # fmt: skip
    assert _Source(llama(12), 256).deep and not _Source(config, 256).deep
    half = llama()
    half.dtype = torch.bfloat16
    with torch.device("meta"):
        assert {one.dtype for one in of_config(half, 2, 1, 8)[0]().parameters()} == {torch.float32}


def test_what_cannot_be_had_leaves_other_ways() -> None:
    """Batches of one row that the model refuses, and offload beside a field of the policy's that rules it out."""
    setup = lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))  # noqa: E731
    given = setup, lambda model, x: model(x).square().mean(), (torch.empty(1, 64),)
    made: Plans = fsdp_compiled.plan(given, "8xH100", policy=Policy(wire="int8"))  # type: ignore[operator]
    assert {one.way.rows for one in made.prices} == {2, 4, 8} and not made.fewer.get('wire="int8"')
    assert not any(one.way.policy.offload for one in made.prices)
    with pytest.raises(ValueError, match=r"(?s)Nothing can be priced. tp=1, rows=1: .*more than 1 value per channel"):
        fsdp_compiled.plan(given, "8xH100", ways=lambda way: way.rows == 1)  # type: ignore[operator]


def test_products_of_experts_are_counted() -> None:
    graph = fx.Graph()
    value = {name: graph.placeholder(name) for name in ("tokens", "experts", "ends")}
    shapes = {"tokens": (12, 8), "experts": (3, 8, 6), "ends": (3,)}
    for name, node in value.items():
        node.meta["val"] = torch.empty(shapes[name], device="meta")
    product = graph.call_function(torch.ops.aten._grouped_mm.default, tuple(value.values()))
    product.meta["val"] = torch.empty(12, 6, device="meta")
    assert flops(product) == 2 * 12 * 8 * 6


SETUP = """
import torch
from torch import nn

def setup():
    return (lambda: nn.Linear(64, 64)), (lambda model, x: model(x).square().mean()), (torch.empty(1, 64),)
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine_to_plan.py").write_text(SETUP)
    monkeypatch.chdir(tmp_path)
    assert main("plan --model mine_to_plan:setup --gpus 4xRTX4090 --batch 8 --json ways.json --most 3".split()) == 0
    said = capsys.readouterr().out
    assert "4 x rtx4090, nodes of 4" in said and "policy = Policy(" in said and "more" in said
    assert "MixedPrecisionPolicy(torch.bfloat16" in said
    assert json.loads((tmp_path / "ways.json").read_text())["inputs"]["gpus"] == "4xrtx4090"
    assert main("plan --model mine_to_plan:setup --gpus 4xRTX4090 --batch 8 --precision float32".split()) == 0
    assert "MixedPrecisionPolicy" not in capsys.readouterr().out


def test_rows_that_are_not_tried_are_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--rows", "3"])
    assert "3 is not tried; expected some of 1, 2, 4, 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--gpus many", "expected a number and a name"),
        ("--gpus 12xH100", "no whole number of nodes of 8"),
        ("--gpus 8xH900", "No GPU 'h900' is known"),
        ("--nic fast", "expected one such as 400Gb/s"),
        ("--dollars 2", "say how much is trained"),
        ("--model nobody/nothing", "nothing is fetched"),
        ("--batch 7 --tp 1", "No way that is tried divides ranks and batch"),
    ],
)
def test_what_is_refused(options: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options.split()]) == 2
    assert why in capsys.readouterr().err


def test_the_errors_that_are_printed_are_the_published_ones() -> None:
    file = RESULTS / "published.json"
    report = json.loads(file.read_text())
    judged = report["summary"]["judged, all"]
    assert (round(judged["median"], 2), round(judged["worst"], 2)) == ERROR
    assert {*JUDGED} == {row["gpu"] for row in report["rows"] if row["fit"] == "no"}
    assert len(report["rows"]) == len(published.rows()) == 105
    assert {row["fit"] for row in report["rows"]} == {"yes", "no"}
    row = published.rows()[-1]
    assert gpus(row["gpu"]).capacity and published.measured(row) > 0
    again = published.judged(row, published.Predicted(row))
    assert again["predicted seconds"] == pytest.approx(report["rows"][-1]["predicted seconds"], rel=0.02)


def test_policies_as_code() -> None:
    assert policy_text(Policy(shard="ddp")) == "Policy(shard='ddp')" and plan_search.FEW < plan_search.MORE


def test_every_tensor_of_a_batch_is_repeated_and_tokens_are_found_inside() -> None:
    batch = (torch.tensor(1.0), {"x": torch.zeros(1, 64, dtype=torch.int64)})
    source = _Source((None, None, batch), 2048)
    scale, rest = source.made(0, 8)[2]
    assert scale is batch[0] and rest["x"].shape == (8, 64) and source.tokens(8) == 512
    with pytest.raises(ValueError, match="has no tensor with rows"):
        _Source((None, None, (torch.tensor(1.0),)), 2048).tokens(8)
    with pytest.raises(ValueError, match="node is 0; expected the number of GPUs of a node"):
        fsdp_compiled.plan(llama(), "2xH100", node=0)  # type: ignore[operator]
