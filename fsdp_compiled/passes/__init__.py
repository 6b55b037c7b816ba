"""The rewrites that turn a captured objective into a sharded training step, and the loop that runs them.

A pass is a function that takes a program and a plan and returns the next program. It knows no rank, process group,
device, clock or environment; options are bound when it is made, as in ``update(rules)``. To remove a pass, delete its
file, its test and its entry in a tuple below. A pass leaves its input as it is, unless that was donated (`ir.edit`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fsdp_compiled.ir.form import ProgramError
from fsdp_compiled.ir.program import Program
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.passes.accumulate import add_up, average, clear
from fsdp_compiled.passes.check import check, check_ends
from fsdp_compiled.passes.clip import clip
from fsdp_compiled.passes.gather import gather
from fsdp_compiled.passes.host_memory import offload
from fsdp_compiled.passes.host_memory import store_saved as store_saved
from fsdp_compiled.passes.limit import limit
from fsdp_compiled.passes.loss_scale import scale, skip, unscale
from fsdp_compiled.passes.outer_update import outer_update, shards_of
from fsdp_compiled.passes.overlap import overlap
from fsdp_compiled.passes.quantize import quantize
from fsdp_compiled.passes.recompute import recompute as recompute
from fsdp_compiled.passes.recompute import recompute_saved as recompute_saved
from fsdp_compiled.passes.reduce import reduce, reduce_row
from fsdp_compiled.passes.rematerialize import rematerialize
from fsdp_compiled.passes.report import compare_batches, report
from fsdp_compiled.passes.reshape import reshape
from fsdp_compiled.passes.row_weights import unweigh, weigh
from fsdp_compiled.passes.same_batches import same_batches
from fsdp_compiled.passes.schedule import schedule
from fsdp_compiled.passes.slice_loss import slice_loss
from fsdp_compiled.passes.update import count_updates, update
from fsdp_compiled.passes.write_back import write_back
from fsdp_compiled.plan.plan import Buffer, Plan

Pass = Callable[[Program, Plan], Program]
Observer = Callable[[Program], None]

# Passes that only some plans need; for other plans they are left out.
OPTIONAL: Mapping[Pass, Callable[[Plan], bool]] = {
    **dict.fromkeys((scale, unscale, skip), lambda plan: plan.policy.scaling is not None),
    slice_loss: lambda plan: plan.policy.loss_rows is not None,
    rematerialize: lambda plan: plan.policy.rematerializes,
    **dict.fromkeys((weigh, unweigh), lambda plan: plan.policy.weigh == "rows"),
    offload: lambda plan: plan.policy.offload,
    quantize: lambda plan: plan.policy.wire is not None and plan.world > 1,
    **dict.fromkeys((same_batches, compare_batches, overlap), lambda plan: plan.tp > 1),
}

SCHEDULING: tuple[Pass, ...] = (limit, schedule, offload)  # what runs when, once it is known what runs
CLOSING: tuple[Pass, ...] = (write_back, quantize, reshape, *SCHEDULING)
FORWARD: tuple[Pass, ...] = (gather, overlap, same_batches, compare_batches, *CLOSING)
SHARDING: tuple[Pass, ...] = (gather, overlap, reduce, rematerialize, recompute, weigh, same_batches)
DIFFERENTIATION: tuple[Pass, ...] = (scale, slice_loss, *SHARDING)
REPORTING: tuple[Pass, ...] = (unscale, report, unweigh)
GRADIENT: tuple[Pass, ...] = (*DIFFERENTIATION, *REPORTING, *CLOSING)
ROW: tuple[Pass, ...] = tuple(reduce_row if one is reduce else one for one in DIFFERENTIATION)
MICROBATCH: tuple[Pass, ...] = (*ROW, add_up, *CLOSING)
# Programs in which the derivative of their results comes from outside.
OUTPUTS: tuple[Pass, ...] = (*DIFFERENTIATION, compare_batches, *CLOSING)


def step(rules: Sequence[Rule], added: Collection[str] | None = None) -> tuple[Pass, ...]:
    """The passes of a training step. ``added``: the parameters that earlier microbatches reached, for a step that ends
    a row of microbatches."""
    means, cleared = ((average(added),), (clear,)) if added is not None else ((), ())
    begin = ROW if added is not None else DIFFERENTIATION
    return (*begin, *means, *REPORTING, *cleared, clip, update(rules), skip, count_updates, *CLOSING)


def outer(plan: Plan, buffers: Iterable[Buffer], late: bool = False, first: bool = False) -> Program:
    """The program that exchanges these buffers between the sites of this plan, which its ``replicate`` axis joins."""
    return run(shards_of(plan, buffers), plan, (partial(outer_update, late=late, first=first or late), quantize))


def run(
    program: Program,
    plan: Plan,
    passes: Iterable[Pass],
    observe: Observer | None = None,
    again: Callable[[], Program] | None = None,
) -> Program:
    """Applies the passes in order, and checks the invariants.

    With ``observe``, each result is checked whole and shown to ``observe``. Without it, each pass takes over the graph
    of the pass before; the last result is checked whole, the others only at their inputs and outputs. The resulting
    program is the same, node for node and name for name. ``again`` makes a donated program once more. Passes that the
    plan does not ask for are left out.
    """
    passes = tuple(one for one in passes if one not in OPTIONAL or OPTIONAL[one](plan))
    if observe is not None:
        return _run_observed(program, plan, passes, observe)
    try:
        return _run(program, plan, passes)
    except Exception as error:
        again = again or (None if program.donated else lambda: program)
        raise _first_fault(error, again, plan, passes) from None


def _run(program: Program, plan: Plan, passes: Iterable[Pass]) -> Program:
    given, program = program, replace(program, donated=False)
    for transform in passes:
        own = given.donated or program.graph is not given.graph
        program = replace(transform(replace(program, donated=own), plan), donated=False)
        check_ends(program, plan)
    check(program, plan)
    return program


def _run_observed(program: Program, plan: Plan, passes: Iterable[Pass], observe: Observer) -> Program:
    program = replace(program, donated=False)
    checked = check(program, plan)
    observe(program)
    for transform in passes:
        program = replace(transform(program, plan), donated=False)
        checked = check(program, plan, checked)
        observe(program)
    return program


def _first_fault(
    error: Exception, again: Callable[[], Program] | None, plan: Plan, passes: Iterable[Pass]
) -> Exception:
    """The error of the first pass whose result breaks an invariant, if any: the given error follows from it."""
    if again is not None:
        try:
            _run_observed(again(), plan, passes, lambda _: None)
        except ProgramError as fault:
            return fault
        except Exception:
            return error
    return error
