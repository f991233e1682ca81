"""What trainers refuse, and why: the table of which docs/combine.md is written."""

from __future__ import annotations

from collections.abc import Mapping

DDP, FSDP, HSDP = "DistributedDataParallel", "fully_shard", "HSDP"
DEEPSPEED, MEGATRON = "DeepSpeed", "Megatron-Core"
LOCAL_SGD, ALL = "LocalSGD", "all"
MOMENTA = "CodedAdamW, CodedSGD"
MEMBERS, UNBIASED = "members that change in place", "unbiased codecs"

_SHARES = (
    "its ranks share the parameters (fully_shard), whose shards keep their places: shard the model "
    "anew and go on from a checkpoint, with load_checkpoint"
)

REFUSALS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    ALL: {
        "a captured CUDA graph": (
            "a step with compressed gradients cannot be part of a CUDA graph, since a replay "
            "would use the residuals, the seed and the step of the capture; capture the model "
            "alone (torch.cuda.make_graphed_callables)",
            "capture the model alone",
        ),
    },
    DDP: {
        "another communication hook": (
            "the model has the communication hook {hook} already, and DDP takes one: wrap the "
            "module in a new DistributedDataParallel to change it",
            "a new DDP without it",
        ),
        "`delay_all_reduce_named_params`": (
            "this model reduces its gradients after backward (delay_all_reduce_named_params) and "
            "uses no communication hook; wrap it without that option",
            "a new DDP without it",
        ),
        "the reducer of `torch.compile`": (
            "DDP has the reducer of torch.compile, which traces hooks: set "
            'torch._dynamo.config.optimize_ddp = "ddp_optimizer" before DistributedDataParallel '
            "is made",
            '`torch._dynamo.config.optimize_ddp = "ddp_optimizer"` before DDP is made',
        ),
    },
    FSDP: {
        MEMBERS: (_SHARES, "a checkpoint"),
        "survivors that adopt a state": (
            "ranks share these parameters, and the shards of lost ranks are gone with them; go on"
            " from a checkpoint, with load_checkpoint",
            "a checkpoint",
        ),
    },
    HSDP: {
        MEMBERS: (_SHARES, "a checkpoint"),
        "residuals on another number of ranks": (
            "the hook's state was saved by groups of {before} ranks; groups that are not the "
            "whole world can only go on with as many, not {ranks}",
            "as many ranks",
        ),
    },
    DEEPSPEED: {
        "no ZeRO": (
            "it is without ZeRO, whose stage 1 gives the same results. Set its stage to 1",
            "stage 1",
        ),
        "ZeRO 3": (
            "ZeRO 3 cuts gradients anywhere in a row. Use fully_shard(model), whose shards are "
            "compressed, or stage 2",
            "`fully_shard`; stage 2",
        ),
        "pipelines": (
            "a PipelineEngine has not been tested. Use deepspeed.initialize without a pipeline",
            "",
        ),
        "1-bit optimizers": (
            "{inner} reduces the gradients itself, compressed in its own way. Use "
            "torch.optim.AdamW to compress them by pycomm",
            "",
        ),
        "sequence parallelism": (
            "sequence parallelism has not been tested. Set sequence_parallel_size to 1",
            "",
        ),
        "experts": (
            "the parameters of experts are reduced in groups of their own. Use fully_shard(model)",
            "",
        ),
        "`zero_quantized_gradients`": (
            "ZeRO++ quantizes the gradients already. Leave zero_quantized_gradients out to "
            "compress them by pycomm, with error feedback",
            "",
        ),
        "other optimizers of its own": (
            "its optimizer is {name}, which has not been tested. Use the usual one of ZeRO",
            "",
        ),
        "no `contiguous_gradients`": (
            "without contiguous_gradients, gradients have no buffer. Set contiguous_gradients to "
            "true",
            "",
        ),
    },
    MEGATRON: {
        "`num_distributed_optimizer_instances` above 1": (
            "num_distributed_optimizer_instances={count} reduces gradients in two stages, within "
            "an instance and between them, and pycomm compresses one: set it to 1",
            "",
        ),
    },
    LOCAL_SGD: {
        MEMBERS: (
            "LocalSGD keeps a start that members share: make a new LocalSGD on all ranks, which "
            "starts from the parameters of the first, and call its "
            "state.adopt_state(former.state)",
            "a new `LocalSGD`",
        ),
        "DDP or other averages over the same ranks": (
            "LocalSGD: {what} over ranks {ranks}, which are to train apart and would meet in "
            "every step: use one of the two, or a group with one rank of each node",
            "a group with one rank of each node",
        ),
        "other trained parameters than at first": (
            "LocalSGD averages the parameters that were trained when it was made, but on rank "
            "{ranks} others are trained now ({names}): call finish() before parameters are "
            "frozen, unfrozen, added, removed or replaced, and make a new LocalSGD after it",
            "`finish()` first; a new `LocalSGD`",
        ),
    },
    MOMENTA: {
        MEMBERS: (
            "a coded optimizer keeps second moments that members share: wrap the module in a new "
            "DistributedDataParallel, make a new optimizer and call its adopt_state on all ranks",
            "a new one",
        ),
        UNBIASED: (
            "{codec} is unbiased, so its errors would pile up in a coded momentum: use {remedy}, "
            "whose errors feedback returns",
            "`eden:...,scale=mmse`, `sign`, `int4`",
        ),
        "`auto`": (
            "'auto' chooses among codecs of gradients by measurements: name a codec, such as "
            '"sign"',
            "another codec",
        ),
        "feedback but `residual`": (
            "feedback={feedback!r}: the momentum has feedback of the kind residual",
            "",
        ),
        "`Join`": (
            "Join shadows this rank, which has no more data and takes no more steps, so its "
            "momentum is not that of the others: give all ranks equally many batches, or use "
            "pycomm.compress",
            "equally many batches",
        ),
        "sparse gradients": (
            "{name} has sparse gradients, which it does not take: make it with sparse=False, or "
            "give its weight to another optimizer",
            "`sparse=False`, or another optimizer for these weights",
        ),
        "a GradScaler that they do not know": (
            "a GradScaler scales the gradients, and the momentum that travels must be in their "
            "unit: make the optimizer with scaler=...",
            "`scaler=`",
        ),
        "two synchronized backwards before a step": (
            "a backward cannot add to the momentum that an earlier one has left in the gradients: "
            "call optimizer.step() or zero_grad() between them, or accumulate in no_sync() (FSDP2: "
            "set_requires_gradient_sync(False)) until the last one. In FSDP2 a module that runs "
            "twice in one forward does so, too",
            "`no_sync()`; FSDP2: `set_requires_gradient_sync(False)`",
        ),
        "`nesterov`, `dampening`, `amsgrad`, `maximize`, `capturable`": (
            "has no {name}: turn it off",
            "",
        ),
        "copies": (
            "cannot be copied or pickled, since it exchanges the momentum of one wrapped model: "
            "keep its state_dict(), or copy what its to_adamw() or to_sgd() returns",
            "its `state_dict()`; models are copied without hooks",
        ),
        "shards that are not rows": (
            "{name} is sharded by dimension {dim}, and its momentum travels by rows: leave out "
            "shard_placement_fn",
            "",
        ),
        "sums of torch": (
            "torch sums the gradients of this model and divides them by itself, so the momentum "
            "would have another unit: leave out set_gradient_divide_factor and "
            "set_force_sum_reduction_for_comms, and reduce in float32 or bfloat16",
            "no `set_gradient_divide_factor`, `set_force_sum_reduction_for_comms`, float16",
        ),
        "survivors that adopt a state, but in DDP": (
            "states of models in DistributedDataParallel alone are adopted, since shards of lost "
            "ranks are gone with them; go on from a checkpoint, with load_checkpoint",
            "a checkpoint",
        ),
        "weight decay of `Adam`": (
            "Adam adds its weight decay to the gradients, so that it is divided by their size, and "
            "CodedAdamW has AdamW's: use torch.optim.AdamW, or weight_decay=0",
            "`AdamW`",
        ),
        "SGD without momentum": (
            "the SGD has no momentum that could travel: compress its gradients, "
            "pycomm.compress(model, ...)",
            "`pycomm.compress`",
        ),
        "other optimizers": (
            "takes torch.optim.AdamW, Adam or SGD, not {name}: compress the gradients of another "
            "optimizer, pycomm.compress(model, ...)",
            "`pycomm.compress`",
        ),
    },
}
"""By `Adapter.trainer` and option, in the words of the documentation: the error, whose fields in
braces are filled in, and what to use instead; "": what the error says."""


def refused(trainer: str, option: str, **fields: object) -> str:
    """Return why a trainer refuses an option of the table, with the fields of the text."""
    why, _ = REFUSALS[trainer][option]
    return why.format(**fields)


def stays_because(trainer: str) -> str:
    """Return why a trainer's states cannot go on with other members; "": they can."""
    return refused(trainer, MEMBERS) if MEMBERS in REFUSALS.get(trainer, {}) else ""
