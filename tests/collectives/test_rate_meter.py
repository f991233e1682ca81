"""The meter of what a rank sends tells a rate once it has seen enough of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.compiling import ROOT, compile_cpp

WINDOW = 250  # milliseconds, at the least


def test_a_rate_is_told_after_four_windows(tmp_path):
    program, source = tmp_path / "meter", Path(__file__).with_name("rate_meter_main.cpp")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    compile_cpp(source, program, *flags)
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    looks = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert all(rate == 0 for _, rate in looks[:-1])
    at, rate = looks[-1]
    # However late a busy machine looks.
    assert at >= 4 * WINDOW
    # A million bytes each second; a look takes its time, so the rate is never higher.
    assert 500_000 < rate <= 1_000_000
