"""Kernels of optimizers on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycomm import _C
from pycomm.codecs import implementations
from pycomm.codecs.implementations import Launcher, Unavailable, current_stream, is_launched


class Kernels:
    """What starts the kernels of a file in csrc/optim.

    Args:
        device: the device.
        launch: what starts kernels there; None: C++ does.
    """

    def __init__(self, device: torch.device, launch: Launcher | None) -> None:
        self.device, self._launch = device, launch

    @staticmethod
    def find(name: str, device: torch.device) -> Kernels | None:
        """Return the kernels of csrc/optim/<name>.cu; None: they do not run on the device."""
        if device.type == "cpu":
            return None
        try:
            way = implementations.select(name, device.type)
        except Unavailable:
            return None
        return Kernels(device, getattr(way, "launch", None)) if is_launched(way) else None

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call C++, and start its kernels on torch's current stream."""
        if self._launch is not None:
            _, launches = _C.recorded(function, *args, 0)
            self._launch(launches, self.device)
            return
        with torch.cuda.device(self.device):
            function(*args, current_stream(self.device))
