"""`make house`: the sizes of the repository beside those that it is to have.

The report is there to look at, before and after a change. No test fails by a size, and lines are
not to be squeezed: what counts is what a reader must know.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".cu", ".sh", ".txt", ".toml"}
PRODUCT = ("csrc", "pycomm", "triton_kernels", "bench")

# The rooms with the lines that each is to have, and where their files are now. A file belongs to
# the longest of these paths that leads to it.
ROOMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "csrc/core": (3_400, ("csrc/core",)),
    "csrc/codecs": (7_600, ("csrc/codecs",)),
    "csrc/transports": (9_400, ("csrc/transports",)),
    "csrc/collectives": (8_800, ("csrc/collectives",)),
    "csrc/optim": (1_000, ("csrc/optim",)),
    "csrc/binding": (5_400, ("csrc/binding",)),
    "pycomm, its own files": (1_200, ("pycomm",)),
    "pycomm/codecs": (2_400, ("pycomm/codecs",)),
    "pycomm/step": (3_600, ("pycomm/feedback", "pycomm/reduction")),
    "pycomm/policy": (1_800, ("pycomm/policy",)),
    "pycomm/trainers": (3_200, ("pycomm/hooks", "pycomm/horovod", "pycomm/torchft")),
    "pycomm/optim": (1_900, ("pycomm/optim", "pycomm/momentum")),
    "pycomm/backend": (2_200, ("pycomm/backend",)),
    "pycomm/elastic": (900, ("pycomm/elastic",)),
    "pycomm/start": (1_300, ("pycomm/run", "pycomm/launch", "pycomm/takeover", "pycomm/_build")),
    "pycomm/local_sgd": (800, ("pycomm/local_sgd",)),
    "pycomm/observe": (1_100, ("pycomm/monitor", "pycomm/straggler", "pycomm/trace")),
    "pycomm/plan": (2_400, ("pycomm/plan",)),
    "pycomm/doctor": (1_500, ("pycomm/doctor",)),
    "triton_kernels": (2_500, ("triton_kernels",)),
    "bench": (6_500, ("bench",)),
    "tests": (45_000, ("tests",)),
}
TARGETS = {
    "product lines": 69_000,
    "tracked files": 900,
    "public names": 30,
    "environment variables": 18,
    "codecs": 8,
    "feedback kinds": 3,
    "words of docs": 25_000,
    "class names defined twice": 0,
}
# A type at the top level of a header.
CXX_TYPE = re.compile(
    r"^(?:template <[^>]*>\s*)?(?:class|struct|enum class) (?:PYCOMM_API |alignas\([^)]*\) )?"
    r"(\w+)(?: final)?(?: : [^;{]*)?\s*\{",
    re.MULTILINE,
)


def tracked(root: Path) -> list[str]:
    """Return the paths of the files that git tracks, below the root."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    )
    return [name for name in listing.stdout.split("\0") if name and (root / name).is_file()]


def room_of(path: str) -> str | None:
    """Return the room of a file; None for a file outside of the rooms."""
    lengths = {
        len(place): room
        for room, (_, places) in ROOMS.items()
        for place in places
        if re.match(rf"{re.escape(place)}[./]", path)
    }
    return lengths[max(lengths)] if lengths else None


def lines_of_rooms(root: Path, files: Iterable[str]) -> Counter[str]:
    """Return the lines of sources in each room."""
    lines: Counter[str] = Counter()
    for name in files:
        room = room_of(name)
        if room and Path(name).suffix in SUFFIXES:
            lines[room] += (root / name).read_bytes().count(b"\n")
    return lines


def entries(file: Path, variable: str) -> list[str]:
    """Return the keys of the dictionary, or the items of the Literal, that a variable is set to."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        else:
            continue
        if getattr(target, "id", None) != variable:
            continue
        if isinstance(node.value, ast.Dict):
            return [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
        return [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
    raise ValueError(f"{file} assigns nothing to {variable}")


def variables(root: Path) -> set[str]:
    """Return pycomm's environment variables, by the two tables that describe them."""
    text = "".join(
        (root / name).read_text() for name in ("csrc/core/option_table.h", "pycomm/env.py")
    )
    return set(re.findall(r"\bPYCOMM_[A-Z_]*[A-Z]\b", text)) - {"PYCOMM_API"}


def types(root: Path, files: Iterable[str]) -> Iterator[str]:
    """Yield the name of each class, once for each definition; codecs in C++ have namespaces."""
    for name in files:
        if name.startswith(PRODUCT) and name.endswith(".py"):
            for node in ast.walk(ast.parse((root / name).read_text())):
                if isinstance(node, ast.ClassDef):
                    yield f"{node.name} (Python)"
        elif name.startswith("csrc/") and name.endswith(".h") and "codecs/" not in name:
            yield from (f"{found} (C++)" for found in CXX_TYPE.findall((root / name).read_text()))


def report(root: Path) -> str:
    """Return the report as text."""
    files = tracked(root)
    lines = lines_of_rooms(root, files)
    twice = {name: n for name, n in sorted(Counter(types(root, files)).items()) if n > 1}
    codecs = root / "pycomm/codecs/__init__.py"
    pages = [root / name for name in files if re.fullmatch(r"docs/.*\.md", name)]
    sizes = {
        "product lines": sum(n for room, n in lines.items() if room.startswith(PRODUCT)),
        "tracked files": len(files),
        "public names": len(entries(root / "pycomm/__init__.py", "_HOMES")),
        "environment variables": len(variables(root)),
        "codecs": len(entries(codecs, "CODECS")),
        "feedback kinds": len(entries(root / "pycomm/feedback/rule.py", "Kind")),
        "words of docs": sum(len(page.read_text().split()) for page in pages),
        "class names defined twice": len(twice),
    }
    rows = [("lines of", "now", "target")]
    rows += [(room, f"{lines[room]:,}", f"{target:,}") for room, (target, _) in ROOMS.items()]
    rows += [("", "", ""), ("in all", "now", "target")]
    rows += [(name, f"{size:,}", f"{TARGETS[name]:,}") for name, size in sizes.items()]
    table = [f"{name:<28}{now:>9}{target:>9}".rstrip() for name, now, target in rows]
    named = [f"  {name}: {n}" for name, n in twice.items()]
    return "\n".join([*table, *(["", "defined twice or more:"] if named else []), *named])


if __name__ == "__main__":
    print(report(ROOT))
