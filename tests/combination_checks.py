"""What must hold of a combination: its numbers beside eager PyTorch, what it sends, and that each field acted."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from fsdp_compiled import Program
from fsdp_compiled.ir.nodes import gathered, is_collective, role_of
from fsdp_compiled.ir.program import Port
from tests.combinations import BLOCKS, DTYPES, Case, Reference, build, reference
from tests.simulate import Simulation


def distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


def furthest(case: Case, simulation: Simulation, theirs: Reference, start: dict[str, torch.Tensor]) -> float:
    """The largest relative error of losses, of the last norm and of parameters; in short formats, of their updates."""
    found = [abs(mine.item() / other - 1) for mine, other in zip(simulation.losses, theirs.losses, strict=True)]
    found.append(abs(simulation.norms[-1].item() / theirs.norms[-1] - 1))
    for name, value in simulation.parameters.items():
        origin = 0.0 if case.precision == "fp32" else start[name]
        found.append(distance(value - origin, theirs.parameters[name] - origin))
    return max(found)


def check_numbers(case: Case, simulation: Simulation) -> None:
    start = {name: value.detach().clone() for name, value in build()[0].named_parameters()}
    theirs = reference(case, start)
    assert furthest(case, simulation, theirs, start) < case.bound
    assert simulation.replicas_agree
    assert not any(free.any() for free in simulation.padding)
    if theirs.scale is not None:
        assert theirs.overflows == 1, "the first step has to overflow"
        for rank in simulation.ranks:
            assert rank.values[Port("in", "scale", "factor")].item() == theirs.scale
            assert rank.values[Port("in", "scale", "overflows")].item() == 1


def sent(program: Program, kind: str) -> list[fx.Node]:
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and is_collective(node)]
    return [node for node in nodes if kind in str(node.target)]


def check_wire(case: Case, program: Program, kind: str) -> None:
    """As many collectives as the placement asks for, in the dtype of the precision, and one message for the rest."""
    units, dtype = BLOCKS + 1, DTYPES[case.precision]
    inside = {"zero3": 2 * units - 1, "zero2": units, "zero1": units, "ddp": 0}[case.shard]
    reduces = kind != "microbatch" or case.accumulate != "full"
    scatters = case.shard in ("zero3", "zero2")
    gathers, reductions = (
        sent(program, "all_gather"),
        [node for node in program.marked("reduce") if is_collective(node)],
    )
    reports = [node for node in sent(program, "all_reduce") if role_of(node) == "norm"]
    axes = 1 + (case.mesh[1] > 1)
    assert len(gathers) == inside
    assert Counter("scatter" if "scatter" in str(node.target) else "all" for node in reductions) == Counter(
        {"scatter": units * reduces * scatters, "all": units * reduces * (axes - scatters)}
    )
    assert len(reports) == (axes if kind != "microbatch" else 0)
    assert len(gathers) + len(reductions) + len(reports) == len(sent(program, ""))
    assert {node.all_input_nodes[0].meta["val"].dtype for node in gathers + reductions} <= {dtype}
    packet = 8 + (case.precision == "fp16")  # loss, squares, three parts of the call and their squares
    assert {tuple(node.meta["val"].shape) for node in reports} <= {(packet,)}


def check_acted(case: Case, program: Program, kind: str) -> None:
    """The fields of the policy show in the program."""
    text = program.text()
    assert ("scale" in program.history) == (case.precision == "fp16")
    if kind != "microbatch":
        assert text.count("aten.clamp(") == {None: 0, "norm": 1, "value": BLOCKS + 1}[case.clip]
        assert text.count("aten.linalg_vector_norm(") == (BLOCKS + 1) * (1 + (case.precision == "fp16"))
    held = {node for nodes in gathered(program.graph).values() for node in nodes}
    crossing = {
        node
        for node in program.graph.nodes
        if node.op == "call_function"
        and node.meta["phase"] == "forward"
        and node not in held
        and node.meta.get("path", "").startswith("blocks.")
        and any(user.op == "call_function" and user.meta["phase"] == "backward" for user in node.users)
    }
    assert bool(crossing) == (case.recompute is None)
