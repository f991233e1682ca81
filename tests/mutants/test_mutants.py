"""The mutants fit the sources: each can be made, and names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant, Stale, functions

ROOT = Path(__file__).parents[2]


def test_every_mutant_finds_its_function_and_its_tests():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text()
        assert mutant.applied(source) != source
        for argument in mutant.arguments:
            file, _, test = argument.partition("::")
            text, name = (ROOT / file).read_text(), test.partition("[")[0]
            assert not name or f"def {name}(" in text, mutant.name


CPP = """
#define BRACE {
namespace a::b {
struct Options { int size = 3; };
constexpr int kSizes[] = {1, 2};
// int hidden() {}
class Ring : public Base {
 public:
  explicit Ring(int n) : size_{n}, left_(n - 1) { push("}"); }
  bool empty() const noexcept { return size_ == 0; }
  bool operator==(const Ring& other) const { return [&] { return true; }(); }
};
template <typename T>
auto Ring::push(T value, Options options = {}) -> int {
  if (value < 3) { return 1; }
  return 2;
}
}  // namespace a::b
extern "C" int main() { return 0; }
"""

PYTHON = """
class Bucket:
    @property
    def size(self):
        def inner():
            return 1
        return inner()

def free(): return 2
"""


def texts(file: str, source: str) -> dict[str, str]:
    return {name: source[begin:end].strip() for name, (begin, end) in functions(file, source)}


def test_functions_of_cpp_are_found_by_their_braces():
    found = texts("ring.cpp", CPP)
    assert [*found] == ["Ring::Ring", "Ring::empty", "Ring::operator==", "Ring::push", "main"]
    assert found["Ring::Ring"].endswith('{ push("}"); }')
    assert found["Ring::push"].startswith("template")
    assert found["Ring::push"].endswith("return 2;\n}")


def test_functions_of_python_are_found_by_its_grammar():
    found = texts("bucket.py", PYTHON)
    assert [*found] == ["Bucket.size", "Bucket.size.inner", "free"]
    assert found["Bucket.size.inner"] == "def inner():\n            return 1"


def made(function: str, old: str) -> Mutant:
    return Mutant("name", f"ring.cpp::{function}", old, "", "mutants/test_mutants.py")


def test_what_is_not_in_the_function_just_once_is_stale():
    assert made("main", "return 0;").applied(CPP) == CPP.replace("return 0;", "")
    with pytest.raises(Stale, match="no function pop"):
        made("pop", "return 1;").applied(CPP)
    for old, times in (("return 0;", 0), ("return", 2)):
        with pytest.raises(Stale, match=f"has {times} times: return"):
            made("Ring::push", old).applied(CPP)
