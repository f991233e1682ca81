"""The communication hook for DistributedDataParallel."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from pycomm import backend
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.hooks import two_shot
from pycomm.hooks.bucket import Bucket
from pycomm.policy import Decision, Parameter, Policy, agree, summary

STATE_VERSION = 1
CODED = (torch.float32, torch.float16, torch.bfloat16)


class HookState:
    """What `compress_hook` keeps between steps: policy, feedback, and what it knows of the buckets.

    Args:
        codec: a codec, its text ("int8", "quant:bits=4,block=64"), or a `Policy`. A codec leaves
            norms, biases and tiny parameters exact; a policy does what it says.
        model: the DDP model. Without it parameters are numbered in the order in which they first
            appear, and rules by name have nothing to look at.
        process_group: where to reduce; None: the model's group, or the default group.
        feedback: keep the error of each payload and add it to the next.
        seed: of random rounding; equal on all ranks.

    Example:
        >>> import pycomm
        >>> state = pycomm.HookState("int4", model)  # doctest: +SKIP
        >>> model.register_comm_hook(state, pycomm.compress_hook)  # doctest: +SKIP
    """

    def __init__(
        self,
        codec: str | Codec | Policy = "int8",
        model: DistributedDataParallel | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        self.policy = codec if isinstance(codec, Policy) else Policy(codec)
        if process_group is None:
            process_group = model.process_group if model is not None else dist.group.WORLD
        if process_group is None:
            raise Error("there is no process group: call init_process_group first")
        self.process_group: dist.ProcessGroup = process_group
        self.feedback = Feedback(process_group.size()) if feedback else None
        self.seed = seed
        self.step = 0
        """Number of the current step, from 1."""
        self.overflows = 0
        """Steps whose result was not finite; they have left the residuals as they were."""
        self.decisions: dict[str, Decision] = {}

        self._names: dict[int, str] = {}  # by id of the parameter
        self._numbers: dict[str, int] = {}
        self._parameters: list[torch.Tensor] = []  # keeps their ids from being used again
        self._named = model is not None
        self._agreed: set[str] = set()
        self._buckets: dict[tuple[str, ...], Bucket] = {}
        self._finite: list[Callable[[], bool]] = []  # of the current step, one for each bucket
        self._touched: set[str] = set()
        self._complete = False
        if model is not None:
            for name, parameter in model.module.named_parameters():
                self._enter(name, parameter)

    # ------------------------------------------------------------------ for users

    def __repr__(self) -> str:
        return f"HookState({self.policy}, step={self.step}, overflows={self.overflows})"

    def summary(self) -> str:
        """Return the decisions that were made so far, a line for each codec and reason."""
        return summary(self.decisions.values())

    def residual_norms(self) -> dict[str, tuple[float, float]]:
        """Return the L2 norms of each parameter's worker and owner residual after the last step."""
        self._settle()
        return self.feedback.norms() if self.feedback else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs. Each rank saves its own, between two steps."""
        self._settle()
        return {
            "version": STATE_VERSION,
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "seed": self.seed,
            "step": self.step,
            "residuals": self.feedback.state_dict() if self.feedback else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, on the same rank of as many ranks.

        Raises:
            ValueError: the state is of another version, rank or number of ranks.
        """
        if state["version"] != STATE_VERSION:
            raise ValueError(
                f"the hook's state has version {state['version']}, not {STATE_VERSION}"
            )
        here = (self.process_group.rank(), self.process_group.size())
        there = (state["rank"], state["world_size"])
        if here != there:
            raise ValueError(
                f"the hook's state was saved by rank {there[0]} of {there[1]} and is loaded by "
                f"rank {here[0]} of {here[1]}: ranks owe different things, so each loads its own"
            )
        self._settle()
        self.seed = state["seed"]
        self.step = state["step"]
        if self.feedback:
            self.feedback.load_state_dict(state["residuals"])

    def agree(self) -> None:
        """Check that all ranks have decided alike; collective. See `pycomm.policy.agree`.

        The hook does it too, for parameters that it has not seen before.
        """
        new = [decision for name, decision in self.decisions.items() if name not in self._agreed]
        if new and self.process_group.size() > 1:
            agree(new, self.process_group, self._parameters[0].device)
        self._agreed.update(self.decisions)

    # ------------------------------------------------------------------ for the hook

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the group; see `compress_hook`."""
        tensor = bucket.buffer()
        if bucket.index() == 0:
            self._settle()
            self.step = (self.step + 1) % 2**32
        if tensor.is_sparse:
            raise Error(
                f"rank {self.process_group.rank()}: bucket {bucket.index()} is sparse and cannot "
                "be compressed; make the embedding with sparse=False"
            )
        if self.process_group.size() == 1:
            return _done(tensor)
        if tensor.dtype not in CODED:
            future = self._reduce_plain(tensor)
        else:
            future = self._reduce_coded(tensor, self._bucket(bucket.parameters(), tensor))
        self._complete = bucket.is_last()
        return future

    def _reduce_coded(
        self, tensor: torch.Tensor, bucket: Bucket
    ) -> torch.futures.Future[torch.Tensor]:
        side = self.feedback.side if self.feedback else 0
        for piece in bucket.pieces:
            if self.feedback and piece.residual is not None:
                self.feedback.use(piece.residual, bucket.layout)
                self._touched.add(piece.name)
        native = backend.find(self.process_group) if tensor.is_cpu else None
        if native is not None:
            work = native.compressed_all_reduce(tensor, bucket.native, side, self.seed, self.step)
            self._finite.append(lambda: work.finite)
            coded: torch.futures.Future[torch.Tensor] = work.get_future()
            return coded
        values = tensor.float().contiguous()
        finite = two_shot.all_reduce(
            values, bucket, self.process_group, side=side, seed=self.seed, step=self.step
        )
        self._finite.append(lambda: bool(finite))
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)
        return _done(tensor)

    def _reduce_plain(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """For dtypes that no codec takes, such as float64: the group's own all_reduce."""
        verdict: list[bool] = []

        def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            result = future.value()[0]
            verdict.append(bool(result.isfinite().all()))
            return result

        tensor.div_(self.process_group.size())
        work = dist.all_reduce(tensor, group=self.process_group, async_op=True)
        self._finite.append(lambda: verdict == [True])
        plain: torch.futures.Future[torch.Tensor] = work.get_future().then(finish)
        return plain

    def _bucket(self, parameters: list[torch.Tensor], tensor: torch.Tensor) -> Bucket:
        for parameter in parameters:
            if id(parameter) in self._names:
                continue
            if self._named:
                raise Error(
                    f"rank {self.process_group.rank()}: a gradient of shape "
                    f"{tuple(parameter.shape)} belongs to no parameter of this state's model"
                )
            self._enter(f"parameter{len(self._names)}", parameter)
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        bucket = self._buckets.get(names)
        if bucket is None:
            self.agree()
            decisions = [self.decisions[name] for name in names]
            numbers = [self._numbers[name] for name in names]
            bucket = Bucket(decisions, numbers, self.feedback, tensor.device)
            self._buckets[names] = bucket
        return bucket

    def _enter(self, name: str, parameter: torch.Tensor) -> None:
        self._names[id(parameter)] = name
        self._numbers[name] = len(self._numbers)
        self._parameters.append(parameter)
        shape = Parameter(name, tuple(parameter.shape), parameter.dtype)
        self.decisions[name] = self.policy.decide(shape)

    def _settle(self) -> None:
        """Keep the residuals of the last step if all of it has come through, and is finite."""
        if not self._finite:
            return
        finite = all([check() for check in self._finite])
        if self.feedback and finite and self._complete:
            self.feedback.commit(self._touched)
        self.overflows += not finite
        self._finite.clear()
        self._touched.clear()
        self._complete = False


def compress_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over all ranks, compressed.

    Decoded values are summed in float32 in rank order and divided once, by the rank that owns them,
    so all ranks get the same bits. With the codec "fp32" these are the exact average; DDP itself
    divides before it sums, which for two ranks gives the same bits.

    Args:
        state: codec and feedback; the same on all ranks.
        bucket: float32, or 16-bit floats, which are converted to float32 and back. Other dtypes are
            averaged as they are.

    Returns:
        A future of the bucket's tensor.

    Raises:
        Error: the gradients are sparse; and what the group's all_reduce raises.
    """
    return state.reduce(bucket)


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
