"""Mutants of the package: steps, buckets, PowerSGD, LocalSGD, hooks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

STATE = "pycomm/reduction/state.py"
DDP = "tests/torch/hooks/test_ddp_compress.py::"
FEEDBACK = "tests/torch/feedback/test_state.py::"
POWERSGD = "tests/torch/reduction/test_powersgd_factors.py"
MEMBERS = "tests/torch/elastic/test_members.py::"
LOCAL = "tests/torch/local_sgd/test_local_sgd.py::"

MUTANTS = (
    # ------------------------------------------------------------------ steps
    Mutant(
        "discarded-step-kept",
        "residual",
        STATE,
        "finite and self._complete and not self._discarded",
        "finite and self._complete",
        "tests/torch/feedback/test_thrown_gradients.py::test_discard",
    ),
    Mutant(
        "residuals-of-an-overflow-kept",
        "residual",
        STATE,
        "- self._unused() - self._thrown if came else set()",
        "- self._unused() - self._thrown",
        DDP
        + "test_overflow_reaches_all_ranks_and_leaves_no_trace "
        + FEEDBACK
        + "test_an_overflow_leaves_no_trace",
    ),
    Mutant(
        "overflows-not-counted",
        "state",
        STATE,
        "self.overflows += not finite",
        "self.overflows += 0",
        DDP + "test_overflow_reaches_all_ranks_and_leaves_no_trace",
    ),
    Mutant(
        "factors-of-an-overflow-kept",
        "state",
        STATE,
        "self._exchanges.memory.commit(came)",
        "self._exchanges.memory.commit(True)",
        "tests/torch/reduction/test_powersgd_ddp.py::test_an_overflow_leaves_no_trace",
    ),
    Mutant(
        "step-not-saved",
        "state",
        STATE,
        '"step": self.step,',
        '"step": 0,',
        DDP + "test_saved_state_continues_to_the_bit",
    ),
    Mutant(
        "steps-have-one-number",
        "random",
        STATE,
        "self.step = (self.step + 1) % 2**32",
        "self.step = 1",
        "tests/torch/hooks/test_policy.py::test_a_schedule_loses_nothing",
    ),
    Mutant(
        "factor-of-zero-accepted",
        "comparison",
        STATE,
        "if factor <= 0:",
        "if factor < 0:",
        "tests/torch/backend/test_refused_arguments.py::"
        "test_every_public_function_names_what_it_refuses",
    ),
    Mutant(
        "state-of-another-version-read",
        "check",
        STATE,
        'about["version"] != STATE_VERSION',
        "False",
        "tests/torch/reduction/test_saved_state.py",
    ),
    Mutant(
        "lost-ranks-residuals-scaled-the-wrong-way",
        "arithmetic",
        STATE,
        "else own], before, ranks)",
        "else own], ranks, before)",
        "tests/torch/elastic/test_shrink_and_go_on.py",
    ),
    Mutant(
        "learning-rate-turned-round",
        "arithmetic",
        "pycomm/reduction/rates.py",
        "before / rate",
        "rate / before",
        FEEDBACK + "test_a_new_learning_rate_rescales_what_is_owed",
    ),
    Mutant(
        "loss-scale-turned-round",
        "arithmetic",
        "pycomm/reduction/rates.py",
        "now / self.loss_scale",
        "self.loss_scale / now",
        FEEDBACK + "test_residuals_are_in_the_unit_of_the_loss_scale",
    ),
    Mutant(
        "rates-not-saved",
        "state",
        "pycomm/reduction/rates.py",
        '{"rates": dict(self.learning), "loss_scale": self.loss_scale}',
        '{"rates": {}, "loss_scale": self.loss_scale}',
        "tests/torch/feedback/test_state.py::test_units_of_residuals_are_saved",
    ),
    # ------------------------------------------------------------------ buckets
    Mutant(
        "plain-average-not-divided",
        "arithmetic",
        "pycomm/reduction/reducer.py",
        "tensor.div_(self.process_group.size())",
        "tensor.div_(1)",
        DDP + "test_other_gradient_dtypes",
    ),
    Mutant(
        "plain-overflow-unseen",
        "check",
        "pycomm/reduction/reducer.py",
        "verdict.append(bool(values.isfinite().all()))",
        "verdict.append(True)",
        FEEDBACK + "test_an_overflow_of_gradients_that_no_codec_takes_is_counted",
    ),
    Mutant(
        "gradients-clipped-as-if-alone",
        "arithmetic",
        "pycomm/reduction/reducer.py",
        "clip / self.process_group.size() ** 0.5",
        "clip",
        "tests/torch/feedback/test_state.py::"
        "test_clipped_gradients_are_bounded_by_the_number_of_ranks",
    ),
    Mutant(
        "paid-residual-sent-again",
        "residual",
        "pycomm/reduction/reducer.py",
        "self._paying |= bucket.paying",
        "pass",
        "tests/torch/hooks/test_policy.py::test_a_schedule_loses_nothing "
        "tests/torch/hooks/test_way_back.py::test_what_is_owed_is_sent_with_the_next_step",
    ),
    Mutant(
        "bucket-of-another-size-reduced",
        "check",
        "pycomm/reduction/reducer.py",
        "bucket.numel != tensor.numel()",
        "False",
        "tests/torch/hooks/test_complex.py::test_a_bucket_of_another_size_is_refused",
    ),
    Mutant(
        "exact-codec-forgets-what-is-owed",
        "residual",
        "pycomm/reduction/bucket.py",
        'keeps_errors or name in residuals or kind == "momentum"',
        'keeps_errors or kind == "momentum"',
        "tests/torch/hooks/test_policy.py::test_a_schedule_loses_nothing "
        "tests/torch/hooks/test_way_back.py::test_what_is_owed_is_sent_with_the_next_step",
    ),
    Mutant(
        "layout-of-another-order-is-the-same",
        "state",
        "pycomm/reduction/bucket.py",
        'text = ";".join(f"{p.name},{p.numel},{p.codec.spec()}" for p in self.pieces)',
        'text = ""',
        FEEDBACK
        + "test_other_numbers_of_ranks_owe_the_same "
        + DDP
        + "test_feedback_loses_nothing_over_new_buckets",
    ),
    Mutant(
        "rows-share-random-numbers",
        "random",
        "pycomm/reduction/coding.py",
        "seed = hop_seed(seed, row)",
        "pass",
        "tests/torch/reduction/test_batched_buckets.py::test_one_call_has_the_bits_of_many",
    ),
    Mutant(
        "owner-rounds-as-a-worker",
        "random",
        "pycomm/reduction/coding.py",
        "OWNER_HOP, 0, 1",
        "self.rank, 0, 1",
        "tests/torch/reduction/test_batched_buckets.py::test_one_call_has_the_bits_of_many",
    ),
    Mutant(
        "payload-of-an-impossible-size-read",
        "check",
        "pycomm/reduction/coding.py",
        "not 0 < used <= part.numel() or used % 4",
        "used > part.numel()",
        "tests/torch/reduction/test_batched_buckets.py "
        "tests/torch/reduction/test_any_backend_contract.py",
    ),
    Mutant(
        "one-finite-row-is-enough",
        "comparison",
        "pycomm/reduction/two_shot.py",
        "dist.ReduceOp.MIN",
        "dist.ReduceOp.MAX",
        "tests/torch/reduction/test_compressed_collectives.py::"
        "test_every_rank_knows_of_an_overflow_in_a_row_of_another",
    ),
    Mutant(
        "overflow-of-dense-pieces-forgotten",
        "check",
        "pycomm/reduction/two_shot.py",
        "finite &= batched.add_up",
        "finite = batched.add_up",
        "tests/torch/reduction/test_compressed_collectives.py "
        "tests/torch/reduction/test_batched_buckets.py",
    ),
    Mutant(
        "gradient-that-is-zero-at-the-samples-thrown-away",
        "check",
        "pycomm/reduction/taken.py",
        "    return bool(gradient.any())",
        "    return False",
        "tests/torch/feedback/test_taken_gradients.py::test_one_value_that_is_not_zero_is_found",
    ),
    Mutant(
        "thrown-gradients-only-of-moved-parameters",
        "check",
        "pycomm/reduction/taken.py",
        "self._tracked.intersection(names) - self._all_moved()",
        "set(names) - self._all_moved()",
        "tests/torch/feedback/test_taken_gradients.py "
        "tests/torch/feedback/test_thrown_gradients.py",
    ),
    # ------------------------------------------------------------------ PowerSGD, LocalSGD
    Mutant(
        "powersgd-adds-what-was-sent",
        "sign",
        "pycomm/reduction/powersgd.py",
        "alpha=-1",
        "alpha=1",
        POWERSGD,
    ),
    Mutant(
        "powersgd-overflow-unseen",
        "check",
        "pycomm/reduction/powersgd.py",
        "self._finite.append(mean.isfinite().all())",
        "pass",
        POWERSGD,
    ),
    Mutant(
        "powersgd-exact-pieces-owe-again",
        "residual",
        "pycomm/reduction/powersgd.py",
        "piece.residual.store_worker(torch.zeros_like(target))",
        "pass",
        "tests/torch/reduction/test_powersgd_factors.py::"
        "test_an_exact_piece_sends_its_residual_once",
    ),
    Mutant(
        "powersgd-scale-squared-in-each-step",
        "arithmetic",
        "pycomm/reduction/powersgd.py",
        "right / top, self.right",
        "right, self.right",
        "tests/torch/reduction/test_powersgd_factors.py::test_factors_keep_their_scale",
    ),
    Mutant(
        "outer-step-uphill",
        "sign",
        "pycomm/local_sgd/outer.py",
        "alpha=-lr",
        "alpha=lr",
        LOCAL + "test_without_momentum_it_averages_parameters",
    ),
    Mutant(
        "outer-start-is-not-what-was-written",
        "arithmetic",
        "pycomm/local_sgd/outer.py",
        "begin.to(part.dtype).to(begin.dtype)",
        "begin",
        "tests/torch/local_sgd/test_models.py::"
        "test_small_outer_updates_of_16_bit_parameters_add_up",
    ),
    Mutant(
        "outer-mean-of-new-parameters-a-sum",
        "arithmetic",
        "pycomm/local_sgd/outer.py",
        "mean.div_(group.size())",
        "pass",
        "tests/torch/local_sgd/test_models.py::test_parameters_may_be_added_and_replaced "
        "tests/torch/local_sgd/test_models.py::"
        "test_unfrozen_parameters_take_part_and_frozen_ones_keep_still",
    ),
    Mutant(
        "infinite-round-applied",
        "check",
        "pycomm/local_sgd/shared.py",
        "if is_finite(average.values):",
        "if True:",
        LOCAL + "test_a_round_that_is_not_finite_leaves_no_trace",
    ),
    Mutant(
        "round-one-step-longer",
        "comparison",
        "pycomm/local_sgd/streamed.py",
        "self.local_steps < self._every",
        "self.local_steps <= self._every",
        LOCAL + "test_without_momentum_it_averages_parameters",
    ),
    Mutant(
        "pending-round-not-saved",
        "state",
        "pycomm/local_sgd/streamed.py",
        "pending = self._shared.parts.index(part), values, average.bad, self._countdown",
        "pass",
        LOCAL + "test_saved_state_continues_to_the_bit",
    ),
    # ------------------------------------------------------------------ hooks
    Mutant(
        "after-removal-a-sum",
        "arithmetic",
        "pycomm/hooks/ddp.py",
        "tensor.div_(self.process_group.size())",
        "pass",
        "tests/torch/hooks/test_way_back.py::test_what_is_owed_is_sent_with_the_next_step",
    ),
    Mutant(
        "unused-parameters-not-looked-for",
        "check",
        "pycomm/hooks/ddp.py",
        "name for name, n in zip(self._reduced, used.tolist(), strict=True) if not n",
        "name for name, n in zip(self._reduced, used.tolist(), strict=True) if n < 0",
        FEEDBACK + "test_an_unused_parameter_keeps_what_it_owes",
    ),
    Mutant(
        "one-finite-shard-is-enough",
        "comparison",
        "pycomm/hooks/fsdp.py",
        "dist.ReduceOp.MIN",
        "dist.ReduceOp.MAX",
        "tests/torch/fsdp/test_compress.py::test_overflow_leaves_no_trace_at_any_shard",
    ),
    Mutant(
        "backward-ends-before-its-collectives",
        "wait",
        "pycomm/hooks/fsdp.py",
        "        for wait in self._waits:\n            wait()\n",
        "        for _ in self._waits:\n            pass\n",
        "tests/torch/fsdp/test_compress.py::test_accumulation "
        "tests/torch/fsdp/test_compress.py::test_exact_gradients_are_those_of_replicas",
    ),
    Mutant(
        "replicas-not-compared",
        "check",
        "pycomm/hooks/replicas.py",
        "if backend is not None:\n                backend.compare",
        "if backend is None:\n                backend.compare",
        "tests/torch/hooks/test_replicas.py",
    ),
    # ------------------------------------------------------------------ coded momentum
    Mutant(
        "momentum-and-delay-in-series",
        "arithmetic",
        "pycomm/reduction/momentum/moment.py",
        "max(0.0, math.floor(_STEPS * (momentum - error) / (1 - error)) / _STEPS)",
        "momentum",
        "tests/torch/optim/test_coded_adamw.py::test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "second-moments-are-sums-over-ranks",
        "arithmetic",
        "pycomm/hooks/momentum.py",
        "means = self._sums.div_(self.process_group.size())",
        "means = self._sums",
        "tests/torch/optim/test_coded_adamw.py::test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "a-second-backward-counts-the-first-again",
        "residual",
        "pycomm/reduction/momentum/moment.py",
        "gradient.sub_(self.base.reshape(-1))",
        "pass",
        "tests/torch/optim/test_coded_adamw.py::test_two_backwards_before_a_step_add_up",
    ),
    Mutant(
        "residuals-of-thrown-momentum-kept",
        "residual",
        "pycomm/hooks/momentum.py",
        "self._thrown.update(self.moments.keys() - kept)",
        "pass",
        "tests/torch/optim/test_coded_adamw.py::test_gradients_that_are_thrown_away_leave_nothing",
    ),
    Mutant(
        "shards-that-others-own-have-the-own-momentum",
        "arithmetic",
        "pycomm/hooks/fsdp_momentum.py",
        "return self._own_of(piece).load_worker(shard)",
        "return None",
        "tests/torch/optim/test_sharded_adamw.py::test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "a-second-backward-forgets-what-the-first-has-sent",
        "state",
        "pycomm/reduction/momentum/scaled.py",
        "sent += storage.load(to, numel)",
        "pass",
        "tests/torch/optim/test_sharded_adamw.py",
    ),
    Mutant(
        "ranks-go-on-from-the-mean-momentum",
        "arithmetic",
        "pycomm/hooks/momentum.py",
        "self._sent_before(moment, piece) if alone else None",
        "None",
        "tests/torch/optim/test_coded_adamw.py::test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "what-was-sent-in-the-scale-of-another-shard",
        "rank",
        "pycomm/hooks/momentum.py",
        "moment.store_sent(copy, piece.residual, own, None, before=before)",
        "moment.store_sent(copy, piece.residual, own, 0, before=before)",
        "tests/torch/optim/test_sharded_adamw.py::test_replicas_of_shards_have_the_bits_of_ddp",
    ),
    Mutant(
        "what-was-never-sent-counts-as-zero",
        "state",
        "pycomm/hooks/momentum.py",
        "own.load_worker(shard or 0) if own.last_step else None",
        "own.load_worker(shard or 0)",
        "tests/torch/optim/test_sent_momentum.py",
    ),
    Mutant(
        "what-was-sent-is-kept-without-a-step",
        "state",
        "pycomm/hooks/fsdp_momentum.py",
        "        super()._scatter(output, input, names, group, average=average, later=later)\n",
        "        super()._scatter(output, input, names, group, average=average, later=later)\n"
        "        self._waits.append(lambda: self.own.commit(self.moments, self.step))\n",
        "tests/torch/optim/test_sharded_adamw.py",
    ),
    Mutant(
        "squares-in-the-unit-of-the-loss",
        "arithmetic",
        "pycomm/reduction/momentum/moment.py",
        "(*self._sums_of(rows), scale**-2), self._most(rows)",
        "(*self._sums_of(rows), 1.0), self._most(rows)",
        "tests/torch/optim/test_coded_adamw.py::test_a_step_that_overflows_leaves_no_trace",
    ),
    # ------------------------------------------------------------------ change of members
    Mutant(
        "members-change-unnoticed",
        "state",
        STATE,
        "if not self.stays_because and not (self._met and self._formed() == self._formed_with):",
        "if not self.stays_because and not self._met:",
        MEMBERS + "test_a_model_with_fixed_buckets_joins_as_it_is",
    ),
    Mutant(
        "buckets-of-new-members-not-compared",
        "check",
        "pycomm/reduction/reducer.py",
        "if self._formed_with and self.process_group.size() > 1:",
        "if False:",
        MEMBERS + "test_a_new_member_that_does_not_fit_is_named_on_all",
    ),
    Mutant(
        "coming-buckets-of-new-members-not-compared",
        "check",
        "pycomm/reduction/members.py",
        "if 0 < len(new) < len(standings):",
        "if False:",
        MEMBERS + "test_a_new_member_that_does_not_fit_is_named_on_all",
    ),
    Mutant(
        "loaded-residuals-keep-those-of-other-owners",
        "residual",
        "pycomm/feedback/residuals.py",
        "            mine.forget_other_side()\n",
        "",
        "tests/torch/feedback/test_state.py::test_loaded_residuals_leave_nothing_of_other_owners",
    ),
)
