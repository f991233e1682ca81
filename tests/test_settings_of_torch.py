"""The sources leave nothing to what a program sets for all of torch.

A tensor that names no dtype or device has those of `torch.set_default_dtype` and
`torch.set_default_device`: C++ would then write float32 to memory of another size or device. And
autocast computes a product in 16 bits that has no ``out``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[1]
FACTORIES = {function.__name__ for function in _device_constructors()}
PRODUCTS = {"matmul", "mm", "bmm", "addmm", "addmv", "mv", "addbmm", "baddbmm", "einsum", "linear"}
SOURCES = [p for folder in ("pycomm", "triton_kernels") for p in (ROOT / folder).rglob("*.py")]


def unnamed(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each expression that leaves something to the program, and what."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield node.lineno, "a @ b: use pycomm.codecs.products.product"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of = node.func.value
        if node.func.attr in PRODUCTS and "out" not in {word.arg for word in node.keywords}:
            yield node.lineno, f"{node.func.attr} without out="
        if isinstance(of, ast.Name) and of.id == "torch" and node.func.attr in FACTORIES:
            given = {keyword.arg for keyword in node.keywords}
            if "sparse" in node.func.attr or None in given:  # like their parts; options in a dict
                continue
            for name in ("dtype", "device"):
                if name not in given:
                    yield node.lineno, f"torch.{node.func.attr} without {name}="


def test_nothing_is_left_to_the_program():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in SOURCES
        for line, what in unnamed(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("torch.zeros(3)", 2),
        ("torch.empty(3, dtype=torch.uint8)", 1),
        ("x = [torch.arange(n, device=d)]", 1),
        ("torch.tensor(1.0, dtype=torch.float32, device=d)", 0),
        ("torch.zeros_like(x); x.new_empty(3)", 0),
        ("x = a.t() @ b", 1),
        ("torch.mm(a, b); a.mv(b)", 2),
        ("torch.mm(a, b, out=c); c.addmm_(a, b)", 0),
    ],
)
def test_the_check_can_fail(source, missing):
    assert len(list(unnamed(source))) == missing
