"""`fsdp-compiled plan`: which machines and which policy, before they are rented."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_compiled.cli.options import file_to_write, positive, whole
from fsdp_compiled.cli.simulate import setup_of
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.plan_search import ROWS, plan

TRIED = ", ".join(map(str, ROWS))  # rows of a microbatch, and ranks along tp

# What is needed to build models of public configurations where nothing is on this machine, from each model's
# config.json. Layers, width, feed-forward, heads, key-value heads, vocabulary.
LLAMAS = {
    "meta-llama/llama-2-7b": (32, 4096, 11008, 32, 32, 32000),
    "meta-llama/llama-2-13b": (40, 5120, 13824, 40, 40, 32000),
    "meta-llama/llama-2-70b": (80, 8192, 28672, 64, 8, 32000),
    "meta-llama/llama-3-8b": (32, 4096, 14336, 32, 8, 128256),
    "meta-llama/llama-3-70b": (80, 8192, 28672, 64, 8, 128256),
    "meta-llama/llama-3-405b": (126, 16384, 53248, 128, 8, 128256),
    "mistralai/mistral-7b": (32, 4096, 14336, 32, 8, 32000),
}


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="meta-llama/Llama-3-8B", metavar="MODEL",
        help="a config.json of transformers or its folder, the name of a model whose configuration is on this machine "
        f"or one of {', '.join(LLAMAS)}, or MODULE:FUNCTION, which returns (model_fn, loss, batch of one row) "
        "(%(default)s)",
    )  # fmt: skip
    parser.add_argument("--gpus", default="8xH100", metavar="NxNAME", help="how many of which (%(default)s)")
    parser.add_argument("--node", type=whole, default=8, metavar="N", help="GPUs of a node (%(default)s)")
    parser.add_argument(
        "--nic", metavar="RATE", help="what a node's NICs carry together: 400Gb/s, 8x400Gb/s (the usual of such a GPU)"
    )
    parser.add_argument("--seq", type=whole, default=8192, metavar="N", help="tokens in a row (%(default)s)")
    parser.add_argument("--batch", type=whole, metavar="N", help="rows of a step, over all GPUs (one microbatch each)")
    parser.add_argument(
        "--precision", choices=("bfloat16", "float32"), default="bfloat16",
        help="what is computed and gathered in; gradients are reduced in float32 (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--memory", type=positive, metavar="GIB", help="of a GPU that a step may use (its own, less 2)")
    parser.add_argument("--tokens", type=positive, metavar="N", help="to train on, such as 1e12: for days and cost")
    parser.add_argument("--dollars", type=positive, metavar="X", help="of a GPU's hour: for the cost")
    for name, about in (("tp", "ranks that the model is cut over"), ("rows", "rows of a microbatch")):
        parser.add_argument(f"--{name}", type=_numbers, default=ROWS, metavar="N,N", help=f"{about}, of {TRIED} (all)")
    parser.add_argument("--most", type=whole, default=12, metavar="N", help="rows of the table (%(default)s)")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="also write inputs and all ways there")
    parser.add_argument("--picture", type=file_to_write, metavar="FILE", help="also draw them (needs matplotlib)")


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(map(whole, text.split(",")))
    if odd := {*found} - {*ROWS}:
        raise argparse.ArgumentTypeError(f"{min(odd)} is not tried; expected some of {TRIED}")
    return found


def run_plan(options: argparse.Namespace, _: Sequence[str]) -> int:
    if options.dollars is not None and options.tokens is None:
        raise ValueError("--dollars is of an hour; say how much is trained: --tokens 1e12")
    if options.picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--picture needs matplotlib, which is not installed: pip install 'fsdp-compiled[train]'")
    found = plan(
        model_of(options.model), options.gpus, options.node, options.nic, seq=options.seq, batch=options.batch,
        memory=options.memory, tokens=options.tokens, dollars=options.dollars, picture=options.picture is not None,
        ways=lambda way: way.tp in options.tp and way.rows in options.rows, processes=2,
        policy=Policy() if options.precision == "float32" else None,
    )  # fmt: skip
    print("\n".join(found.lines(options.most)), flush=True)
    if options.json is not None:
        options.json.write_text(found.json() + "\n")
    if options.picture is not None:
        found.picture(options.picture)
    return 0


def model_of(given: str) -> Any:
    """A configuration, or what a user's function returns."""
    path = Path(given)
    if ":" in given and not path.exists():
        return setup_of(given, "--model")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--model needs transformers, which is not installed: pip install 'fsdp-compiled[bench]'")
    import transformers

    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        try:
            read = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {given}: {error}") from error
        if (kind := read.pop("model_type", None)) is None:
            raise ValueError(f"--model {given} has no model_type, by which transformers finds the model's class.")
        return transformers.AutoConfig.for_model(kind, **read)
    known = LLAMAS.get(given.lower().replace("3.1-", "3-").removesuffix("-hf").removesuffix("-v0.1"))
    if known is not None:
        layers, width, ffn, heads, groups, vocabulary = known
        return transformers.LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=ffn, num_attention_heads=heads,
            num_key_value_heads=groups, vocab_size=vocabulary, max_position_embeddings=8192, name_or_path=given,
        )  # fmt: skip
    try:
        return transformers.AutoConfig.from_pretrained(given, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {given}: its configuration is not on this machine, and nothing is fetched. Give its config.json, "
            f"or one of {', '.join(LLAMAS)}."
        ) from error
