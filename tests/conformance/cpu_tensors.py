"""Tests written for one GPU per rank, on CPU tensors: devices change, the maths does not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any


def open_gates(common_distributed: Any) -> None:
    """Drop the suite's checks for GPUs, before it is imported."""

    def let_through(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)  # the suite looks for __wrapped__
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return test(*args, **kwargs)

        return wrapper

    common_distributed.skip_if_no_gpu = let_through
    for gate in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common_distributed, gate, lambda *args, **kwargs: let_through)
    common_distributed.init_multigpu_helper = lambda world_size, backend: {
        rank: [rank] for rank in range(int(world_size))
    }


def for_rank(rank: int, backend: str) -> contextlib.AbstractContextManager[Any]:
    """In a rank's process: everything that names a CUDA device means the CPU."""
    import torch
    import torch.distributed as dist
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")

    def moved(device: Any) -> Any:
        is_number = isinstance(device, int) and not isinstance(device, bool)
        is_name = isinstance(device, str) and device.startswith("cuda")
        is_device = isinstance(device, torch.device) and device.type == "cuda"
        return cpu if is_number or is_name or is_device else device

    class OnCpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.Tensor.cuda:
                return args[0]
            if "device" in kwargs:
                kwargs["device"] = moved(kwargs["device"])
            if func is torch.Tensor.to and len(args) > 1:
                args = (args[0], moved(args[1]), *args[2:])
            return func(*args, **kwargs)

    class NoStream:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: rank
    torch.cuda.current_stream = torch.cuda.device = torch.cuda.stream = nothing
    torch.cuda.Stream = lambda *args, **kwargs: NoStream()
    torch.accelerator.current_stream = lambda *args, **kwargs: NoStream()

    module_to = torch.nn.Module.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = moved(kwargs["device"])
        return module_to(self, *(moved(arg) for arg in args), **kwargs)

    torch.nn.Module.to = to
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self

    ddp = torch.nn.parallel.DistributedDataParallel
    ddp_init = ddp.__init__

    def init(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        ddp_init(self, module, None, None, *args, **kwargs)

    ddp.__init__ = init

    # Some tests ask for a second group by that very name.
    new_group = dist.new_group

    def new_group_here(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = backend
        return new_group(*args, **kwargs)

    dist.new_group = new_group_here
    return OnCpu()
