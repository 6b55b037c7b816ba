"""Two models that are trained against each other by alternating updates: a GAN.

torchrun --nproc-per-node 2 examples/adversarial.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from toy import say, say_weights

from fsdp_compiled import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
for model in (generator, critic):
    fully_shard(model)

generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
drawn = torch.Generator().manual_seed(dist.get_rank())
for step in range(4):
    noise, real = torch.randn(6, 4, generator=drawn), torch.randn(6, 8, generator=drawn)

    critic_optimizer.zero_grad()
    made = generator(noise)
    critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
    critic_loss.backward()
    critic_optimizer.step()

    generator_optimizer.zero_grad()
    generator_loss = F.softplus(-critic(made)).mean()  # through the critic that was just updated
    generator_loss.backward()
    generator_optimizer.step()
    say("step", step, "critic", critic_loss.item(), "generator", generator_loss.item())
say_weights(generator)
say_weights(critic, "critic")
dist.destroy_process_group()
