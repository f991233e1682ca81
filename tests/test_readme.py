"""README's script has the output that stands below it, and its tables say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pycomm
from tests.torch.interpreter import ROOT, run

README = (ROOT / "README.md").read_text()


def test_the_script_says_what_stands_below_it(tmp_path: Path):
    script, output = re.findall(r"```python\n(.*?)```\n\n```\n\$ (.*?)```", README, re.DOTALL)[0]
    command, *lines = output.splitlines()
    (tmp_path / "train.py").write_text(script)
    program, *arguments = command.split()
    assert program == "torchrun"
    torchrun = [sys.executable, "-m", "torch.distributed.run", *arguments]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    said = done.stdout.splitlines() + done.stderr.splitlines()
    assert done.returncode == 0, done.stderr
    assert [line for line in lines if line not in ("...", *said)] == []
    assert [line for line in said if line.startswith("rank ") and line not in lines] == []


def test_the_table_of_codecs_has_their_bytes():
    rows = re.findall(r"^\| (`.*?) \| (\d[\d/ +to]*) \|", README, re.MULTILINE)
    assert len(rows) > 5
    for names, text in rows:
        specs = re.findall(r"`(.*?)`", names.partition("(")[0])
        ends = [sum(Fraction(part) for part in end.split(" + ")) for end in text.split(" to ")]
        for spec, bytes_per_value in {specs[0]: ends[0], specs[-1]: ends[-1]}.items():
            sent = pycomm.codec(spec).encoded_bytes(1 << 20) / (1 << 20)
            assert abs(sent - bytes_per_value) < 0.001, spec


def test_every_link_leads_to_a_file():
    links = re.findall(r"\]\(([^)#:]+)[^)]*\)", README)
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_commands_are_there():
    for module in set(re.findall(r"python -m ([\w.]+)", README)):
        done = run("-m", module, "--help", timeout=100)
        assert done.returncode == 0, (module, done.stderr)
