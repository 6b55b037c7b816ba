"""What `gpu_step` trains: models, their batches, what they compute in, and their loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled.cli.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Preset:
    """A model, its batch, and what it computes in."""

    model: Callable[[bool], nn.Module]
    blocks: str
    batch: int
    length: int
    dtype: torch.dtype


def thin(tiny: bool) -> nn.Module:
    return GPT(GPTConfig(layers=2 if tiny else 24, width=64, heads=4, context=16 if tiny else 32))


def gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 16} if tiny else {}
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, **small))
    model.loss_type = "ForCausalLM"
    return model


def llama(tiny: bool) -> nn.Module:
    """The shapes of Llama 3.2 1B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, heads, inner, vocabulary = (2, 32, 4, 64, 128) if tiny else (16, 2048, 32, 8192, 128256)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads // 4,
            intermediate_size=inner, vocab_size=vocabulary, tie_word_embeddings=True, use_cache=False,
        )
    )  # fmt: skip


PRESETS = {
    "thin": Preset(thin, "layers", 1, 32, torch.float32),
    "gpt2": Preset(gpt2, "transformer.h", 4, 1024, torch.bfloat16),
    "llama": Preset(llama, "model.layers", 4, 1024, torch.bfloat16),
}


@dataclass(frozen=True)
class Setting:
    preset: Preset
    device: torch.device
    tiny: bool

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with self.device:
            return self.preset.model(self.tiny).train()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule(self.preset.blocks).children())

    @property
    def precision(self) -> MixedPrecisionPolicy:
        if self.preset.dtype == torch.float32:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self.preset.dtype, reduce_dtype=torch.float32)

    def batches(self, count: int) -> list[Tensor]:
        """Tokens; two batches by turns, so that the losses fall."""
        rows, length = (1, 16) if self.tiny else (self.preset.batch, self.preset.length)
        vocabulary = 100 if self.tiny else 256
        generator = torch.Generator().manual_seed(1)
        two = [torch.randint(vocabulary, (rows, length), generator=generator).to(self.device) for _ in range(2)]
        return [two[index % 2] for index in range(count)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    if hasattr(model, "config"):  # of transformers
        return model(input_ids=tokens, labels=tokens).loss
    logits = model(tokens)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
