"""How long a first step of models of transformers takes, by family and depth, and which of their blocks are traced.

    python -m bench.family_starts bench/results/family-starts.json --beside ../before

In seconds of processor time of one process, which a shared machine hardly moves, with the eager lowering and nothing on
disk: models of width 32 with random weights, as their own classes make them, that train with dropout, each in a process
of its own. The first step of a smaller model of the same family comes before, since it imports what is imported late.
``--cache``: with the cache of keys and values that models keep unless told not to (``use_cache``), too. ``--beside``:
another checkout of the package, measured in turns with this one; it need not know this command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LAYERS = (12,)
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
WIDTH = {**TOKENS, "hidden_size": 32, "num_attention_heads": 2}
DECODER = {**WIDTH, "num_key_value_heads": 2, "intermediate_size": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip
SIDES = {
    **TOKENS, "d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "decoder_start_token_id": 0,
}  # fmt: skip
DEPTH, BOTH = ("num_hidden_layers",), ("encoder_layers", "decoder_layers")
# By family: the class of the model, of its config, the sizes of that, and what says how deep it is.
FAMILIES: dict[str, tuple[str, str, Mapping[str, Any], Sequence[str]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, DEPTH),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {**TOKENS, "n_embd": 32, "n_head": 2, "n_positions": 64}, ("n_layer",)),
    "OPT": (
        "OPTForCausalLM", "OPTConfig",
        {**WIDTH, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}, DEPTH,
    ),
    "Mistral": ("MistralForCausalLM", "MistralConfig", DECODER, DEPTH),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 16}, DEPTH),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 16}, DEPTH),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4}, DEPTH),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**DECODER, **EXPERTS, **LATENT}, DEPTH),
    "BERT": ("BertForMaskedLM", "BertConfig", {**WIDTH, "intermediate_size": 64}, DEPTH),
    "ViT": (
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 16, "patch_size": 4,
         "num_labels": 3}, DEPTH,
    ),
    "T5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "decoder_start_token_id": 0},
        ("num_layers", "num_decoder_layers"),
    ),
    "BART": ("BartForConditionalGeneration", "BartConfig", {**SIDES, "max_position_embeddings": 64}, BOTH),
    "Whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {**SIDES, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}, BOTH,
    ),
}  # fmt: skip
NO_CACHE = ("BERT", "ViT")  # which know none


def first_step(family: str, layers: int, cache: bool) -> dict[str, Any]:
    import torch
    import transformers

    from fsdp_compiled import Policy, compile_sharded

    def loss(model: Any, batch: Mapping[str, Any]) -> Any:
        return model(**batch).loss

    kind, config, sizes, depth = FAMILIES[family]
    targets = torch.randint(1, 64, (2, 12))
    batch: dict[str, Any] = {"input_ids": targets, "labels": targets}
    if family == "ViT":
        batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 3, (2,))}
    if family == "Whisper":
        batch = {"input_features": torch.randn(2, 8, 16), "labels": targets}
    if family not in NO_CACHE:
        batch["use_cache"] = cache

    def step(count: int) -> float:
        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes, **dict.fromkeys(depth, count)))
        model.loss_type = getattr(model, "loss_type", None) or "ForCausalLM"
        optimizer = torch.optim.AdamW(model.train().parameters())
        begun = time.process_time()
        sharded = compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))
        sharded.step(batch)
        return time.process_time() - begun

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    step(2)
    told = _Told()
    seconds = step(layers)
    return {"family": family, "layers": layers, "cache": cache, "seconds": round(seconds, 2), "why": told.why}


class _Told(logging.Handler):
    """Why blocks are traced one by one, as the package says it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.why: list[str] = []
        log = logging.getLogger("fsdp_compiled")
        log.addHandler(self)
        log.setLevel(logging.INFO)
        log.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "equal" in text and (said := re.sub(r"^.*?(?=is traced|equal)", "", text)) not in self.why:
            self.why.append(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cache", action="store_true")
    parser.add_argument("--beside", type=Path, help="another checkout, whose figures stand beside this one's")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        family, layers, cache = arguments.one
        arguments.out.write_text(json.dumps(first_step(family, int(layers), cache == "True")))
        return
    import torch
    import transformers

    found: dict[str, list[dict[str, Any]]] = {}
    load = os.getloadavg()[1]
    places = {"now": Path.cwd()} | ({"beside": arguments.beside.absolute()} if arguments.beside else {})
    caches = (False, True) if arguments.cache else (False,)
    for cache, family, layers in itertools.product(caches, arguments.families, arguments.layers):
        if cache and family in NO_CACHE:
            continue
        best: dict[str, dict[str, Any]] = {}
        for _, (name, checkout) in itertools.product(range(arguments.rounds), places.items()):
            row = _one(family, layers, cache, checkout)
            print(name, row, flush=True)
            best[name] = min(best.get(name, row), row, key=lambda one: one["seconds"])
        for name, row in best.items():
            found.setdefault(name, []).append(row)
    record = {
        "command": f"python -m bench.family_starts {arguments.out} --rounds {arguments.rounds}"
        + f" --layers {' '.join(map(str, arguments.layers))} --families {' '.join(map(repr, arguments.families))}"
        + " --cache" * arguments.cache
        + f" --beside {arguments.beside}" * bool(arguments.beside),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__
        },
        "load average": [round(load, 1), round(os.getloadavg()[1], 1)],  # of five minutes, before and after
        "seconds of processor time": found,
    }  # fmt: skip
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


def _one(family: str, layers: int, cache: bool, checkout: Path) -> dict[str, Any]:
    """In a process of its own, with empty caches, by the package of that checkout."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "row.json")
        changed = {"TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
        command = [sys.executable, "-P", str(Path(__file__).absolute()), str(place)]
        command += ["--one", family, str(layers), str(cache)]
        subprocess.run(command, env=os.environ | changed, check=True, cwd=checkout)
        return json.loads(place.read_text())  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
