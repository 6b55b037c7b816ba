"""Loops of other frameworks, each with FSDP2 and with this package; what rank 0 would print, for both.

integrations.py RESULT NAME ...
"""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compiled import FSDPModule
from tests.launch import answer

VOCABULARY, WIDTH = 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rows(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (6,), generator=generator) for _ in range(count)]


def digest(model: nn.Module) -> str:
    """Of the bits of all weights."""
    bits = hashlib.sha256()
    for value in model.state_dict().values():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        bits.update(whole.detach().double().numpy().tobytes())
    return bits.hexdigest()[:16]


def folder() -> str:
    """A new one, the same on all ranks."""
    made = [tempfile.mkdtemp()]
    dist.broadcast_object_list(made)
    return made[0]


def as_new() -> None:
    """Accelerators share their state, which tells who came first."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState(cpu=True)


def switch(face: str, user: Any, **options: Any) -> None:
    """To ours; or to FSDP2, which accelerate does not turn on by itself on CPUs."""
    from fsdp_compiled.integrations import accelerate as adapter

    if face == "FSDP2":
        adapter._enable_on_cpus(getattr(user, "accelerator", user), user, options.get("plugin"))
    else:
        adapter.use_fully_shard(user, **options)


def accelerated(face: str, lr: float = 1e-2, precision: str = "no", once: bool = False, **options: Any) -> list[Any]:
    """Accumulation, clipping, schedule; `save_state`, `load_state`, `unwrap_model`, `get_state_dict`, `save_model`."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from torch.utils.data import DataLoader

    as_new()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"], **options
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2, mixed_precision=precision)
    switch(face, accelerator, plugin=plugin)
    torch.manual_seed(0)
    model: Any = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(rows(32), batch_size=4), schedule
    )
    assert isinstance(model, FSDPModule) == (face == "ours")
    found: list[Any] = [type(model).__name__]

    def epoch() -> None:
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found.append(accelerator.gather(loss.detach()[None]).tolist())
        found.append(digest(model))

    epoch()
    if once:
        return found
    there = folder()
    accelerator.save_state(there)
    epoch()
    accelerator.load_state(there)
    epoch()
    assert found[-1] == found[-1 - (len(found) - 1) // 3], "load_state did not bring the saved state back"
    plain = accelerator.unwrap_model(model)
    whole = accelerator.get_state_dict(model)
    accelerator.save_model(model, f"{there}/weights")
    accelerator.wait_for_everyone()
    names = sorted(str(one.relative_to(there)) for one in Path(there).rglob("*") if one.suffix != ".distcp")
    return [*found, isinstance(plain, Net), {name: list(value.shape) for name, value in whole.items()}, names]


def half(face: str) -> list[Any]:
    return accelerated(face, precision="bf16", activation_checkpointing=True)


def efficient(face: str) -> list[Any]:
    """Weights on rank 0 alone, and saved whole; parameters stay gathered."""
    return accelerated(
        face, cpu_ram_efficient_loading=True, state_dict_type="FULL_STATE_DICT", reshard_after_forward=False
    )


def trained(face: str) -> list[Any]:
    """The Trainer of transformers: evaluation, logging, checkpoints, resuming, `generate`, `save_model`."""
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

    there = folder()
    data = [{"input_ids": row, "labels": row} for row in rows(28)]

    def trainer() -> Trainer:
        as_new()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            attn_implementation="eager",  # the others ask whether they are traced, and then mask in another way
        )  # fmt: skip
        arguments = TrainingArguments(
            output_dir=there, use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=4,
            gradient_accumulation_steps=2, logging_steps=1, save_steps=2, eval_strategy="steps", eval_steps=2,
            report_to=[], learning_rate=1e-2, seed=7, disable_tqdm=True, dataloader_pin_memory=False,
            fsdp="full_shard", fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        )  # fmt: skip
        made = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data[:24], eval_dataset=data[24:])
        made.remove_callback(PrinterCallback)
        switch(face, made)
        return made

    def logged(one: Trainer) -> list[Any]:
        shown = ("step", "loss", "grad_norm", "eval_loss", "learning_rate")
        return [{name: value for name, value in line.items() if name in shown} for line in one.state.log_history]

    first, second = trainer(), trainer()
    first.train()
    assert isinstance(first.model, FSDPModule) == (face == "ours")
    second.train(resume_from_checkpoint=f"{there}/checkpoint-2")
    assert digest(first.model) == digest(second.model), "what was resumed ended elsewhere"
    found = [*logged(first), *logged(second), digest(second.model), second.evaluate()["eval_loss"]]
    second.model.eval()
    tokens = second.model.generate(data[0]["input_ids"][None], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    second.save_model(f"{there}/final")
    dist.barrier()
    found += [tokens.tolist(), digest(LlamaForCausalLM.from_pretrained(f"{there}/final"))]
    return [*found, sorted(str(one.relative_to(there)) for one in Path(there).rglob("*.*"))]


def translated() -> list[Any]:
    """The Seq2SeqTrainer, which evaluates by `generate`, of a T5, whose embedding both halves and the head have in
    common: FSDP2 refuses it. What it generates and its loss, and those of the trained weights in one process."""
    from transformers import PrinterCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config
    from transformers import T5ForConditionalGeneration as T5

    as_new()
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0, dropout_rate=0.0, initializer_factor=4.0,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows(16)]
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder(), use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=2,
        report_to=[], learning_rate=1e-2, seed=7, disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no",
        predict_with_generate=True, generation_max_length=6, generation_num_beams=2,
        fsdp="full_shard", fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["T5Block"]},
    )  # fmt: skip
    made = Seq2SeqTrainer(T5(config), arguments, train_dataset=data[:8], eval_dataset=data[8:])
    made.remove_callback(PrinterCallback)
    switch("ours", made)
    before = digest(made.model)
    made.train()
    assert digest(made.model) != before
    found = made.predict(data[8:])
    plain = T5(config).eval()
    plain.load_state_dict({name: one.full_tensor() for name, one in made.model.state_dict().items()})
    tokens = torch.stack(rows(16)[8:])
    expected = plain.generate(tokens, max_length=6, num_beams=2)
    loss = plain(input_ids=tokens, labels=tokens).loss.item()
    shown = [found.predictions[:, : expected.shape[1]].tolist(), found.metrics["test_loss"]]
    return [shown, [expected.tolist(), loss], int(found.predictions[:, expected.shape[1] :].sum())]


def broken() -> list[Any]:
    """An epoch of this package, with another rate: what must be told apart from FSDP2's."""
    return accelerated("ours", lr=1.01e-2, once=True)[1:]


LOOPS = {loop.__name__: loop for loop in (accelerated, half, efficient, trained)}


def main(*names: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {name: {face: LOOPS[name](face) for face in ("FSDP2", "ours")} for name in names}
    return found | {"broken": broken(), "translated": translated() if torch.__version__ >= "2.13" else None}


if __name__ == "__main__":
    answer(main)
