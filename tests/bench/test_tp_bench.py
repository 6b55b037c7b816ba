"""A fast network inside of nodes and a slow one between: what is simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from bench import tables
from bench.estimates import add_estimates, machine
from bench.network import Inner, Network
from bench.options import BenchOptions, bench_options
from bench.presets import PRESETS
from bench.start import selection
from bench.summary import ratio
from fsdp_compiled.cli import parser
from fsdp_compiled.cli.simulate import sized


class Done(dist._Work):
    pass


def test_groups_inside_of_a_node_have_a_wire_of_their_own() -> None:
    inner = Inner(gigabits_per_second=8.0, ranks=2)
    assert inner.holds([2, 3]) and not inner.holds([1, 2]) and not inner.holds([0, 1, 2, 3])
    network = Network(1e6, 0.5, inner=inner)
    for ranks in ([0, 2], [0, 1], [0, 2], [0, 1]):
        network.send("allgather", 1_000_000, Done(), ranks)
    sent = network.take()
    outside, inside = ([one for one in sent if one.inner == where] for where in (False, True))
    for pair, seconds in ((outside, 0.5 + 1.0), (inside, 0.5 + 1e-3)):
        assert [one.end - one.start for one in pair] == pytest.approx([seconds] * 2)
        assert pair[1].start == pair[0].end  # one wire, one at a time
    assert inside[1].start < outside[0].end  # and neither waits for the other


def test_what_the_options_refuse() -> None:
    with pytest.raises(ValueError, match="--node 2 --network-gbps 1 --inner-gbps 20"):
        bench_options(parser("bench").parse_args(["bench", "--inner-gbps", "20", "--network-gbps", "1"]))
    with pytest.raises(ValueError, match="ours-tp-eager treats the ranks of a node apart"):
        selection(BenchOptions(rivals=("ours-tp-eager",), lower="eager"))
    assert not [rival for rival in selection(BenchOptions(lower="eager"))[1] if rival.tp]


def test_simulate_is_given_the_same_network() -> None:
    found = machine(BenchOptions(network_gbps=1.0, inner_gbps=8.0, node=2, latency_ms=1.0))
    assert (found.network, found.inner) == (1.25e8, 1e9) and found.latency > 1e-3


def test_where_nodes_are_far_apart_simulate_says_that_tensor_parallelism_wins() -> None:
    """And the control: where nodes are as near as the ranks in them, it does not."""
    preset = sized(PRESETS["small"], layers=1, batch=1, context=16)
    seconds = []
    for between in (0.1, 20.0):
        found: dict[str, Any] = {
            "conditions": {"world": 4, "device": "cpu", "threads a rank": 1},
            "rivals": {"ours-eager": {}, "ours-tp-eager": {}, "ddp": {}},
        }
        add_estimates(found, BenchOptions(network_gbps=between, inner_gbps=20.0, node=2), preset)
        rivals = found["rivals"]
        assert rivals["ddp"] == {}
        assert rivals["ours-tp-eager"]["simulated"]["lanes"]["tp"] > 0
        seconds.append([rivals[name]["simulated"]["seconds"] for name in ("ours-tp-eager", "ours-eager")])
    assert seconds[0][0] < 0.8 * seconds[0][1]
    assert seconds[1][0] > 0.9 * seconds[1][1]


def test_the_committed_results_say_where_it_wins_and_simulate_says_the_same() -> None:
    results = {name: found for name, found in tables.load().items() if name in tables.NODES}
    if not results:
        pytest.skip("not measured yet: python -m bench.run_all far-nodes near-nodes")
    far, near = (results[name]["rivals"] for name in tables.NODES)
    for pure in ("fsdp2", "ours-eager"):
        assert ratio(results["far-nodes"], "ours-tp-eager", pure, "wall") < 0.8
    said = [
        found["ours-tp-eager"]["simulated"]["seconds"] / found["ours-eager"]["simulated"]["seconds"]
        for found in (far, near)
    ]
    assert said[0] < 0.8 and said[1] > 0.9
