"""What a kernel's SASS computes from the arguments of a call: the branches that they decide.

Bits of registers and predicates are followed from the arguments and from the place of the first
warp of the second block, since the first block also writes headers and clears what is unused. What
comes from memory, from other lanes or by an instruction that is not among those below is unknown. A
branch that is not decided stays with both of its ways.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

Instruction = tuple[int, str, str, str]  # address, guard, operation, operands
FULL = 0xFFFFFFFF
# Where the arguments begin in the constant bank.
ARGUMENTS = {90: 0x210, 100: 0x380}


class Bits(NamedTuple):
    """A word whose bits are known but for those of ``open``, which are 0 in ``value``."""

    value: int
    open: int = 0

    @property
    def most(self) -> int:
        return self.value | self.open


UNKNOWN = Bits(0, FULL)
State = dict[str, Bits]  # registers and predicates; those that are missing are unknown


def plus(a: Bits, b: Bits, carry: Bits, width: int = 32) -> Bits:
    """Return a sum of ``width`` bits, and the bit that it carries."""
    low, high = a.value + b.value + carry.value, a.most + b.most + carry.most
    # A carry into a bit grows with the summands: it is known if it is the same for both ends.
    unsure = (low ^ a.value ^ b.value) ^ (high ^ a.most ^ b.most)
    # Above the words it is the carry alone that differs.
    open_ = (a.open | b.open | unsure) & ((2 << width) - 1)
    return Bits(low & ~open_ & ((2 << width) - 1), open_)


def part(x: Bits, at: int, width: int = 32) -> Bits:
    mask = (1 << width) - 1
    return Bits(x.value >> at & mask, x.open >> at & mask)


def joined(low: Bits, high: Bits) -> Bits:
    return Bits(low.value | high.value << 32, low.open | high.open << 32)


def shifted(x: Bits, by: int, width: int = 32) -> Bits:
    mask = (1 << width) - 1
    if by < 0:
        return Bits(x.value >> -by, x.open >> -by)
    return Bits(x.value << by & mask, x.open << by & mask)


def times(a: Bits, b: Bits, width: int) -> Bits:
    if a.open and not b.open:
        a, b = b, a
    if a.open:
        return Bits(0, (1 << width) - 1)
    if not b.open:
        return Bits(a.value * b.value & ((1 << width) - 1))
    if a.value == 0:
        return Bits(0)
    if a.value & (a.value - 1) == 0:
        return shifted(b, a.value.bit_length() - 1, width)
    return Bits(0, (1 << width) - 1)


def compared(how: str, a: Bits, b: Bits) -> Bits:
    """Return a bit: the result of a comparison of unsigned numbers."""
    if how in ("GT", "LE"):
        how, a, b = {"GT": "LT", "LE": "GE"}[how], b, a
    if how in ("LT", "GE"):
        less = 1 if a.most < b.value else 0 if a.value >= b.most else None
        return UNSURE if less is None else Bits(less ^ (how == "GE"))
    same = a.value if a == b and not a.open else None
    differs = ((a.value ^ b.value) & ~(a.open | b.open)) != 0
    if same is None and not differs:
        return UNSURE
    return Bits(int(differs == (how == "NE")))


UNSURE = Bits(0, 1)


def logic(table: int, *words: Bits, width: int = 32) -> Bits:
    """Return a function of the bits of three words: bit 4 a + 2 b + c of the table."""
    ones = zeros = 0  # where an input that is possible gives the one, and the other
    mask = (1 << width) - 1
    for place in range(8):
        possible = mask
        for n, word in enumerate(words):
            wanted = place >> (2 - n) & 1
            possible &= word.most if wanted else ~word.value
        if table >> place & 1:
            ones |= possible
        else:
            zeros |= possible
    return Bits(ones & ~zeros, ones & zeros)


def meet(a: Bits, b: Bits) -> Bits:
    open_ = a.open | b.open | (a.value ^ b.value)
    return Bits(a.value & ~open_, open_)


def is_predicate(name: str) -> bool:
    return re.fullmatch(r"!?U?P(\d|T)", name) is not None


class Thread:
    """A thread of a block's first warp: what is known when it runs instructions."""

    def __init__(self, arguments: bytes, base: int) -> None:
        self.arguments = arguments
        self.base = base

    # ------------------------------------------------------------------ operands

    def constant(self, at: int, words: int) -> list[Bits]:
        found = []
        for place in range(at - self.base, at - self.base + 4 * words, 4):
            inside = 0 <= place <= len(self.arguments) - 4
            word = int.from_bytes(self.arguments[place : place + 4], "little")
            found.append(Bits(word) if inside else UNKNOWN)
        return found

    def word(self, state: State, operand: str, words: int = 1) -> Bits:
        """Return the word of an operand, or the joined words of two registers."""
        text = operand.strip().split(".reuse")[0]
        sign, text = (text[0], text[1:]) if text[:1] in "-~" else ("", text)
        found: list[Bits] = [UNKNOWN] * words
        if text in ("RZ", "URZ", "SRZ"):
            found = [Bits(0)] * words
        elif re.fullmatch(r"U?R\d+(\.64)?", text):
            name, number = re.match(r"(U?R)(\d+)", text).groups()
            found = [state.get(f"{name}{int(number) + k}", UNKNOWN) for k in range(words)]
        elif re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
            found = [Bits(int(text, 0) & FULL)] + [Bits(0)] * (words - 1)
        elif place := re.fullmatch(r"c\[0x0\]\[(?:(U?R[\dZ]+)\+?)?(0x[0-9a-f]+)?\]", text):
            base = self.word(state, place[1]) if place[1] else Bits(0)
            if not base.open:
                found = self.constant(base.value + int(place[2] or "0", 16), words)
        value = found[0] if words == 1 else joined(*found)
        full = (1 << 32 * words) - 1
        if sign == "~":
            return Bits(~value.most & full, value.open)
        if sign == "-":
            inverse = Bits(~value.most & full, value.open)
            return part(plus(inverse, Bits(0), Bits(1), 32 * words), 0, 32 * words)
        return value

    def bit(self, state: State, operand: str) -> Bits:
        text = operand.strip()
        inverse, name = text.startswith("!"), text.lstrip("!@")
        value = Bits(1) if name in ("PT", "UPT") else state.get(name, UNSURE)
        return Bits(1 - value.value) if inverse and not value.open else value

    # -------------------------------------------------------------- instructions

    def run(self, state: State, guard: str, op: str, rest: str) -> None:
        """Change the state by an instruction."""
        executed = self.bit(state, guard.strip().removeprefix("@")) if guard else Bits(1)
        if not executed.open and not executed.value:
            return
        operands = [each.strip() for each in re.split(r",(?![^\[]*\])", rest.strip()) if each]
        for name, value in self.results(state, op, operands):
            if name in ("RZ", "URZ", "PT", "UPT"):
                continue
            unknown = UNSURE if "P" in name else UNKNOWN
            state[name] = meet(state.get(name, unknown), value) if executed.open else value

    def results(self, state: State, op: str, operands: list[str]) -> list[tuple[str, Bits]]:
        """Return what an instruction writes."""
        word, *modifiers = op.split(".")
        leading = next((n for n, each in enumerate(operands) if not is_predicate(each)), 0)
        compute = getattr(self, "_" + word.lower().removeprefix("u"), None)
        if compute is not None:
            return compute(state, modifiers, operands)
        if word in ("BRA", "BSSY", "BSYNC", "EXIT", "CALL", "RET"):
            return []
        written = [(each, UNSURE) for each in operands[: min(leading, 2)]]
        target = operands[leading] if operands else ""
        if place := re.fullmatch(r"(U?R)(\d+)", target):
            sizes = {"128": 4, "64": 2, "WIDE": 2, "F64": 2, "S64": 2, "U64": 2}
            count = max([sizes.get(m, 1) for m in modifiers] + [2 if word == "CS2R" else 1])
            count = 2 if word[:1] == "D" else count
            written += [(f"{place[1]}{int(place[2]) + k}", UNKNOWN) for k in range(count)]
            written += [
                (each, UNSURE) for each in operands[leading + 1 : leading + 3] if is_predicate(each)
            ]
        if word == "R2P":
            written += [(f"P{n}", UNSURE) for n in range(7)]
        return [(name.lstrip("!"), value) for name, value in written]

    def _mov(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        if modifiers == ["64"]:
            return self._pair(operands[0], self.word(state, operands[1], 2))
        return [(operands[0], self.word(state, operands[1]))]

    def _pair(self, target: str, value: Bits) -> list:
        if target in ("RZ", "URZ"):
            return []
        name, number = re.match(r"(U?R)(\d+)", target).groups()
        return [(f"{name}{int(number) + k}", part(value, 32 * k)) for k in range(2)]

    def _hfma2(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        """Two numbers of 16 bits: known if 0 times 0 is added to constants, the upper one first."""
        target, *factors, upper, lower = operands
        numbers = [re.fullmatch(r"-?\d+(\.\d+)?(e[-+]?\d+)?", each) for each in (upper, lower)]
        if factors != ["-RZ", "RZ"] or None in numbers or "BF16_V2" in modifiers:
            return [(target, UNKNOWN)]
        word = struct.pack("<2e", float(lower), float(upper))
        return [(target, Bits(int.from_bytes(word, "little")))]

    def _ldc(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        if modifiers == ["64"]:
            return self._pair(operands[0], self.word(state, operands[1], 2))
        return [(operands[0], UNKNOWN if modifiers else self.word(state, operands[1]))]

    _ldcu = _ldc

    def _s2r(self, _: State, modifiers: list[str], operands: list[str]) -> list:
        known = {"SR_CTAID.X": Bits(1), "SR_TID.X": Bits(0, 31)}
        return [(operands[0], known.get(operands[1], UNKNOWN))]

    _s2ur = _s2r

    def _cs2r(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        value = Bits(0) if operands[1] == "SRZ" else joined(UNKNOWN, UNKNOWN)
        return self._pair(operands[0], value)

    def _r2ur(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        at = 1 if is_predicate(operands[0]) else 0
        return [(operands[at], self.word(state, operands[at + 1]))]

    def _imad(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        target, *sources = operands
        out = [
            (each, UNSURE) for each in sources if sources.index(each) == 0 and is_predicate(each)
        ]
        sources = sources[len(out) :]
        a, b = (self.word(state, each) for each in sources[:2])
        if "HI" in modifiers:
            return [*out, (target, UNKNOWN)]
        if "WIDE" in modifiers:
            signed = "U32" not in modifiers
            if signed and ((a.most | b.most) >> 31):
                return [*out, *self._pair(target, joined(UNKNOWN, UNKNOWN))]
            c = self.word(state, sources[2], 2)
            return [*out, *self._pair(target, part(plus(times(a, b, 64), c, Bits(0), 64), 0, 64))]
        c = self.word(state, sources[2])
        carry = self.bit(state, sources[3]) if "X" in modifiers else Bits(0)
        return [*out, (target, part(plus(times(a, b, 32), c, carry), 0))]

    def _add(self, state: State, extended: bool, operands: list[str]) -> list:
        target, *sources = operands
        carries = []
        while sources and is_predicate(sources[0]):
            carries.append(sources.pop(0))
        added = [self.bit(state, each) for each in sources[3:]] if extended else []
        added += [Bits(0)] * (2 - len(added))
        a, b, c = (self.word(state, each) for each in sources[:3])
        first = plus(a, b, added[0])
        second = plus(part(first, 0), c, added[1])
        carry = UNSURE
        one, other = part(first, 32, 1), part(second, 32, 1)
        there = [each for each in sources[:3] if each not in ("RZ", "URZ")]
        minus = [each for each in there if each.startswith("-")]
        if not minus:
            carry = logic(0xFC, one, other, Bits(0), width=1)
        elif len(there) <= 2 and len(minus) == 1:  # a difference carries if it is not negative
            left = next((each for each in there if each not in minus), "RZ")
            carry = compared("GE", self.word(state, left), self.word(state, minus[0][1:]))
        named = [each for each in carries if each not in ("PT", "UPT")]
        carry = carry if len(named) == 1 else UNSURE
        return [(target, part(second, 0)), *((each, carry) for each in named)]

    def _iadd3(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        if "64" in modifiers:
            return self._pair(operands[0], joined(UNKNOWN, UNKNOWN))
        return self._add(state, "X" in modifiers, operands)

    def _viadd(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        return self._add(state, False, [*operands, "RZ"])

    def _iadd(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        a, b = (self.word(state, each, 2) for each in operands[1:3])
        return self._pair(operands[0], part(plus(a, b, Bits(0), 64), 0, 64))

    def _isetp(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        target, second, left, right, *conditions = operands
        size = 2 if {"U64", "S64"} & set(modifiers) else 1
        a, b = (self.word(state, each, size) for each in (left, right))
        how = modifiers[0]
        unsigned = "U32" in modifiers or "U64" in modifiers or how in ("EQ", "NE")
        if unsigned or not (a.most | b.most) >> (32 * size - 1):
            result = compared(how, a, b)
            if "EX" in modifiers:
                result = self._extended(how, a, b, self.bit(state, conditions[1]))
        else:
            result = UNSURE
        also = self.bit(state, conditions[0])
        if "AND" in modifiers:
            result = logic(0x80 | 0x40, result, also, Bits(0), width=1)
        elif "OR" in modifiers:
            result = logic(0xFC, result, also, Bits(0), width=1)
        else:
            result = UNSURE
        return [(target, result), (second, UNSURE)]

    @staticmethod
    def _extended(how: str, a: Bits, b: Bits, lower: Bits) -> Bits:
        """Return the result for the upper words, if that for the lower ones is ``lower``."""
        same = compared("EQ", a, b)
        if not same.open and same.value:
            return lower
        strict = compared({"GE": "GT", "LE": "LT"}.get(how, how), a, b)
        if how in ("EQ", "NE") or not same.open:
            return strict if not same.open else UNSURE
        return UNSURE

    def _lop3(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        written = []
        if is_predicate(operands[0]):
            predicate, *operands = operands
            written.append(predicate)
        target, a, b, c, table, also = operands
        result = logic(int(table, 16), *(self.word(state, each) for each in (a, b, c)))
        ways = [(target, result)]
        if written:
            some = Bits(1) if result.value else UNSURE if result.open else Bits(0)
            extra = self.bit(state, also)
            if also == "!PT" or (not extra.open and not extra.value):
                ways.append((written[0], some))
            else:
                ways.append((written[0], UNSURE))
        return ways

    def _plop3(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        targets, sources, tables = operands[:2], operands[2:5], operands[5:7]
        bits = [self.bit(state, each) for each in sources]
        return [
            (target, logic(int(table, 16), *bits, width=1))
            for target, table in zip(targets, tables, strict=True)
        ]

    def _sel(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        target, a, b, condition = operands
        bit = self.bit(state, condition)
        one, other = self.word(state, a), self.word(state, b)
        return [(target, meet(one, other) if bit.open else one if bit.value else other)]

    def _shf(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        target, low, by, high = operands
        shift = self.word(state, by)
        if shift.open or "S32" in modifiers or "S64" in modifiers:
            return [(target, UNKNOWN)]
        count = shift.value & 63 if "W" not in modifiers else shift.value & 31
        pair = joined(self.word(state, low), self.word(state, high))
        if "L" in modifiers:
            found = part(shifted(pair, count, 64), 32 if "HI" in modifiers else 0)
        elif "HI" in modifiers and "U32" in modifiers:
            # The upper word, shifted: what leaves it is not seen.
            found = part(shifted(joined(Bits(0), self.word(state, high)), -count, 64), 32)
        else:
            found = part(shifted(pair, -count, 64), 0)
        return [(target, found)]

    def _prmt(self, state: State, modifiers: list[str], operands: list[str]) -> list:
        target, low, pick, high = operands
        select = self.word(state, pick)
        if modifiers or select.open or select.value & 0x8888:
            return [(target, UNKNOWN)]
        pair, found = joined(self.word(state, low), self.word(state, high)), Bits(0)
        for byte in range(4):
            one = shifted(part(pair, 8 * (select.value >> 4 * byte & 7), 8), 8 * byte)
            found = Bits(found.value | one.value, found.open | one.open)
        return [(target, found)]


def decided(
    lines: list[Instruction], follows: list[list[int]], arguments: bytes, arch: int
) -> list[list[int]]:
    """Return the instructions that can follow each one in a call with these arguments.

    Args:
        lines: the kernel.
        follows: what can follow each, whatever the call: the target of a jump first.
        arguments: of the launch.
        arch: 90 or 100.
    """
    thread = Thread(arguments, ARGUMENTS[arch])
    states: list[State | None] = [None] * len(lines)
    states[0] = {}
    ways: list[set[int]] = [set() for _ in lines]
    waiting = [0]
    while waiting:
        i = waiting.pop()
        while True:
            state = dict(states[i] or {})
            _, guard, op, rest = lines[i]
            thread.run(state, guard, op, rest)
            possible = list(_possible(thread, state, lines[i], follows[i]))
            ways[i] |= set(possible)
            changed = [each for each in possible if _merge(states, each, state)]
            if not changed:
                break
            i, *others = changed
            waiting += others
    return [[each for each in follows[i] if each in ways[i]] for i in range(len(lines))]


def _possible(thread: Thread, state: State, line: Instruction, follows: list[int]) -> Iterator[int]:
    _, guard, op, rest = line
    if not op.startswith("BRA") or len(follows) < 2:
        yield from follows
        return
    taken = thread.bit(state, guard.strip().removeprefix("@")) if guard else Bits(1)
    if condition := re.match(r"\s*(!?U?P(?:\d|T))\s*,", rest):
        taken = logic(0xC0, taken, thread.bit(state, condition[1]), Bits(0), width=1)
    if taken.open or taken.value:
        yield follows[0]
    if taken.open or not taken.value:
        yield follows[1]


def _merge(states: list[State | None], i: int, new: State) -> bool:
    """Add what is known before an instruction; return whether that is less than before."""
    old = states[i]
    if old is None:
        states[i] = dict(new)
        return True
    changed = False
    for name, value in list(old.items()):
        both = meet(value, new.get(name, UNSURE if "P" in name else UNKNOWN))
        if both != value:
            changed = True
            if both in (UNKNOWN, UNSURE):
                del old[name]
            else:
                old[name] = both
    return changed
