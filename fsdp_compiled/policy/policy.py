"""Policy: every decision about how a model is sharded and run, one field each. Placements: the ZeRO stages as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled.policy.check import check
from fsdp_compiled.policy.local_steps import LossScale, OuterSGD, Rendezvous


@dataclass(frozen=True)
class Placement:
    """Where the parameters, gradients and optimizer state of a buffer live, as data.

    ``True`` means cut along the shard axis, ``False`` a full copy on every rank. ``regather``: free the gathered
    parameters after forward and gather them again for backward, what FSDP2 calls ``reshard_after_forward``.
    """

    parameter: bool
    gradient: bool
    state: bool
    regather: bool


PLACEMENTS: Mapping[str, Placement] = {
    "zero3": Placement(parameter=True, gradient=True, state=True, regather=True),
    "zero2": Placement(parameter=True, gradient=True, state=True, regather=False),
    "zero1": Placement(parameter=True, gradient=False, state=True, regather=False),
    "ddp": Placement(parameter=False, gradient=False, state=False, regather=False),
}
MOST_AHEAD = 4  # at most so many units are gathered ahead under Policy(prefetch="auto")


@dataclass(frozen=True)
class Policy:
    """How a model is sharded and run: one field, one decision.

    shard
        ``"zero3"``: parameters, gradients and optimizer state are cut over the ranks; each unit is gathered for
        forward and again for backward (FSDP2 with ``reshard_after_forward=True``). ``"zero2"``: gathered once a step
        and kept through backward. ``"zero1"``: as ``"zero2"``, with gradients all-reduced in full on every rank.
        ``"ddp"``: every rank holds everything; gradients are all-reduced.
    reshard_onto
        Under ``"zero3"``: over how many neighbouring ranks along the shard axis, as the 8 of a node, a unit stays cut
        after forward, so that backward gathers it among them alone: FSDP2's ``reshard_after_forward=8``, ZeRO++'s hpZ.
        Each rank then holds one part in so many of the gathered parameters, in the compute dtype, until backward.
        Shards and optimizer state stay cut over all ranks. None: over all.
    precision
        torch's own ``MixedPrecisionPolicy``. Shards stay in the parameters' dtype; ``param_dtype`` is cast to before
        the wire, ``reduce_dtype`` is the dtype of the gradient reduction, ``cast_forward_inputs`` casts the
        floating-point tensors that go into the model, ``output_dtype`` those that it returns.
    loss_scale
        For fp16. ``"dynamic"``: as ``torch.amp.GradScaler``, with its defaults; `LossScale`: with others; a number: a
        scale that stays. Backward starts from the scaled loss, and gradients are divided by the scale once they are
        reduced, before clipping. A step that finds an infinity or a NaN in any rank's gradient updates nothing, and is
        counted in `Sharded.overflows`. As in eager PyTorch, what forward itself wrote (BatchNorm statistics) stays.
        No message is added: what a rank found travels with the loss.
    clip
        Largest global norm of the gradient (2-norm over all ranks' shards), or None. As
        ``torch.nn.utils.clip_grad_norm_`` of the optimizer's parameters: gradients are scaled by
        ``min(1, clip / (norm + 1e-6))``. Parameters that no optimizer holds are not counted.
    clip_value
        Largest absolute value of any element of the gradient, or None, as ``torch.nn.utils.clip_grad_value_``. Not
        together with ``clip``: one after the other gives two results, by the order.
    accumulate
        What `Sharded.accumulate` holds between microbatches. ``"shards"``: each microbatch is reduced, and a rank
        holds the sums of its shards. ``"full"``: a rank holds the whole gradient, and a step reduces once.
    offload
        Shards and optimizer state in pinned host memory. A unit's shard is copied to the GPU for each gather, while the
        unit before it is used, and the update goes buffer by buffer: one arrives and one leaves while a third is
        updated. `Sharded.state` and `Sharded.apply` wait for copies that are on their way; a tensor that was taken from
        the state before a later step does not. With one rank, a step still has all parameters on the GPU until their
        last use. Sums over microbatches stay there. The update is the optimizer's own code rather than one kernel for
        all. Refused on a CPU, and where every rank has everything (``"ddp"``).
    recompute
        ``"unit"``: backward computes each block again from its input instead of keeping what forward computed inside,
        as if the model wrapped it in ``torch.utils.checkpoint``. Results of random operators (dropout's output and
        mask) are kept, so that the numbers are the same. The root is not computed again. ``"cheap"``: backward makes
        element-wise values, copies and normalisations again from what is kept anyway. None: only what the model itself
        checkpoints is computed again. ``"auto"``: ``"cheap"`` under Inductor, where that fuses with its readers, and
        None under the eager lowering.
    prefetch
        How many units ahead of their first use gathers are started, and how many reductions may be on the wire at
        once. 0: each gather starts where it is waited for. ``"auto"``: from estimated compute and transfer times; on
        CPUs, whose cores the ranks share with what sends, only as far as it leaves the predicted peak of memory as it
        is. With `fully_shard`, ``"auto"`` is 1, as FSDP2 has it.
    limit
        Most gathered units alive at once, at every point of the step (the rate limiter). Where a program needs more,
        a unit is freed and gathered again. ``"auto"``: what the placement and ``prefetch`` come to.
    bucket_mb
        Size of a unit on the wire, in MiB. Neighbouring blocks are merged while they stay under it, and a block over it
        is cut between parameters. 0: one unit a block. ``"auto"``: where a collective's latency stops to matter, but no
        more than a part of the model, so that a step takes no more memory than FSDP2's, which holds one block and the
        next: a sixth under Inductor; a twelfth under the eager lowering, which leaves the last twelfth as it is. Where
        layers are many and thin that costs processor time, most under the eager lowering; a larger size, as 64, is
        faster there and takes the memory. With `fully_shard`, modules that were marked are merged, and none is cut.
    network
        What the network carries from and to each rank, in 1e9 bits a second, where that is far from what such devices
        usually have (Ethernet between GPU nodes); or a pair of that and the milliseconds that a collective takes
        however little it carries. The ``"auto"`` choices follow it: messages are larger where latency is long, and
        leave earlier where bytes take long; and on CPUs owners of whole matrices update them while messages travel.
        Along a tp axis, which is taken to be inside of a node, estimates keep the device's own rate. ``"measure"``:
        `compile_sharded` makes a few dozen gathers, and all ranks go by what they measured together, which the plan's
        notes say; a network that is within four times of what the device usually has is left as that is.
    wire
        ``"int8"`` or ``"fp8"``: parameters and gradients cross the wire as one byte each, with a scale in float32 for
        each 128 of them: about a quarter of float32's bytes, half of bfloat16's. ``"fp8"`` is ``torch.float8_e4m3fn``.
        A gather brings rounded parameters, the same to every rank, to forward and to backward; shards, optimizer
        state and checkpoints stay as they are. A reduction is an exchange of rounded parts, which are added up in
        float32; they are rounded at random, up as often as their value asks for, so that what is lost in one step
        is there on average over many. The noise follows from the step, the rank and the place of an element: a
        resumed run goes on bit for bit, and no rank keeps an error. Where gradients, or replicas, are all-reduced, the
        sum is rounded once more. An infinity or a NaN makes its 128 elements NaN, on all ranks. With one rank nothing
        is sent, and nothing is rounded; the loss, the norm and what travels along a tp axis are sent as they are, and
        so is what an evaluation of `Sharded.gathered` reads. Refused for parameters in float64, and, until it is held
        against eager PyTorch there, with ``offload``, ``loss_scale``, tensor parallelism and optimizers of whole
        matrices. What rounding needs on a CPU meanwhile, some 1 MB, is not in the predicted memory. None: in
        the compute dtype, and the dtype of the reduction.
    memory_gb
        What a step may take of a rank's memory at its peak, as `Sharded.memory` predicts it, in GiB, or None. Until it
        fits, and as far as the policy leaves them on ``"auto"``, ``prefetch`` is lowered; then values that forward
        keeps are made again in backward (``recompute``) or, on a GPU, wait in pinned host memory meanwhile, each the
        cheaper way, chosen by a knapsack as the least time for the bytes that are missing; then ``limit`` is lowered.
        Copies run beside compute, two at once in each direction; the link is taken to carry 20 GB/s. Random operators
        are never run twice, and under the eager lowering the numbers are the same to the bit. Nothing goes to host
        memory with ``recompute="unit"``, with sizes that move (``dynamic``), or with `fully_shard`. Where nothing fits,
        a warning says the least that can be had, which runs.
    loss_rows
        Of so many rows at a time the logits of a linear head that go into ``F.cross_entropy``, and their gradient, are
        made: never the whole ``[rows, classes]``. A slice's gradient is made beside its loss, so that nothing is
        computed twice; sums over slices are in another order (in float32 within 1e-6). What else is made of logits is
        to be made row by row, as by a shift of rows, a cap, label smoothing, or ``reduction="none"``. In float16 only
        where of the loss sums and products with constants are made, in a step. Anything else is refused, with the
        reason. With `fully_shard`, forward is to return the loss. Each number of rows has a program of its own.
        Forward alone has its logits whole. None: whole.
    lower
        ``"inductor"``: the compute between collectives is compiled, each distinct piece once. ``"eager"``: ATen
        kernels, the same as eager PyTorch runs, bit for bit.
    weigh
        What a rank's loss and gradient count by. ``"ranks"``: each rank the same, as in DDP and FSDP2. ``"rows"``: by
        the length of the first tensor of its batch, so that with a mean loss a step is that of one process on all rows,
        however they are spread; a rank may then run out of batches (`Sharded.join`).
    cuda_graph
        Whether training steps and microbatches run as CUDA graphs: from the third call of a program on, the host copies
        the batch and launches once. ``"auto"``: on a GPU, if the program can be captured; else the reason is logged,
        once, and it runs as it is. True: a program that cannot be captured is an error. False: never. A graph keeps the
        memory that its steps work with; results (loss, norm) are copies. Forward alone and `value_and_grad` hand out
        much and run without.
    dynamic
        Sizes of the batch that may change with no other program. ``"auto"``, as `torch.compile` does it: the first
        size has a program of its own; a second one, in a call that is otherwise the same, makes one program for all
        sizes of the dims that changed. Where that cannot be made (a model that asks for one certain size), each size
        has its own; so it is under tensor parallelism and with ``cuda_graph=True`` too. True: from the first call on,
        for the first dim (how many rows); or the dims, ``(0, 1)`` for rows and lengths. A dim moves in every tensor
        that has the size there that the batch's first tensor has. Ranks may then have different sizes; what each
        counts, ``weigh`` says. Sizes 0 and 1 have programs of their own. False: each size has its own.
    kernels
        Whether the package's own operators take the place of ATen's where they have one: a unit's gradients are
        flattened, cast and scaled in one pass over memory, and AdamW and Adam update all shards of a parameter
        group in one, clipping included; under ``lower="inductor"`` a matrix product writes a weight's gradient to its
        place by itself, where nothing is cast or scaled on the way. On a GPU each is one Triton kernel; on a CPU plain
        PyTorch, for tests. The update's arithmetic is that of ``torch.optim``'s fused optimizers, not bit for bit that
        of the others. ``"auto"``: on GPUs.
    copies
        Whether a rank keeps its shards in the compute dtype as well (``precision.param_dtype``), written by the update
        together with the shards, so that gathers cast nothing: for two bytes a parameter of its shard, forward and
        backward each read four and write two less. ``"auto"``: where ``kernels`` are, whose update writes them on the
        way. Not with ``offload``. Whoever writes a shard between steps, other than with PyTorch's operators, says so
        with ``torch.autograd.graph.increment_version``.
    unrounded_gradients
        Where the model computes in half precision and gradients are reduced in float32 (``precision``): matrix products
        write a weight's gradient in float32, as they sum it up, in the place of a rounded one that is cast afterwards.
        Half the memory traffic, and nearer to the true gradient, so no longer FSDP2's bit for bit. For
        ``lower="inductor"`` with ``kernels``. Refused where PyTorch has no such product (``torch.mm(out_dtype=)``), as
        on a CPU.
    tp
        How a model that `parallelize_module` did not cut is cut along the mesh's axis ``"tp"``. ``"auto"``: by the plan
        that it brings, ``tp_plan``, as models of transformers do, or by one that is derived from its blocks and tried
        beside them. A dictionary: styles by patterns of module names, ``{"layers.*.up": "colwise", "layers.*.down":
        "rowwise"}``. Styles are ``colwise``, ``rowwise``,
        ``colwise_gather_output``, ``embedding_rowwise`` and ``replicated_with_grad_allreduce`` (norms of heads). None:
        it was cut, or is not.
    async_tp
        Matrix products along the tp axis in pieces, each sent while the next is computed (PyTorch's
        ``micro_pipeline_tp``). It writes into other GPUs' memory (symmetric memory), which CPUs do not have, and has
        been run on no GPU: True is refused, with the reason. What is hidden without it: the pass ``overlap``.
    without
        Names of fusions to leave out, such as ``("exchange",)``, or ``"all"``: what remains are ATen's operators and
        plain collectives. `fsdp_compiled.lower.fusions` lists them. Fusions make a step faster and mean the same: two
        policies that differ in them agree to the last bits that another order of rounding leaves.
    programs
        How many compiled programs are kept: each kind of call (a step, forward, ...) on each shape of batch is one.
        Past it, the program that was used the longest time ago is dropped, which is said. Nothing falls back to
        slower code or is refused, so that a run with too many shapes ends, but compiles more often than it should.
    verify
        Whether calls are compared with eager PyTorch while they train. True: the first two of each program. A whole
        number K: these, and every K-th. False, the default: none. These calls are those of `Sharded.step` with all its
        microbatches, of `Sharded.value_and_grad`, and evaluations; under `fully_shard` all calls of a module.

        Before such a call the model's own code runs on the same weights, batch, modes and random numbers. Each unit is
        gathered while it is read, and what the code changes is restored. Compared are the loss, what else is returned,
        buffers, gradients, their norm, and each element that a step updates. Where one is off by more than rounding
        explains, or than ``wire`` rounds, every rank raises, and the step does not count. The log says once what a
        comparison took. Meanwhile a rank holds three copies of its shards and state; under `fully_shard`, what the
        eager forward keeps for its backward. Under `fully_shard` ranks first agree which calls to compare, with one
        small reduction a call, since they may run programs for other lengths.

        Not compared are updates by optimizers that run as they are, updates under `fully_shard`, which are the loop's,
        gradients that are held back, evaluations in which nothing is gathered (each rank may make its own), and what
        draws random numbers on a GPU, or along tp, where they are others. Under ``sync_every`` the ranks of a site
        compare its steps, and all sites the same ones: the first two of the run, the first of each program, every K-th.
        An exchange is not compared, nor are evaluation and `Sharded.value_and_grad` then, and after a difference no
        site goes on.
    verify_gradients
        Whether ``verify`` compares gradients and updates, too, for which each rank holds the gradients of the whole
        model in host memory. False: forward and loss alone.
    verify_difference
        What follows where ``verify`` finds a difference. No program that differs is used again: the next such call is
        traced anew. ``"raise"``, the default: every rank raises, with the first module that computes something else
        than it did in the trace. ``"recapture"``: the log says so, the call is traced anew and made again; where that
        program differs, too, every rank raises. A difference in gradients under `fully_shard`, found when the loop runs
        backward, always raises. Not under ``sync_every``.
    sync_every
        After how many steps sites exchange what they learned; between exchanges each trains by itself, and nothing
        crosses the replicate axis (local steps, DiLoCo: Douillard et al., 2023). None: every step is one of all ranks.
        A site is a row of the mesh, ``("replicate", "shard")``: inside of it a step is as without this. Under ``"ddp"``
        on a mesh of one axis each rank is a site. After the last of so many calls of `Sharded.step`, the mean over the
        sites of how far weights came since the last exchange is the gradient of ``outer``, which moves the weights from
        where they were then: one all-reduce of parameters' size on the replicate axis, the program
        `Sharded.outer_program`. `Sharded.synchronize` exchanges earlier, as at the end of a run. With ``wire`` what is
        exchanged is sent in a byte an element.

        Meanwhile losses, norms, clipping, evaluation and parameters that are read are of this rank's site, as are
        SyncBatchNorm's statistics. Optimizer state stays with its site; module buffers stay with their rank. Rates are
        compared at an exchange. What is written to parameters before the first step after one counts for where they
        were; later, for how far a site came. For each element of a parameter a rank holds where it was, and ``outer``'s
        momentum. `Sharded.save` keeps all of it at any step, and goes on bit for bit on the same mesh.

        Not with ``loss_scale``, ``offload`` or ``weigh="rows"``, and not yet under tensor parallelism or with
        optimizers of whole matrices.
    outer
        How an exchange moves the weights: `OuterSGD`. None: with its defaults, DiLoCo's, whose momentum of 0.9 is for
        hundreds of exchanges; with 40 of them 0.6 lost less (bench/README.md). Its ``parts`` and ``overlap`` exchange
        the model in parts, each of which travels beside the next steps (`Sharded.outer_parts`). Then what is written to
        parameters after the first step counts for how far a site came, until `Sharded.synchronize`.
    rendezvous
        Where sites meet that come and go: `Rendezvous`. None: sites are rows of one mesh, and end together. Given, each
        site is a job of its own, of as many ranks as the others, with a mesh of one axis. Sites exchange over gloo. An
        exchange is among the sites that are alive. If one is lost in it, the others make it again: the gradient of
        ``outer`` is the mean over those that are left. A site that joins waits for the next exchange. It starts from
        the weights and ``outer``'s momentum that the others have then. If all sites join, they start from those of the
        one that made the most exchanges, as after a checkpoint. Optimizer state, buffers, frozen parameters, rates and
        ``sync_every`` are each site's own. A site that was thought gone joins again: its steps since its last exchange
        are lost, which the log says. If the store is lost, every site ends with an error. Not with ``outer``'s
        ``parts`` or ``overlap``.
    """

    shard: str = "zero3"
    reshard_onto: int | None = None
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    loss_scale: float | str | LossScale | None = None
    clip: float | None = None
    clip_value: float | None = None
    accumulate: str = "shards"
    recompute: str | None = "auto"
    offload: bool = False
    prefetch: int | Literal["auto"] = "auto"
    limit: int | Literal["auto"] = "auto"
    bucket_mb: float | Literal["auto"] = "auto"
    network: float | tuple[float, float] | Literal["measure"] | None = None
    wire: Literal["int8", "fp8"] | None = None
    memory_gb: float | None = None
    loss_rows: int | None = None
    lower: str = "inductor"
    weigh: str = "ranks"
    cuda_graph: bool | Literal["auto"] = "auto"
    dynamic: bool | Literal["auto"] | tuple[int, ...] = "auto"
    kernels: bool | Literal["auto"] = "auto"
    copies: bool | Literal["auto"] = "auto"
    unrounded_gradients: bool = False
    tp: Literal["auto"] | Mapping[str, str] | tuple[tuple[str, str], ...] | None = None
    async_tp: bool = False
    without: tuple[str, ...] | Literal["all"] = ()
    programs: int = 16
    verify: bool | int = False
    verify_gradients: bool = True
    verify_difference: Literal["raise", "recapture"] = "raise"
    sync_every: int | None = None
    outer: OuterSGD | None = None
    rendezvous: Rendezvous | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tp, Mapping):
            object.__setattr__(self, "tp", tuple(self.tp.items()))  # a tuple has a hash
        check(self, tuple(PLACEMENTS))

    @property
    def scaling(self) -> LossScale | None:
        """``loss_scale`` as a `LossScale`, or None."""
        if self.loss_scale is None or isinstance(self.loss_scale, LossScale):
            return self.loss_scale
        if isinstance(self.loss_scale, str):
            return LossScale()
        return LossScale(float(self.loss_scale), growth=1.0, backoff=1.0)

    def initial_scale(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The first values of the tensors that loss scaling reads and writes; none without ``loss_scale``."""
        if self.scaling is None:
            return {}
        return {
            "factor": torch.full((), self.scaling.init, dtype=torch.float32, device=device),
            "good": torch.zeros((), dtype=torch.int32, device=device),
            "overflows": torch.zeros((), dtype=torch.int64, device=device),
        }

    @property
    def exchange(self) -> OuterSGD:
        """How sites exchange under ``sync_every``: ``outer``, or its defaults."""
        return self.outer or OuterSGD()

    @property
    def moving(self) -> tuple[int, ...]:
        """The dims of the batch's tensors whose sizes programs leave open from the first call on."""
        if self.dynamic == "auto":
            return ()
        return ((0,) if self.dynamic else ()) if isinstance(self.dynamic, bool) else self.dynamic

    @property
    def learns_sizes(self) -> bool:
        """Whether sizes that changed once stay open from then on. A graph is for one size, as are slices of rows."""
        return self.dynamic == "auto" and self.cuda_graph is not True and self.loss_rows is None

    @property
    def rematerializes(self) -> bool:
        """Whether backward makes cheap values again."""
        return self.recompute == "cheap" or (self.recompute == "auto" and self.lower == "inductor")

    @property
    def placement(self) -> Placement:
        return PLACEMENTS[self.shard]
