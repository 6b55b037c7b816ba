"""Predictions beside what others measured and published: ``python -m bench.published``.

Reads `results/published.csv`, predicts each row, and writes `results/published.json`: the errors of the rows that the
figures of `plan.hardware.ACHIEVED` were fitted on, and of all others, which they were not. ``--fit`` fits anew and
prints what it finds.

Rows are trained as their authors did it: mixed precision with FSDP's defaults, blocks gathered one by one, a unit
ahead, no CUDA graph. MPT is taken for GPT-2 with its sizes, which differs from it in biases and positions. Attention is
causal.

Source: ``llm-foundry``: https://github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md (Composer with
FSDP1; A100 nodes joined by 1600 Gb/s of RoCE). Fitted on MPT-1b, 7b and 13b on one node each.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench import RESULTS
from fsdp_compiled import Policy
from fsdp_compiled.plan import hardware
from fsdp_compiled.runtime.simulate import Estimate, traced

DEPTHS = (4, 6)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Row = dict[str, str]


def rows() -> list[Row]:
    with (RESULTS / "published.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def model_of(row: Row, depth: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=int(row["vocab"]), n_positions=int(row["seq"]), n_embd=int(row["width"]),
            n_layer=depth, n_head=int(row["heads"]), n_inner=int(row["ffn"]), activation_function="gelu",
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())


class Predicted:
    """A step of this row: the model `DEPTHS` blocks deep, from which a line leads to all of its blocks."""

    def __init__(self, row: Row) -> None:
        self.row, self.depth = row, int(row["layers"])
        self.made = [estimated(row, depth) for depth in DEPTHS]

    def at(self, figure: Callable[[Estimate], float]) -> float:
        one, other = map(figure, self.made)
        return one + (other - one) * (self.depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

    def seconds(self) -> float:
        """On the figures of the hardware as they are now."""
        cluster = hardware.gpus(self.row["gpu"])
        return self.at(lambda one: one.on(cluster).seconds)


def estimated(row: Row, depth: int) -> Estimate:
    policy = Policy(
        shard=row["shard"],
        precision=MixedPrecisionPolicy(torch.bfloat16, DTYPES[row["reduce"]]),
        recompute=row["recompute"] or None,
        lower="inductor" if row["compiled"] == "yes" else "eager",
        bucket_mb=0,
        prefetch=1,
        cuda_graph=False,
        kernels=False,
    )
    tokens = torch.empty(int(row["rows"]), int(row["seq"]), dtype=torch.int64, device="meta")
    cluster, ranks = hardware.gpus(row["gpu"]), int(row["gpus"])
    with traced(lambda: model_of(row, depth), loss_of, (tokens, tokens), {"shard": ranks}, cluster, policy) as step:
        return step.estimate(policy, ranks, 1, cluster, int(row["microbatches"]))


def measured(row: Row) -> float:
    """Seconds of a step."""
    tokens = int(row["rows"]) * int(row["seq"]) * int(row["microbatches"])
    return tokens / float(row["tokens_per_s_per_gpu"])


def judged(row: Row, found: Predicted) -> dict[str, Any]:
    seconds, said = measured(row), found.at(lambda one: one.seconds)
    names = ("model", "gpu", "gpus", "seq", "rows", "microbatches", "fit")
    return {name: row[name] for name in names} | {
        "measured seconds": seconds,
        "predicted seconds": said,
        "error": said / seconds - 1,
        "exposed": found.at(lambda one: one.exposed) / said,
        "predicted peak GiB": found.at(lambda one: one.memory.peak.nbytes) / hardware.GIB,
    }


def summary(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Errors in size, of the fitted rows and of the others, by GPU and of all."""
    made = {}
    for fit in ("yes", "no"):
        for gpu in ("all", *sorted({one["gpu"] for one in found})):
            errors = [abs(one["error"]) for one in found if one["fit"] == fit and gpu in ("all", one["gpu"])]
            if errors:
                name = f"{'fitted' if fit == 'yes' else 'judged'}, {gpu}"
                made[name] = {"rows": len(errors), "median": median(errors), "worst": max(errors)}
    return made


def fitted(known: Sequence[Predicted], start: hardware.Achieved, promised: str) -> hardware.Achieved:
    """The parts with the least mean square of the logarithm of predicted over measured, coordinate by coordinate."""

    def cost(part: hardware.Achieved) -> float:
        hardware.ACHIEVED[promised] = part  # type: ignore[index]
        errors = [math.log(one.seconds() / measured(one.row)) for one in known]
        return sum(error**2 for error in errors) / len(errors)

    best, least, step = start, cost(start), 0.2
    while step > 0.02:
        moved = False
        for name in best._fields:
            for factor in (1 + step, 1 / (1 + step)):
                tried = best._replace(**{name: min(getattr(best, name) * factor, 1.0)})
                if (found := cost(tried)) < least * 0.999:
                    best, least, moved = tried, found, True
                    break
        if not moved:
            step /= 2
    hardware.ACHIEVED[promised] = best  # type: ignore[index]
    return best


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"{'':22}{'rows':>6}{'median':>9}{'worst':>9}"
    for name, figures in summary(found).items():
        yield f"{name:22}{figures['rows']:>6}{figures['median']:>9.1%}{figures['worst']:>9.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit anew on the rows that are for it")
    chosen = parser.parse_args()
    if chosen.fit:
        for promised in ("a100", "h100"):
            own = [row for row in rows() if row["fit"] == "yes" and hardware.GPUS[row["gpu"]].like == promised]
            known = list(map(Predicted, own))
            print(promised, fitted(known, hardware.ACHIEVED[promised], promised))
        return
    found = [judged(row, Predicted(row)) for row in rows()]
    report = {"summary": summary(found), "rows": found}
    (RESULTS / "published.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
