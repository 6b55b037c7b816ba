"""`fsdp-compiled simulate`: what a step would take, hold and send on ranks that one does not have."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy
from fsdp_compiled.cli.gpt import GPT, VOCABULARY, GPTConfig, next_byte_loss
from fsdp_compiled.cli.options import check_heads, file_to_write, positive, whole
from fsdp_compiled.plan.hardware import GBIT, HARDWARE, bits, gpus, with_network
from fsdp_compiled.runtime.simulate import Estimate, simulate, this_cpu

P = TypeVar("P", bound="Preset")
SIZES = ("layers", "width", "heads", "context", "batch", "vocabulary")  # of a preset


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    mesh = parser.add_argument_group("the ranks")
    mesh.add_argument("--ranks", type=whole, default=8, metavar="N", help="all of them (%(default)s)")
    mesh.add_argument("--replicate", type=whole, default=1, metavar="N", help="replicas: HSDP (%(default)s)")
    mesh.add_argument(
        "--tp", type=whole, default=1, metavar="N",
        help="ranks that the model is cut over, by the plan that it brings or one that is derived (%(default)s)",
    )  # fmt: skip
    mesh.add_argument("--hardware", choices=tuple(HARDWARE), default="gpu", help="what ranks are (%(default)s)")
    mesh.add_argument("--node", type=whole, metavar="N", help="ranks of a node (8 GPUs)")
    mesh.add_argument(
        "--nic", type=bits, metavar="RATE",
        help="what a node's NICs carry together, such as 400Gb/s, or 8x400Gb/s (the usual of such a GPU)",
    )  # fmt: skip
    mesh.add_argument("--network-gbps", type=positive, metavar="X", help="gigabits a second from and to each rank")
    mesh.add_argument("--inner-gbps", type=positive, metavar="X", help="the same along tp, where it has its own wire")

    model = parser.add_argument_group("the model and one rank's batch")
    model.add_argument("--preset", choices=tuple(PRESETS), default="small", help="one of bench's (%(default)s)")
    model.add_argument(
        "--setup", metavar="MODULE:FUNCTION",
        help="one of your own: the function returns (model_fn, loss, batch), as fsdp_compiled.simulate takes them; "
        "MODULE is found from the current folder",
    )  # fmt: skip
    model.add_argument("--microbatches", type=whole, default=1, metavar="N", help="how many make a step (%(default)s)")
    for name, about in (
        ("layers", "blocks"), ("width", "size of the residual stream"), ("heads", "attention heads"),
        ("context", "tokens in a row"), ("batch", "rows a rank sees in a step"), ("vocabulary", "tokens (llama)"),
    ):  # fmt: skip
        model.add_argument(f"--{name}", type=whole, metavar="N", help=f"{about} (by preset)")

    policy = parser.add_argument_group("how it is trained")
    policy.add_argument(
        "--shard", choices=("zero3", "zero2", "zero1", "ddp"), default="zero3", help="what is sharded (%(default)s)"
    )
    policy.add_argument(
        "--reshard-onto",
        type=whole,
        metavar="N",
        help="ranks, as of a node, over which a unit stays cut until backward",
    )
    policy.add_argument("--half", action="store_true", help="compute in bfloat16, reduce in float32")
    policy.add_argument(
        "--recompute",
        choices=("auto", "cheap", "unit"),
        default="auto",
        help="what backward makes again (%(default)s)",
    )

    parser.add_argument("--program", action="store_true", help="print the program too")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="also write the figures there")


def run_simulate(options: argparse.Namespace, _: Sequence[str]) -> int:
    if options.ranks % (options.replicate * options.tp):
        raise ValueError(
            f"--ranks {options.ranks} are no whole number of --replicate {options.replicate} times --tp {options.tp}"
        )
    if options.inner_gbps is not None and options.tp == 1:
        raise ValueError("--inner-gbps is the wire along tp; say how many ranks that is: --tp 8")
    if options.network_gbps is not None and (options.node is not None or options.nic is not None):
        raise ValueError(
            "--network-gbps is what each rank has for itself, and --node and --nic say it of nodes; give one of both"
        )
    if options.setup is not None and (given := [name for name in SIZES if getattr(options, name) is not None]):
        raise ValueError(f"--{given[0]} is of a preset's model, and --setup brings its own")
    model_fn, loss, batch = setup_of(options.setup) if options.setup is not None else _preset(options)
    machine = HARDWARE[options.hardware]
    if machine.gpu:
        machine = gpus(options.hardware, options.node or machine.node, options.nic)
    else:
        machine = replace(machine, node=options.node or machine.node, network=options.nic or machine.network)
    machine = with_network(machine, options.network_gbps, options.tp)
    if options.inner_gbps is not None:
        machine = replace(machine, inner=options.inner_gbps * GBIT)
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.half else None
    policy = Policy(
        shard=options.shard,
        reshard_onto=options.reshard_onto,
        tp="auto" if options.tp > 1 else None,
        recompute=options.recompute,
        **({"precision": precision} if precision is not None else {}),
    )
    shape = {
        "replicate": options.replicate,
        "shard": options.ranks // options.replicate // options.tp,
        "tp": options.tp,
    }
    shape = {axis: size for axis, size in shape.items() if size > 1 or axis == "shard"}
    found = simulate(model_fn, loss, batch, shape, machine, policy, microbatches=options.microbatches)
    if not machine.gpu:
        found = found.on(this_cpu(found.plan))
    if options.json is not None:
        options.json.write_text(json.dumps(figures(found), indent=1) + "\n")
    where = f"{options.ranks} ranks ({', '.join(f'{axis} {size}' for axis, size in shape.items())})"
    print(f"simulated: {where}, {options.hardware}\n{found}", *[f"\n{found.program}"] * options.program, sep="\n")
    return 0


LANES = ("compute", "network", "replicate", "tp", "from the host", "to the host")


def figures(found: Estimate) -> dict[str, Any]:
    return {
        "seconds": found.seconds,
        "exposed seconds": found.exposed,
        "busy seconds": {lane: found.busy(lane) for lane in LANES},
        "sent": {axis: {"collectives": count, "bytes": size} for axis, (count, size) in found.sent.items()},
        "bytes between steps": found.memory.persistent.total,
        "bytes at the peak": found.memory.peak.nbytes,
    }


def _preset(options: argparse.Namespace) -> tuple[Callable[[], Any], Any, tuple[Any, ...]]:
    preset = sized(PRESETS[options.preset], **{name: getattr(options, name) for name in SIZES})
    tokens = torch.empty(preset.batch, preset.context, dtype=torch.int64)
    return preset.model, preset.loss, (tokens, tokens)


def setup_of(setup: str, option: str = "--setup") -> tuple[Callable[[], Any], Any, tuple[Any, ...]]:
    """The result of the user's function that the option names."""
    module, _, name = setup.partition(":")
    if not module or not name:
        raise ValueError(f"{option} is {setup!r}; expected MODULE:FUNCTION, such as my_model:setup")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} {setup}: {error}") from error
    finally:
        sys.path.pop(0)
    made = function()
    if not (isinstance(made, tuple) and len(made) == 3 and callable(made[0]) and isinstance(made[2], tuple)):
        raise ValueError(f"{option} {setup} returned {type(made).__name__}; expected (model_fn, loss, batch), a tuple")
    return made


@dataclass(frozen=True)
class Preset:
    """A model and one rank's batch."""

    layers: int
    width: int
    heads: int
    context: int  # tokens in a row
    batch: int  # rows of a rank
    vocabulary: int = VOCABULARY
    llama: bool = False

    def model(self) -> nn.Module:
        return _llama(self) if self.llama else GPT(GPTConfig(self.layers, self.width, self.heads, self.context))

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.llama:
            return model(input_ids=tokens, labels=tokens).loss  # which shifts the labels itself
        return next_byte_loss(model, tokens, targets)


def _llama(preset: Preset) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=preset.vocabulary,
        hidden_size=preset.width,
        intermediate_size=preset.width * 11 // 4,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=max(1, preset.heads // 2),
        max_position_embeddings=preset.context,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


PRESETS = {
    "thin": Preset(24, 64, 4, 32, 1),
    "small": Preset(4, 256, 4, 128, 4),
    "large": Preset(6, 512, 8, 128, 4),
    "llama": Preset(6, 256, 8, 128, 2, vocabulary=2048, llama=True),
}


def sized(preset: P, **sizes: int | None) -> P:
    """The preset with some of its numbers replaced; refuses what cannot be built."""
    preset = replace(preset, **{name: value for name, value in sizes.items() if value is not None})  # type: ignore[arg-type]
    check_heads(preset.width, preset.heads)
    if preset.llama and importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "--preset llama needs transformers, which is not installed: pip install 'fsdp-compiled[bench]'"
        )
    return preset
