"""Mutants of what a new member of a group gets from the others."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HAND_OVER = "tests/torch/elastic/test_hand_over.py::"

KEPT = "tests/torch/elastic/test_kept_memory.py::"

MUTANTS = (
    Mutant(
        "inherited-residuals-not-noted",
        "state",
        "pycomm/feedback/residuals.py",
        "        self.inherited = True\n",
        "",
        "tests/torch/elastic/test_members.py::test_who_stays_keeps_what_it_owes_and_who_is_new_owes_nothing",
    ),
    Mutant(
        "nan-given-to-the-codec",
        "check",
        "pycomm/elastic/chunks.py",
        "if not bool(floats.isnan().any()):",
        "if True:",
        HAND_OVER + "test_new_members_have_the_same_bits",
    ),
    Mutant(
        "half-a-state-taken",
        "check",
        "pycomm/elastic/state.py",
        "    receiver.end()\n",
        "",
        HAND_OVER + "test_a_rank_that_gives_up_tells_those_after_it",
    ),
    Mutant(
        "models-not-compared",
        "check",
        "pycomm/elastic/transfer.py",
        "if any(member.digest != members[0].digest for member in members):",
        "if False:",
        HAND_OVER + "test_what_does_not_fit_is_told_on_all_before_anything_is_sent",
    ),
    Mutant(
        "states-cast-to-their-parameters",
        "arithmetic",
        "pycomm/elastic/contents.py",
        "if loaded.dtype != value.dtype and loaded.shape == value.shape:",
        "if False:",
        HAND_OVER + "test_states_of_another_dtype_than_their_parameter_keep_it",
    ),
    Mutant(
        "floats-sent-uncoded",
        "constant",
        "pycomm/elastic/chunks.py",
        "_INTEGERS.get(tensor.dtype, torch.uint8) if self._coded else torch.uint8",
        "torch.uint8",
        HAND_OVER + "test_each_link_carries_the_state_once_and_coded",
    ),
    Mutant(
        "extra-state-forgotten",
        "state",
        "pycomm/elastic/contents.py",
        'module.set_extra_state(found["extra"][name])',
        "pass",
        HAND_OVER + "test_new_members_have_the_same_bits",
    ),
    Mutant(
        "buffers-forgotten",
        "state",
        "pycomm/elastic/contents.py",
        "if buffer is not None and name not in module._non_persistent_buffers_set:",
        "if False:",
        HAND_OVER + "test_new_members_have_the_same_bits",
    ),
    Mutant(
        "sender-on-another-host",
        "rank",
        "pycomm/elastic/transfer.py",
        "return -hosts, -nodes",
        "return 0, 0",
        HAND_OVER + "test_the_sender_is_near_and_neighbours_follow_each_other",
    ),
    Mutant(
        "other-parts-of-a-chunk",
        "rank",
        "pycomm/elastic/chunks.py",
        "            at += end - begin\n",
        "",
        HAND_OVER + "test_new_members_have_the_same_bits",
    ),
    Mutant(
        "any-class-read-from-others",
        "check",
        "pycomm/elastic/contents.py",
        'if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):',
        "if (found := getattr(__import__(module), name, None)) is not None:",
        HAND_OVER + "test_what_does_not_fit_is_told_on_all_before_anything_is_sent",
    ),
    Mutant(
        "heaps-kept-that-were-taken-back",
        "check",
        "csrc/transports/shm/kept_heaps.cpp",
        "heaps == nullptr || heaps->heap->taken_back()",
        "heaps == nullptr",
        KEPT + "test_memory_that_was_taken_back_is_not_kept",
    ),
    Mutant(
        "heaps-kept-of-different-ranks",
        "check",
        "csrc/transports/shm/kept_heaps.cpp",
        "if (space == std::string::npos) return {};",
        "if (space == std::string::npos) continue;",
        KEPT + "test_with_a_new_member_the_memory_is_new",
    ),
    Mutant(
        "sender-left-waiting",
        "error",
        "pycomm/elastic/state.py",
        "        receiver.fail()\n",
        "",
        HAND_OVER + "test_a_new_member_that_fails_holds_nobody_up",
    ),
    Mutant(
        "part-not-compared",
        "check",
        "pycomm/elastic/contents.py",
        "{shape}{part}",
        "{shape}",
        "tests/torch/elastic/test_hand_over_sharded.py::"
        "test_members_of_a_sharded_model_hand_over_their_parts",
    ),
    Mutant(
        "round-that-does-not-wait-for-a-load",
        "wait",
        "pycomm/local_sgd/progress.py",
        "if any(rank.loads != ranks[0].loads for rank in ranks):",
        "if False:",
        "tests/torch/local_sgd/test_quorum.py::test_rounds_wait_for_a_rank_that_loads_late",
    ),
)
