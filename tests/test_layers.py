"""The rules of the house, checked on the sources: arrows point down, and what may stand where.

Every rule is a function from the root of a tree to the list of its violations. It must be empty for
this repository, and a made-up tree that breaks the rule proves that it can be broken.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {".h", ".cpp", ".cu", ".py", ".pyi", ".md", ".toml", ".yml", ".yaml", ".txt", ".sh", ""}

# What each layer may use besides itself. Codecs and transports are strangers.
CXX_LAYERS = {
    "binding": {"collectives", "codecs", "transports", "core"},
    "collectives": {"codecs", "transports", "core"},
    "codecs": {"core"},
    "transports": {"core"},
    "core": set(),
}
# From the top down: a module may use those in the lines below its own, and its own line.
PYTHON_LAYERS = (
    {"bench"},
    {"run", "compress", "local_sgd", "plan", "doctor", "__main__"},
    {"hooks"},
    {"policy", "feedback", "monitor", "trace"},
    {"codecs", "communicator", "backend"},
    {"triton_kernels"},
    {"_autoload", "arrays", "health", "pieces", "takeover"},
    {"_build", "charts", "errors", "env", "_C", "_c10d"},
)
MAX_LINES = 500


def files(root: Path, folder: str, *suffixes: str) -> Iterator[Path]:
    yield from (f for f in sorted((root / folder).rglob("*")) if f.suffix in suffixes)


def cxx(root: Path) -> Iterator[Path]:
    return files(root, "csrc", ".h", ".cpp", ".cu")


def includes_that_point_up(root: Path) -> list[str]:
    wrong = []
    for file in cxx(root):
        layer = file.relative_to(root / "csrc").parts[0]
        used = set(re.findall(r'#\s*include\s+"(\w+)/', file.read_text()))
        wrong += [
            f"{file.name}: {layer} -> {u}" for u in sorted(used - {layer} - CXX_LAYERS[layer])
        ]
    return wrong


def torch_users(root: Path) -> list[str]:
    """Files that include torch, other than the parts of _c10d."""
    uses = re.compile(r'#\s*include\s+[<"](torch|ATen|c10)/|#\s*include\s+"binding/c10d')
    found = [f for f in cxx(root) if uses.search(f.read_text())]
    parts = re.compile(r"csrc/binding/c10d(_\w+)?\.(h|cpp)$")
    return [f.name for f in found if not parts.search(str(f))]


def modules_used(file: Path, package: list[str]) -> Iterator[str]:
    """Modules and packages right below `pycomm` that a file imports, in whatever spelling."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        yield from (name[1] for name in names if name[0] == "pycomm" and len(name) > 1)


def python_files(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every file of the package, with its dotted name as installed."""
    for folder in ("pycomm", "bench", "triton_kernels"):
        for file in files(root, folder, ".py"):
            name = list(file.relative_to(root).with_suffix("").parts)
            yield file, name if folder == "pycomm" else ["pycomm", *name]


def imports_that_point_up(root: Path) -> list[str]:
    depth = {name: i for i, layer in enumerate(PYTHON_LAYERS) for name in layer}
    wrong = []
    for file, name in python_files(root):
        if name[1] == "__init__":
            continue  # the public face of the package names what is in it
        if name[1] not in depth:
            wrong.append(f"{'.'.join(name)}: not in PYTHON_LAYERS")
            continue
        package = name[:-1]
        for used in modules_used(file, package):
            if used in depth and depth[used] < depth[name[1]]:
                wrong.append(f"{'.'.join(name)} -> {used}")
    return wrong


def readers_of_the_environment(root: Path) -> list[str]:
    wrong = [
        str(f.relative_to(root))
        for f in cxx(root)
        if f.name != "env.cpp" and re.search(r"\b(secure_)?getenv\s*\(", f.read_text())
    ]
    for file, name in python_files(root):
        if name[1] in ("bench", "env", "__main__"):
            continue  # programs that start processes hand an environment on
        if re.search(
            r"\bos\.(environ|getenv)\b|from os import .*\b(environ|getenv)\b", file.read_text()
        ):
            wrong.append(str(file.relative_to(root)))
    return wrong


def long_files(root: Path, tracked: Iterable[Path]) -> list[str]:
    lengths = {f: len(f.read_text().splitlines()) for f in tracked}
    return [f"{f.relative_to(root)}: {n} lines" for f, n in lengths.items() if n > MAX_LINES]


def unfinished(root: Path, tracked: Iterable[Path]) -> list[str]:
    word = re.compile(r"\b" + "TO" + r"DO\b|\bFIX" + r"ME\b")
    return [str(f.relative_to(root)) for f in tracked if word.search(f.read_text())]


def tracked_sources() -> list[Path]:
    """Sources that git knows; in a tree without git, all of them."""
    try:
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        folders = ("csrc", "pycomm", "bench", "triton_kernels", "tests", "docs", "examples")
        listed = [str(f.relative_to(ROOT)) for d in folders for f in (ROOT / d).rglob("*")]
    found = [ROOT / name for name in listed]
    return [f for f in found if f.suffix in SOURCES and f.is_file()]


def test_includes_point_down():
    assert includes_that_point_up(ROOT) == []


def test_only_c10d_cpp_knows_torch():
    assert torch_users(ROOT) == []


def test_imports_point_down():
    assert imports_that_point_up(ROOT) == []


def test_environment_is_read_on_one_page_per_language():
    assert readers_of_the_environment(ROOT) == []


def test_no_file_is_longer_than_500_lines():
    assert long_files(ROOT, tracked_sources()) == []


def test_nothing_is_marked_as_unfinished():
    assert unfinished(ROOT, tracked_sources()) == []


VIOLATIONS = {
    "core-uses-codecs": (
        includes_that_point_up,
        "csrc/core/types.h",
        '#include "codecs/codec.h"\n',
    ),
    "codecs-use-transports": (
        includes_that_point_up,
        "csrc/codecs/cast.cu",
        '#include "transports/store.h"\n',
    ),
    "module-knows-torch": (torch_users, "csrc/binding/module.cpp", "#include <torch/torch.h>\n"),
    "header-of-c10d-elsewhere": (
        torch_users,
        "csrc/binding/bind_core.cpp",
        '#include "binding/c10d_work.h"\n',
    ),
    "core-knows-c10": (torch_users, "csrc/core/env.h", '#  include "c10/util/Half.h"\n'),
    "codecs-import-hooks": (
        imports_that_point_up,
        "pycomm/codecs/quant.py",
        "from pycomm.hooks import ddp\n",
    ),
    "relative-import": (
        imports_that_point_up,
        "pycomm/feedback.py",
        "def f():\n    from .hooks.ddp import x\n",
    ),
    "plain-import": (imports_that_point_up, "pycomm/env.py", "import pycomm.policy as p\n"),
    "from-package": (
        imports_that_point_up,
        "pycomm/communicator.py",
        "from pycomm import compress\n",
    ),
    "triton-uses-codecs": (
        imports_that_point_up,
        "triton_kernels/quant.py",
        "from pycomm.codecs import quant\n",
    ),
    "unknown-module": (imports_that_point_up, "pycomm/helpers.py", "x = 1\n"),
    "getenv-in-tcp": (
        readers_of_the_environment,
        "csrc/transports/tcp.cpp",
        'auto* x = std::getenv("X");\n',
    ),
    "environ-in-hooks": (
        readers_of_the_environment,
        "pycomm/hooks/ddp.py",
        'import os\nx = os.environ["X"]\n',
    ),
}


@pytest.mark.parametrize(("rule", "path", "text"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_the_rule_finds_its_violation(rule, path, text, tmp_path):
    assert rule(tmp_path) == []
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert len(rule(tmp_path)) == 1


def test_length_and_marks_are_found(tmp_path):
    file = tmp_path / "long.py"
    file.write_text("x = 1\n" * (MAX_LINES + 1) + "# TO" + "DO\n")
    assert long_files(tmp_path, [file])
    assert unfinished(tmp_path, [file])
