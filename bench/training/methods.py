"""Methods of averaging gradients for comparisons: pycomm's, and torch's own hooks."""

# No `from __future__ import annotations` here: DDP checks a hook's annotations, as types.
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HOOKS = ("fp16", "powersgd:RANK", "fp16-powersgd:RANK", "late")
OPTIMIZERS = ("sgd",)  # with momentum, which is coded if `momentum` names a codec


@dataclass(frozen=True)
class Method:
    """The settings that differ between the runs of a comparison."""

    label: str
    backend: str = "pycomm"
    codec: str = ""
    """The codec for `pycomm.compress`; empty: gradients are not compressed."""
    feedback: str = ""
    """The feedback for `pycomm.compress`: a kind, or "none"; empty: the default."""
    momentum: str = ""
    """The codec of the momentum, which travels instead of the gradients (`pycomm.CodedAdamW`, and
    `pycomm.CodedSGD` for the optimizer sgd)."""
    small: str = ""
    """With `momentum`: the codec of gradients of one dimension; empty: they travel exactly."""
    hook: str = ""
    """One of torch's own communication hooks, as in `HOOKS`, or `late_hook`."""
    bucket_mb: float = 25.0
    """DDP's bucket_cap_mb; its default is 25."""
    update: str = ""
    """The optimizer, one of `OPTIMIZERS`; empty: AdamW."""
    rate: float = 1.0
    """What its learning rate is, beside AdamW's."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the settings by which `python -m pycomm.bench.training` makes this method."""
        return {name: value for name, value in asdict(self).items() if name != "label"}

    @property
    def scheduled(self) -> bool:
        """Return whether the codec changes over the steps, so that step times vary."""
        return " " in self.codec + self.momentum

    def wrap(
        self, model: nn.Module, group: dist.ProcessGroup | None = None, *, sync: bool = True
    ) -> DistributedDataParallel:
        """Return the model in DDP with this method's hook. Collective.

        Args:
            model: the bare model.
            group: a group of this method's backend; None: the default group.
            sync: let DDP broadcast rank 0's parameters first.

        Raises:
            ValueError: an unknown hook.
        """
        wrapped = DistributedDataParallel(
            model,
            process_group=group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.bucket_mb,
            init_sync=sync,
        )
        if self.codec:
            import pycomm

            feedback = {"": True, "none": False}.get(self.feedback, self.feedback)
            pycomm.compress(wrapped, self.codec, feedback=feedback)
        if self.hook:
            _torch_hook(wrapped, self.hook, group)
        return wrapped

    def optimizer(
        self, model: DistributedDataParallel, lr: float, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        """Return this method's optimizer for a model that `wrap` has returned. Collective.

        Args:
            model: the model.
            lr: AdamW's learning rate.
            betas: AdamW's.
        """
        lr *= self.rate
        if self.update == "sgd":
            return _sgd(model, lr, betas[0], self.momentum)
        if self.momentum:
            import pycomm

            policy = pycomm.Policy.of(self.momentum)
            if self.small:
                rule = pycomm.Rule(codec=self.small, max_dims=1, reason="norms and biases")
                policy = replace(policy, rules=(rule, *policy.rules))
            return pycomm.CodedAdamW(model.parameters(), lr, betas, model=model, codec=policy)
        return torch.optim.AdamW(model.parameters(), lr, betas)


def _sgd(
    model: DistributedDataParallel, lr: float, momentum: float, codec: str
) -> torch.optim.Optimizer:
    if not codec:
        return torch.optim.SGD(model.parameters(), lr, momentum)
    import pycomm

    return pycomm.CodedSGD(model.parameters(), lr, momentum, model=model, codec=codec)


def _torch_hook(model: DistributedDataParallel, text: str, group: dist.ProcessGroup | None) -> None:
    name, _, rank = text.partition(":")
    if name == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        return
    if name == "late":
        model.register_comm_hook(Late(group), late_hook)
        return
    if name not in ("powersgd", "fp16-powersgd"):
        raise ValueError(f"unknown hook {text!r}: use one of {', '.join(HOOKS)}")
    state = powerSGD_hook.PowerSGDState(
        process_group=group,
        matrix_approximation_rank=int(rank),
        start_powerSGD_iter=2,  # the minimum with its error feedback
    )
    hook = powerSGD_hook.powerSGD_hook
    if name == "fp16-powersgd":
        hook = default_hooks.fp16_compress_wrapper(hook)
    model.register_comm_hook(state, hook)


class Late:
    """State of `late_hook`: its group, and each parameter's mean gradient of the previous step."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.before: dict[int, torch.Tensor] = {}  # by id of the parameter


def late_hook(state: Late, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return exact means delayed by one step, which shows the effect of delay alone on training.

    The first step uses its own mean.
    """

    def swap(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            now = gradient.clone()
            gradient.copy_(state.before.get(id(parameter), now))
            state.before[id(parameter)] = now
        return future.value()

    return default_hooks.allreduce_hook(state.group, bucket).then(swap)


# torch's methods come first. PowerSGD on Gloo aborts with more than one bucket: its chained
# collectives start in a different order on every rank.
ONE_BUCKET = 1000.0
# One bit while the second moments and the loss change fast, then one value of a hundred.
TOP_1 = "sign 21:topk:density=0.01,values=int8,indices=int12"
TOP_1_BINS = TOP_1.replace("int8", "bins2")  # values of two bits
# SGD's learning rate beside AdamW's: of 8, 15, 25 and 50 the best one for exact gradients.
SGD_RATE = 25.0
METHODS = (
    Method("Gloo, fp32", "gloo"),
    Method("Gloo, fp16 hook", "gloo", hook="fp16"),
    Method("Gloo, PowerSGD rank 1", "gloo", hook="powersgd:1", bucket_mb=ONE_BUCKET),
    Method("Gloo, PowerSGD rank 4", "gloo", hook="powersgd:4", bucket_mb=ONE_BUCKET),
    Method("Gloo, fp16 PowerSGD rank 2", "gloo", hook="fp16-powersgd:2", bucket_mb=ONE_BUCKET),
    Method("Gloo, fp32 one step late", "gloo", hook="late"),
    Method("pycomm, exact"),
    Method("pycomm, bf16", codec="bf16"),
    Method("pycomm, int8", codec="int8"),
    Method("pycomm, int4", codec="int4"),
    Method("pycomm, int4 without feedback", codec="int4", feedback="none"),
    Method("pycomm, MXFP4", codec="mxfp4"),
    Method("pycomm, EDEN 2 bits", codec="eden:bits=2"),
    Method("pycomm, EDEN 2 bits of 128", codec="eden:bits=2,size=128"),
    Method("pycomm, EDEN 1 bit", codec="eden:bits=1"),
    Method("pycomm, sign", codec="sign"),
    Method("pycomm, top-k 1 %", codec="topk:0.01"),
    Method("pycomm, top-k 25 to 1 %", codec="topk:0.25 21:topk:0.06 41:topk:0.015 61:topk:0.01"),
    Method("pycomm, coded momentum, int4", momentum="int4"),
    Method("pycomm, coded momentum, 2 bits", momentum="eden:bits=2,scale=mmse"),
    Method("pycomm, coded momentum, 1 bit", momentum="eden:bits=1,scale=mmse"),
    Method("pycomm, coded momentum, sign", momentum="sign"),
    Method("pycomm, coded momentum, top-k 1 %", momentum=TOP_1),
    Method("pycomm, coded momentum, lean top-k 1 %", momentum=TOP_1, small="int8"),
    Method("pycomm, coded momentum, 2-bit top-k 1 %", momentum=TOP_1_BINS, small="int8"),
    Method("pycomm, exact SGD", update="sgd", rate=SGD_RATE),
    Method("pycomm, SGD, int8", codec="int8", update="sgd", rate=SGD_RATE),
    Method("pycomm, SGD, int4", codec="int4", update="sgd", rate=SGD_RATE),
    Method("pycomm, SGD, EDEN 2 bits", codec="eden:bits=2", update="sgd", rate=SGD_RATE),
    Method("pycomm, SGD, EDEN 1 bit", codec="eden:bits=1", update="sgd", rate=SGD_RATE),
    *(
        Method(f"pycomm, SGD, coded momentum, {name}", momentum=text, update="sgd", rate=SGD_RATE)
        for name, text in (
            ("int4", "int4"),
            ("2 bits", "eden:bits=2,scale=mmse"),
            ("1 bit", "eden:bits=1,scale=mmse"),
            ("sign", "sign"),
            ("top-k 1 %", TOP_1),
        )
    ),
    Method("pycomm, PowerSGD rank 4", codec="powersgd:4"),
    Method("pycomm, auto", codec="auto"),
)
