"""Kernels take no more instructions than budgets.csv says; and which leave time for their share."""

from __future__ import annotations

import csv

import pytest

from tests.codecs.cuda.ptx import ARCHS, cuobjdump
from tests.codecs.cuda.sass import CALLS, Kernel, budgets, calls, counted, summary

pytestmark = pytest.mark.timeout(600)

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


# The flag at 0x8 of the arguments decides one branch, a value in memory another, and the place of a
# thread in its first warp a third.
DECIDED = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x218] ;
        /*0010*/                   ISETP.NE.AND P0, PT, RZ, UR4, PT ;
        /*0020*/               @P0 BRA 0x50 ;
        /*0030*/                   MOV R1, R1 ;
        /*0040*/                   MOV R1, R1 ;
        /*0050*/                   LDG.E R2, desc[UR8][R2.64] ;
        /*0060*/                   ISETP.NE.AND P1, PT, R2, RZ, PT ;
        /*0070*/               @P1 BRA 0x90 ;
        /*0080*/                   MOV R1, R1 ;
        /*0090*/                   S2R R3, SR_TID.X ;
        /*00a0*/                   IMAD.SHL.U32 R3, R3, 0x4, RZ ;
        /*00b0*/                   ISETP.GE.U32.AND P2, PT, R3, 0x80, PT ;
        /*00c0*/              @!P2 BRA 0x110 ;
        /*00d0*/                   MOV R1, R1 ;
        /*00e0*/                   MOV R1, R1 ;
        /*00f0*/                   MOV R1, R1 ;
        /*0100*/                   MOV R1, R1 ;
        /*0110*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("flag", "length"),
    [(None, 18), (0, 14), (1, 12)],
)
def test_the_arguments_of_a_call_decide_branches(flag, length):
    """What a loaded value decides is open: the longer way of the branch at 0x70 is counted."""
    arguments = None if flag is None else bytes(8) + flag.to_bytes(8, "little")
    assert Kernel(DECIDED, arguments).longest({}) == (length, 0)


@pytest.mark.parametrize("arch", sorted({row.arch for row in budgets()} & set(ARCHS)))
def test_kernels_stay_within_their_counts(arch):
    if cuobjdump() is None:
        pytest.skip("there is no cuobjdump to count a kernel's instructions")
    rows = [row for row in budgets() if row.arch == arch]
    over = [
        f"{row.kernel} ({row.accesses}): {counts}, at most {row.most}"
        for row, counts in counted(rows)
        if any(n > most for n, most in zip(counts, row.most, strict=True))
    ]
    assert over == []


def test_calls_csv_has_the_sums_of_the_counts():
    with CALLS.open() as file:
        assert list(csv.reader(file)) == summary(budgets())


@pytest.mark.parametrize("arch", sorted({row.arch for row in budgets()}))
def test_calls_leave_time_for_their_share_of_a_copy(arch):
    rows = budgets()
    assert [call.call for call in calls() if call.counted(rows, arch) > call.allowed] == []
