"""Loops that need no adapter, or more than is installed everywhere, each with FSDP2 and with this package.

other_loops.py RESULT NAME ...
"""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import integrations
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from integrations import VOCABULARY, WIDTH, Net, as_new, digest, folder, rows, switch

import fsdp_compiled as ours
from tests.launch import answer

API = {"FSDP2": theirs, "ours": ours}
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def own_rows(count: int) -> list[torch.Tensor]:
    """This rank's, [3, 6] each."""
    given = torch.stack(rows(6 * count)).view(count, 2, 3, 6)
    return list(given[:, dist.get_rank()])


def fabric(face: str) -> list[Any]:
    """Lightning Fabric: mixed precision, accumulation, clipping, a checkpoint, meta initialisation."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def parallelize(model: Any, mesh: Any) -> Any:
        for layer in model.layers:
            API[face].fully_shard(layer, mesh=mesh["data_parallel"])
        return API[face].fully_shard(model, mesh=mesh["data_parallel"])

    found: list[Any] = []
    for precision, empty in (("32-true", False), ("bf16-mixed", True)):
        strategy = ModelParallelStrategy(
            parallelize, data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=not empty
        )
        one = Fabric(accelerator="cpu", devices=2, precision=precision, strategy=strategy)
        one.launch()

        def made(one: Any = one, empty: bool = empty) -> tuple[Any, Any]:
            torch.manual_seed(0)
            with one.init_module(empty_init=empty):
                model = Net()
            model = one.setup(model)
            torch.manual_seed(0)
            for module in model.modules():
                if empty and hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            return model, one.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))

        def train(model: Any, optimizer: Any, data: list[torch.Tensor], one: Any = one) -> None:
            for step, tokens in enumerate(data):
                with one.no_backward_sync(model, enabled=step % 2 == 0):
                    loss = loss_of(model, tokens)
                    one.backward(loss)
                if step % 2:
                    found.append(float(one.clip_gradients(model, optimizer, max_norm=1.0)))
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(float(one.all_reduce(loss.detach())))
            found.append(digest(model.module))

        data = own_rows(6)
        model, optimizer = made()
        assert isinstance(model.module, ours.FSDPModule) == (face == "ours")
        train(model, optimizer, data[:4])
        path = folder() + "/checkpoint"
        one.save(path, {"model": model, "optimizer": optimizer, "step": 4})
        model, optimizer = made()
        state = {"model": model, "optimizer": optimizer, "step": 0}
        one.load(path, state)
        train(model, optimizer, data[4:])
        found.append(state["step"])
    return found


def lightning_trainer(face: str) -> list[Any]:
    """Lightning's Trainer: `configure_model`, validation, logging, accumulation, checkpoints, resuming."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    seen: list[Any] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None

        def configure_model(self) -> None:
            if self.model is None:
                torch.manual_seed(0)
                self.model = Net()
                for layer in self.model.layers:
                    API[face].fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                API[face].fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
            loss = loss_of(self.model, tokens)
            seen.append(loss.item())
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, tokens: torch.Tensor, _: int) -> None:
            self.log("validation", loss_of(self.model, tokens), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    there = folder()
    data = rows(32)
    for epochs, path in ((2, None), (3, f"{there}/last.ckpt")):
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, max_epochs=epochs, accumulate_grad_batches=2, log_every_n_steps=1,
            logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=there,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            callbacks=[ModelCheckpoint(dirpath=there, save_last=True)],
        )  # fmt: skip
        module = Module()
        trainer.fit(module, DataLoader(data[:24], batch_size=3), DataLoader(data[24:], batch_size=4), ckpt_path=path)
        assert isinstance(module.model, ours.FSDPModule) == (face == "ours")
        seen += [digest(module.model), {name: value.item() for name, value in trainer.callback_metrics.items()}]
    return seen


def peft(face: str) -> list[Any]:
    """LoRA by peft: dropout, adapters switched off, `generate`, adapters saved."""
    from peft import LoraConfig, get_peft_model
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from transformers import LlamaConfig, LlamaForCausalLM

    api = API[face]
    torch.manual_seed(0)
    lora = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model: Any = get_peft_model(LlamaForCausalLM(LlamaConfig(**LLAMA)), lora)
    for layer in model.base_model.model.model.layers:
        api.fully_shard(layer)
    api.fully_shard(model)
    api.register_fsdp_forward_method(model, "generate")
    torch.manual_seed(5 + dist.get_rank())
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    found: list[Any] = []
    for tokens in own_rows(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    model.eval()
    with torch.no_grad():
        found.append(model(input_ids=tokens, labels=tokens).loss.item())
        with model.disable_adapter():
            found.append(model(input_ids=tokens, labels=tokens).loss.item())
        text = model.generate(input_ids=tokens[:1, :3], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    saved = get_model_state_dict(model, options=options)
    return [*found, text.tolist(), digest(model), {name: value.sum().item() for name, value in saved.items()}]


def trl(face: str) -> list[Any]:
    """TRL's SFT, with evaluation, and DPO with its reference."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    drawn = random.Random(0)
    words = [f"w{number}" for number in range(28)]

    def text(length: int) -> str:
        return " ".join(drawn.choice(words) for _ in range(length))

    def model() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**LLAMA))

    numbers = {word: place for place, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    reader = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    common: dict[str, Any] = {
        "output_dir": folder(), "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "learning_rate": 1e-2, "seed": 7, "disable_tqdm": True, "bf16": False,
        "dataloader_pin_memory": False, "gradient_checkpointing": False, "max_length": 16, "fsdp": "full_shard",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }  # fmt: skip
    plain = Dataset.from_list([{"text": text(6)} for _ in range(16)])
    pairs = [{"prompt": text(3), "chosen": f" {text(3)}", "rejected": f" {text(3)}"} for _ in range(16)]

    def tuned() -> Any:
        as_new()
        arguments = SFTConfig(**common, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=2)
        yield SFTTrainer(
            model(), arguments, train_dataset=plain, eval_dataset=plain.select(range(4)), processing_class=reader
        )
        as_new()
        yield DPOTrainer(
            model(), model(), DPOConfig(**common), train_dataset=Dataset.from_list(pairs), processing_class=reader
        )

    found: list[Any] = []
    for trainer in tuned():
        trainer.remove_callback(PrinterCallback)
        switch(face, trainer)
        trainer.train()
        assert isinstance(trainer.model, ours.FSDPModule) == (face == "ours")
        timed = ("runtime", "per_second", "flos")
        for line in trainer.state.log_history:
            found.append({name: value for name, value in line.items() if not any(one in name for one in timed)})
        found.append(digest(trainer.model))
    return found


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    integrations.LOOPS |= {loop.__name__: loop for loop in (fabric, lightning_trainer, peft, trl)}
    answer(integrations.main)
