"""Mutants of the optimizers to which each rank brings the gradients of its own data."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LION = "pycomm/optim/distributed_lion.py"
OWN = "pycomm/optim/own_state.py"
VOTES = "pycomm/optim/votes.py"
ZERO_ONE = "pycomm/optim/zero_one_adam.py"
FAMILY = "tests/torch/optim/test_local_gradients.py::"
LION_TESTS = "tests/torch/optim/test_distributed_lion.py::"
ADAM_TESTS = "tests/torch/optim/test_one_bit_adam.py::"
MASKS = "pycomm/optim/shared_mask.py"
MASK_TESTS = "tests/torch/optim/test_shared_mask.py::"

MUTANTS = (
    Mutant(
        "an-overflow-is-told-to-no-other-rank",
        "rank",
        "pycomm/hooks/local_gradients.py",
        "dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)",
        "pass",
        FAMILY + "test_a_step_that_overflows_leaves_no_trace",
    ),
    Mutant(
        "an-overflow-of-an-earlier-bucket-forgotten",
        "state",
        "pycomm/hooks/local_gradients.py",
        "self._overflows |= not bool(values.isfinite().all())",
        "self._overflows = not bool(values.isfinite().all())",
        FAMILY + "test_a_step_that_overflows_leaves_no_trace",
    ),
    Mutant(
        "undecided-votes-are-for-one-sign",
        "sign",
        LION,
        "1.0 - 2.0 * (places % 2)",
        "1.0",
        LION_TESTS + "test_values_without_a_gradient_stay_where_they_are",
    ),
    Mutant(
        "what-is-not-finite-votes",
        "check",
        LION,
        "update.sign() + update * 0",
        "update.sign().nan_to_num()",
        FAMILY + "test_a_step_that_overflows_leaves_no_trace",
    ),
    Mutant(
        "momentum-of-the-update-kept",
        "arithmetic",
        LION,
        'beta2 = part.group["betas"][1]',
        'beta2 = part.group["betas"][0]',
        LION_TESTS + "test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "owners-of-a-majority-answer-with-the-mean",
        "arithmetic",
        VOTES,
        "refine = torch.Tensor.sign_ if self._majority else None",
        "refine = None",
        LION_TESTS + "test_results_do_not_depend_on_who_counts",
    ),
    Mutant(
        "equally-many-votes-are-answered-in-one-bit",
        "constant",
        VOTES,
        '"sign" if ranks % 2 else "quant:bits=2"',
        '"sign"',
        LION_TESTS + "test_results_do_not_depend_on_who_counts",
    ),
    Mutant(
        "means-of-votes-not-counted",
        "arithmetic",
        VOTES,
        "            self._count(tensor)\n",
        "            pass\n",
        LION_TESTS + "test_results_do_not_depend_on_who_counts",
    ),
    Mutant(
        "counts-of-many-ranks-in-four-bits",
        "constant",
        VOTES,
        '(13, "int4")',
        '(20, "int4")',
        LION_TESTS + "test_means_are_counted_exactly_for_any_number_of_ranks",
    ),
    Mutant(
        "other-ranks-go-on-from-one-momentum",
        "state",
        OWN,
        "parts = [saved[key][1] for key in keys]",
        "parts = [saved[key][1] for key in keys[:1]]",
        FAMILY + "test_other_ranks_go_on_from_the_mean_momentum",
    ),
    Mutant(
        "frozen-second-moments-corrected-on",
        "arithmetic",
        "pycomm/optim/one_bit_adam.py",
        "step_by_momentum(self.state, part, self._warmup)",
        'step_by_momentum(self.state, part, int(state["step"]))',
        ADAM_TESTS + "test_a_step_of_one_bit_adam_is_that_of_the_formula",
    ),
    Mutant(
        "the-own-momentum-after-a-synchronization",
        "rank",
        ZERO_ONE,
        'state["exp_avg"].copy_(total / self.rates)',
        'state["exp_avg"].copy_(self.momentum)',
        ADAM_TESTS + "test_a_step_of_zero_one_adam_is_that_of_the_formula",
    ),
    Mutant(
        "saved-while-ranks-are-apart",
        "check",
        ZERO_ONE,
        "        if self._apart:\n            raise Error(",
        "        if False:\n            raise Error(",
        ADAM_TESTS + "test_a_step_of_zero_one_adam_is_that_of_the_formula",
    ),
    Mutant(
        "a-late-parameter-has-the-second-moment-of-one-step",
        "constant",
        ZERO_ONE,
        "return step > self._freeze or self._updates_variance(own)",
        "return own == 1",
        FAMILY + "test_parameters_that_get_no_gradient",
    ),
    Mutant(
        "coefficients-averaged-over-all-ranks",
        "arithmetic",
        "pycomm/optim/demo.py",
        "state.averages_senders = True",
        "state.averages_senders = False",
        "tests/torch/optim/test_demo.py::test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "second-moments-of-own-gradients",
        "arithmetic",
        "pycomm/reduction/moment.py",
        "weight = (1 - decay) * agreement.share(*energies, self._ranks)",
        "weight = 1 - decay",
        "tests/torch/optim/test_coded_adamw.py::test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "denominators-without-the-least-factor-of-the-coding",
        "arithmetic",
        "pycomm/reduction/moment.py",
        "self.rows, least, FLOOR)",
        "self.rows, least, 0.0)",
        "tests/torch/optim/test_faint_rows.py",
    ),
    Mutant(
        "squares-of-projections-not-condensed",
        "arithmetic",
        "pycomm/hooks/momentum.py",
        "CodedMoment.condense(one)",
        "pass",
        "tests/torch/optim/test_coded_adamw.py::test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "own-squares-of-projections-left-out",
        "arithmetic",
        "pycomm/reduction/moment.py",
        "projections.dot(projections)\n        return sums",
        "0\n        return sums",
        "tests/torch/optim/test_coded_adamw.py::test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "rows-of-a-shard-begin-at-the-first",
        "arithmetic",
        "pycomm/reduction/agreement.py",
        "first = (step - begin) % stride",
        "first = step % stride",
        "tests/torch/reduction/test_agreement.py::test_shards_have_the_projections_of_the_whole",
    ),
    Mutant(
        "the-share-is-not-bounded-by-the-ranks",
        "arithmetic",
        "pycomm/reduction/agreement.py",
        "max(1 / ranks, of_mean / own)",
        "of_mean / own",
        "tests/torch/reduction/test_agreement.py::test_bounds",
    ),
    Mutant(
        "one-rank-chooses-for-all",
        "rank",
        MASKS,
        "(torch.arange(one.chunks) + at) % size",
        "torch.arange(one.chunks) * 0",
        MASK_TESTS + "test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "a-chunk-keeps-its-rank",
        "rank",
        MASKS,
        "dealt, at = {}, state.step",
        "dealt, at = {}, 0",
        MASK_TESTS + "test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "what-was-sent-stays-in-the-residual",
        "state",
        MASKS,
        "rows[name].scatter_(1, mask, 0.0)",
        "rows[name]",
        MASK_TESTS + "test_a_step_is_that_of_the_formula",
    ),
    Mutant(
        "the-residual-of-a-mask-is-dropped",
        "state",
        MASKS,
        "state.own.get(p.name, torch.zeros(()))",
        "torch.zeros(())",
        MASK_TESTS + "test_a_step_is_that_of_the_formula",
    ),
)
