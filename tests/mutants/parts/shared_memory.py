"""Mutants of csrc/transports/shm, the store and the rendezvous."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

X86 = "x86 keeps the order of stores and of loads itself, and the compiler has nothing to exchange"
SHARED = "tests/collectives/test_shared.py::"
SEGMENT = "tests/transports/test_shm.py::"
HEAP = "tests/collectives/test_shared_heap.py"

MUTANTS = (
    # ------------------------------------------------------------------ window
    Mutant(
        "window-flag-without-release",
        "wait",
        "csrc/transports/shm/window.h",
        "std::memory_order_release",
        "std::memory_order_relaxed",
        SHARED + "test_all_reduce_gives_the_same_bits_everywhere",
        within="store(hash_ | stage_, std::memory_order_release)",
        escapes=X86,
    ),
    Mutant(
        "window-end-without-a-fence",
        "wait",
        "csrc/transports/shm/window.h",
        "std::atomic_thread_fence(std::memory_order_acquire);",
        "",
        "tests/faults/test_stopped.py",
        within="std::atomic_thread_fence(std::memory_order_acquire);  // after all reads",
        escapes=X86,
    ),
    Mutant(
        "window-call-that-was-aborted-succeeds",
        "check",
        "csrc/transports/shm/window.h",
        "if (aborted_here()) throw_aborted();",
        "",
        "tests/faults/test_stopped.py::test_a_rank_that_goes_on_late_neither_succeeds_nor_writes",
    ),
    Mutant(
        "window-other-call-of-the-same-number",
        "comparison",
        "csrc/transports/shm/window.h",
        "static_cast<int32_t>(static_cast<uint32_t>(seen) - stage) > 0",
        "static_cast<int32_t>(static_cast<uint32_t>(seen) - stage) >= 0",
        SHARED + "test_calls_that_differ_are_described_on_every_rank",
    ),
    Mutant(
        "window-used-after-a-failed-call",
        "check",
        "csrc/transports/shm/window.h",
        "if (open_) throw_broken();",
        "",
        SHARED + "test_a_failed_call_ends_the_window",
    ),
    Mutant(
        "window-slot-of-the-round-before",
        "rank",
        "csrc/transports/shm/window.h",
        "round % kSlots * kSlotBytes",
        "round % (kSlots / 2) * kSlotBytes",
        SHARED
        + "test_all_gather_brings_all_parts "
        + SHARED
        + "test_calls_of_all_kinds_may_follow_each_other",
    ),
    Mutant(
        "window-abort-after-a-call-takes-it-back",
        "comparison",
        "csrc/transports/shm/window.cpp",
        "theirs.completed >= tag_.seq",
        "theirs.completed > tag_.seq",
        "tests/faults/test_stopped.py::test_an_abort_that_follows_a_call_takes_nothing_from_it",
    ),
    Mutant(
        "window-calls-not-compared",
        "check",
        "csrc/transports/shm/window.cpp",
        "compare_tags(stage);",
        "",
        SHARED + "test_calls_that_differ_are_described_on_every_rank",
        within="drive_();\n    compare_tags(stage);",
    ),
    Mutant(
        "window-waits-for-a-rank-that-has-left",
        "check",
        "csrc/transports/shm/window.cpp",
        "detector_.left(rank) && !ready()",
        "false",
        SHARED + "test_a_rank_that_leaves_is_named_at_once",
    ),
    Mutant(
        "window-waits-without-a-deadline",
        "deadline",
        "csrc/transports/shm/window.cpp",
        "if (deadline_.expired()) throw_timeout(stage);",
        "",
        SHARED + "test_a_rank_that_does_not_come_is_named",
    ),
    Mutant(
        "window-timeout-names-who-has-come",
        "comparison",
        "csrc/transports/shm/window.cpp",
        "r != rank_ && !arrived(r, stage)",
        "r != rank_ && arrived(r, stage)",
        SHARED + "test_a_rank_that_does_not_come_is_named",
        escapes=(
            "The list counts only if all ranks are in the call and one stands still in its "
            "own copying."
        ),
    ),
    # ------------------------------------------------------------------ rings
    Mutant(
        "ring-padding-of-the-writer",
        "constant",
        "csrc/transports/shm/ring_channel.cpp",
        "if (whole) head_ += padding(message.data.size);",
        "",
        SEGMENT + "test_messages_of_every_size_arrive_in_order",
    ),
    Mutant(
        "ring-end-not-continued-at-the-beginning",
        "rank",
        "csrc/transports/shm/ring_channel.cpp",
        "std::memcpy(ring.data, static_cast<const uint8_t*>(from) + first, bytes - first);",
        "",
        SEGMENT + "test_messages_of_every_size_arrive_in_order",
    ),
    Mutant(
        "ring-message-of-another-size-taken",
        "check",
        "csrc/transports/shm/ring_channel.cpp",
        "same_tag && frame.bytes == wanted.data.size",
        "same_tag",
        "tests/transports/test_channels.py::test_mismatch_of_sizes_is_found",
    ),
    Mutant(
        "ring-last-words-of-a-rank-not-read",
        "order",
        "csrc/transports/shm/ring_channel.cpp",
        "if (pull()) return true;",
        "",
        SEGMENT + "test_what_a_rank_sent_before_it_left_still_arrives",
        escapes="the rank must leave between two reads of the same call of progress(), which are "
        "some nanoseconds apart",
    ),
    Mutant(
        "ring-does-not-wake-the-peer",
        "wait",
        "csrc/transports/shm/ring_channel.cpp",
        "peer_bell_->ring();",
        "",
        SEGMENT + "test_messages_of_every_size_arrive_in_order",
        within="peer_bell_->ring();\n    moved = true;\n    if (whole) {\n      traffic_",
        escapes="all sleeps are short, so that a wake-up may be missed: it costs time alone, and "
        "no test asserts a time",
    ),
    # ------------------------------------------------------------------ failure detector
    Mutant(
        "detector-rank-that-left-has-died",
        "check",
        "csrc/transports/shm/failure_detector.cpp",
        "!dead || left(rank)",
        "!dead",
        "tests/faults/test_lost.py::test_a_rank_that_left_before_its_process_ended_has_not_died",
    ),
    Mutant(
        "detector-child-leaves-for-its-parent",
        "check",
        "csrc/transports/shm/failure_detector.cpp",
        "region_.rank_slot(self_).process[0] != static_cast<uint64_t>(::getpid())",
        "false",
        SEGMENT + "test_a_forked_child_that_cleans_up_does_not_leave_for_its_parent",
    ),
    Mutant(
        "detector-leaves-without-a-word",
        "state",
        "csrc/transports/shm/failure_detector.cpp",
        "region_.rank_slot(self_).left.store(1, std::memory_order_release);",
        "",
        SHARED + "test_a_rank_that_leaves_is_named_at_once",
    ),
    Mutant(
        "detector-second-reason-replaces-the-first",
        "error",
        "csrc/transports/shm/failure_detector.cpp",
        "if (!first) return;",
        "",
        SHARED + "test_of_two_reasons_for_an_abort_the_first_counts",
    ),
    Mutant(
        "detector-abort-without-a-fence",
        "wait",
        "csrc/transports/shm/failure_detector.cpp",
        "std::atomic_thread_fence(std::memory_order_seq_cst);",
        "",
        "tests/faults/test_stopped.py",
        escapes="the exchange before it is a full barrier on x86",
    ),
    Mutant(
        "detector-deaths-not-looked-for",
        "check",
        "csrc/transports/shm/failure_detector.cpp",
        "check_deaths();",
        "",
        SHARED + "test_a_rank_that_dies_is_named_in_a_fifth_of_a_second",
        within="check_deaths();\n  if (aborted()) throw_aborted();",
    ),
    Mutant(
        "detector-descriptor-of-another-file",
        "check",
        "csrc/transports/shm/peer_process.cpp",
        "handle_->ours()",
        "true",
        "tests/transports/test_watch.py::"
        "test_a_death_is_seen_when_descriptors_are_those_of_other_files "
        "tests/transports/test_watch.py::"
        "test_who_closes_all_descriptors_goes_on_and_its_new_files_stay_open",
        within="if (handle_->ours()) return dead(how_);",
    ),
    Mutant(
        "detector-closes-what-is-not-its-own",
        "check",
        "csrc/transports/shm/peer_process.cpp",
        "fd_ >= 0 && ours()",
        "fd_ >= 0",
        "tests/transports/test_watch.py::"
        "test_who_closes_all_descriptors_goes_on_and_its_new_files_stay_open",
    ),
    Mutant(
        "memory-of-another-process-read",
        "check",
        "csrc/transports/shm/cma.cpp",
        "std::memcmp(seen, theirs.process, sizeof seen) != 0",
        "false",
        "tests/collectives/test_peer_read.py tests/transports/test_read_permit.py",
        escapes=(
            "Only a process that got the number of one that ended, and can be read at the "
            "same address, shows it."
        ),
    ),
    # ------------------------------------------------------------------ heap
    Mutant(
        "heap-bytes-in-use-only-grow",
        "state",
        "csrc/transports/shm/heap.cpp",
        "used_ -= block->second;",
        "",
        HEAP + "::test_a_freed_block_is_used_again " + HEAP + "::test_blocks_never_overlap",
    ),
    Mutant(
        "heap-neighbours-not-joined",
        "check",
        "csrc/transports/shm/heap.cpp",
        "neighbour->first + neighbour->second.bytes == offset",
        "false",
        HEAP + "::test_freed_neighbours_are_one_gap",
    ),
    Mutant(
        "heap-pages-kept-forever",
        "comparison",
        "csrc/transports/shm/heap.cpp",
        "kept_ + gap.touched > std::max(kKeep, used_)",
        "false",
        HEAP + "::test_many_freed_bytes_go_back_to_the_system",
    ),
    Mutant(
        "heap-releases-a-page-of-its-neighbour",
        "rank",
        "csrc/transports/shm/heap.cpp",
        "(offset + gap.bytes) / page_ * page_",
        "round_up(offset + gap.bytes, page_)",
        "tests/collectives/test_shared_heap.py::"
        "test_bytes_beside_those_that_go_back_to_the_system_stay",
    ),
    Mutant(
        "heap-child-allocates",
        "check",
        "csrc/transports/shm/heap.cpp",
        "::getpid() != process_",
        "false",
        HEAP + "::test_a_forked_child_leaves_the_heap_alone",
        within="if (::getpid() != process_) {\n    throw Error",
        escapes="Communicator.allocate() refuses in a child before it asks the heap.",
    ),
    Mutant(
        "region-of-threads-never-unmapped",
        "state",
        "csrc/transports/shm/local.cpp",
        "header.holders.fetch_sub(1) == 1",
        "header.holders.fetch_sub(1) == 0",
        "tests/faults/test_abort.py::test_errors_leave_no_thread_no_file_and_no_memory_behind",
    ),
    # ------------------------------------------------------------------ store, rendezvous
    Mutant(
        "store-others-may-write-to",
        "check",
        "csrc/transports/store.cpp",
        "(info.st_mode & (S_IWGRP | S_IWOTH)) != 0",
        "(info.st_mode & S_IWGRP) != 0",
        "tests/transports/test_store.py",
    ),
    Mutant(
        "store-value-of-another-user",
        "check",
        "csrc/transports/store.cpp",
        "check_owner(info, folder_ + path);",
        "",
        "tests/transports/test_store.py",
    ),
    Mutant(
        "store-leaves-half-a-value-on-a-full-disk",
        "state",
        "csrc/transports/store.cpp",
        "::unlinkat(opened_.get(), part.c_str(), 0);",
        "",
        "tests/faults/test_disk.py",
    ),
    Mutant(
        "store-keys-collide",
        "constant",
        "csrc/transports/store.cpp",
        "byte == '-' || byte == '_'",
        "byte == '-' || byte == '_' || byte == '%'",
        "tests/transports/test_store.py::test_keys_do_not_collide",
    ),
    Mutant(
        "rendezvous-topic-of-some-ranks-taken",
        "check",
        "csrc/transports/rendezvous.cpp",
        "texts.size() == values.size()",
        "true",
        "tests/faults/test_mismatch.py tests/transports/test_store.py",
        escapes=(
            "Ranks that announce different topics have different options, which is an error "
            "before a topic is used."
        ),
    ),
    Mutant(
        "rendezvous-does-not-look-out",
        "check",
        "csrc/transports/rendezvous.cpp",
        "rendezvous.interrupt_check();",
        "",
        "tests/faults/test_rendezvous.py::"
        "test_a_signal_ends_the_wait_for_others_and_they_hear_of_it",
    ),
)
