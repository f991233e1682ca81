"""Mutants of the kernels in Triton, and of the CUDA kernels, which g++ compiles for the tests."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BYTES = "tests/codecs/test_contract.py::test_same_bytes"
GOLDEN = "tests/codecs/test_golden.py::test_bytes_are_those_of_the_golden_file"

MUTANTS = (
    Mutant(
        "triton-topk-writes-beyond-its-room",
        "exception",
        "triton_kernels/topk_select.py",
        "fits = chosen & (to < room)",
        "fits = chosen",
        "tests/codecs/test_topk.py::test_triton_writes_no_more_than_it_has_counted",
    ),
    Mutant(
        "triton-topk-believes-a-slot-that-was-not-written",
        "exception",
        "triton_kernels/topk_pack.py",
        "index = tl.where((index.to(tl.int64) & 0xFFFFFFFF) < n, index, 0)",
        "",
        "tests/codecs/test_topk.py::test_triton_writes_no_more_than_it_has_counted",
    ),
    Mutant(
        "triton-residual-not-added",
        "residual",
        "triton_kernels/_math.py",
        "        p = p + residual\n",
        "",
        GOLDEN,
    ),
    Mutant(
        "triton-owed-has-the-wrong-sign",
        "sign",
        "triton_kernels/_math.py",
        "p - decoded, residual",
        "decoded - p, residual",
        GOLDEN,
    ),
    Mutant(
        "triton-decode-does-not-add",
        "state",
        "triton_kernels/_math.py",
        "value = tl.load(out_ptr + offsets, mask=mask, other=0.0) + value",
        "value = value",
        "tests/codecs/test_contract.py::test_any_payload_decodes_the_same[int8-triton-cpu]",
    ),
    Mutant(
        "triton-words-exchanged",
        "random",
        "triton_kernels/_math.py",
        "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
        "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
        GOLDEN,
    ),
    Mutant(
        "triton-halves-up",
        "arithmetic",
        "triton_kernels/_math.py",
        "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16",
        "(bits + 0x8000) >> 16",
        BYTES + "[bf16-triton-cpu]",
    ),
    Mutant(
        "triton-sum-in-another-order",
        "order",
        "triton_kernels/_math.py",
        "halves = tl.reshape(x, (ROWS, 2, COLUMNS >> (bits + 1)))\n"
        "            left, right = tl.split(tl.permute(halves, (0, 2, 1)))",
        "halves = tl.reshape(x, (ROWS, COLUMNS >> (bits + 1), 2))\n"
        "            left, right = tl.split(halves)",
        GOLDEN,
    ),
    Mutant(
        "triton-quant-chance-one-too-high",
        "comparison",
        "triton_kernels/quant.py",
        "(words >> 1).to(tl.int32) < threshold",
        "(words >> 1).to(tl.int32) <= threshold",
        BYTES + "_where_chance_just_decides[int8:rounding=stochastic-triton-cpu]",
    ),
    Mutant(
        "triton-quant-codes-beyond-the-end",
        "constant",
        "triton_kernels/quant.py",
        "mask=pairs < code_bytes",
        "mask=pairs < code_bytes - 1",
        GOLDEN,
    ),
    Mutant(
        "triton-sign-of-zero-negative",
        "comparison",
        "triton_kernels/sign.py",
        "(p < 0.0) & used",
        "(p <= 0.0) & used",
        GOLDEN,
    ),
    Mutant(
        "triton-mx-scale-up-at-the-limit",
        "comparison",
        "triton_kernels/mx.py",
        "(amax & 0x7FFFFF) > (TOP_BITS & 0x7FFFFF)",
        "(amax & 0x7FFFFF) >= (TOP_BITS & 0x7FFFFF)",
        BYTES + "[mxfp8_e5m2:scale=ceil-triton-cpu]",
    ),
    Mutant(
        "triton-lossless-widest-of-equals",
        "comparison",
        "triton_kernels/lossless.py",
        "better = size <= least",
        "better = size < least",
        BYTES + "[lossless-triton-cpu] tests/codecs/test_lossless.py",
    ),
    Mutant(
        "triton-rotation-difference-turned",
        "sign",
        "triton_kernels/_rotation.py",
        "tl.join(a + b, a - b)",
        "tl.join(a + b, b - a)",
        GOLDEN,
    ),
    Mutant(
        "triton-conversion-without-clip",
        "arithmetic",
        "triton_kernels/convert.py",
        "value * tl.load(by_ptr) * tl.load(clip_ptr)",
        "value * tl.load(by_ptr)",
        "tests/codecs/test_convert.py::test_same_bits",
    ),
    Mutant(
        "triton-conversion-overflow-unseen",
        "check",
        "triton_kernels/convert.py",
        "magnitude_bits(from_code(code, TO)) >= INF_BITS",
        "magnitude_bits(from_code(code, TO)) > INF_BITS",
        "tests/codecs/test_convert.py::test_same_bits",
    ),
)
