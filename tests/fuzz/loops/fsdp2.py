"""FSDP2 itself as the one that a loop is compared with: for what a plain model with reductions by hand does not say,
such as what is cast where."""

from __future__ import annotations

from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from tests.fuzz.loops.model import Shape
from tests.fuzz.loops.sides import Ours

# Of which FSDP2 does something else, by docs/fully_shard.md, or nothing at all.
NOT_ALIKE = {
    "hook_on_a_parameter", "gradients_by_autograd", "gradient_of_the_input_beside", "unshard", "keep_gathered",
    "evaluations_at_once", "a_block_alone", "forward_that_fails", "input_of_a_wrong_dtype", "second_backward",
    "backward_that_fails", "stale_weights", "one_of_two_backwards", "forward_that_is_dropped", "beside_a_constant",
    "order", "results_changed_in_place", "two_forwards", "two_forwards_of_one_input", "backwards_in_reverse",
    "retained", "two_losses", "hook_on_the_model", "between_forward_and_backward", "step_with_a_closure",
    "two_forwards_that_carry", "exception_of_the_users_own",
    "divide",  # which gloo cannot
    "dropout",  # in half precision, eager PyTorch on CPUs rounds what backward multiplies by
}  # fmt: skip


def not_alike(shape: Shape) -> set[str]:
    """The steps that are left out beside FSDP2: a block under `torch.compile` sees no later hook inside, and gradients
    that are reduced in half precision are added up in it, where we round once."""
    compiled, added = {"hook_on_a_module"}, {"accumulate", "synchronise"}
    rounded = shape.precision == "whole, reduced in half"
    return NOT_ALIKE | (compiled if shape.wrapped == "compile" else set()) | (added if rounded else set())


class Theirs(Ours):
    fully_shard = staticmethod(fully_shard)
    register = staticmethod(register_fsdp_forward_method)
    own_policy = undivided = uncast = False
