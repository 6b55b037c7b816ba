"""What FSDP2, DDP and this package can do, a row each, with the tests that prove ours; and the table of them.

``python tests/capabilities.py --write`` runs those tests and puts the table between the markers of docs/guarantees.md,
without the rows of which a test failed or did not run; ``--junit FILE`` reads the results of a run instead (``pytest
--junitxml=FILE``). What FSDP2 and DDP have is named by the API that does it.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guarantees.md"
BEGIN, END = "<!-- capabilities: written by tests/capabilities.py -->", "<!-- end of capabilities -->"
NO = "no"


@dataclass(frozen=True)
class Row:
    capability: str
    fsdp2: str
    ddp: str
    ours: str
    tests: tuple[str, ...] = ()  # file::function; a row without any says what is missing


ROWS = (
    Row(
        "Parameters, gradients and optimizer state sharded",
        "`fully_shard`",
        NO,
        '`shard="zero3"`',
        (
            "test_parity::test_two_ranks_are_bitwise_fsdp2",
            "test_shape::test_a_rank_holds_its_share_between_steps_and_no_more",
        ),
    ),
    Row(
        "Gathered once a step and kept",
        "`reshard_after_forward=False`",
        NO,
        '`shard="zero2"`',
        ("test_parity::test_two_ranks_are_bitwise_fsdp2", "test_shape::test_under_zero2_parameters_do_stay_gathered"),
    ),
    Row(
        "Optimizer state alone sharded",
        NO,
        "`ZeroRedundancyOptimizer`",
        '`shard="zero1"`',
        ("test_parity::test_two_ranks_are_bitwise_ddp",),
    ),
    Row(
        "Replicas, all-reduced in buckets while backward runs",
        NO,
        "`DistributedDataParallel`",
        '`shard="ddp"`, `bucket_mb`',
        (
            "test_parity::test_two_ranks_are_bitwise_ddp",
            "test_buckets::test_without_gathers_parameters_are_packed_whatever_their_block_and_the_last_are_first",
        ),
    ),
    Row(
        "Sharded inside, replicated across (HSDP)",
        "2-D mesh",
        NO,
        '2-D mesh `("replicate", "shard")`',
        (
            "test_parity::test_hybrid_sharding_has_the_weights_of_fsdp2_bit_for_bit",
            "test_shape::test_hsdp_reduces_over_both_axes",
        ),
    ),
    Row(
        "Gathers ahead, and a bound on what is gathered at once",
        "prefetch, by module; a rate limit of its own",
        NO,
        "`prefetch`, `limit`, for the whole step",
        (
            "test_schedule::test_a_gather_starts_as_many_units_ahead_as_asked",
            "test_schedule::test_no_node_of_any_program_has_more_units_alive_than_the_limit",
        ),
    ),
    Row(
        "Mixed precision, cast before the wire",
        "`MixedPrecisionPolicy`",
        "`autocast`, wire in fp32",
        "`precision`, the same `MixedPrecisionPolicy`",
        (
            "test_precision::test_two_ranks_are_bitwise_fsdp2_with_the_same_policy",
            "test_precision::test_each_cast_comes_before_its_wire",
        ),
    ),
    Row(
        "fp16 with dynamic loss scaling",
        "`GradScaler`, which asks the device every step",
        "`GradScaler`, which asks the device every step",
        "`loss_scale`, inside the program",
        (
            "test_loss_scale::test_one_process_is_bit_for_bit_the_grad_scaler",
            "test_loss_scale_ranks::test_an_overflow_on_one_rank_voids_the_step_on_all",
            "test_loss_scale_ranks::test_scaling_sends_no_message_more_and_a_number_at_most",
        ),
    ),
    Row(
        "Microbatches, communicating once a step",
        "`set_requires_gradient_sync`",
        "`no_sync`",
        '`accumulate="full"`',
        ("test_accumulate::test_microbatches_are_one_step_on_the_joined_batch",),
    ),
    Row(
        "Microbatches, holding shards in between",
        "backward without `zero_grad`",
        NO,
        '`accumulate="shards"`',
        (
            "test_accumulate::test_microbatches_are_one_step_on_the_joined_batch",
            "test_accumulate::test_nothing_is_held_before_the_first_microbatch",
        ),
    ),
    Row(
        "Clipping by global norm",
        "`clip_grad_norm_`",
        "`clip_grad_norm_`",
        "`clip`",
        (
            "test_parity::test_clipping_is_that_of_fsdp2_with_clip_grad_norm",
            "test_clip::test_the_norm_is_exact_with_frozen_and_tied_parameters_and_replicas",
        ),
    ),
    Row(
        "Clipping by value",
        "`clip_grad_value_`",
        "`clip_grad_value_`",
        "`clip_value`",
        ("test_loss_scale::test_gradients_are_clipped_after_they_are_unscaled",),
    ),
    Row(
        "The model's own `torch.utils.checkpoint`, dropout included",
        "yes",
        "yes",
        "yes",
        (
            "test_shape::test_checkpointed_regions_are_computed_again_and_random_numbers_are_not",
            "test_meaning::test_generated_models_train_as_in_eager",
        ),
    ),
    Row(
        "Blocks computed again without touching the model",
        "wrappers (`apply_activation_checkpointing`)",
        "wrappers (`apply_activation_checkpointing`)",
        '`recompute="unit"`',
        (
            "test_recompute::test_of_a_block_that_is_computed_again_only_its_input_is_kept",
            "test_recompute::test_numbers_are_bit_for_bit_those_of_keeping_everything",
        ),
    ),
    Row(
        "Shards and optimizer state on the CPU",
        "`CPUOffloadPolicy`",
        NO,
        "`offload=True` (not run on a GPU yet)",
        (
            "test_host_offload::test_each_gather_and_each_update_fetches_and_what_was_written_goes_back",
            "test_host_offload::test_three_steps_are_bit_for_bit_those_without_copies",
        ),
    ),
    Row(
        "Activations in host memory, or computed again, as a budget needs it",
        "wrappers (`offload_wrapper`), all of them",
        "wrappers (`offload_wrapper`), all of them",
        "`memory_gb` (copies not run on a GPU yet)",
        (
            "test_store_saved::test_a_budget_is_kept_in_host_memory_with_the_same_bits",
            "test_store_saved::test_each_value_goes_the_cheaper_way",
            "test_store_saved::test_copies_that_end_as_late_as_they_may_change_nothing",
        ),
    ),
    Row(
        "SyncBatchNorm",
        "yes, on GPUs",
        "yes, on GPUs",
        "yes, inside the program",
        (
            "test_sync_batchnorm::test_statistics_are_those_of_the_joined_batch",
            "test_sync_batchnorm::test_a_norm_adds_one_collective_an_axis_to_each_phase",
        ),
    ),
    Row(
        "The whole step as one CUDA graph",
        NO,
        NO,
        "`cuda_graph` (not run on a GPU yet)",
        (
            "test_cuda_graph::test_200_launches_with_changing_batches_rates_and_dropout_are_the_steps_themselves",
            "test_cuda_graph::test_a_step_is_one_copy_in_one_launch_and_one_copy_out",
        ),
    ),
    Row(
        "BatchNorm with local statistics",
        "yes",
        "yes",
        "yes",
        ("test_meaning::test_every_kind_of_block_trains_as_in_eager",),
    ),
    Row(
        "Dropout by rank and step, repeated under one seed",
        "the user seeds each rank",
        "the user seeds each rank",
        "yes",
        ("test_ranks::test_dropout_differs_by_rank_and_step_and_repeats_under_a_seed",),
    ),
    Row(
        "Parameters that the loss does not reach",
        "yes",
        "`find_unused_parameters`",
        "yes, named once",
        (
            "test_meaning::test_a_parameter_that_the_loss_never_reaches_stays_as_it_is_under_weight_decay",
            "test_program_cache::test_an_idle_parameter_is_named_once",
        ),
    ),
    Row(
        "Ranks with different numbers of rows or batches",
        NO,
        "`join`, each rank counts the same",
        '`weigh="rows"`, `join`: each row counts the same',
        (
            "test_row_weights::test_a_step_is_that_of_one_process_on_all_rows",
            "test_uneven_inputs::test_five_batches_and_three_are_one_process_on_all_rows",
            "test_row_weights::test_no_collective_is_added",
        ),
    ),
    Row(
        "Batches whose sizes change, without a program each",
        "yes (eager)",
        "yes (eager)",
        "yes, after the second size (`dynamic`); at most `programs` are kept",
        (
            "test_dynamic_shapes::test_one_capture_serves_every_number_of_rows_bit_for_bit",
            "test_moving_sizes::test_the_second_number_of_rows_makes_the_last_program_bit_for_bit",
            "test_program_cache::test_the_least_recently_used_program_is_dropped_and_the_numbers_stay",
        ),
    ),
    Row(
        "Peak memory told before the first step",
        NO,
        NO,
        "predicted, and compared with what is measured",
        ("test_memory::test_the_peak_of_a_gpt", "test_memory::test_persistent_bytes_are_exact"),
    ),
    Row(
        "Models that no rank can hold, from the meta device",
        "`to_empty`, then the user's own initialisation",
        NO,
        "`init`, a unit at a time",
        ("test_api::test_a_meta_model_is_initialised_unit_by_unit",),
    ),
    Row(
        "`torch.optim`'s element-wise optimizers inside the step's program, others on the shards after it",
        "`torch.compile` of `optimizer.step`",
        "`torch.compile` of `optimizer.step`",
        "yes; a new rate compiles nothing",
        (
            "test_optim::test_the_traced_update_is_the_eager_one",
            "test_optimizer_trial::test_an_update_that_differs_is_not_believed",
            "test_api::test_a_learning_rate_schedule_drives_the_step_without_a_recompile",
        ),
    ),
    Row(
        "The step as a function of a state",
        NO,
        NO,
        "`state`, `apply`",
        ("test_api::test_apply_is_step_as_a_function_and_consumes_its_state",),
    ),
    Row(
        "The step as a program that can be read and compared",
        NO,
        NO,
        "`plan`, `program`, `dump`",
        ("test_api::test_plan_program_and_dump_show_what_will_run", "test_shape::test_what_is_sent_is_as_written_down"),
    ),
    Row(
        "Ranks that disagree get an error instead of a hang",
        NO,
        "shapes of parameters, at the start",
        "yes",
        ("test_disagreements::test_a_disagreement_is_an_error_on_every_rank",),
    ),
    Row(
        "A call that fails on one rank",
        "the others wait",
        "the others wait",
        "an error on every rank, after which all can go on",
        (
            "test_failed_calls::test_all_ranks_raise_and_go_on_as_if_the_call_had_not_been",
            "test_failed_calls::test_with_nothing_told_the_other_rank_waits",
        ),
    ),
    Row(
        "`autocast` around a step, with parts in fp32",
        "yes",
        "yes",
        "yes; one program a mode",
        ("test_autocast::test_autocast_around_a_model_with_a_part_in_fp32",),
    ),
    Row(
        "Hooks of autograd on parameters and modules",
        "yes",
        "yes",
        "refused by name, with what does the same",
        (
            "test_autograd_hooks::test_a_hook_on_a_parameter_is_refused_before_anything_is_changed",
            "test_autograd_hooks::test_the_cure_for_a_hook_on_a_parameter_does_what_the_hook_does",
        ),
    ),
    Row(
        "Parameters read and written in place between steps",
        "by `DTensor`s",
        "yes",
        "yes, as in eager PyTorch; what one rank writes alone is an error on all",
        (
            "test_taken_over_ranks::test_what_is_read_and_written_is_what_an_eager_model_has",
            "test_taken_over_ranks::test_what_one_rank_writes_alone_is_an_error_on_both_until_the_other_does",
        ),
    ),
    Row(
        "`loss.backward()` and `optimizer.step()` in a loop of one's own",
        "yes",
        "yes",
        "`fsdp_compiled.fully_shard`",
        ("test_fully_shard::test_a_loop_leaves_what_it_leaves_with_fsdp2",),
    ),
    Row(
        "Checkpoints that another number of ranks loads",
        "`torch.distributed.checkpoint`",
        "`torch.save`",
        "`save` and `load`, with checksums; with tensor parallelism or without",
        (
            "test_checkpoint_ranks::test_other_numbers_of_ranks_load_the_same",
            "test_checkpoint_ranks::test_what_failed_has_changed_nothing",
            "test_tensor_parallel_checkpoints::test_other_meshes_load_the_same",
        ),
    ),
    Row(
        "Tensor parallelism on a further axis",
        "`parallelize_module`",
        "not stated",
        '`parallelize_module` before `compile_sharded` or `fully_shard`; `Policy(tp="auto")`',
        (
            "test_tensor_parallel::test_with_sequence_parallelism_it_is_fsdp2_to_the_bit",
            "test_tensor_parallel::test_what_is_not_right_is_refused_on_every_rank",
            "test_tensor_parallel_loop::test_with_sequence_parallelism_and_clipping_it_is_fsdp2_to_the_bit",
            "test_tensor_parallel_loop::test_dropout_is_fsdp2s_where_activations_are_whole_and_independent_on_parts",
            "test_tp_overlap::test_they_start_and_are_waited_for_as_data_allows",
            "test_tensor_parallel_models::test_a_model_of_transformers_is_cut_by_the_plan_that_it_brings",
            "test_tensor_parallel_models::test_a_model_without_a_plan_is_cut_by_one_that_is_derived",
            "test_derived_plan::test_the_trial_sees_cuts_that_fit_and_are_wrong",
            "test_uneven_parts::test_they_are_pytorch_with_the_same_plan_to_the_bit_and_one_process",
        ),
    ),
    Row(
        "Expert parallelism: tokens are sent to the ranks that have their experts",
        "by the model's own all-to-all",
        "not stated",
        "the model's own all-to-all along `tp`, captured; with room for a fixed number of tokens",
        (
            "test_expert_parallel::test_experts_that_tokens_are_sent_to_train_as_in_one_process",
            "test_expert_parallel::test_what_is_not_known_to_be_right_is_refused_on_every_rank",
        ),
    ),
    Row(
        "Context parallelism: stretches of long sequences",
        "`context_parallel`, on GPUs",
        "not stated",
        "`SequenceAttention`, `stretch`",
        (
            "test_sequence_attention::test_stretches_train_as_whole_sequences_do",
            "test_tensor_parallel_models::test_stretches_of_sequences_train_as_whole_ones_under_both_faces",
        ),
    ),
    Row(
        "Optimizers that need whole matrices (Muon, Shampoo)",
        "where `DTensor` has their operators",
        "yes",
        "each matrix on one rank, after the program; not with tensor parallelism",
        (
            "test_whole_matrices::test_as_in_eager_pytorch",
            "test_whole_matrices::test_on_ranks",
            "test_whole_matrices_edges::test_on_ranks_and_from_other_numbers_of_them",
            "test_whole_matrices_edges::test_dcp_goes_on_bit_for_bit_before_a_first_step_and_after",
        ),
    ),
    Row(
        "Every combination of placement, precision, accumulation, clipping and recomputation",
        "not stated",
        "not stated",
        "runs, or is refused by `compile_sharded`",
        (
            "test_combinations::test_every_combination_on_two_ranks",
            "test_combinations::test_every_combination_on_four_ranks",
            "test_combinations::test_what_is_not_allowed_is_refused_before_anything_is_changed",
        ),
    ),
)


def path_of(test: str) -> tuple[str, str]:
    """``test_scale::test_x`` -> the file, from the root, and the function."""
    module, function = test.split("::")
    file = next((ROOT / "tests").rglob(f"{module}.py"))
    return str(file.relative_to(ROOT)), function


def table(rows: Collection[Row]) -> str:
    """Markdown, between its markers."""
    lines = [BEGIN, "", "| | FSDP2 | DDP | here | shown by |", "|---|---|---|---|---|"]
    for row in rows:
        files = defaultdict(list)
        for file, function in map(path_of, row.tests):
            files[file].append(function)
        proofs = [
            f"[{'`, `'.join(functions)}](../{file})".replace("[", "[`").replace("](", "`](")
            for file, functions in files.items()
        ]
        lines.append(
            f"| {row.capability} | {row.fsdp2} | {row.ddp} | {row.ours} | {', '.join(proofs) or 'not there yet'} |"
        )
    return "\n".join([*lines, "", END])


def passed(*reports: Path) -> set[str]:
    """The tests of which every case in these JUnit files ran and passed, as ``module::function``."""
    good: dict[str, bool] = {}
    for case in itertools.chain.from_iterable(ElementTree.parse(report).iter("testcase") for report in reports):
        module = case.get("classname", "").rpartition(".")[2]
        name = f"{module}::{case.get('name', '').split('[')[0]}"
        ran = not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        good[name] = good.get(name, True) and ran
    return {name for name, ran in good.items() if ran}


def proven(rows: Collection[Row], good: Collection[str]) -> list[Row]:
    """The rows whose tests all passed, and those that claim nothing."""
    return [row for row in rows if all(test in good for test in row.tests)]


def run(rows: Collection[Row]) -> set[str]:
    """Runs the rows' tests; what passed."""
    ids = sorted({"::".join(path_of(test)) for row in rows for test in row.tests})
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        subprocess.run(
            [sys.executable, "-P", "-m", "pytest", "-q", f"--junitxml={report}", *ids], cwd=ROOT, check=False
        )
        return passed(report)


def replaced(text: str, new: str) -> str:
    """The page's text with this table in the place of the one between the markers."""
    before, rest = text.split(BEGIN)
    return before + new + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of capabilities, from test results.")
    parser.add_argument("--write", action="store_true", help="put it into docs/guarantees.md; else it is printed")
    parser.add_argument("--junit", type=Path, metavar="FILE", nargs="+", help="results of runs, instead of running now")
    arguments = parser.parse_args()
    good = passed(*arguments.junit) if arguments.junit else run(ROWS)
    rows = proven(ROWS, good)
    for row in ROWS:
        if row not in rows:
            missing = [test for test in row.tests if test not in good]
            print(f"left out: {row.capability}: not passed: {', '.join(missing)}", file=sys.stderr)
    if arguments.write:
        PAGE.write_text(replaced(PAGE.read_text(), table(rows)))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
