"""What is trained: models of four sizes, and batches from which something can be learnt.

A *preset* is a model and its batch, and how often it is stepped. *Blocks* are what FSDP2 is applied to one by one,
and what becomes a unit each in this package.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compiled.cli.gpt import GPT, VOCABULARY, GPTConfig, next_byte_loss

Batch = tuple[Tensor, Tensor]  # tokens and targets, [rows, context] int64


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    layers: int
    width: int
    heads: int
    context: int  # tokens in a row
    batch: int  # rows a rank sees in a step
    rounds: int
    steps: int  # a rival takes in a round
    vocabulary: int = VOCABULARY
    llama: bool = False

    def model(self) -> nn.Module:
        return _llama(self) if self.llama else GPT(GPTConfig(self.layers, self.width, self.heads, self.context))

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.llama:
            return model(input_ids=tokens, labels=tokens).loss  # which shifts the labels itself
        return next_byte_loss(model, tokens, targets)

    @property
    def tp(self) -> Any:
        """`Policy.tp`: the plan that Llama brings; of our GPT (q, k and v are one matrix) the feed-forward alone."""
        return "auto" if self.llama else {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def blocks(self, model: Any) -> list[nn.Module]:
        return list(model.model.layers if self.llama else model.layers)

    def batches(self, world: int, seed: int, count: int) -> list[Batch]:
        """Whole batches, [world * batch, context]: each token follows from the one before it."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for _ in range(count):
            column = torch.randint(self.vocabulary, (world * self.batch,), generator=generator)
            columns = [column]
            for _ in range(self.context):
                column = (5 * column + 1) % self.vocabulary
                columns.append(column)
            rows = torch.stack(columns, 1)
            made.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
        return made

    def __str__(self) -> str:
        kind = "Llama" if self.llama else "GPT"
        return f"{kind}, {self.layers} layers of width {self.width}, {self.batch} x {self.context} tokens a rank"


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
    preset.name: preset
    for preset in (
        Preset("thin", "many small layers: overhead", 24, 64, 4, 32, 1, rounds=12, steps=5),
        Preset("small", "few layers of a middling width", 4, 256, 4, 128, 4, rounds=12, steps=2),
        Preset("large", "compute and memory", 6, 512, 8, 128, 4, rounds=6, steps=1),
        Preset("llama", "a LlamaForCausalLM of transformers", 6, 256, 8, 128, 2, 10, 2, vocabulary=2048, llama=True),
    )
}


def sized(preset: Preset, **sizes: int | None) -> Preset:
    """The preset with some of its numbers given; refuses what cannot be built."""
    preset = replace(preset, **{name: value for name, value in sizes.items() if value is not None})  # type: ignore[arg-type]
    if preset.width % preset.heads or preset.width // preset.heads % 2:
        raise ValueError(
            f"--width {preset.width} over --heads {preset.heads}: each head needs the same, even size; "
            f"try --width {2 * preset.heads * max(1, round(preset.width / preset.heads / 2))}"
        )
    if preset.llama and importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "--preset llama needs transformers, which is not installed: pip install 'fsdp-compiled[bench]'"
        )
    return preset


def rows_of_rank(batch: Batch, rank: int, rows: int) -> Batch:
    """A rank's rows of a whole batch."""
    tokens, targets = (part[rank * rows : (rank + 1) * rows].contiguous() for part in batch)
    return tokens, targets


def on_device(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    return [(tokens.to(device), targets.to(device)) for tokens, targets in batches]
