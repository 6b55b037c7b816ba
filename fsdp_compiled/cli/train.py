"""A training run, as one rank runs it."""

import gc
import json
import math
import resource
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compiled import LossScale, Policy, compile_sharded
from fsdp_compiled.analysis.best_effort import attempt
from fsdp_compiled.capture.disk_cache import whole_file
from fsdp_compiled.cli import summary
from fsdp_compiled.cli.clock import Attempts, Clock
from fsdp_compiled.cli.data import (
    IGNORED,
    Loader,
    Share,
    held_out_windows,
    load_corpus,
    rank_batches,
    share,
    train_windows,
    unigram_loss,
)
from fsdp_compiled.cli.gpt import GPT, GPTConfig, decay_groups, next_byte_loss
from fsdp_compiled.cli.journal import Compiling, Journal, Progress, Record
from fsdp_compiled.cli.options import TrainOptions
from fsdp_compiled.cli.rank import STOPPED, RankInfo, Ranks, Stop, began
from fsdp_compiled.cli.summary import Read, Unread, blame, configuration, curve, first_line, generate
from fsdp_compiled.runtime.profiling import Profile

# Validation and sampling share one shape, so the forward is compiled once. Few rows, because each sampled
# byte costs a whole forward.
ROWS = 4
VALIDATION_WINDOWS = 256
SAMPLE_BYTES = 300
PROFILED = (3, 5)  # steps of an attempt, the first and the last, under --profile


def loss_of(how: Share) -> Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The loss of one microbatch, and the same as this rank's own.

    If some rows do not count, ranks' losses are sums, scaled so that their mean over microbatches and ranks is the mean
    over the windows that count.
    """

    def mean(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = next_byte_loss(model, tokens, targets)
        return loss, loss.detach()

    def scaled(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(tokens).flatten(0, 1)
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = total * (how.world * how.parts / (how.batch * tokens.shape[1]))
        return loss, loss.detach()

    return scaled if how.padded else mean


def rate(step: int, options: TrainOptions) -> float:
    """The learning rate of a step, counted from 0, as a fraction of --lr: a straight rise, then half a cosine
    down to a tenth."""
    warmup = min(50, options.steps // 10) if options.warmup is None else options.warmup
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, options.steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


class Training:
    """A model in training and everything beside it. Rank 0 alone owns the journal and writes to the run
    folder."""

    def __init__(self, options: TrainOptions, here: RankInfo) -> None:
        self.began = began()
        self.clock = Clock(self.began)
        self.options, self.here = options, here
        self.stop = Stop()
        torch.manual_seed(options.seed)
        corpus = load_corpus(options.data)
        assert options.lower is not None and options.global_batch is not None
        self.share = share(options.global_batch, here.world, options.batch)
        windows = train_windows(corpus, options.context, options.global_batch)
        self.loader = Loader(windows, self.share, options.seed, here.rank)
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
        # A scale that stays 1 changes no number; what is not finite then updates nothing.
        scale = LossScale(1.0, growth=1.0, backoff=1.0) if options.on_nonfinite == "skip" else None
        policy = Policy(shard=options.shard, lower=options.lower, clip=options.clip or None, loss_scale=scale)
        with self.stop.ending():
            self.sharded = compile_sharded(self.model, optimizer, loss=loss_of(self.share), policy=policy)
        self.ranks = Ranks(self.sharded.explain)
        if len(set(map(str, self.ranks.exchange(self.loader.state_dict())))) > 1:
            raise ValueError(
                "ranks have other text, or were given another --seed, --context or --global-batch, and would train on "
                "windows of different orders. Give all hosts the same --data and options"
            )
        self.unread = Unread()
        self.skipped = 0  # steps that updated nothing, because something was not finite
        self.saved: Future[Any] | None = None
        self.step = self.began_after = self._restore()
        self.first_seconds = 0.0  # of this attempt's first step, which compiles

        self.journal: Journal | None = None
        self.attempts: Attempts | None = None
        self.progress = Progress(options.steps, self.share.batch * options.context, here.first)
        if here.first:
            self._open(f"{corpus}", size)

    def _restore(self) -> int:
        """The step after which the newest checkpoint was saved; 0 if there is none, or no --checkpoint."""
        if self.options.checkpoint is None:
            return 0
        with self.clock.spending("restoring"):
            step = self.sharded.load(self.options.checkpoint, extra=self._beside())
        if step is not None and step > self.options.steps:
            raise ValueError(
                f"--steps {self.options.steps}: the newest checkpoint in {self.options.checkpoint} is of step {step}"
            )
        return step or 0

    def _beside(self) -> dict[str, Any]:
        """What a checkpoint holds besides the model, its optimizer and the random state."""
        return {"data": self.loader, "schedule": self.schedule}

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
        parts = f" in {self.share.parts} microbatches" if self.share.parts > 1 else ""
        print(
            f"ranks: {self.here.world} on {self.here.device.type}, {self.share.rows * self.share.parts} windows each a "
            f"step{parts}; shard {options.shard}, lower {options.lower}",
            flush=True,
        )
        self.journal = Journal(out, self.step)
        self.attempts = Attempts(out, self.clock, self.here.world, self.step)
        if self.step:
            self.progress.say(f"goes on after step {self.step}, from {options.checkpoint}")

    def run(self) -> int:
        """Makes all steps that are left; returns the signal that stopped the run before the last, 0 if none did."""
        options = self.options
        every = options.validate_every or max(1, options.steps // 10)
        save_every = options.save_every or max(1, options.steps // 10)
        logged = 1 if self.here.device.type == "cpu" else 10  # reading a loss makes the host wait for the GPU
        first = self.step + 1
        if first <= options.steps:
            self.progress.say(f"step {first}: capturing the model and compiling the step; the slowest one ...")
        measuring, profile = ExitStack(), None
        self.clock.enter("training")
        for step in range(first, options.steps + 1):
            lr = self.schedule.get_last_lr()[0]
            if options.profile and step - first + 1 == PROFILED[0]:
                profile = measuring.enter_context(self.sharded.profile())
            with Compiling(self.progress) if step == first else nullcontext():
                self._train(step)
            self.schedule.step()
            last = step == options.steps
            validating = step % every == 0 or last
            with self.clock.spending("waiting"):
                stopped = 0 if last else self.stop.agreed(self.ranks)
            saving = options.checkpoint is not None and (step % save_every == 0 or last or stopped > 0)
            reading = validating or saving or step in (1, first) or step % logged == 0
            if reading:
                self._read(step)
            if validating or step == 1 or step % logged == 0:
                self._log(lr, validating)
            if saving:
                self._save(step, wait=stopped > 0)
            if step == first:
                self._dump()
            if profile is not None and (step - first + 1 == PROFILED[1] or last):
                measuring.close()
                self._dump(profile)
                profile = None
            if stopped:
                where = f"; saved in {options.checkpoint}" if saving else ""
                self.progress.say(f"stopped after step {step} of {options.steps}, as asked{where}")
                return stopped
        return 0

    def _train(self, step: int) -> None:
        """One step, on all of this rank's microbatches."""
        with self.clock.spending("waiting"):
            parts = [
                (tokens.to(self.here.device), targets.to(self.here.device)) for tokens, targets in next(self.loader)
            ]
        captures, since = self.sharded.captures, time.perf_counter()
        own = [self.sharded.accumulate(*part)[1] for part in parts[:-1]]
        loss, mine = self.sharded.step(*parts[-1])
        if self.sharded.captures != captures:
            self.clock.move("training", "compiling", time.perf_counter() - since)
        self.unread.add(step, loss, self.sharded.grad_norm, [*own, mine])
        self.step = step

    def _read(self, step: int) -> None:
        """Reads the losses of the steps since the last time. One that is not finite stops the run, or is reported."""
        found = self.unread.read()
        if not self.first_seconds:
            self.first_seconds = self.clock.seconds["compiling"]
            self.progress.say(f"step {step} took {self.first_seconds:.1f} s; the next ones only run")
        for read in found:
            if read.finite:
                continue
            text = blame(read, self.ranks.exchange)
            if self.options.on_nonfinite == "stop":
                raise ValueError(
                    f"{text}; try a smaller --lr or --clip, or --on-nonfinite skip, which makes such a step without an "
                    "update. Nothing was saved since"
                )
            self.skipped += 1
            self.progress.say(f"{text}; nothing was updated ({self.skipped} so far)")
        self.newest: Read = found[-1]

    def _log(self, lr: float, validating: bool) -> None:
        val_loss = None
        if validating:
            with self.clock.spending("validating"):
                val_loss = self.validate()
        if self.journal is not None and self.attempts is not None:
            read, speed, seconds = self.newest, self.tokens_per_second, time.time() - self.began
            record = Record(read.step, read.loss, val_loss, read.grad_norm, lr, speed, self._memory(), seconds)
            self.journal.add(record)
            self.attempts.add(read.step)
            self.progress.update(record)

    def _save(self, step: int, wait: bool) -> None:
        assert self.options.checkpoint is not None
        with self.clock.spending("saving"):
            if self.journal is not None:
                self.journal.sync()
            self.saved = self.sharded.save(
                self.options.checkpoint, step=step, keep=self.options.keep, wait=wait, extra=self._beside()
            )

    def _dump(self, profile: Profile | None = None) -> None:
        if not self.here.first:
            return
        if profile is not None:
            self.progress.say(f"profile: {profile}")
        assert self.options.out is not None
        folder = self.options.out / "dump"
        with self.clock.spending("compiling"):
            describing = attempt(lambda: str(self.sharded.dump(folder, profile)), lambda why: f"no dump: {why}")
        if describing.startswith("no dump"):
            self.progress.say(describing)

    def validate(self) -> float:
        """Nats a byte over all held-out windows, of all ranks."""
        self.model.eval()
        nats, count = 0.0, 0
        for tokens, targets in self.held_out:
            logits = self.sharded(tokens.to(self.here.device))
            logits, targets = logits.flatten(0, 1).float().cpu(), targets.flatten()
            nats += F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").item()
            count += int((targets != IGNORED).sum())
        self.model.train()
        of_ranks = self.ranks.exchange((nats, count))
        return sum(nats for nats, _ in of_ranks) / sum(count for _, count in of_ranks)

    def finish(self, stopped: int) -> None:
        """Saves the model, draws, samples and sums up. A stopped run reports what it knows and computes nothing new. A
        run whose machine is wanted back has its checkpoint, and leaves."""
        if self.saved is not None:
            with self.clock.spending("saving"):
                self.saved.result()
        if stopped == signal.SIGTERM and self.saved is not None:
            self.tell("stopped")
            return
        self.clock.enter("validating")
        options, out = self.options, self.options.out
        state = self.sharded.full_state_dict()
        memory = max(self.ranks.exchange(self._memory()))
        if self.journal is not None:
            assert out is not None
            with whole_file(out / "model.pt", "wb") as file:
                torch.save(dict(state), file)
        texts: list[bytes] = []
        if not stopped:
            self.progress.say("writing a sample ...")
            self.model.eval()
            shape = (ROWS, options.context)
            texts = generate(self._forward, self.prompt, shape, SAMPLE_BYTES, options.seed)
        if self.journal is None:
            return
        assert out is not None
        curve(self.journal.records, self.unigram, out / "loss.png")
        self._sum_up(texts, memory)

    def tell(self, ended: str) -> None:
        """Writes the attempt's last word to the journal."""
        if self.attempts is not None:
            self.attempts.add(self.step, ended)

    def close(self) -> None:
        for one in (self.journal, self.attempts):
            if one is not None:
                one.close()

    def _forward(self, tokens: Tensor) -> Tensor:
        return self.sharded(tokens.to(self.here.device))

    def _sum_up(self, texts: list[bytes], memory: int) -> None:
        out, journal = self.options.out, self.journal
        assert out is not None and journal is not None
        if texts:
            print(summary.samples(texts, self.prompt, out))
        speed, seconds = (self.tokens_per_second, self.first_seconds), time.time() - self.began
        print(summary.results(journal, *speed, self.unigram, memory, self.skipped, seconds, out))
        self.tell("complete" if texts else "stopped")
        print(summary.written(out), flush=True)

    @property
    def tokens_per_second(self) -> float:
        """All ranks together, over this attempt's steps but the first, and what they waited for."""
        spent, steps = self.clock.seconds, self.step - self.began_after - 1
        return max(steps, 0) * self.share.batch * self.options.context / (spent["training"] + spent["waiting"])

    def _memory(self) -> int:
        """This process's peak, in bytes: of the GPU if it has one."""
        if self.here.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.here.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def train(options: TrainOptions, here: RankInfo) -> int:
    """Trains and writes the run folder; 0, or the code of `STOPPED` when the run was stopped before its last step."""
    gc.set_threshold(100_000, 20, 100)  # a first step makes a million objects that stay: looking at them takes 0.2 s
    training = Training(options, here)
    try:
        stopped = training.run()
        training.finish(stopped)
    except BaseException as error:
        with suppress(OSError):  # the disk is full, which is why it failed
            training.tell("failed: " + type(error).__name__)
        raise
    finally:
        with suppress(OSError):
            training.close()
    return STOPPED[signal.Signals(stopped)] if stopped else 0
