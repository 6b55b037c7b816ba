"""What `simulate` says of machines: collectives by where an axis lies, a GPU's program, its traffic and its memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, simulate
from fsdp_compiled.analysis import roofline
from fsdp_compiled.analysis.kernel_workspace import in_kernel
from fsdp_compiled.analysis.roofline import is_attention, seconds_of
from fsdp_compiled.analysis.timeline import estimate
from fsdp_compiled.cli.gpt import GPT, GPTConfig, next_byte_loss
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import role_of
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.hardware import CPU, GBIT, GPUS, HARDWARE, NCCL, Cluster, bits, gpus, machine_of
from fsdp_compiled.runtime.simulate import Estimate, Traced, traced

HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
H100 = gpus("h100")


@cache
def step(gpu: bool, precision: MixedPrecisionPolicy) -> Traced:
    """What `simulate` captures; programs for other meshes, policies and GPUs are made from it."""
    tokens, policy = torch.zeros(2, 512, dtype=torch.int64), Policy(precision=precision)
    with traced(
        lambda: GPT(GPTConfig(4, 512, 4, 512)), next_byte_loss, (tokens, tokens), {"replicate": 1, "shard": 8},
        HARDWARE["gpu" if gpu else "cpu"], policy,
    ) as found:  # fmt: skip
        return found


@cache
def gpt(
    hardware: str = "h100", shape: tuple[int, int] = (1, 8), microbatches: int = 1,
    precision: MixedPrecisionPolicy = HALF, **policy: Any,
) -> Estimate:  # fmt: skip
    replicate, shard = shape
    chosen = Policy(precision=precision, bucket_mb=0, **policy)
    cluster = HARDWARE[hardware]
    return step(cluster.gpu, precision).estimate(chosen, shard, replicate, cluster, microbatches)


def test_a_ring_goes_at_the_rate_of_its_slowest_link() -> None:
    far = replace(H100, network=4e10, node=8)
    assert far.link(8) == H100.inner and far.link(64) == 4e10  # a node's NICs carry one ring
    assert far.link(8, stride=8) == 4e10 / 8  # and here one for each rank of the node
    assert far.link(4, stride=2) == H100.inner and far.link(8, stride=2) == 4e10 / 2
    large = 1e10
    assert far.transfer(large, 8) == pytest.approx(large * 7 / 8 / H100.inner, rel=0.01)
    assert far.transfer(large, 64, both=True) == pytest.approx(2 * far.transfer(large, 64), rel=0.01)


def test_latency_grows_with_hops_and_an_all_reduce_has_trees() -> None:
    small = [H100.transfer(1024, ranks) for ranks in (2, 8, 64, 16384)]
    assert small == sorted(small) and small[0] < 1e-5 and small[-1] > 1e-3
    base, near, far = NCCL[0].ring
    assert H100.transfer(0, 64) == pytest.approx(base + 56 * near + 7 * far)
    assert H100.transfer(1024, 16384, both=True) < 0.1 * H100.transfer(1024, 16384)
    assert CPU.transfer(0, 4) == CPU.transfer(0, 4096) == CPU.latency  # where one is given it is taken


@pytest.mark.parametrize("name", sorted(GPUS))
def test_each_gpu_is_monotone_in_bytes_ranks_and_slowness(name: str) -> None:
    cluster = gpus(name)
    for one, other in (((1e6, 8), (1e7, 8)), ((1e8, 8), (1e8, 16)), ((1e8, 64), (1e8, 512))):
        assert cluster.transfer(*one) < cluster.transfer(*other)
    assert gpus(name, nic=cluster.network / 2).transfer(1e9, 64) > cluster.transfer(1e9, 64)
    assert GPUS[name].source and cluster.peak is not None and cluster.rate(torch.bfloat16) < cluster.peak
    assert cluster.rate(torch.float32) < cluster.rate(torch.bfloat16) == cluster.rate(torch.float16)
    assert 0 < (cluster.capacity or 0) < GPUS[name].gib * 2**30


def test_rates_as_people_write_them() -> None:
    assert bits("400Gb/s") == 400 * GBIT and bits("8x400Gb/s") == 3200 * GBIT and bits("25 gbps") == 25 * GBIT
    assert bits("50GB/s") == bits("400 GBIT/S") == bits("0.4Tb/s") == 400 * GBIT  # a large B is of bytes
    for wrong in ("fast", "0Gb/s", "400GB/s/s"):
        with pytest.raises(ValueError, match="expected one such as 400Gb/s"):
            bits(wrong)
    with pytest.raises(ValueError, match="No GPU 'h900' is known"):
        gpus("h900")


def test_choices_go_by_the_model_that_simulate_goes_by() -> None:
    assert machine_of(torch.device("cuda")) == HARDWARE["gpu"] == gpt("gpu").plan.machine
    slow = machine_of(torch.device("cuda"), network=100, tp=4)
    assert slow.link(16, stride=4) == 100 * GBIT and slow.link(4) == H100.inner


def test_a_gpu_has_a_gpus_program_and_nccls_memory() -> None:
    """It was that of a CPU: gloo's copies were counted, and no kernel of the package's was there."""
    plan, text = gpt().plan, gpt().program.text()
    assert plan.kernels and plan.device.type == "cuda" and "fsdp_compiled." in text
    assert "wire" not in gpt().memory.at_peak()
    on_cpu = gpt("cpu")
    assert not on_cpu.plan.kernels and on_cpu.plan.device.type == "cpu"
    assert on_cpu.memory.at_peak()["wire"] > 0


def test_flash_attentions_float32_sums_are_counted() -> None:
    found = gpt(lower="eager").program
    backward = next(n for n in found.graph.nodes if is_attention(n) and "backward" in str(n.target))
    assert in_kernel(backward) == 4 * 2 * 512 * 512 + 4 * 2 * 512 * 4


def test_arithmetics_dtype_counts() -> None:
    whole = gpt(precision=MixedPrecisionPolicy())
    assert whole.busy("compute") > 2 * gpt().busy("compute")


def test_of_causal_attention_half_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node for node in gpt().program.graph.nodes if is_attention(node)]
    assert len(nodes) == 8
    causal = [roofline.flops(node) for node in nodes]
    monkeypatch.setattr(roofline, "_causal", lambda node: False)
    assert [roofline.flops(node) for node in nodes] == [2 * count for count in causal]


def test_what_inductor_fuses_is_read_and_written_once() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (nn.Linear(1024, 1024, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(F.gelu(self.first(x)) * 2 + 1)

    found = simulate(
        Chain, lambda model, x: model(x).sum(), (torch.empty(65536, 1024),), 8, "h100", Policy(recompute=None)
    )
    machine, size = found.plan.machine, 65536 * 1024 * 4
    forward = [node for node in found.program.graph.nodes if node.meta.get("phase") == "forward"]
    chain = [
        node for node in forward if str(node.target) in ("aten.gelu.default", "aten.mul.Tensor", "aten.add.Tensor")
    ]
    together, apart = (
        dict(zip(found.program.graph.nodes, seconds_of(found.program.graph, machine, fused))) for fused in (True, False)
    )
    assert len(chain) == 3
    assert sum(apart[node] for node in chain) == pytest.approx(6 * size / machine.memory / machine.eager)
    assert sum(together[node] for node in chain) == pytest.approx(2 * size / machine.memory, rel=0.01)


def test_an_all_reduce_is_two_on_the_wire() -> None:
    found = gpt(shard="ddp", precision=MixedPrecisionPolicy())
    parameters = sum(buffer.numel for buffer in found.plan.buffers)
    assert found.sent["shard"][1] == pytest.approx(8 * parameters, rel=0.01)


def test_offload_takes_the_link_beside_compute() -> None:
    kept, away = gpt(lower="eager"), gpt(lower="eager", offload=True)
    crossing = away.memory.persistent.host / away.plan.machine.host  # one way, in the update alone
    there, back = away.busy("to the host"), away.busy("from the host")
    assert there == pytest.approx(crossing) and back > 1.5 * crossing  # to gathers, too
    assert away.seconds > kept.seconds + crossing  # an update takes less than its copies
    apart = estimate(waited_for_at_once(away.program), away.plan)  # the control
    assert away.exposed - kept.exposed < 0.6 * (apart.end - apart.busy("compute") - kept.exposed)
    assert away.seconds < apart.end - 0.4 * (there + back)


def waited_for_at_once(program: Program) -> Program:
    """With each copy from or to the host in compute's own time."""
    edit = Edit(program)
    for role in ("fetch", "return"):
        for start in [edit.map[node] for node in program.marked(role)]:  # type: ignore[arg-type]
            (wait,) = (user for user in start.users if role_of(user) in ("restored", "stored"))
            if role == "fetch":
                edit.move([start], before=wait)
            else:
                edit.move([wait], before=start.next)
    return edit.done("waited for at once")


def test_a_host_that_is_slower_than_the_kernels_is_waited_for() -> None:
    launched, graph = gpt(lower="eager", cuda_graph=False), gpt(lower="eager")
    assert graph.plan.graphed and launched.seconds > 2 * graph.seconds
    assert launched.busy("compute") == pytest.approx(graph.busy("compute"))


def test_microbatches_are_added_up() -> None:
    one, four = gpt(), gpt(microbatches=4)
    assert 3 * one.seconds < four.seconds < 4.2 * one.seconds
    assert four.memory.persistent.sums > 0 and four.memory.persistent.total > one.memory.persistent.total
    assert four.sent["shard"][0] > 3 * one.sent["shard"][0] - 10
    whole = gpt(microbatches=4, accumulate="full")
    assert whole.sent["shard"][1] < four.sent["shard"][1]  # which reduces once
    assert whole.memory.persistent.sums == pytest.approx(8 * four.memory.persistent.sums, rel=0.01)


def test_replicas_win_where_nodes_are_far() -> None:
    """They had one rate for both axes, and could not win."""
    flat, replicas = (gpt(shape=shape, precision=MixedPrecisionPolicy()) for shape in ((1, 64), (8, 8)))
    assert replicas.timeline.busy("replicate") > 0
    far = replace(H100, network=1e9)
    ends = [estimate(one.program, replace(one.plan, machine=far)).end for one in (flat, replicas)]
    assert ends[1] < 0.7 * ends[0]


def test_exposed_is_between_nothing_and_all_that_is_sent() -> None:
    for one in (gpt(), gpt(shape=(8, 8)), gpt(shard="zero2"), gpt(prefetch=0), gpt(microbatches=4)):
        lanes = sum(one.busy(lane) for lane in ("network", "replicate", "tp"))
        assert 0 <= one.exposed <= lanes + 1e-9


def test_a_given_cluster_is_a_cpus_unless_it_says_so() -> None:
    given = Cluster(flops=1e12, memory=1e11, network=1e9, latency=1e-4)
    found = replace(given, gpu=True)
    for cluster, kind in ((given, "cpu"), (found, "cuda")):
        made = simulate(
            lambda: nn.Linear(64, 64), lambda model, x: model(x).sum(), (torch.empty(8, 64),), 2, cluster, Policy()
        )
        assert made.plan.device.type == kind


def test_a_group_of_the_models_own_is_as_far_apart_as_it_can_be() -> None:
    plan = replace(gpt(shape=(2, 8)).plan, shard=8, replicate=2)
    size = 1e9
    assert plan.transfer(size, "group 0 of 2 ranks") == plan.transfer(size, "replicate")  # between two nodes
    assert plan.transfer(size, "all 16 ranks") == plan.machine.transfer(size, 16, 1)
