"""Documentation: scripts have the output that stands below them, blocks run, tables are true, and
all public names are there, which are loaded at first use."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

import pycomm
from tests.torch.interpreter import ROOT, run, torchrun

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_script_says_what_stands_below_it(tmp_path: Path):
    script, output = re.findall(r"```python\n(.*?)```\n\n```\n\$ (.*?)```", README, re.DOTALL)[0]
    command, *lines = output.splitlines()
    (tmp_path / "train.py").write_text(script)
    program, *arguments = command.split()
    assert program == "torchrun"
    torchrun = [sys.executable, "-m", "torch.distributed.run", *arguments]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    # Two ranks may write between a line of the other and its end.
    ranks = re.compile(r"rank \d+: loss \d+\.\d+")
    assert sorted(ranks.findall(done.stdout)) == sorted(filter(ranks.fullmatch, lines))
    said = done.stderr.splitlines()
    others = [line for line in lines if not ranks.fullmatch(line)]
    assert [line for line in others if line not in ("...", *said)] == []


def test_the_table_of_codecs_has_their_bytes():
    rows = re.findall(r"^\| (`.*?) \| (\d[\d/ +to]*) \|", README, re.MULTILINE)
    assert len(rows) > 5
    for names, text in rows:
        specs = re.findall(r"`(.*?)`", names.partition("(")[0])
        ends = [sum(Fraction(part) for part in end.split(" + ")) for end in text.split(" to ")]
        for spec, bytes_per_value in {specs[0]: ends[0], specs[-1]: ends[-1]}.items():
            sent = pycomm.codec(spec).encoded_bytes(1 << 20) / (1 << 20)
            assert abs(sent - bytes_per_value) < 0.001, spec


@pytest.mark.timeout(300)
def test_commands_of_the_start_page_say_what_it_shows(tmp_path: Path):
    page = (ROOT / "docs/start.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    blocks = re.findall(r"^```\n(\$ .*?)^```", page, re.DOTALL | re.MULTILINE)
    shown = [part.splitlines() for block in blocks for part in block.split("$ ")[1:]]
    assert len(shown) == 5
    for command, *lines in shown:
        variables = dict(word.split("=") for word in command.split() if word.startswith("PYCOMM_"))
        program, *words = command.split()[len(variables) :]
        assert program == "torchrun"
        assert words[:2] == ["--nproc-per-node", "2"]
        printed = torchrun(*words[2:], folder=tmp_path, **variables)
        said = [timeless(line) for line in printed.splitlines()]
        assert [line for line in lines if timeless(line) not in ("...", *said)] == []


def timeless(line: str) -> str:
    """Return a line without what differs between machines."""
    return re.sub(r"(in )\d+\.\d( s$)|(torch )\S+(;)", r"\1\3\2\4", line)


def test_returns_are_one_paragraph():
    """In Google's style, what precedes a colon there is a type."""
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    found = 0
    for name in re.findall(r"^::: (\S+)", pages, re.MULTILINE):
        if name.startswith("pycomm.torchft"):  # which may be absent
            continue
        thing: object = pydoc.locate(name)
        parts = [thing, *(v for k, v in inspect.getmembers(thing) if not k.startswith("_"))]
        for doc in filter(None, map(inspect.getdoc, parts)):
            for line in re.findall(r"^ *Returns:\n +(.*)", doc, re.MULTILINE):
                found += 1
                assert not re.match(r"[^`;.]*: ", line), (name, line)
    assert found > 15


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and GitHub name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_heading_of_a_file(page: Path):
    for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text()):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_the_commands_are_there():
    for module in set(re.findall(r"python -m ([\w.]+)", README)):
        done = run("-m", module, "--help", timeout=100)
        assert done.returncode == 0, (module, done.stderr)


# ------------------------------------------------------------------------------------- public names


def test_every_public_name_exists_and_has_a_docstring():
    for name in pycomm.__all__:
        assert (getattr(pycomm, name).__doc__ or "").strip(), name
    assert set(pycomm.__all__) <= set(dir(pycomm))


def test_the_documentation_mentions_every_public_name():
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
    missing = [name for name in pycomm.__all__ if not re.search(rf"\bpycomm\.{name}\b", text)]
    assert missing == []


def test_the_reference_has_every_class_and_function():
    pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    names = [name for name in pycomm.__all__ if not isinstance(getattr(pycomm, name), ModuleType)]
    missing = [name for name in names if f"\n::: pycomm.{name}\n" not in pages]
    assert missing == []


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "pycomm" / "__init__.py").read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    (block,) = (b for b in blocks if getattr(b.test, "id", "") == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    imported = [alias.asname for node in imports for alias in node.names]
    assert sorted(map(str, imported)) == sorted(pycomm.__all__)


def test_no_name_is_loaded_before_it_is_used():
    program = (
        "import sys, pycomm\n"
        "assert 'torch' not in sys.modules\n"
        "assert not any(name.startswith('pycomm.') for name in sys.modules), sys.modules\n"
        "pycomm.Error, pycomm.errors\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=ROOT)


# ------------------------------------------------------------------------------------ Python blocks
# They run on one rank, in the order of their page, after the names that they use.
#
# Not here: pages whose examples have tests of their own (start, policy, README), what needs other
# packages (trainers but for arrays: `make trainers`), GPUs (gpu) or ranks that die or join
# (elastic, reliability).

NAMES = """
import dataclasses
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
import pycomm
DDP = DistributedDataParallel
dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
path = "saved"
batches = [torch.randn(4, 64) for _ in range(4)]
loss = lambda model, batch: model(batch).square().mean()
"""
BEFORE_EACH = "net = torch.nn.Linear(64, 64)\n"
ADAMW = "optimizer = torch.optim.AdamW(model.parameters())\n"
# Arrays in place of what TensorFlow has.
TENSORFLOW = """
import math, numpy as np
from types import SimpleNamespace as Some
from pycomm import Communicator
model = Some(trainable_variables=[np.zeros((4, 8), np.float32), np.zeros(3, np.float32)])
tape, step = Some(gradient=lambda _, variables: [v + 1 for v in variables]), 0
optimizer = Some(apply_gradients=lambda pairs: [np.add(mean, v, out=v) for mean, v in pairs])
"""
# What the blocks of a page assume.
TAKEN_FOR_GRANTED = {
    "choosing": "",
    "feedback": "model = DDP(net)\n",
    "index": "",
    "local_sgd": f"model = net\n{ADAMW}",
    "optimizers": f"model = DDP(net)\n{ADAMW}",
    "trace": "",
    "trainers": TENSORFLOW,
}


@pytest.mark.parametrize("page", TAKEN_FOR_GRANTED)
def test_blocks_of_a_page_run(page: str, tmp_path: Path):
    text = (ROOT / f"docs/{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks = [block for block in blocks if page != "trainers" or "Communicator" in block]
    assert blocks
    script = NAMES + "".join(BEFORE_EACH + TAKEN_FOR_GRANTED[page] + block for block in blocks)
    done = run("-c", script, timeout=100, cwd=tmp_path, variables={"RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode == 0, done.stderr
