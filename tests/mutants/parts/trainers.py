"""Mutants of the reductions of DeepSpeed and Megatron-Core that are replaced."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DEEPSPEED, MEGATRON = "pycomm/hooks/deepspeed.py", "pycomm/hooks/megatron.py"
REPLACED = "pycomm/hooks/replaced.py"
SPEED = "tests/torch/hooks/test_deepspeed.py"
MEGA = "tests/torch/hooks/test_megatron.py"

MUTANTS = (
    Mutant(
        "deepspeed-residuals-keep-the-old-scale",
        "residual",
        DEEPSPEED,
        "self.rescale(now / self._scale)",
        "pass",
        SPEED + "::test_residuals_follow_the_loss_scale",
    ),
    Mutant(
        "deepspeed-scale-not-remembered",
        "state",
        DEEPSPEED,
        "            self._scale = now\n",
        "",
        SPEED + "::test_residuals_follow_the_loss_scale",
    ),
    Mutant(
        "deepspeed-steps-never-end",
        "state",
        DEEPSPEED,
        "            self.close_step()\n            return result",
        "            return result",
        SPEED,
    ),
    Mutant(
        "deepspeed-sums-are-averages",
        "arithmetic",
        DEEPSPEED,
        "factor = 1.0 if self._engine.gradient_average else float(self.process_group.size())",
        "factor = 1.0",
        SPEED + "::test_without_gradient_average_gradients_are_summed",
    ),
    Mutant(
        "zero-2-sums-are-averages",
        "arithmetic",
        DEEPSPEED,
        "factor = 1.0 if optimizer.gradient_average else float(self.process_group.size())",
        "factor = 1.0",
        SPEED + "::test_without_gradient_average_gradients_are_summed",
    ),
    Mutant(
        "zero-2-names-in-another-order",
        "order",
        DEEPSPEED,
        "for group, place, _ in optimizer.ipg_buckets[dtype].params",
        "for group, place, _ in reversed(optimizer.ipg_buckets[dtype].params)",
        SPEED + "::test_after_remove_the_residuals_have_come_and_deepspeeds_methods_are_back",
    ),
    Mutant(
        "zero-3-shards-one-short",
        "constant",
        DEEPSPEED,
        "return -(-self._shapes[name].numel() // self.process_group.size())",
        "return self._shapes[name].numel() // self.process_group.size()",
        SPEED + "::test_zero_3_gets_its_shards_of_the_mean_and_keeps_residuals",
    ),
    Mutant(
        "zero-3-gets-anothers-padding",
        "rank",
        DEEPSPEED,
        "self._shapes[name].numel() - rank * n",
        "self._shapes[name].numel() - 0 * n",
        SPEED + "::test_zero_3_gets_its_shards_of_the_mean_and_keeps_residuals",
    ),
    Mutant(
        "deepspeed-quantized-gradients-compressed-twice",
        "check",
        DEEPSPEED,
        "if engine.zero_quantized_gradients():",
        "if False:",
        SPEED + "::test_what_cannot_be_compressed_is_refused_with_what_to_do",
    ),
    Mutant(
        "deepspeed-exact-gradients-not-told",
        "error",
        DEEPSPEED,
        'self._tell("sparse gradients travel exactly")',
        "pass",
        SPEED + "::test_what_travels_exactly_is_told_once",
    ),
    Mutant(
        "megatron-averages-twice",
        "arithmetic",
        MEGATRON,
        "factor *= 1 if config.average_in_collective else ranks",
        "factor *= 1",
        MEGA + "::test_sums_and_averages_are_those_that_megatron_is_configured_for",
    ),
    Mutant(
        "megatron-averages-in-the-collective-summed",
        "arithmetic",
        MEGATRON,
        "factor *= 1 if config.average_in_collective else ranks",
        "factor *= ranks",
        MEGA + "::test_sums_and_averages_are_those_that_megatron_is_configured_for",
    ),
    Mutant(
        "megatron-padded-gradients-stay-local",
        "state",
        MEGATRON,
        "view.copy_(part)",
        "pass",
        MEGA + "::test_buckets_have_the_bits_of_torchs_ddp_step_by_step",
    ),
    Mutant(
        "megatron-steps-never-end",
        "state",
        MEGATRON,
        "        if len(self._started) == len(self._groups):\n            self.close_step()",
        "        if len(self._started) == len(self._groups):\n            self._open = False",
        MEGA,
    ),
    Mutant(
        "megatron-checks-of-gradients-dropped",
        "check",
        MEGATRON,
        "if config.check_for_nan_in_grad or config.check_for_large_grads:",
        "if False:",
        MEGA + "::test_the_order_of_megatrons_calls_is_followed_or_refused",
    ),
    Mutant(
        "megatron-several-instances-accepted",
        "check",
        MEGATRON,
        "config.num_distributed_optimizer_instances > 1",
        "config.num_distributed_optimizer_instances > 2",
        MEGA + "::test_what_cannot_be_compressed_is_refused_with_the_reason",
    ),
    Mutant(
        "replaced-methods-stay-after-remove",
        "state",
        REPLACED,
        "                delattr(owner, name)",
        "                pass",
        f"{SPEED} {MEGA}",
    ),
    Mutant(
        "replaced-residuals-leave-unpaid",
        "residual",
        REPLACED,
        "if self._leaving and self._paid and self._may_leave(begins=True):",
        "if self._leaving:",
        f"{SPEED} {MEGA}",
    ),
)
