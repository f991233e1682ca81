"""Systems that have no wheel for this Python and torch: their builds, and what ends them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field

BUILD = "build"
"""The settings of a build's row: it does not depend on the model."""


@dataclass(frozen=True)
class Build:
    """A source distribution of PyPI."""

    name: str
    package: str
    tools: tuple[str, ...] = ()
    """Packages that its build imports, and that its metadata do not name."""
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def attempt(self, limit: float) -> str:
        """Build a wheel of it in a temporary folder, beside the installed torch.

        Args:
            limit: seconds, after which the build is ended.

        Returns:
            The first error of the output; "": there is a wheel.
        """
        pip = [sys.executable, "-m", "pip"]
        with tempfile.TemporaryDirectory() as folder:
            tools = f"{folder}/tools"
            if self.tools:
                get = [*pip, "install", "--quiet", "--target", tools, *self.tools]
                got = subprocess.run(get, capture_output=True, text=True)
                if got.returncode:
                    return first_error(got.stderr)
            search = os.pathsep.join(filter(None, [tools, os.environ.get("PYTHONPATH", "")]))
            make = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, self.package]
            with subprocess.Popen(
                make,
                env={**os.environ, "PYTHONPATH": search, **self.environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            ) as process:
                try:
                    output, _ = process.communicate(timeout=limit)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, 9)
                    return f"its build has not ended after {limit:.0f} s"
        return first_error(output) if process.returncode else ""


def first_error(output: str) -> str:
    """Return the first line of an output that tells an error, or its last line.

    pip's own line says only that there was one in a process, and a traceback has lines of source
    that name exceptions. Folders of this machine are left out.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line for line in lines if re.search(r"^[\w.]*(Error|Exception): |\berror:", line)]
    told = [line for line in told if "subprocess-exited-with-error" not in line]
    named = [line for line in lines if "Error" in line]
    line = (told or named or lines[-1:] or ["no output"])[0]
    return re.sub(r"/\S*/site-packages/| -> '/.*", "", line)[:300]


BUILDS = (
    Build(
        "Horovod",
        "horovod",
        environment={
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            # CMake 4 refuses its files, which are for CMake before 3.5.
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
            "MAKEFLAGS": "-j2",
        },
        note="built for torch alone, with Gloo",
    ),
    Build("Bagua", "bagua", ("setuptools-rust", "colorama", "tqdm")),
)
