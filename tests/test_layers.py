"""Layering and style rules, checked on the sources.

Every rule is a function from the root of a tree to the list of its violations. The list must be
empty for this repository, and a made-up tree that breaks the rule shows that violations are found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

from tests.house import CXX_TYPE

ROOT = Path(__file__).parent.parent
SOURCES = (".h", ".cpp", ".cu", ".py", ".pyi", ".md", ".toml", ".yml", ".yaml", ".txt", ".sh")

# The layers that each layer may use besides itself. Codecs and transports are independent.
CXX_LAYERS = {
    "binding": {"collectives", "codecs", "transports", "optim", "core"},
    "collectives": {"codecs", "transports", "core"},
    "codecs": {"core"},
    "transports": {"core"},
    "optim": {"codecs", "core"},
    "core": set(),
}
# From the top down: a module may use those in its own line and in the lines below.
PYTHON_LAYERS = (
    {"bench"},
    {"_autoload"},
    {"torchft"},
    {"run", "compression", "horovod", "local_sgd", "optim", "plan", "doctor", "__main__"},
    {"hooks"},
    {"reduction", "momentum"},
    {"elastic"},
    {"policy", "feedback", "monitor", "trace"},
    {"codecs", "communicator", "backend"},
    {"triton_kernels"},
    {"arrays", "launch", "stores", "straggler", "takeover"},
    {
        "_build",
        "_cuda_wheel",
        "arguments",
        "errors",
        "env",
        "folders",
        "log",
        "units",
    }
    | {"_C", "_c10d"},
)
MAX_SOURCES = 25
# Codecs are triples of one name, and the core has no parts.
CROWDED = ("csrc/codecs", "csrc/core")
FACTORIES = {function.__name__ for function in _device_constructors()}
PRODUCTS = {"matmul", "mm", "bmm", "addmm", "addmv", "mv", "addbmm", "baddbmm", "einsum", "linear"}


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


def a_circle(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """Return nodes of which each leads to the next, as one text; nothing if there is no circle."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def folders_in_circles(root: Path) -> list[str]:
    """Return folders of csrc that include each other, directly or indirectly."""
    arrows: dict[str, set[str]] = {}
    for file in cxx(root):
        here = str(file.parent.relative_to(root / "csrc"))
        used = re.findall(r'#\s*include\s+"([\w/]+)/\w+\.\w+"', file.read_text())
        arrows.setdefault(here, set()).update(set(used) - {here})
    return a_circle(arrows)


def crowded_folders(root: Path) -> list[str]:
    """Return folders with more sources than fit into one listing."""
    count: dict[str, int] = {}
    for top in ("csrc", "pycomm", "bench", "triton_kernels", "tests"):
        for file in files(root, top, ".h", ".cpp", ".cu", ".py"):
            folder = str(file.parent.relative_to(root))
            count[folder] = count.get(folder, 0) + 1
    return [f"{f}: {n}" for f, n in count.items() if n > MAX_SOURCES and f not in CROWDED]


def types_with_one_name(root: Path) -> list[str]:
    """Return top-level types of headers that several folders define; codecs have namespaces."""
    places: dict[str, set[str]] = {}
    for file in cxx(root):
        folder = str(file.parent.relative_to(root / "csrc"))
        if file.suffix == ".h" and not folder.startswith("codecs"):
            for name in CXX_TYPE.findall(file.read_text()):
                places.setdefault(name, set()).add(folder)
    return [f"{name}: {', '.join(sorted(f))}" for name, f in places.items() if len(f) > 1]


def torch_users(root: Path) -> list[str]:
    """Return files that include torch, other than the parts of _c10d."""
    uses = re.compile(r'#\s*include\s+[<"](torch|ATen|c10)/|#\s*include\s+"binding/torch/')
    found = [f for f in cxx(root) if uses.search(f.read_text())]
    parts = re.compile(r"csrc/binding/torch/\w+\.(h|cpp)$")
    return [f.name for f in found if not parts.search(str(f))]


def modules_used(file: Path, package: list[str]) -> Iterator[list[str]]:
    """Yield the dotted names below `pycomm` that a file imports, in any form and anywhere."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names = [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called not in ("import_module", "__import__"):
                continue
            names = [str(node.args[0].value).split(".")]
        else:
            continue
        yield from (name for name in names if name[0] == "pycomm" and len(name) > 1)


def python_files(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield every file of the package, with its dotted name as installed."""
    for folder in ("pycomm", "bench", "triton_kernels"):
        for file in files(root, folder, ".py"):
            name = list(file.relative_to(root).with_suffix("").parts)
            yield file, name if folder == "pycomm" else ["pycomm", *name]


def imports_that_point_up(root: Path) -> list[str]:
    depth = {name: i for i, layer in enumerate(PYTHON_LAYERS) for name in layer}
    wrong = []
    for file, name in python_files(root):
        if name[1] == "__init__":
            continue  # the package's public interface re-exports its contents
        if name[1] not in depth:
            wrong.append(f"{'.'.join(name)}: not in PYTHON_LAYERS")
            continue
        package = name[:-1]
        for used in sorted({used[1] for used in modules_used(file, package)}):
            if used in depth and depth[used] < depth[name[1]]:
                wrong.append(f"{'.'.join(name)} -> {used}")
    return wrong


def modules_in_circles(root: Path) -> list[str]:
    """Return modules that import each other: at module level, in a function, or only for types."""
    modules = {".".join(name).removesuffix(".__init__"): file for file, name in python_files(root)}
    arrows: dict[str, set[str]] = {}
    for module, file in modules.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        if module == "pycomm":
            continue  # the package's public interface re-exports its contents
        for used in modules_used(file, package.split(".")):
            target = ".".join(used)
            while target not in modules and target:
                target = target.rpartition(".")[0]
            if target not in ("pycomm", module):
                arrows.setdefault(module, set()).add(target)
    return a_circle(arrows)


def names_that_submodules_take(root: Path) -> list[str]:
    """Return names that a package imports from elsewhere and that one of its own modules has.

    Importing a submodule binds its name in the package: with a module `cast` in it,
    ``from typing import cast`` leaves a package whose functions call a module.
    """
    wrong = []
    for file, name in python_files(root):
        if file.name != "__init__.py":
            continue
        own = {p.stem for p in file.parent.iterdir() if p.suffix == ".py" or p.is_dir()}
        package = ".".join(name[:-1])
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level:
                continue
            for alias in node.names:
                bound = alias.asname or alias.name
                if bound in own and node.module not in (package, f"{package}.{bound}"):
                    wrong.append(f"{package}: {node.module}.{alias.name}")
    return wrong


def readers_of_the_environment(root: Path) -> list[str]:
    wrong = [
        str(f.relative_to(root))
        for f in cxx(root)
        if f.name != "env.cpp" and re.search(r"\b(secure_)?getenv\s*\(", f.read_text())
    ]
    for file, name in python_files(root):
        if name[1] in ("bench", "env", "__main__"):
            continue  # programs that start processes pass on an environment
        if re.search(
            r"\bos\.(environ|getenv)\b|from os import .*\b(environ|getenv)\b", file.read_text()
        ):
            wrong.append(str(file.relative_to(root)))
    return wrong


def printers(root: Path) -> list[str]:
    """Return sources that write for people beside the logger (pycomm/log.py), but for commands."""
    wrong = [
        f"{f.name}: {call}"
        for f in cxx(root)
        if f.name != "warning.cpp"
        for call in re.findall(r"\b(fprintf|printf|perror|std::cerr|TORCH_WARN)\b", f.read_text())
    ]
    for file, name in python_files(root):
        if name[0] != "pycomm" or name[1] in ("bench", "doctor", "plan", "run", "log", "__main__"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if ast.unparse(node) in ("print", "sys.stderr", "sys.stdout"):
                wrong.append(f"{file.relative_to(root)}: {ast.unparse(node)}")
    return wrong


def users_of_numpy(root: Path) -> list[str]:
    """Return modules of the package that need numpy, which torch does not bring."""
    return [
        str(file.relative_to(root))
        for file, name in python_files(root)
        if name[1] not in ("bench", "triton_kernels")
        and name[-1] != "nvrtc"  # CuPy brings it
        and re.search(r"\.numpy\(\)|from_numpy|^import numpy", file.read_text(), re.MULTILINE)
    ]


def left_to_the_program(root: Path) -> list[str]:
    """Return expressions that depend on what a program sets for all of torch.

    A tensor that names no dtype or device has those of `torch.set_default_dtype` and
    `torch.set_default_device`: C++ would then write float32 to memory of another size or device.
    And autocast computes a product in 16 bits that has no ``out``.
    """
    wrong = []
    for file, name in python_files(root):
        if name[1] == "bench":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            missing: set[str | None] = set()
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                missing = {"torch.matmul with out"}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called, given = node.func.attr, {keyword.arg for keyword in node.keywords}
                if called in PRODUCTS:
                    missing = {"out"} - given
                elif called in FACTORIES and getattr(node.func.value, "id", "") == "torch":
                    # Sparse ones are like their parts; options may be in a dict.
                    known = "sparse" in called or None in given
                    missing = set() if known else {"dtype", "device"} - given
            wrong += [f"{file.relative_to(root)}: {ast.unparse(node)}: use {m}" for m in missing]
    return wrong


def unfinished(root: Path) -> list[str]:
    """Return sources with marks of unfinished work."""
    word = re.compile(r"\b" + "TO" + r"DO\b|\bFIX" + r"ME\b")
    folders = ("csrc", "pycomm", "bench", "triton_kernels", "tests", "docs", "examples", "release")
    sources = [f for folder in folders for f in files(root, folder, *SOURCES)]
    return [str(f.relative_to(root)) for f in sources if word.search(f.read_text())]


# For each rule, trees that break it once.
VIOLATIONS = {
    includes_that_point_up: (
        {"csrc/core/types.h": '#include "codecs/base/codec.h"\n'},
        {"csrc/codecs/cast.cu": '#include "transports/store.h"\n'},
    ),
    folders_in_circles: (
        {
            "csrc/collectives/ring/ring.h": '#include "collectives/tree/tree.h"\n',
            "csrc/collectives/tree/tree.h": '#include "collectives/mesh/mesh.h"\n',
            "csrc/collectives/mesh/mesh.h": '#include "collectives/ring/ring.h"\n',
        },
    ),
    crowded_folders: (
        {f"csrc/transports/tcp/part{i}.h": "" for i in range(MAX_SOURCES + 1)},
        {f"bench/part{i}.py": "" for i in range(MAX_SOURCES + 1)},
        {
            **{f"tests/torch/test_{i}.py": "" for i in range(MAX_SOURCES)},
            "tests/torch/ranks.cpp": "",
            "tests/torch/backend/test_x.py": "",
        },
    ),
    types_with_one_name: (
        {
            "csrc/transports/shm/link.h": "class Link final : public Base {\n};\n",
            "csrc/collectives/link.h": "struct Link {\n};\n",
        },
    ),
    modules_in_circles: (
        {
            "pycomm/reduction/state.py": "def f():\n    from pycomm.hooks import ddp\n",
            "pycomm/hooks/ddp.py": "from pycomm.reduction.state import f\n",
        },
        {
            "bench/a.py": "if TYPE_CHECKING:\n    from pycomm.bench.b import B\n",
            "bench/b.py": "from pycomm.bench.c import C\n",
            "bench/c.py": "from .a import A\n",
        },
        {
            "pycomm/codecs/base.py": 'x = import_module("pycomm.codecs.quant")\n',
            "pycomm/codecs/quant.py": "from pycomm.codecs import base\n",
        },
    ),
    names_that_submodules_take: (
        {"pycomm/codecs/__init__.py": "from typing import cast\n", "pycomm/codecs/cast.py": ""},
    ),
    torch_users: (
        {"csrc/binding/core/module.cpp": "#include <torch/torch.h>\n"},
        {"csrc/binding/core/core.cpp": '#include "binding/torch/work.h"\n'},
        {"csrc/core/env.h": '#  include "c10/util/Half.h"\n'},
    ),
    imports_that_point_up: (
        {"pycomm/codecs/quant.py": "from pycomm.hooks import ddp\n"},
        {"pycomm/feedback.py": "def f():\n    from .hooks.ddp import x\n"},
        {"pycomm/env.py": "import pycomm.policy as p\n"},
        {"pycomm/env.py": 'importlib.import_module("pycomm.hooks.ddp")\n'},
        {"pycomm/communicator.py": "from pycomm import compression\n"},
        {"triton_kernels/quant.py": "from pycomm.codecs import quant\n"},
        {"pycomm/helpers.py": "x = 1\n"},  # a module of no layer
    ),
    readers_of_the_environment: (
        {"csrc/transports/tcp/tcp.cpp": 'auto* x = std::getenv("X");\n'},
        {"pycomm/hooks/ddp.py": 'import os\nx = os.environ["X"]\n'},
    ),
    printers: (
        {"csrc/binding/torch/work.h": 'TORCH_WARN("x");\n'},
        {"pycomm/policy/plan.py": "import sys\nx = sys.stderr\n"},
    ),
    unfinished: ({"docs/page.md": "x = 1  # TO" + "DO\n"},),
    users_of_numpy: ({"pycomm/policy/plan.py": "x = tensor.numpy()\n"},),
    left_to_the_program: (
        {"pycomm/env.py": "torch.empty(3, dtype=torch.uint8)\ntorch.zeros_like(x)\n"},
        {"pycomm/env.py": "x = [torch.arange(n, device=d)]\nx.new_empty(3)\n"},
        {"pycomm/env.py": "x = a.t() @ b\ntorch.tensor(1.0, dtype=torch.float32, device=d)\n"},
        {"triton_kernels/x.py": "torch.mm(a, b)\ntorch.mm(a, b, out=c)\nc.addmm_(a, b)\n"},
    ),
}


@pytest.mark.parametrize("rule", VIOLATIONS)
def test_this_tree_keeps_the_rule(rule):
    assert rule(ROOT) == []


@pytest.mark.parametrize(
    ("rule", "tree"), [(rule, tree) for rule, trees in VIOLATIONS.items() for tree in trees]
)
def test_a_rule_finds_its_violation(rule, tree, tmp_path):
    assert rule(tmp_path) == []
    for path, text in tree.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert len(rule(tmp_path)) == 1
