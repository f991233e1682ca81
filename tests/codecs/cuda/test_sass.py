"""Kernels take no more instructions than budgets.csv says; and which leave time for their share."""

from __future__ import annotations

import csv
import shutil

import pytest

from tests.codecs.cuda.ptx import ARCHS, cuobjdump
from tests.codecs.cuda.sass import CALLS, Kernel, budgets, calls, counted, summary

pytestmark = pytest.mark.timeout(600)

# Calls whose instructions leave no time for the share that is wanted, and why.
ENCODES_BF16 = "residuals are rounded to bf16 by integers; counted with the branches of an average"
OWN = "each value is divided, and each form of a residual has a branch that is counted"
RANDOM = "Philox takes 16 instructions for each random word, and each value has its own"
OVER = {
    "fp8_e4m3 encode, feedback": ENCODES_BF16,
    "fp8_e4m3 own, one payload": OWN,
    "int8 own, one payload": OWN,
    "int8, random encode": RANDOM,
    "int4 encode, feedback": ENCODES_BF16,
    "int4 own, one payload": OWN,
    "int4, random encode": RANDOM,
    "int4, random encode, feedback": RANDOM,
    "int6 encode": "codes cross the borders of words",
    "int6 encode, feedback": ENCODES_BF16,
    "sign own, one payload": OWN,
    "mxfp4 encode, feedback": ENCODES_BF16,
    "mxfp4 own, one payload": OWN,
    "nvfp4 encode, feedback": ENCODES_BF16,
    "nvfp4 own, one payload": OWN,
    "eden, 2 bits of 1024, encode": "eight steps cross lanes: one hundredth too many",
    "eden, 2 bits of 1024, encode, feedback": ENCODES_BF16,
    "eden, 2 bits of 128, encode, feedback": ENCODES_BF16,
    "eden, 4 bits of 1024, encode": "the search of a level takes 14 instructions",
    "eden, 4 bits of 128, encode": "the search of a level takes 14 instructions",
    "lossless encode": "codes are packed by a kernel of their own",
    "topk, encode": "the values are read twice, and counted by shared atomics",
}
# Those of one architecture alone.
OVER_ON = {
    90: {"nvfp4 encode": "two scales, of which one is rounded to a small float"},
    100: {"sign encode, feedback": ENCODES_BF16},
}

# A loop, a branch around a load of 16 bytes, a shuffle and a call.
SASS = """
        /*0000*/              @!P0 BRA 0x30 ;      /* 0x0 */
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   SHFL.BFLY PT, R0, R0, 0x1, 0x1f ;
        /*0030*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0040*/               @P1 BRA 0x30 ;
        /*0050*/               @P2 BRA 0x90 ;
        /*0060*/                   STG.E.EF.64 desc[UR4][R2.64], R4 ;
        /*0070*/                   EXIT ;
        /*0080*/                   NOP ;
        /*0090*/                   MOV R1, R1 ;
        /*00a0*/                   CALL.REL.NOINC 0xc0 ;
        /*00b0*/                   BRA 0x60 ;
        /*00c0*/                   RET.REL.NODEC R2 0x0 ;
"""


@pytest.mark.parametrize(
    ("accesses", "path"),
    [
        ({"load16": 1, "store8": 1}, (8, 1)),
        ({"store8": 1}, (6, 0)),
        ({"load16": 1}, None),
        ({"load16": 1, "store8": 1, "load4": 1}, None),
        ({"load16": 1, "store8": 1, "store4": 0}, (8, 1)),
    ],
)
def test_the_longest_path_has_the_wanted_accesses(accesses, path):
    assert Kernel(SASS).longest(accesses) == path


@pytest.mark.parametrize("arch", sorted({row.arch for row in budgets()} & set(ARCHS)))
def test_kernels_stay_within_their_counts(arch):
    nvcc = shutil.which("nvcc")
    if nvcc is None or cuobjdump() is None:
        pytest.skip("there is no nvcc, or no cuobjdump, to count a kernel's instructions")
    rows = [row for row in budgets() if row.arch == arch]
    over = [
        f"{row.kernel} ({row.accesses}): {counts}, at most {row.most}"
        for row, counts in counted(nvcc, rows)
        if any(n > most for n, most in zip(counts, row.most, strict=True))
    ]
    assert over == []


def test_calls_csv_has_the_sums_of_the_counts():
    with CALLS.open() as file:
        assert list(csv.reader(file)) == summary(budgets())


@pytest.mark.parametrize("arch", sorted({row.arch for row in budgets()}))
def test_calls_leave_time_for_their_share_of_a_copy(arch):
    rows = budgets()
    over = {call.call for call in calls() if call.counted(rows, arch) > call.allowed}
    assert over == {*OVER, *OVER_ON[arch]}
