"""The public names of pycomm: one list, documented, and loaded at first use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pycomm

ROOT = Path(__file__).parent.parent


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


def test_state_and_communicator_are_public():
    from pycomm.communicator import Communicator
    from pycomm.reduction.state import CompressionState

    assert pycomm.CompressionState is CompressionState
    assert pycomm.Communicator is Communicator
