"""A codec takes the files that CONTRIBUTING.md lists, and no other change.

A toy codec (tests/codecs/toy) is added to a copy of the tree in those files. Its reference, C++
loops, launches, kernels and Triton code are then compared by the tests of all codecs.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pycomm import _C
from tests.compiling import compile_object, compiler

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "codecs" / "toy"
# What a package and its tests need of the tree.
COPIED = ("pycomm", "triton_kernels", "csrc/core", "csrc/codecs", "tests/codecs", "tests/golden")
LISTS = {
    "pycomm/codecs/__init__.py": [
        ("from pycomm.codecs.topk import TopK\n", "from pycomm.codecs.toy import Toy\n"),
        ('    "topk": TopK,\n', '    "toy": Toy,\n'),
    ],
    "csrc/codecs/registry.cpp": [("  CODEC(topk) \\\n", "  CODEC(toy) \\\n")],
}


def table() -> list[str]:
    """Return the files of the rows of CONTRIBUTING.md's table, for the codec ``toy``."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| \d \| (.*?) \|", text, flags=re.MULTILINE)
    assert len(rows) == 6
    files = []
    for row in rows:
        names = re.findall(r"`([^`]*)`", row)
        folder = Path(names[0]).parent
        files += [str(folder / Path(name).name).replace("/x.", "/toy.") for name in names]
    return files


def build_folder() -> Path:
    """Return the folder in which the installed library was built."""
    for folder in (ROOT / "build").glob("*"):
        library = folder / "libpycomm.so"
        if library.exists() and filecmp.cmp(library, ROOT / "pycomm" / library.name, False):
            return folder / "CMakeFiles" / "pycomm.dir" / "csrc"
    pytest.skip("by design: the library was not built here, so there are no objects to link")


@pytest.fixture
def tree(tmp_path) -> Path:
    """Copy the tree, and add the files of the toy codec."""
    skipped = shutil.ignore_patterns("__pycache__")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skipped)
    for file in (*ROOT.glob("tests/*.py"), *ROOT.glob("tests/golden/*.py")):
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    (tmp_path / "triton_kernels").rename(tmp_path / "pycomm" / "triton_kernels")
    (tmp_path / "triton_kernels").symlink_to(tmp_path / "pycomm" / "triton_kernels")
    return tmp_path


def python(tree: Path, *arguments: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(tree: Path) -> None:
    """Compile what is new and what has the list, and link it with the other objects."""
    objects = build_folder()
    flags = ("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Icsrc")
    new = [tree / f"{name}.o" for name in ("toy", "registry")]
    for target in new:
        source = tree / "csrc" / "codecs" / f"{target.stem}.cpp"
        compile_object(source, target, *flags, root=tree)
    # Of a file that was moved or deleted since, the build keeps the object.
    sources = {
        file: ROOT / "csrc" / file.relative_to(objects).with_suffix("")
        for file in objects.rglob("*.o")
    }
    old = [
        file
        for file, source in sources.items()
        if source.exists() and file.name != "registry.cpp.o"
    ]
    library = tree / "pycomm" / "libpycomm.so"
    subprocess.run(
        [compiler(), "-shared", *old, *new, "-pthread", "-ldl", "-o", library], check=True
    )


def test_a_codec_takes_six_files_and_a_line_in_each_list(tree):
    if _C.cuda_built():
        pytest.skip("by design: objects of nvcc need its linker")
    written = []
    for file in sorted(TOY.rglob("toy.*")):
        if "__pycache__" in file.parts:
            continue
        written.append(str(file.relative_to(TOY)))
        (tree / written[-1]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tree / written[-1])
    assert sorted([*written, "tests/golden/toy.npz"]) == sorted(table())
    for file, lines in LISTS.items():
        text = (tree / file).read_text()
        for after, line in lines:
            assert text.count(after) == 1
            text = text.replace(after, after + line)
        (tree / file).write_text(text)
    build(tree)
    made = python(tree, "-m", "tests.golden", "toy")
    assert "toy.npz" in made
    assert python(tree, "-m", "tests.codecs.toy.check") == "toy is a codec\n"
