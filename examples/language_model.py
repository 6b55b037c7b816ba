"""A model of Hugging Face transformers: training by its own loss, evaluation, and ``generate`` with a cache.

torchrun --nproc-per-node 2 examples/language_model.py
"""

import torch
import torch.distributed as dist
from toy import VOCABULARY, WIDTH, batch, say, say_weights
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_compiled import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
model = LlamaForCausalLM(config)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    tokens, _ = batch(step)
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say("step", step, "loss", output.loss.item(), "class", type(output).__name__)

model.eval()
with torch.no_grad():
    tokens, _ = batch(100)
    say("evaluation", model(input_ids=tokens, labels=tokens).loss.item())
    text = model.generate(tokens[:, :3], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    say("generated", text.flatten().tolist())
say_weights(model)
dist.destroy_process_group()
