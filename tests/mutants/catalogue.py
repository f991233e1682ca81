"""The mutants: mistakes that no error would show, each of which few tests notice.

Longer than others: it is one table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


class Stale(ValueError):
    """An entry does not fit the sources any more."""


@dataclass(frozen=True)
class Mutant:
    """A change to one function, and the tests that should notice it.

    `place` is the file and the function, with its classes: `csrc/queue.cpp::Queue::post` in C++,
    `pycomm/bucket.py::Bucket.pack` in Python. `old` occurs once in that file.
    """

    name: str
    place: str
    old: str
    new: str
    tests: str
    """Arguments for pytest, from the folder tests on, separated by blanks."""

    @property
    def file(self) -> str:
        return self.place.partition("::")[0]

    @property
    def function(self) -> str:
        return self.place.partition("::")[2]

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(f"tests/{test}" for test in self.tests.split())

    @property
    def compiled(self) -> bool:
        return self.file.startswith("csrc/")

    def fits(self, word: str) -> bool:
        """Return whether a word is the name, or the file or folder."""
        return word == self.name or f"{self.file}/".startswith(f"{word.rstrip('/')}/")

    def applied(self, source: str) -> str:
        """Return the file's text with the change.

        Raises:
            Stale: the file does not name the function, or does not have `old` just once.
        """
        name = self.function.replace("::", ".").split(".")[-1]
        if not re.search(rf"\b{name}\b", source):
            raise Stale(f"{self.name}: {self.file} has no function {self.function}")
        if (times := source.count(self.old)) != 1:
            line = self.old.strip().splitlines()[0]
            raise Stale(f"{self.name}: {self.file} has {times} times: {line}")
        return source.replace(self.old, self.new)


MUTANTS = (
    # -------------------------------------------------------------------- waits, and what ends them
    Mutant(
        "ring-adds-before-the-bytes-are-there",
        "csrc/collectives/algorithms/ring.cpp::reduce_around",
        "context.wait(left, arrival.ticket);\n    uint8_t* own",
        "uint8_t* own",
        "collectives/test_algorithms.py::test_every_collective_is_exact_in_tiny_segments",
    ),
    Mutant(
        "direct-writes-what-is-still-sent",
        "csrc/collectives/algorithms/direct.cpp::one_shot_reduce",
        "context.wait_all();  // the output may be the input, which is sent until here",
        "",
        "collectives/test_algorithms.py::test_every_collective_is_exact",
    ),
    Mutant(
        "channels-wait-without-a-deadline",
        "csrc/collectives/algorithms/context.cpp::CollectiveContext::pause",
        "!deadline_.expired()",
        "true",
        "collectives/test_algorithms.py::test_a_missing_rank_ends_the_call_everywhere",
    ),
    Mutant(
        "window-tiny-sum-read-too-early",
        "csrc/collectives/window/shared.cpp::tiny",
        "window.wait(stage);\n  if (out)",
        "if (out)",
        "collectives/test_algorithms.py::test_every_dtype_and_op",
    ),
    Mutant(
        "window-left-while-others-write-to-us",
        "csrc/collectives/window/shared.cpp::all_reduce",
        "mine, size);\n  }\n  barrier(window);",
        "mine, size);\n  }",
        "collectives/test_zero_copy.py::test_every_collective_between_processes",
    ),
    Mutant(
        "read-before-the-others-have-summed",
        "csrc/collectives/window/shared.cpp::all_reduce_by_reading",
        "barrier(window);\n  for (int k = 1; k < window.size(); k++)",
        "\n  for (int k = 1; k < window.size(); k++)",
        "collectives/test_zero_copy.py::test_ranks_on_one_core_wait_for_sums",
    ),
    Mutant(
        "coded-owner-does-not-wait",
        "csrc/collectives/coded/two_shot.cpp::TwoShot::own",
        "return have_all(Shot::contribution, s);",
        "return true;",
        "collectives/coded/test_collectives.py::test_bytes_of_the_model",
    ),
    Mutant(
        "queue-callers-do-not-wait-for-their-turn",
        "csrc/collectives/queue.cpp::Queue::Impl::begin_turn",
        "if (serving_.load() == number) return;",
        "if (true) return;",
        "torch/backend/test_ops.py::test_async_operations_run_and_complete_in_order",
    ),
    Mutant(
        "frame-checksum-that-follows-not-awaited",
        "csrc/transports/tcp/channel.cpp::TcpChannel::pull_payload",
        "header.checks == FrameHeader::kNext",
        "false",
        "transports/tcp/test_frames.py::test_a_message_waits_for_its_last_checksum",
    ),
    Mutant(
        "requests-of-a-cut-control-connection-lost",
        "csrc/transports/tcp/connect/connector.cpp::Connector::join",
        "ask_again(link);",
        "",
        "transports/tcp/test_reconnect.py::test_a_request_to_connect_that_was_cut_off_is_repeated",
    ),
    # --------------------------------------------- orders: of sums, messages, ranks, random numbers
    Mutant(
        "second-key-word-of-many-not-raised",
        "csrc/codecs/base/random.cpp::random_block_avx2",
        "key1 += kPhiloxKey1;\n  }\n  const size_t size",
        "}\n  const size_t size",
        "codecs/test_golden.py",
    ),
    Mutant(
        "floats-summed-in-any-order",
        "csrc/collectives/algorithms/dispatch.cpp::select",
        "[](Algo) { return true; }",
        "[](Algo algo) { return algo == Algo::ring; }",
        "collectives/test_schedule.py",
    ),
    Mutant(
        "sites-sum-in-rank-order",
        "csrc/collectives/group/channel_mesh.cpp::ChannelMesh::use_sites",
        "    topology_ = sites;\n",
        "",
        "collectives/test_hierarchical.py::test_float_sums_have_one_order_at_every_size",
    ),
    Mutant(
        "coded-rows-share-random-numbers",
        "csrc/collectives/coded/coder.cpp::Coder::key",
        "if (row > 0) key.seed = hop_seed(key.seed, static_cast<int>(row));",
        "",
        "collectives/coded/test_collectives.py::test_reduce_scatter_has_the_bytes_of_the_model",
    ),
    Mutant(
        "receives-of-any-rank-overtaken",
        "csrc/collectives/point_to_point/point_to_point.cpp::PointToPoint::post_recv",
        "request->peer != rank_ && first",
        "request->peer != rank_",
        "collectives/test_point_to_point.py::test_receives_posted_first_are_filled_first",
    ),
    Mutant(
        "detector-second-reason-replaces-the-first",
        "csrc/transports/shm/failure_detector.cpp::FailureDetector::abort",
        "if (!first) return;",
        "",
        "faults/test_abort.py::test_of_two_reasons_for_an_abort_the_first_counts",
    ),
    Mutant(
        "stream-resumes-where-it-was",
        "csrc/transports/tcp/channel.cpp::TcpChannel::greet",
        "socket.out.resume_at(socket.theirs.received);",
        "",
        "transports/tcp/test_reconnect.py::test_collectives_go_on_when_connections_are_cut",
    ),
    # --------------------------------------------------------- residuals, and what is added to them
    Mutant(
        "what-was-sent-without-the-residual-in-it",
        "csrc/optim/moments_passes.h::send_patch",
        "x = x + warp.load(before, args.form, begin, left, k);",
        "",
        "core/test_moments.py::test_steps_have_the_bits_of_their_definition",
    ),
    Mutant(
        "residual-not-written",
        "csrc/codecs/base/feedback.cpp::encode",
        "if (residual) store(feedback.storage, {fresh, n}, feedback.error.fresh);",
        "",
        "torch/reduction/test_two_shot.py::test_every_kind_of_feedback_likewise",
    ),
    Mutant(
        "triton-residual-not-added",
        "triton_kernels/_math.py::load_sum",
        "        p = p + residual\n",
        "",
        "codecs/test_golden.py::test_bytes_are_those_of_the_golden_file",
    ),
    Mutant(
        "discarded-step-kept",
        "pycomm/reduction/state.py::CompressionState.settle",
        "finite and step.status is StepStatus.REDUCED",
        "finite and step.status is not StepStatus.OPEN",
        "torch/feedback/test_state.py::test_discard",
    ),
    Mutant(
        "lost-ranks-residuals-scaled-the-wrong-way",
        "pycomm/reduction/state.py::CompressionState._meet",
        "reshard([own], before, ranks)",
        "reshard([own], ranks, before)",
        "torch/elastic/test_members.py",
    ),
    Mutant(
        "paid-residual-sent-again",
        "pycomm/reduction/state.py::CompressionState.settle",
        "self._drop_flushed(kept)",
        "pass",
        "torch/hooks/test_policy.py::test_of_every_kind_of_feedback_nothing_stays",
    ),
    Mutant(
        "written-side-never-current",
        "pycomm/feedback/residual.py::Residual.commit",
        "        self.side = 1 - self.side\n",
        "",
        (
            "torch/hooks/test_ddp_compress.py::test_feedback_loses_nothing_over_new_buckets "
            "torch/feedback/test_kinds.py"
        ),
    ),
    Mutant(
        "old-ranks-residuals-taken-twice",
        "pycomm/feedback/reshard.py::sources",
        "range(rank, before, ranks)",
        "range(before)",
        "torch/feedback/test_state.py::test_other_numbers_of_ranks_owe_the_same",
    ),
    Mutant(
        "a-second-backward-codes-the-momentum-of-the-first",
        "pycomm/hooks/momentum.py::Momenta.before_step",
        "if self._unused and self._has_momentum():",
        "if False:",
        "torch/optim/contract/test_gradients.py::test_a_second_backward_before_a_step_is_refused",
    ),
    Mutant(
        "shards-that-others-own-have-the-own-momentum",
        "pycomm/momentum/passes.py::Job.encode",
        "(own[i].last_step or shards > 1)",
        "own[i].last_step and shards == 1",
        "torch/optim/test_coded_adamw.py::test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "deepspeed-residuals-keep-the-old-scale",
        "pycomm/hooks/deepspeed.py::DeepSpeedHooks._open_step",
        "self._state.rescale(now / self._scale, momentum=True)",
        "pass",
        "torch/hooks/test_other_trainers.py::test_residuals_follow_the_loss_scale",
    ),
    # --------------------------------------------------------------- bounds, and what ranks compare
    Mutant(
        "codes-of-the-last-blocks-not-packed",
        "csrc/codecs/base/loops.h::encode_blocks",
        "(end % kMaxBlock != 0 && end != numel)",
        "end % kMaxBlock != 0",
        "codecs/test_contract.py::test_same_bytes[int4:block=32-native-cpu]",
    ),
    Mutant(
        "cut-inside-a-block-accepted",
        "csrc/codecs/base/codec.cpp::Codec::encode",
        "granule() != 0 && args.index % granule() != 0",
        "false",
        "codecs/test_spec.py::test_native_checks_for_itself",
    ),
    Mutant(
        "parts-of-another-size-taken",
        "csrc/collectives/window/shared.cpp::PartExchange::read_slot_headers",
        "from_[r].bytes != out_.bytes(r)",
        "false",
        "collectives/test_algorithms.py::test_sizes_that_differ_are_named_on_every_rank",
    ),
    Mutant(
        "coded-step-not-compared",
        "csrc/collectives/coded/coded.cpp::signature",
        "add_number(args.step);",
        "",
        "faults/test_mismatch.py::test_every_rank_is_told_who_differs",
    ),
    Mutant(
        "damaged-notice-read-beyond-its-end",
        "csrc/core/notice.cpp::Notice::decode",
        "head.text > bytes.size - fixed",
        "false",
        "transports/test_channels.py::test_bytes_that_are_no_notice_are_an_error",
    ),
    Mutant(
        "short-messages-without-a-bound",
        "csrc/collectives/point_to_point/point_to_point.cpp::PointToPoint::check_eager",
        "peer.kept > kKeptBytes",
        "false",
        "collectives/test_point_to_point.py::test_no_more_is_kept_than_the_bound",
    ),
    Mutant(
        "window-calls-not-compared",
        "csrc/transports/shm/window.cpp::Window::wait_long",
        "drive_();\n    compare_tags(stage);",
        "drive_();\n    ",
        "faults/test_mismatch.py::test_every_rank_is_told_who_differs",
    ),
    Mutant(
        "ring-end-not-continued-at-the-beginning",
        "csrc/transports/shm/ring_channel.cpp::write_ring",
        "std::memcpy(ring.data, static_cast<const uint8_t*>(from) + first, bytes - first);",
        "",
        "transports/test_channels.py::test_every_pair_exchanges_every_size",
    ),
    Mutant(
        "heap-releases-a-page-of-its-neighbour",
        "csrc/transports/shm/heap.cpp::SharedHeap::release",
        "(offset + gap.bytes) / page_ * page_",
        "round_up(offset + gap.bytes, page_)",
        "collectives/test_zero_copy.py::test_bytes_beside_released_pages_stay",
    ),
    Mutant(
        "store-value-of-another-user",
        "csrc/transports/store.cpp::FileStore::read",
        "check_owner(info, folder_ + path);",
        "",
        "transports/test_store.py",
    ),
    Mutant(
        "frame-beyond-its-message-taken",
        "csrc/transports/tcp/stream.cpp::flaw_of",
        "header.length > header.size - header.offset",
        "false",
        "transports/tcp/test_frames.py::test_false_frame_is_described",
    ),
    Mutant(
        "both-ends-prove-alike",
        "csrc/transports/tcp/connect/handshake.cpp::Handshake::proof_of",
        'std::string("pycomm tcp ") + role',
        'std::string("pycomm tcp ")',
        "transports/tcp/test_handshake.py",
    ),
    Mutant(
        "compressed-overflow-unseen",
        "csrc/binding/torch/backend.cpp::Backend::compressed",
        "comm.run_coded(coded_call.op, args, out)",
        "(comm.run_coded(coded_call.op, args, out), true)",
        "torch/feedback/test_state.py::test_an_overflow_of_any_parameter_leaves_no_trace",
    ),
    Mutant(
        "half-a-state-taken",
        "pycomm/elastic/transfer.py::_broadcast",
        "if failed := [rank for rank, (has_failed,) in enumerate(rows) if has_failed]:",
        "if failed := []:",
        "torch/elastic/test_hand_over.py::test_a_rank_that_fails_holds_nobody_up",
    ),
    Mutant(
        "decisions-not-compared",
        "pycomm/policy/agreement.py::agree",
        "any(other != digests[0] for other in digests)",
        "False",
        "torch/hooks/test_policy.py::test_a_rank_that_counts_other_steps_is_named",
    ),
    Mutant(
        "megatron-padded-gradients-stay-local",
        "pycomm/hooks/megatron.py::BucketGroup._reduce.complete",
        "view.copy_(part)",
        "pass",
        "torch/hooks/test_other_trainers.py::test_buckets_have_the_bits_of_ddp",
    ),
)
