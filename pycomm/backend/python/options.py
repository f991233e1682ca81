"""Options of a group of the backend in Python, with the names and defaults of `_c10d`'s."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d

from pycomm import _C
from pycomm.errors import Error

NAMES = tuple(name for name in vars(_C.GroupOptions) if not name.startswith("_"))


class Options(_distributed_c10d.Backend.Options):
    """Options of a group: ``init_process_group("pycomm", pg_options=...)``.

    Args:
        timeout: of the rendezvous and of operations; None: PYCOMM_TIMEOUT, or the core's default.
        given: the options of the table in `docs/index.md` by name, `blocking_wait`, `device_path`.

    Raises:
        TypeError: there is no option of that name, or its value has another type.
    """

    def __init__(self, timeout: timedelta | None = None, **given: Any) -> None:
        core = _C.CommunicatorOptions()
        if timeout is None:
            timeout = timedelta(seconds=core.timeout)
        super().__init__("pycomm", timeout)
        self._core = core
        self.blocking_wait = False
        self._device_path = "auto"
        for name, value in given.items():
            if name == "enable_reconfigure":
                self.enable_reconfigure = value  # the group refuses it
                continue
            if name not in (*NAMES, "blocking_wait", "device_path"):
                raise TypeError(f"pycomm.Options has no option {name!r}")
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in NAMES:
            return getattr(self._core, name)
        raise AttributeError(f"pycomm.Options has no option {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in NAMES:
            setattr(self._core, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def device_path(self) -> str:
        """Kept for scripts: tensors of devices always go through the host here, as "mixed" asks."""
        return self._device_path

    @device_path.setter
    def device_path(self, path: str) -> None:
        if path not in ("auto", "host", "mixed"):
            raise Error(f'unknown device_path "{path}"; use one of auto, host, mixed')
        self._device_path = path

    def core(self) -> _C.CommunicatorOptions:
        """Return a copy of the core's part; its group, ranks and timeout are still to be set."""
        made = _C.CommunicatorOptions()
        for name in NAMES:
            setattr(made, name, getattr(self._core, name))
        if self._device_path == "mixed":
            made.agreed = "device_path=mixed"
        return made

    def __copy__(self) -> Options:
        made = Options(self._timeout)
        made._core = self.core()
        made.blocking_wait, made._device_path = self.blocking_wait, self._device_path
        made.enable_reconfigure = getattr(self, "enable_reconfigure", False)
        made.group_name = self.group_name
        made.global_ranks_in_group = self.global_ranks_in_group
        return made

    def __deepcopy__(self, _: Any) -> Options:
        return self.__copy__()
