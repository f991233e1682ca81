"""Mutants of the package: residuals, the references of codecs, arguments, groups."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DDP = "tests/torch/hooks/test_ddp_compress.py::"
FEEDBACK = "tests/torch/feedback/test_state.py::"
KINDS = "tests/torch/feedback/test_kinds.py"
GOLDEN = "tests/codecs/test_golden.py"

MUTANTS = (
    # ------------------------------------------------------------------ residuals
    Mutant(
        "written-side-never-current",
        "residual",
        "pycomm/feedback/residual.py",
        "        self.side = 1 - self.side\n",
        "",
        DDP + "test_feedback_loses_nothing_over_new_buckets " + KINDS,
    ),
    Mutant(
        "owners-residual-counted-twice",
        "residual",
        "pycomm/feedback/residual.py",
        "        _clear(self.owner[then])\n\n    def commit",
        "\n    def commit",
        KINDS
        + "::test_other_owners_change_nothing_of_what_is_owed "
        + DDP
        + "test_feedback_loses_nothing_over_new_buckets",
    ),
    Mutant(
        "owners-residual-as-a-workers",
        "arithmetic",
        "pycomm/feedback/residual.py",
        'alpha = -ranks if self.rule.kind == "ef21" else ranks',
        'alpha = -1 if self.rule.kind == "ef21" else 1',
        KINDS
        + "::test_other_owners_change_nothing_of_what_is_owed "
        + DDP
        + "test_feedback_loses_nothing_over_new_buckets",
    ),
    Mutant(
        "momentum-goes-with-the-residual",
        "state",
        "pycomm/feedback/residuals.py",
        "        if found.momentum is not None:\n            kept = Residual",
        "        if False:\n            kept = Residual",
        "tests/torch/hooks/test_way_back.py::test_of_every_kind_of_feedback_nothing_stays "
        "tests/torch/feedback/test_state.py::test_dgc_is_topk_with_its_warm_up_and_momentum "
        "tests/torch/hooks/test_policy.py::test_a_schedule_loses_nothing",
    ),
    Mutant(
        "one-side-of-residuals-told",
        "constant",
        "pycomm/feedback/residuals.py",
        "return 2 * taken",
        "return taken",
        "tests/torch/feedback/test_residual_memory.py::test_residuals_take_what_is_told_before",
    ),
    Mutant(
        "residual-of-a-large-parameter-rounded",
        "comparison",
        "pycomm/feedback/rule.py",
        "numel >= LARGE",
        "numel > LARGE",
        "tests/torch/feedback/test_residual_memory.py",
    ),
    Mutant(
        "stored-bf16-becomes-infinite",
        "arithmetic",
        "pycomm/feedback/storage.py",
        "stored.copy_(values).clamp_(-largest, largest)",
        "stored.copy_(values)",
        KINDS,
    ),
    Mutant(
        "old-ranks-residuals-taken-twice",
        "rank",
        "pycomm/feedback/reshard.py",
        "range(rank, before, ranks)",
        "range(before)",
        FEEDBACK
        + "test_other_numbers_of_ranks_owe_the_same "
        + FEEDBACK
        + "test_training_goes_on_with_other_ranks",
    ),
    Mutant(
        "torch-ema-keeps-all",
        "residual",
        "pycomm/feedback/encode.py",
        "left = e * rule.decay + left",
        "left = e + left",
        KINDS,
    ),
    # ------------------------------------------------------------------ codecs' references
    Mutant(
        "reference-one-round-less",
        "random",
        "pycomm/codecs/philox.py",
        "range(10)",
        "range(9)",
        GOLDEN,
    ),
    Mutant(
        "reference-halves-down",
        "arithmetic",
        "pycomm/codecs/quant.py",
        "v.round()",
        "(v - 2.0**-20).round()",
        GOLDEN,
    ),
    Mutant(
        "reference-residual-without-the-old-one",
        "residual",
        "pycomm/codecs/implementations.py",
        "p - value, residual",
        "x - value, residual",
        GOLDEN,
    ),
    Mutant(
        "reference-infinite-value-owes",
        "residual",
        "pycomm/codecs/implementations.py",
        "value.isfinite()",
        "~value.isnan()",
        GOLDEN + " tests/codecs/test_contract.py::test_same_bytes[fp16-native-cpu-inf-at-0]",
    ),
    Mutant(
        "powersgd-where-it-does-not-pay",
        "comparison",
        "pycomm/codecs/powersgd.py",
        "4 * numel <= self.min_compression",
        "4 * numel < self.min_compression",
        "tests/codecs/test_powersgd.py",
    ),
    Mutant(
        "index-inside-a-block-accepted",
        "check",
        "pycomm/codecs/base.py",
        "index < 0 or (index % self.granule if self.granule else index)",
        "index < 0",
        "tests/codecs/test_spec.py::test_wrong_arguments_are_explained",
    ),
    Mutant(
        "sum-encoded-by-a-codec-without-sums",
        "check",
        "pycomm/codecs/base.py",
        'summed and self.combine != "sum"',
        "False",
        "tests/codecs/test_spec.py::test_wrong_arguments_are_explained "
        "tests/codecs/test_randomk.py::test_only_what_sums_encodes_a_sum",
    ),
    # ------------------------------------------------------------------ arguments, groups
    Mutant(
        "true-is-a-number",
        "check",
        "pycomm/arguments.py",
        "if isinstance(value, bool) or not isinstance(value, Integral):",
        "if not isinstance(value, Integral):",
        "tests/torch/backend/test_refused_arguments.py",
    ),
    Mutant(
        "nan-is-a-number",
        "check",
        "pycomm/arguments.py",
        "not math.isfinite(plain)",
        "math.isinf(plain)",
        "tests/torch/backend/test_refused_arguments.py",
    ),
    Mutant(
        "negative-count-accepted",
        "comparison",
        "pycomm/arrays.py",
        "not 0 <= value <= _LARGEST",
        "not value <= _LARGEST",
        "tests/collectives/test_arguments.py",
    ),
    Mutant(
        "tensor-with-gaps-taken",
        "check",
        "pycomm/arrays.py",
        "not array.is_contiguous() or array.is_conj() or array.is_neg()",
        "not array.is_contiguous() or array.is_conj()",
        "tests/collectives/test_communicator.py::test_tensors_that_cannot_be_used_are_refused",
    ),
    Mutant(
        "buffer-of-a-receive-freed",
        "state",
        "pycomm/communicator.py",
        "src, tag)\n        request.buffer = data",
        "src, tag)",
        "tests/collectives/test_communicator.py::test_a_request_keeps_its_group_and_its_buffer",
    ),
    Mutant(
        "timeout-of-the-call-overridden",
        "deadline",
        "pycomm/backend.py",
        "if given != default_pg_timeout:\n        return given",
        "if given == default_pg_timeout:\n        return given",
        "tests/torch/backend/test_groups.py::test_the_first_timeout_that_is_named_wins",
    ),
    Mutant(
        "gloo-stays-released",
        "state",
        "pycomm/takeover.py",
        "_released.reset(token)",
        "pass",
        "tests/torch/run/test_takeover.py",
    ),
    Mutant(
        "lost-rank-without-a-list",
        "error",
        "pycomm/errors.py",
        "list(ranks) or [rank]",
        "list(ranks)",
        "tests/faults/test_lost.py",
    ),
    Mutant(
        "least-period-refused",
        "comparison",
        "pycomm/env.py",
        "1 <= seconds <= 86400",
        "1 < seconds <= 86400",
        "tests/straggler/test_straggler.py::test_the_variable_says_how_often",
    ),
    Mutant(
        "half-a-binary-loaded",
        "order",
        "pycomm/_build.py",
        'partial = folder / "partial.so"',
        "partial = folder / BINARY",
        "tests/torch/backend/test_build.py",
    ),
    Mutant(
        "horovod-average-for-sum",
        "arithmetic",
        "pycomm/horovod/optimizer.py",
        "size() if self.op is Op.Sum else 1",
        "1",
        "tests/torch/horovod/test_horovod.py",
    ),
    Mutant(
        "horovod-unused-gradient-of-the-last-step",
        "state",
        "pycomm/horovod/optimizer.py",
        "view.zero_()  # no backward on this rank has used it",
        "pass",
        "tests/torch/horovod/test_horovod.py",
    ),
    Mutant(
        "slurm-tasks-of-the-job",
        "rank",
        "pycomm/launch.py",
        '_number(given, "SLURM_STEP_NUM_TASKS")',
        '_number(given, "SLURM_NTASKS")',
        "tests/launch/test_launch.py",
    ),
)
