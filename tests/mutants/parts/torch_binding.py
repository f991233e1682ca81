"""Mutants of csrc/binding: the process group of torch, and the binding of the core."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OPS = "tests/torch/backend/test_ops.py::"
ARGUMENTS = "tests/torch/backend/test_arguments.py::"
GROUPS = "tests/torch/backend/test_groups.py::"
PYTHON = "tests/torch/backend/test_python_backend.py::"
MIXED = "tests/torch/device/test_mixed_ranks.py::"

MUTANTS = (
    # ------------------------------------------------------------------ CPU and device ranks
    Mutant(
        "operations-on-devices-destroyed-by-the-thread-that-ends-them",
        "wait",
        "csrc/binding/torch/engine.h",
        "if (on_device) self->dispose(std::move(operation));",
        "",
        "tests/torch/device/test_fake_device.py::test_operations_are_in_the_order_of_streams",
    ),
    Mutant(
        "device-ranks-of-a-mixed-group-cut-large-sums",
        "check",
        "csrc/binding/torch/backend.cpp",
        'options_->device.path != "mixed"',
        "true",
        MIXED + "test_every_operation_has_the_bits_of_ranks_on_the_cpu",
    ),
    Mutant(
        "mixed-groups-not-compared-when-they-are-made",
        "check",
        "csrc/binding/torch/backend.cpp",
        'if (options_->device.path == "mixed") communicator.agreed = "device_path=mixed";',
        "",
        MIXED + "test_a_rank_that_alone_has_the_option_is_refused",
    ),
    Mutant(
        "groups-of-a-mixed-group-are-not-mixed",
        "state",
        "pycomm/backend/__init__.py",
        "if parent is not None and _is_mixed(parent):",
        "if False:",
        MIXED + "test_groups_made_from_a_mixed_one_are_mixed",
    ),
    Mutant(
        "buckets-of-a-mixed-group-compressed-in-the-backend",
        "check",
        "pycomm/backend/__init__.py",
        "None if found is None or _is_mixed(found) else found",
        "found",
        MIXED + "test_compressed_gradients_have_the_bits_of_ranks_on_the_cpu",
    ),
    Mutant(
        "mismatch-of-paths-without-advice",
        "check",
        "csrc/collectives/group/failure.cpp",
        "text.find(kPathsLabel) == std::string::npos",
        "true",
        MIXED + "test_without_the_option_every_rank_reads_what_to_do",
    ),
    Mutant(
        "pending-works-without-their-hooks",
        "wait",
        "csrc/binding/torch/engine.cpp",
        "for (const auto& report : reports) report.wait();",
        ";",
        GROUPS + "test_pending_works_include_the_hooks_of_sends_and_receives",
    ),
    Mutant(
        "dropped-receive-not-copied",
        "state",
        "csrc/binding/torch/engine.h",
        "engine->timed_ || work->copies()",
        "engine->timed_ || false",
        GROUPS + "test_pending_works_include_receives_that_were_dropped",
    ),
    Mutant(
        "result-not-copied-to-a-tensor-with-gaps",
        "state",
        "csrc/binding/torch/support.h",
        "if (is_copy()) tensor_.copy_(flat_);",
        "",
        OPS + "test_tensors_that_are_not_contiguous",
    ),
    Mutant(
        "others-wait-for-a-rank-with-wrong-parts",
        "check",
        "csrc/binding/torch/backend.cpp",
        "in == out || size_ == 1",
        "true",
        ARGUMENTS + "test_a_part_that_only_one_rank_sees_to_be_wrong_ends_the_wait_of_all",
    ),
    Mutant(
        "sizes-of-a-list-not-compared",
        "check",
        "csrc/binding/torch/backend.cpp",
        "if (compare) compare_sizes(comm, Op::all_gather, input, out, call.timeout);",
        "",
        ARGUMENTS + "test_a_list_that_is_wrong_for_one_rank_raises_on_all",
    ),
    Mutant(
        "peer-beyond-the-last-accepted",
        "comparison",
        "csrc/binding/torch/arguments.h",
        "peer < 0 || peer >= size",
        "peer < 0 || peer > size",
        ARGUMENTS + "test_roots_peers_and_tags_that_do_not_exist_are_refused_at_the_call",
    ),
    Mutant(
        "negative-split-accepted",
        "check",
        "csrc/binding/torch/arguments.h",
        "count >= 0 && count <= left",
        "count <= left",
        ARGUMENTS + "test_negative_split_sizes_are_refused_and_nothing_is_written",
    ),
    Mutant(
        "outputs-that-overlap-accepted",
        "check",
        "csrc/binding/torch/arguments.h",
        "taken && place.begin < taken",
        "false",
        ARGUMENTS + "test_outputs_that_share_memory_are_refused_at_the_call",
    ),
    Mutant(
        "coalesced-work-done-when-one-is",
        "wait",
        "csrc/binding/torch/work.h",
        "for (const WorkPtr& work : works_)\n"
        "      work->wait(timeout.count() > 0 ? std::max(deadline.left(), Milliseconds(1)) : "
        "kNoTimeout);",
        "works_.front()->wait(timeout);",
        "tests/torch/backend/test_forms.py::test_a_coalescing_block_is_one_work "
        "tests/torch/backend/test_forms.py::test_batches_of_sends_and_receives_are_one_work",
    ),
    Mutant(
        "timeout-is-told-as-another-error",
        "error",
        "csrc/binding/torch/work.h",
        "late_ = error_type(error) == c10d::ErrorType::TIMEOUT;",
        "",
        "tests/torch/backend/test_trace.py::"
        "test_a_timeout_is_told_alike_by_waits_futures_and_later_calls",
    ),
    Mutant(
        "wait-of-a-work-without-its-limit",
        "deadline",
        "csrc/binding/torch/work.h",
        "timeout.count() <= 0",
        "true",
        GROUPS + "test_wait_that_times_out_names_rank_and_operation_and_hurts_nothing",
    ),
    Mutant(
        "error-of-a-work-swallowed",
        "error",
        "csrc/binding/torch/work.h",
        "error ? fail(error) : complete();",
        "complete();",
        "tests/torch/backend/test_errors.py::test_rank_that_does_not_call_is_named "
        "tests/torch/backend/test_errors.py::test_different_calls_are_named_on_both_ranks",
    ),
    Mutant(
        "kind-of-an-error-not-kept",
        "error",
        "csrc/binding/torch/engine.h",
        "note(std::current_exception());",
        "",
        "tests/torch/backend/test_groups.py::test_failed_work_says_how",
    ),
    Mutant(
        "operation-in-a-callback-comes-later",
        "order",
        "csrc/binding/torch/engine.h",
        "if (queue_.inside()) return run();",
        "",
        "tests/torch/backend/test_callbacks.py::"
        "test_what_a_callback_issues_comes_before_what_is_queued",
        within="if (queue_.inside()) return run();\n    queue_.submit(std::move(run));\n  }\n"
        "  /// Destroys something",
    ),
    Mutant(
        "compressed-bucket-of-16-bits-not-narrowed",
        "state",
        "csrc/binding/torch/backend.cpp",
        "to.finish();",
        "",
        "tests/torch/reduction/test_compressed_collectives.py::"
        "test_16_bit_floats_and_wrong_arguments",
    ),
    Mutant(
        "compressed-overflow-unseen",
        "check",
        "csrc/binding/torch/backend.cpp",
        "coded(comm, coded_call.op, args, out)",
        "(coded(comm, coded_call.op, args, out), true)",
        "tests/torch/hooks/test_ddp_compress.py::"
        "test_overflow_reaches_all_ranks_and_leaves_no_trace",
    ),
    Mutant(
        "residual-read-from-the-new-side",
        "residual",
        "csrc/binding/torch/layout.h",
        "(*pair)[sides.old]",
        "(*pair)[sides.fresh]",
        "tests/torch/reduction/test_compressed_collectives.py::"
        "test_any_backend_gives_the_bits_of_cpp",
    ),
    Mutant(
        "shrunk-group-forgets-its-numbers",
        "rank",
        "csrc/binding/torch/backend.cpp",
        "old_ranks.empty() ? r : old_ranks[r]",
        "r",
        "tests/torch/backend/test_groups.py::test_shrink_a_subgroup",
    ),
    Mutant(
        "shrink-names-ranks-of-the-new-group",
        "rank",
        "csrc/binding/torch/backend.cpp",
        "kept[lost.rank]",
        "lost.rank",
        GROUPS + "test_shrink_group tests/torch/elastic/test_shrink_and_go_on.py",
    ),
    Mutant(
        "group-of-an-old-name-meets-its-values",
        "state",
        "csrc/binding/torch/backend.cpp",
        'name + "/" + std::to_string(count)',
        "name",
        OPS + "test_groups_one_after_another_in_the_same_store",
    ),
    Mutant(
        "monitored-barrier-names-one-rank",
        "comparison",
        "csrc/binding/torch/backend.cpp",
        "wait_all_ranks || count == 0",
        "count == 0",
        GROUPS + "test_monitored_barrier_names_all_ranks_that_are_missing",
    ),
    Mutant(
        "options-of-a-parent-forgotten",
        "deadline",
        "csrc/binding/torch/backend.cpp",
        "if (options->timeout == kBackendDefaultTimeout) options->timeout = options_->timeout;",
        "",
        "tests/torch/backend/test_groups.py::"
        "test_a_split_group_has_its_parents_timeout_unless_it_names_one",
    ),
    Mutant(
        "message-kept-by-its-group",
        "state",
        "csrc/binding/torch/engine.cpp",
        "self->wanted_.erase(std::find(self->wanted_.begin(), self->wanted_.end(), work));",
        "",
        "tests/torch/backend/test_group_ends.py::"
        "test_nobody_keeps_a_message_that_has_been_sent_or_received",
    ),
    Mutant(
        "short-timeout-becomes-none",
        "deadline",
        "csrc/binding/core/arguments.h",
        "std::ceil(seconds * 1e3)",
        "std::floor(seconds * 1e3)",
        "tests/faults/test_absent.py::test_a_call_may_name_its_own_timeout",
    ),
    Mutant(
        "pieces-that-wrap-accepted",
        "check",
        "csrc/binding/core/arguments.h",
        "numel > kLargestBuffer / sizeof(float) - numel_",
        "false",
        "tests/collectives/test_arguments.py::test_pieces_that_wrap",
    ),
    # ------------------------------------------------------------------ the backend in Python
    Mutant(
        "python-result-not-copied-to-a-tensor-with-gaps",
        "state",
        "pycomm/backend/python/tensors.py",
        "            tensor.detach().copy_(made)\n",
        "            pass\n",
        PYTHON + "test_what_is_written_to_flat_memory_reaches_tensors_with_gaps",
    ),
    Mutant(
        "python-conjugate-sent-as-it-lies",
        "arithmetic",
        "pycomm/backend/python/tensors.py",
        " and not tensor.is_conj() and not tensor.is_neg()",
        "",
        PYTHON + "test_what_is_written_to_flat_memory_reaches_tensors_with_gaps",
    ),
    Mutant(
        "python-error-not-in-the-future",
        "check",
        "pycomm/backend/python/work.py",
        "            raise self._error\n        return self._outputs\n",
        "            pass\n        return self._outputs\n",
        PYTHON + "test_an_error_keeps_its_type_in_every_wait_and_is_the_futures_too",
    ),
    Mutant(
        "python-receive-forgotten-before-its-copy",
        "wait",
        "pycomm/backend/python/engine.py",
        "if work.is_completed()}",
        "if not work.needs_its_buffer()}",
        PYTHON + "test_pending_works_include_receives_that_were_dropped",
    ),
)
