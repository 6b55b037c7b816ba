"""What a replayed step launches: ``python -m bench.launches`` writes `results/launches-8b.txt`.

For each unit and phase of Llama 3 8B on 8 H100s, a row of 8,192 tokens a rank: kernels, the bytes that they read and
write (of a collective, those of its whole result), and the time that a roofline gives them. From the program on fake
tensors, fusions included: a product is a kernel, and so is what Inductor is taken to fuse between two of them
(`analysis.roofline`). Nothing is run. What a profile of the first run on a GPU has more of is worth a look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench import RESULTS
from fsdp_compiled import Policy, simulate
from fsdp_compiled.analysis import roofline
from fsdp_compiled.cli.plan import model_of
from fsdp_compiled.ir.nodes import carried, computes, is_collective
from fsdp_compiled.ir.text import where
from fsdp_compiled.lower.partition import segments
from fsdp_compiled.lower.piece import Piece
from fsdp_compiled.plan.text import fold, human
from fsdp_compiled.runtime.plan_search import of_config
from fsdp_compiled.runtime.simulate import Estimate

MODEL, RANKS, TOKENS, GPU = "meta-llama/Llama-3-8B", 8, 8192, "h100"
HEAD = f"{'':<10}{'unit':<18}{'what':<12}{'kernels':>8}{'bytes':>12}{'time':>12}"


def launched(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, int, int]]:
    """The nodes that take part in a kernel: what it is, 1 where it is a kernel's first, and bytes."""
    runs = roofline._in_runs(graph, roofline._size)
    for node in graph.nodes:
        if node.op == "call_function" and is_collective(node):
            yield node, "collectives", 1, max(carried(node))
        elif node in runs:
            nbytes, first = runs[node]
            yield node, "fused", int(first), nbytes
        elif computes(node):
            what = "products" if roofline.flops(node) else "others"
            yield node, what, 1, roofline._traffic(node, roofline._size)


def pieces_of(found: Estimate, whole: bool) -> dict[fx.Node, int]:
    """The number of each node's piece. ``whole``: the pieces of one block and phase, between which collectives start or
    are waited for, count as one."""
    numbers: dict[fx.Node, int] = {}
    place, number = ("", ""), 0
    for piece in segments(found.program.graph, found.plan.blocks):
        if isinstance(piece, Piece):
            own = piece.nodes[-1].meta["phase"], where(piece.nodes[-1])
            number += not whole or own != place
            place = own
            numbers |= dict.fromkeys(piece.nodes, number)
    return numbers


def fused_in(found: Estimate, pieces: dict[fx.Node, int]) -> tuple[int, int]:
    """The kernels and the bytes of what is fused inside of these pieces."""
    runs = roofline._in_runs(found.program.graph, roofline._size, pieces).values()
    return sum(first for _, first in runs), sum(nbytes for nbytes, _ in runs)


def cuttings(found: Estimate) -> list[str]:
    lines = [f"{'fused by Inductor':<32}{'pieces':>8}{'kernels':>8}{'bytes':>12}"]
    for name, whole in (("cut at collectives, as it runs", False), ("blocks whole in each phase", True)):
        pieces = pieces_of(found, whole)
        kernels, nbytes = fused_in(found, pieces)
        lines.append(f"{name:<32}{len({*pieces.values()}):>8}{kernels:>8}{human(nbytes):>12}")
    return lines


def table(found: Estimate) -> list[str]:
    seconds = {span.node: span.end - span.start for span in found.timeline.nodes if span.lane != "wait"}
    rows: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for node, what, kernels, nbytes in launched(found.program.graph):
        for row in (rows[node.meta["phase"], where(node), what], sums[what]):
            for place, value in enumerate((kernels, nbytes, seconds.get(node.name, 0.0))):
                row[place] += value
    lines = [_line(*key, *row) for key, row in rows.items() if row[0] or row[1]]
    return [HEAD, *fold(lines), "", HEAD, *(_line("step", "", what, *row) for what, row in sums.items())]


def _line(phase: str, unit: str, what: str, kernels: float, nbytes: float, taken: float) -> str:
    return f"{phase:<10}{unit:<18}{what:<12}{int(kernels):>8}{human(int(nbytes)):>12}{f'{taken * 1e3:.3f} ms':>12}"


def main() -> None:
    model_fn, loss, batch = of_config(model_of(MODEL), 0, 1, TOKENS)
    policy = Policy(precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    found = simulate(model_fn, loss, batch, RANKS, GPU, policy)
    head = [
        f"python -m bench.launches: {MODEL} on {RANKS} x {GPU}, 1 row of {TOKENS} tokens a rank, torch "
        f"{torch.__version__}; estimates, nothing was run",
        f"a step: {found.seconds * 1e3:.4g} ms, of which {found.exposed * 1e3:.4g} ms are waiting; "
        f"{sum(node.op == 'call_function' for node in found.program.graph.nodes)} nodes",
        "",
    ]
    (RESULTS / "launches-8b.txt").write_text("\n".join([*head, *table(found), "", *cuttings(found)]) + "\n")


if __name__ == "__main__":
    main()
