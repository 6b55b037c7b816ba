"""As torchtitan trains: a model on the meta device, checkpointed blocks, mixed precision, prefetching, a warm-up.

torchrun --nproc-per-node 2 examples/pretraining.py
"""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from toy import GPT, batch, loss_of, say, say_weights

from fsdp_compiled import fully_shard

MICROBATCHES, WARM_UP = 2, 2

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
with torch.device("meta"):
    model = GPT(depth=3)
for index, layer in enumerate(model.layers):
    model.layers[index] = checkpoint_wrapper(layer)

config = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
fully_shard(model.embed, **config)
blocks = [fully_shard(layer, **config) for layer in model.layers]
fully_shard([model.norm, model.head], **config, reshard_after_forward=False)
fully_shard(model, **config)
for block, later in itertools.pairwise(blocks):
    block.set_modules_to_forward_prefetch([later])
    later.set_modules_to_backward_prefetch([block])

model.to_empty(device="cpu")
torch.manual_seed(0)
for module in model.modules():
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=True)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
for step in range(3):
    optimizer.zero_grad()
    total = torch.zeros(())
    for micro in range(MICROBATCHES):
        tokens, targets = batch(MICROBATCHES * step + micro)
        loss = loss_of(model(tokens).float(), targets) / MICROBATCHES
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    schedule.step()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    say("step", step, "loss", total.item(), "norm", norm.full_tensor().item())
say_weights(model)
dist.destroy_process_group()
