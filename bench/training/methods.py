"""Methods of averaging gradients or parameters for comparisons: pycomm's, and torch's own hooks."""

# No `from __future__ import annotations` here: DDP checks a hook's annotations, as types.
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.local_sgd import Streamed


@dataclass
class System:
    """A model in training: what computes its loss, and what takes a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
    step: Callable[[], object] | None = None
    """Applies the gradients, and forgets them; None: the optimizer does."""
    finish: Callable[[], object] = lambda: None
    """Makes the ranks' parameters equal before they are judged."""
    close: Callable[[], object] = lambda: None

    def apply(self) -> None:
        if self.step is not None:
            self.step()
            return
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Method:
    """The settings that differ between the runs of a comparison."""

    label: str
    backend: str = "pycomm"
    codec: str = ""
    """The codec for `pycomm.compress`; empty: gradients are not compressed."""
    feedback: str = ""
    """The feedback, as for `pycomm.compress`: a kind, or "none"; empty: the default."""
    momentum: str = ""
    """The codec of the momentum, which travels instead of the gradients (`pycomm.CodedAdamW`, and
    `pycomm.CodedSGD` with `sgd`)."""
    small: str = ""
    """With `momentum` or `local`: the codec of parameters of one dimension; empty: exact."""
    hook: str = ""
    """One of torch's own: fp16, bf16, powersgd:RANK[:FIRST_STEP], fp16-powersgd:RANK."""
    bucket_mb: float = 25.0
    """DDP's bucket_cap_mb; its default is 25."""
    sgd: bool = False
    """SGD with momentum in place of AdamW."""
    rate: float = 1.0
    """What its learning rate is, beside AdamW's: steps by signs are larger."""

    sharded: bool = False
    """`fully_shard` in place of DDP; its blocks stay gathered between forward and backward."""
    local: dict[str, Any] = field(default_factory=dict)
    """Arguments of `pycomm.LocalSGD`, which averages parameters now and then in place of DDP."""
    system: Callable[[nn.Module, float], System] | None = None
    """Another package's way to train a model with a learning rate."""

    def start(
        self,
        net: nn.Module,
        lr: float,
        betas: tuple[float, float],
        group: dist.ProcessGroup | None = None,
        *,
        sync: bool = True,
        fused: bool = False,
    ) -> System:
        """Return what trains a bare model by this method. Collective.

        Args:
            net: the model.
            lr, betas: AdamW's; SGD has the first beta as its momentum.
            group: a group of this method's backend; None: the default group.
            sync: let DDP broadcast rank 0's parameters first.
            fused: torch's AdamW is the fused one.
        """
        if self.system is not None:
            return self.system(net, lr)
        lr *= self.rate
        model = net
        if self.sharded:
            device = next(net.parameters()).device.type
            mesh = None if group is None else dist.DeviceMesh.from_group(group, device)
            for part in (*net.blocks, net):
                fully_shard(part, mesh=mesh, reshard_after_forward=False)
        elif not self.local:
            model = DistributedDataParallel(
                net,
                process_group=group,
                gradient_as_bucket_view=True,
                bucket_cap_mb=self.bucket_mb,
                init_sync=sync,
            )
            if self.codec:
                feedback = {"": True, "none": False}.get(self.feedback, self.feedback)
                pycomm.compress(model, self.codec, feedback=feedback)
            if self.hook:
                _torch_hook(model, self.hook, group)
        optimizer = self._optimizer(model, lr, betas, fused=fused)
        if not self.local:
            return System(model, optimizer)
        options = dict(self.local)
        if self.small:
            rules = (pycomm.Rule(codec=self.small, max_dims=1),)
            options["codec"] = pycomm.Policy(options["codec"], rules=rules, guard=None)
        local = pycomm.LocalSGD(net, process_group=group, **options)
        optimizer.register_step_post_hook(lambda *_: local.step())
        return System(net, optimizer, finish=local.finish)

    def _optimizer(
        self, model: nn.Module, lr: float, betas: tuple[float, float], *, fused: bool
    ) -> torch.optim.Optimizer:
        parameters = model.parameters()
        if self.sgd and self.momentum:
            return pycomm.CodedSGD(parameters, lr, betas[0], model=model, codec=self.momentum)
        if self.sgd:
            return torch.optim.SGD(parameters, lr, betas[0])
        if not self.momentum:
            return torch.optim.AdamW(parameters, lr, betas, fused=fused)
        policy = pycomm.Policy.of(self.momentum)
        if self.small:
            rule = pycomm.Rule(codec=self.small, max_dims=1, reason="norms and biases")
            policy = replace(policy, rules=(rule, *policy.rules))
        feedback = self.feedback or "residual"
        options = {"model": model, "codec": policy, "feedback": feedback}
        return pycomm.CodedAdamW(parameters, lr, betas, **options)


def _torch_hook(model: DistributedDataParallel, text: str, group: dist.ProcessGroup | None) -> None:
    name, rank, start, *_ = [*text.split(":"), "", ""]
    if name in ("fp16", "bf16"):
        model.register_comm_hook(group, getattr(default_hooks, f"{name}_compress_hook"))
        return
    state = powerSGD_hook.PowerSGDState(
        process_group=group,
        matrix_approximation_rank=int(rank),
        start_powerSGD_iter=int(start or 2),  # 2 is the minimum with its error feedback
    )
    hook = powerSGD_hook.powerSGD_hook
    if name == "fp16-powersgd":
        hook = default_hooks.fp16_compress_wrapper(hook)
    model.register_comm_hook(state, hook)


# torch's methods come first. PowerSGD on Gloo aborts with more than one bucket: its chained
# collectives start in a different order on every rank.
ONE_BUCKET = 1000.0
# One bit while the second moments and the loss change fast, then one value of a hundred.
TOP_1 = "sign 21:topk:density=0.01,values=int8,indices=int12"
TOP_1_BINS = TOP_1.replace("int8", "bins2")  # values of two bits
# SGD's learning rate beside AdamW's: of 8, 15, 25 and 50 the best one for exact gradients.
SGD_RATE = 25.0
# DiLoCo's rounds, the same in streams, and SparseLoCo's form: 64 values of 4096 in two bits.
DILOCO = {"lr": 0.7, "momentum": 0.9}
ROUND = {"every": 30, "codec": "int4", **DILOCO}
STREAM = {"exchange": Streamed(6, overlap=5)}
SPARSE = {"codec": "topk:0.015625,indices=int12,values=bins2", "lr": 1.0, "momentum": 0.0}
SPARSE |= {"feedback": "decay:0.95", "average": "senders"}
METHODS = (
    Method("Gloo, fp32", "gloo"),
    Method("Gloo, fp16 hook", "gloo", hook="fp16"),
    Method("Gloo, PowerSGD rank 1", "gloo", hook="powersgd:1", bucket_mb=ONE_BUCKET),
    Method("Gloo, PowerSGD rank 4", "gloo", hook="powersgd:4", bucket_mb=ONE_BUCKET),
    Method("Gloo, fp16 PowerSGD rank 2", "gloo", hook="fp16-powersgd:2", bucket_mb=ONE_BUCKET),
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
    Method("pycomm, coded momentum, int4", momentum="int4"),
    Method("pycomm, coded momentum, 2 bits", momentum="eden:bits=2,scale=mmse"),
    Method("pycomm, coded momentum, 1 bit", momentum="eden:bits=1,scale=mmse"),
    Method("pycomm, coded momentum, sign", momentum="sign"),
    Method("pycomm, coded momentum, top-k 1 %", momentum=TOP_1),
    Method("pycomm, coded momentum, lean top-k 1 %", momentum=TOP_1, small="int8"),
    Method("pycomm, coded momentum, 2-bit top-k 1 %", momentum=TOP_1_BINS, small="int8"),
    Method("pycomm, exact SGD", sgd=True, rate=SGD_RATE),
    Method("pycomm, SGD, int8", codec="int8", sgd=True, rate=SGD_RATE),
    Method("pycomm, SGD, int4", codec="int4", sgd=True, rate=SGD_RATE),
    Method("pycomm, SGD, EDEN 2 bits", codec="eden:bits=2", sgd=True, rate=SGD_RATE),
    Method("pycomm, SGD, EDEN 1 bit", codec="eden:bits=1", sgd=True, rate=SGD_RATE),
    *(
        Method(f"pycomm, SGD, coded momentum, {name}", momentum=text, sgd=True, rate=SGD_RATE)
        for name, text in (
            ("int4", "int4"),
            ("2 bits", "eden:bits=2,scale=mmse"),
            ("1 bit", "eden:bits=1,scale=mmse"),
            ("sign", "sign"),
            ("top-k 1 %", TOP_1),
        )
    ),
    Method("Gloo, FSDP2", "gloo", sharded=True),
    Method("pycomm, FSDP2", sharded=True),
    Method("LocalSGD, fp32", local={"every": 15, "codec": "fp32", **DILOCO}),
    Method("LocalSGD, SparseLoCo", small="int8", local={"every": 15, **SPARSE}),
    Method("LocalSGD, int4", local=ROUND),
    Method("LocalSGD, int4 in streams", local={**ROUND, **STREAM}),
    Method(
        "LocalSGD, SparseLoCo in streams", small="int8", local={"every": 30, **SPARSE, **STREAM}
    ),
)
