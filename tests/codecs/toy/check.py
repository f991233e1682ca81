"""Checks of the toy codec, in a tree that has it: ``python -m tests.codecs.toy.check``."""

from __future__ import annotations

import torch

import pycomm
from pycomm import _C
from pycomm.codecs import CODECS
from pycomm.codecs.cuda.sources import has_kernels, source_file
from tests.codecs.cases import CASES, SPECS
from tests.codecs.cuda import emulated
from tests.codecs.test_contract import check
from tests.codecs.test_golden import golden
from tests.golden.__main__ import make

assert "toy" in CODECS
assert "toy" in _C.codec_names()
assert "toy" in SPECS  # the tests of all codecs find it
assert has_kernels("toy")

# Its kernels alone, since those of all codecs take longer to compile.
compiled = emulated.compiled([source_file("toy")])
emulated.all_kernels = lambda: compiled
assert sorted(emulated.kernels(["toy"])) == emulated.listed(compiled)

for case in ("normal-1", "normal-257", "any-bits", "nan-at-300"):
    for kind in ("native", "emulated-cuda", "triton"):
        check("toy", kind, "cpu", *CASES[case])

made = make("toy")
assert made.keys() == golden("toy").keys()
assert all(made[key].tobytes() == golden("toy")[key].tobytes() for key in made)
x = torch.tensor([1.0, -2.0, 3.0000002])
assert pycomm.codec("toy").decode(pycomm.codec("toy").encode(x), 3).tolist() == [1.0, -2.0, 3.0]
print("toy is a codec")
