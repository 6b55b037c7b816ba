"""The training job, as one rank runs it."""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.analysis.contained import attempt
from fsdp_compiled.cli.data import (
    IGNORED,
    Windows,
    held_out_windows,
    load_corpus,
    rank_batches,
    train_windows,
    unigram_loss,
)
from fsdp_compiled.cli.gpt import GPT, GPTConfig, decay_groups, next_byte_loss
from fsdp_compiled.cli.journal import Journal, Record
from fsdp_compiled.cli.options import TrainOptions
from fsdp_compiled.cli.progress import Progress, Silent, progress
from fsdp_compiled.cli.rank import STOPPED, RankInfo, Ranks, Stop, began
from fsdp_compiled.cli.report import configuration, curve, printable, save, table
from fsdp_compiled.cli.sample import first_line, generate

# Validation and sampling share one shape, so the forward is compiled once. Few rows, because each sampled
# byte costs a whole forward.
ROWS = 4
VALIDATION_WINDOWS = 256
SAMPLE_BYTES = 300


class Job:
    """A model in training and everything beside it. Rank 0 alone owns the journal and writes to the run
    folder."""

    def __init__(self, options: TrainOptions, here: RankInfo) -> None:
        self.began = began()
        self.options, self.here = options, here
        self.stop = Stop()
        torch.manual_seed(options.seed)
        corpus = load_corpus(options.data)
        self.windows = train_windows(corpus, options.context, options.batch, here.world)
        tokens, targets = held_out_windows(corpus, options.context, VALIDATION_WINDOWS)
        self.held_out = rank_batches(tokens, targets, ROWS, here.rank, here.world)
        self.unigram = unigram_loss(corpus.train, targets)
        self.prompt = first_line(corpus.held_out) if options.prompt is None else options.prompt.encode()

        config = GPTConfig(options.layers, options.width, options.heads, options.context)
        with here.device:
            self.model = GPT(config)
        size = sum(parameter.numel() for parameter in self.model.parameters())
        optimizer = torch.optim.AdamW(decay_groups(self.model, options.weight_decay), lr=options.lr, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, options))

        self.journal: Journal | None = None
        self.progress: Progress = Silent()
        if here.first:
            self._open(f"{corpus}", size)
        assert options.lower is not None
        policy = Policy(shard=options.shard, lower=options.lower, clip=options.clip or None)
        self.sharded = compile_sharded(self.model, optimizer, loss=next_byte_loss, policy=policy)
        self.ranks = Ranks()
        self.pace = Pace(options.batch * options.context * here.world)

    def _open(self, corpus: str, size: int) -> None:
        options, out = self.options, self.options.out
        assert out is not None
        out.mkdir(parents=True, exist_ok=True)
        facts = {
            "world": self.here.world,
            "device": str(self.here.device.type),
            "parameters": size,
            "corpus": corpus,
        }
        (out / "config.json").write_text(json.dumps(configuration(options, **facts), indent=2) + "\n")
        print(f"text: {corpus}")
        print(
            f"model: {size / 1e6:.2f}M parameters, {options.layers} layers of width {options.width}, "
            f"{options.context} bytes of context"
        )
        print(
            f"ranks: {self.here.world} on {self.here.device.type}, {options.batch} windows each a step; "
            f"shard {options.shard}, lower {options.lower}",
            flush=True,
        )
        self.journal = Journal(out)
        self.progress = progress(options.steps, options.batch * options.context * self.here.world)

    def run(self) -> bool:
        """All steps; False if the run was asked to stop before the last."""
        options = self.options
        every = options.validate_every or max(1, options.steps // 10)
        logged = 1 if self.here.device.type == "cpu" else 10  # reading a loss makes the host wait for the GPU
        self.progress.say("step 1: capturing the model and compiling the step; the slowest one ...")
        batches = self._batches()
        self.pace.start()
        for step in range(1, options.steps + 1):
            tokens, targets = next(batches)
            lr = self.schedule.get_last_lr()[0]
            loss = self.sharded.step(tokens, targets)
            self.schedule.step()
            validating = step % every == 0 or step == options.steps
            if validating or step == 1 or step % logged == 0:
                self._log(step, loss, lr, validating)
            if self.stop.agreed(self.ranks) and step < options.steps:
                self.progress.say(f"stopped after step {step} of {options.steps}, as asked")
                return False
        return True

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's batches [batch, context], epoch after epoch."""
        options, here = self.options, self.here
        sampler: DistributedSampler[Windows] = DistributedSampler(
            self.windows, here.world, here.rank, seed=options.seed, drop_last=True
        )
        loader = DataLoader(self.windows, options.batch, sampler=sampler, drop_last=True)
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            for tokens, targets in loader:
                yield tokens.to(here.device), targets.to(here.device)
            epoch += 1

    def _log(self, step: int, loss: Tensor, lr: float, validating: bool) -> None:
        value = loss.item()
        self.pace.stop(step)
        if step == 1:
            self.progress.say(f"step 1 took {self.pace.first:.1f} s; the next ones only run")
        if not math.isfinite(value):
            raise ValueError(f"the loss is {value} at step {step}; try a smaller --lr or a smaller --clip")
        if step == 1 and self.here.first:
            assert self.options.out is not None
            folder = self.options.out / "dump"
            describing = attempt(lambda: str(self.sharded.dump(folder)), lambda why: f"no dump: {why}")
            if describing.startswith("no dump"):
                self.progress.say(describing)
        val_loss = self.validate() if validating else None
        if self.journal is not None:
            grad_norm = float(self.sharded.grad_norm)
            speed, seconds = self.pace.tokens_per_second, time.time() - self.began
            record = Record(step, value, val_loss, grad_norm, lr, speed, self._memory(), seconds)
            self.journal.add(record)
            self.progress.update(record)
        self.pace.start()

    def validate(self) -> float:
        """Nats a byte over all held-out windows, of all ranks."""
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64)  # nats, bytes
        for tokens, targets in self.held_out:
            logits = self.sharded(tokens.to(self.here.device))
            nats = F.cross_entropy(
                logits.flatten(0, 1).float().cpu(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            total += torch.stack((nats.double(), (targets != IGNORED).sum().double()))
        self.model.train()
        nats_and_bytes = self.ranks.sum(total)
        return (nats_and_bytes[0] / nats_and_bytes[1]).item()

    def finish(self, complete: bool) -> None:
        """Saves the model, draws, samples and sums up. A stopped run says what it knows and computes nothing
        new."""
        options, out = self.options, self.options.out
        state = self.sharded.full_state_dict()
        memory = self.ranks.max(torch.tensor(self._memory())).item()
        if self.journal is not None:
            assert out is not None
            save(state, out / "model.pt")
        texts: list[bytes] = []
        if complete:
            self.progress.say("writing a sample ...")
            self.model.eval()
            shape = (ROWS, options.context)
            texts = generate(self._forward, self.prompt, shape, SAMPLE_BYTES, options.seed)
        if self.journal is None:
            return
        assert out is not None
        self.progress.close()
        self.journal.close()
        curve(self.journal.records, self.unigram, out / "loss.png")
        self._sum_up(texts, int(memory))

    def _forward(self, tokens: Tensor) -> Tensor:
        return self.sharded(tokens.to(self.here.device))

    def _sum_up(self, texts: list[bytes], memory: int) -> None:
        out, journal = self.options.out, self.journal
        assert out is not None and journal is not None
        if texts:
            samples = [text.decode("utf-8", errors="replace") for text in texts]
            rule = "\n\n" + "─" * 40 + "\n\n"
            (out / "sample.txt").write_text(rule.join(samples) + "\n")
            print(f"\na sample, which continues {self.prompt.decode('utf-8', errors='replace')!r}:\n")
            print("\n".join("    " + line for line in printable(samples[0]).split("\n")))
        result = {
            "validation_loss": journal.val_loss,
            "unigram_loss": self.unigram,
            "train_loss": journal.train_loss,
            "tokens_per_second": self.pace.tokens_per_second,
            "first_step_seconds": self.pace.first,
            "peak_memory_bytes": memory,
            "wall_seconds": time.time() - self.began,
        }
        (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        rows = [
            ("validation loss", _nats(journal.val_loss)),
            ("byte-unigram model's validation loss", _nats(self.unigram)),
            ("training loss, last steps", _nats(journal.train_loss)),
            ("speed", f"{self.pace.tokens_per_second:,.0f} tokens/s"),
            ("first step, with compilation", f"{self.pace.first:.1f} s"),
            ("peak memory of a rank", f"{memory / 2**30:.2f} GiB"),
            ("wall time", f"{result['wall_seconds']:.0f} s"),
        ]
        print(f"\n{table(rows)}\n")
        print("wrote", ", ".join(sorted(path.name + "/" * path.is_dir() for path in out.iterdir())), "in")
        print(out, flush=True)

    def _memory(self) -> int:
        """This process's peak, in bytes: of the GPU if it has one."""
        if self.here.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.here.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class Pace:
    """Time spent in steps: the first, which compiles, by itself, and the others with validation left out."""

    def __init__(self, tokens: int) -> None:
        self.first = 0.0  # seconds
        self._tokens = tokens  # of all ranks, in one step
        self._seconds, self._step, self._started = 0.0, 0, 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self, step: int) -> None:
        seconds = time.perf_counter() - self._started
        if self._step == 0:
            self.first = seconds
        else:
            self._seconds += seconds
        self._step = step

    @property
    def tokens_per_second(self) -> float:
        return (self._step - 1) * self._tokens / self._seconds if self._seconds else 0.0


def train(options: TrainOptions, here: RankInfo) -> int:
    """Trains and writes the run folder; 0, or `STOPPED` when the run was stopped before its last step."""
    job = Job(options, here)
    try:
        complete = job.run()
        job.finish(complete)
    finally:
        job.progress.close()
    return 0 if complete else STOPPED


def rate(step: int, options: TrainOptions) -> float:
    """The learning rate of a step, counted from 0, as a fraction of --lr: a straight rise, then half a cosine
    down to a tenth."""
    warmup = min(50, options.steps // 10) if options.warmup is None else options.warmup
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, options.steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def _nats(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f} nats/byte"
