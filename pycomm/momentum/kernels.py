"""What runs the passes of csrc/optim: threads of the host, or kernels of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycomm import _C
from pycomm.codecs.implementations import Launcher, current_stream, of_kernels
from pycomm.errors import Error


class Kernels:
    """What runs the passes of csrc/optim on a device.

    Args:
        device: the device.
        launch: what starts kernels there; None: C++ does, or it works on the host.
    """

    def __init__(self, device: torch.device, launch: Launcher | None = None) -> None:
        self.device, self._launch = device, launch
        self.on_host = device.type == "cpu" and launch is None
        self.moments = _C.HostMoments if self.on_host else _C.DeviceMoments
        """Matrices and the passes over them."""

    @staticmethod
    def find(name: str, device: torch.device) -> Kernels:
        """Return what runs csrc/optim/<name>.cu, or the same on the host.

        Raises:
            Error: the kernels do not run on the device.
        """
        if device.type == "cpu":
            return Kernels(device)
        way = of_kernels(name, device.type)
        if way is None:
            raise Error(
                f"coded optimizers have kernels for CUDA devices, and none for {device.type}: "
                "move the model to the CPU, or compress gradients with pycomm.compress"
            )
        return Kernels(device, getattr(way, "launch", None))

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call C++, which works on the host, or queues on torch's current stream."""
        if self._launch is not None:
            _, launches = _C.recorded(function, *args, 0)
            self._launch(launches, self.device)
        elif self.on_host:
            function(*args, torch.get_num_threads())
        else:
            with torch.cuda.device(self.device):
                function(*args, current_stream(self.device))


def written(parameters: Any) -> None:
    """Tell autograd that C++ has written parameters, a tensor or some.

    A graph that was kept with their old values then refuses a backward, as after an operation of
    torch.
    """
    torch.autograd.graph.increment_version(parameters)
