"""What a kernel's SASS computes from the arguments of a call: the branches that they decide.

Words of registers and bits of predicates are followed from the arguments and from the place of the
first and the last thread of the first warp of the second block, since the first block also writes
headers and clears what is unused. What comes from memory, from other lanes or by an instruction
that is not among those below is unknown. A branch that is not decided, or not for both threads
alike, stays with both of its ways.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from itertools import product

Instruction = tuple[int, str, str, str]  # address, guard, operation, operands
Value = int | None  # a word, two of them, or a predicate's bit; None: unknown
State = dict[str, int]  # the registers and predicates that are known
Written = list[tuple[str, Value]]
FULL = 0xFFFFFFFF
# Where the arguments begin in the constant bank.
ARGUMENTS = {90: 0x210, 100: 0x380}
LANES = (0, 31)
COMPARISONS = {
    **{"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__},
    **{"EQ": int.__eq__, "NE": int.__ne__},
}


def logic(table: int, values: list[Value], width: int = 32) -> Value:
    """Return a function of the bits of three words: bit 4 a + 2 b + c of the table."""
    mask = (1 << width) - 1
    found = set()
    for words in product(*([0, mask] if value is None else [value] for value in values)):
        result = 0
        for place in (place for place in range(8) if table >> place & 1):
            here = mask
            for n, word in enumerate(words):
                here &= word if place >> (2 - n) & 1 else ~word
            result |= here
        found.add(result)
    return found.pop() if len(found) == 1 else None


def times(a: Value, b: Value) -> Value:
    return 0 if 0 in (a, b) else None if a is None or b is None else a * b


def is_predicate(name: str) -> bool:
    return re.fullmatch(r"!?U?P(\d|T)", name) is not None


def pair(target: str, value: Value) -> Written:
    """Write two registers."""
    if target in ("RZ", "URZ"):
        return []
    name, number = re.match(r"(U?R)(\d+)", target).groups()
    words = (None, None) if value is None else (value & FULL, value >> 32 & FULL)
    return [(f"{name}{int(number) + k}", word) for k, word in enumerate(words)]


class Thread:
    """A thread of a block's first warp: what is known when it runs instructions."""

    def __init__(self, arguments: bytes, base: int, lane: int = 0) -> None:
        self.arguments, self.base = arguments, base
        self.places = {"SR_CTAID.X": 1, "SR_TID.X": lane}

    # ------------------------------------------------------------------ operands

    def constant(self, at: int) -> Value:
        place = at - self.base
        inside = 0 <= place <= len(self.arguments) - 4
        return int.from_bytes(self.arguments[place : place + 4], "little") if inside else None

    def word(self, state: State, operand: str, words: int = 1) -> Value:
        """Return the word of an operand, or the joined words of two registers."""
        text = operand.strip().split(".reuse")[0]
        sign, text = (text[0], text[1:]) if text[:1] in "-~" else ("", text)
        found: list[Value] = [None]
        if text in ("RZ", "URZ", "SRZ"):
            found = [0]
        elif register := re.fullmatch(r"(U?R)(\d+)(\.64)?", text):
            found = [state.get(f"{register[1]}{int(register[2]) + k}") for k in range(words)]
        elif re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
            found = [int(text, 0) & FULL]
        elif place := re.fullmatch(r"c\[0x0\]\[(?:(U?R[\dZ]+)\+?)?(0x[0-9a-f]+)?\]", text):
            base = self.word(state, place[1]) if place[1] else 0
            if base is not None:
                begin = base + int(place[2] or "0", 16)
                found = [self.constant(begin + 4 * k) for k in range(words)]
        if None in found:
            return None
        value = sum(each << 32 * k for k, each in enumerate(found))
        return {"~": ~value, "-": -value}.get(sign, value) & ((1 << 32 * words) - 1)

    def bit(self, state: State, operand: str) -> Value:
        inverse, name = operand.strip().startswith("!"), operand.strip().lstrip("!@")
        value = 1 if name in ("PT", "UPT") else state.get(name)
        return value if value is None else value ^ inverse

    # -------------------------------------------------------------- instructions

    def run(self, state: State, guard: str, op: str, rest: str) -> None:
        """Change the state by an instruction."""
        executed = self.bit(state, guard.strip().removeprefix("@")) if guard else 1
        if executed == 0:
            return
        operands = [each.strip() for each in re.split(r",(?![^\[]*\])", rest.strip()) if each]
        for name, value in self.results(state, op, operands):
            if name in ("RZ", "URZ", "PT", "UPT"):
                continue
            if value is None or (executed is None and state.get(name) != value):
                state.pop(name, None)
            else:
                state[name] = value

    def results(self, state: State, op: str, operands: list[str]) -> Written:
        """Return what an instruction writes."""
        word, *modifiers = op.split(".")
        leading = next((n for n, each in enumerate(operands) if not is_predicate(each)), 0)
        compute = getattr(self, "_" + word.lower().removeprefix("u"), None)
        if compute is not None:
            return compute(state, modifiers, operands)
        if word in ("BRA", "BSSY", "BSYNC", "EXIT", "CALL", "RET"):
            return []
        written = operands[: min(leading, 2)]
        target = operands[leading] if operands else ""
        if place := re.fullmatch(r"(U?R)(\d+)", target):
            sizes = {"128": 4, "64": 2, "WIDE": 2, "F64": 2, "S64": 2, "U64": 2}
            count = max(
                [sizes.get(m, 1) for m in modifiers]
                + [2 if word == "CS2R" or word[0] == "D" else 1]
            )
            written += [f"{place[1]}{int(place[2]) + k}" for k in range(count)]
            written += filter(is_predicate, operands[leading + 1 : leading + 3])
        if word == "R2P":
            written += [f"P{n}" for n in range(7)]
        return [(name.lstrip("!"), None) for name in written]

    def _mov(self, state: State, modifiers: list[str], operands: list[str]) -> Written:
        if modifiers == ["64"]:
            return pair(operands[0], self.word(state, operands[1], 2))
        return [(operands[0], self.word(state, operands[1]))]

    def _ldc(self, state: State, modifiers: list[str], operands: list[str]) -> Written:
        known = modifiers in ([], ["64"])
        return self._mov(state, modifiers, operands) if known else [(operands[0], None)]

    _ldcu = _ldc

    def _hfma2(self, _: State, modifiers: list[str], operands: list[str]) -> Written:
        """Two numbers of 16 bits: known if 0 times 0 is added to constants, the upper one first."""
        target, *factors, upper, lower = operands
        numbers = [re.fullmatch(r"-?\d+(\.\d+)?(e[-+]?\d+)?", each) for each in (upper, lower)]
        if factors != ["-RZ", "RZ"] or None in numbers or "BF16_V2" in modifiers:
            return [(target, None)]
        word = struct.pack("<2e", float(lower), float(upper))
        return [(target, int.from_bytes(word, "little"))]

    def _s2r(self, _: State, modifiers: list[str], operands: list[str]) -> Written:
        return [(operands[0], self.places.get(operands[1]))]

    _s2ur = _s2r

    def _imad(self, state: State, modifiers: list[str], operands: list[str]) -> Written:
        target, *sources = operands
        carry: Written = [(sources.pop(0), None)] if is_predicate(sources[0]) else []
        a, b = (self.word(state, each) for each in sources[:2])
        wide = "WIDE" in modifiers
        if wide and "U32" not in modifiers:  # numbers with a sign
            a, b = (each and each - (each >> 31 << 32) for each in (a, b))
        added = [times(a, b), self.word(state, sources[2], 2 if wide else 1)]
        added.append(self.bit(state, sources[3]) if "X" in modifiers else 0)
        total = None if None in added or "HI" in modifiers else sum(added)
        if wide:
            return [*carry, *pair(target, total)]
        return [*carry, (target, total if total is None else total & FULL)]

    def _iadd3(self, state: State, modifiers: list[str], operands: list[str]) -> Written:
        target, *sources = operands
        if "64" in modifiers:
            return pair(target, None)
        carries = []
        while sources and is_predicate(sources[0]):
            carries.append(sources.pop(0))
        words = [self.word(state, each.removeprefix("-")) for each in sources[:3]]
        words += [self.bit(state, each) for each in sources[3:] if "X" in modifiers]
        named = [each for each in carries if each not in ("PT", "UPT")]
        if None in words:
            return [(each, None) for each in (target, *named)]
        minus = [each.startswith("-") for each in sources[:3]]
        total = sum(
            (1 << 32) - word if less else word
            for word, less in zip(words, [*minus, False, False], strict=False)
        )
        # A difference of two carries if it is not negative; of more, nothing is said.
        two = len([each for each in sources[:3] if each not in ("RZ", "URZ")]) <= 2
        clear = not any(minus) or (sum(minus) == 1 and two and "X" not in modifiers)
        carry = int(total >> 32 > 0) if clear and len(named) == 1 else None
        return [(target, total & FULL), *((each, carry) for each in named)]

    def _viadd(self, state: State, modifiers: list[str], operands: list[str]) -> Written:
        return self._iadd3(state, [], [*operands, "RZ"])

    def _isetp(self, state: State, modifiers: list[str], operands: list[str]) -> Written:
        target, second, left, right, *conditions = operands
        size = 2 if {"U64", "S64"} & set(modifiers) else 1
        a, b = (self.word(state, each, size) for each in (left, right))
        how, result = modifiers[0], None
        if a is not None and b is not None:
            if not {"U32", "U64"} & set(modifiers):  # numbers with a sign
                a, b = (each - (each >> 32 * size - 1 << 32 * size) for each in (a, b))
            result = int(COMPARISONS[how](a, b))
            if "EX" in modifiers and a == b:  # of the upper words: the lower ones decide
                result = self.bit(state, conditions[1])
        also = self.bit(state, conditions[0])
        tables = {"AND": 0xC0, "OR": 0xFC}
        table = next((table for word, table in tables.items() if word in modifiers), None)
        result = None if table is None else logic(table, [result, also, 0], width=1)
        return [(target, result), (second, None)]

    def _lop3(self, state: State, modifiers: list[str], operands: list[str]) -> Written:
        predicate = [operands.pop(0)] if is_predicate(operands[0]) else []
        target, *sources, table, also = operands
        result = logic(int(table, 16), [self.word(state, each) for each in sources])
        alone = self.bit(state, also) == 0
        some = int(result != 0) if alone and result is not None else None
        return [(target, result), *((each, some) for each in predicate)]

    def _plop3(self, state: State, modifiers: list[str], operands: list[str]) -> Written:
        bits = [self.bit(state, each) for each in operands[2:5]]
        return [
            (target, logic(int(table, 16), bits, width=1))
            for target, table in zip(operands[:2], operands[5:7], strict=True)
        ]

    def _sel(self, state: State, modifiers: list[str], operands: list[str]) -> Written:
        target, *sources, condition = operands
        one, other = (self.word(state, each) for each in sources)
        bit = self.bit(state, condition)
        return [(target, one if bit or one == other else other if bit == 0 else None)]

    def _shf(self, state: State, modifiers: list[str], operands: list[str]) -> Written:
        target, *sources = operands
        low, by, high = (self.word(state, each) for each in sources)
        upper = "HI" in modifiers
        if None in (low, by, high) or {"S32", "S64"} & set(modifiers):
            return [(target, None)]
        both, count = low | high << 32, by & (31 if "W" in modifiers else 63)
        both = both << count if "L" in modifiers else both >> count
        return [(target, both >> 32 * upper & FULL)]


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
    ways: list[set[int]] = [set() for _ in lines]
    for lane in LANES:
        thread = Thread(arguments, ARGUMENTS[arch], lane)
        states: dict[int, State] = {0: {}}
        waiting = [0]
        while waiting:
            i = waiting.pop()
            state = dict(states[i])
            _, guard, op, rest = lines[i]
            thread.run(state, guard, op, rest)
            for each in _possible(thread, state, lines[i], follows[i]):
                ways[i].add(each)
                old = states.get(each)
                known = {k: v for k, v in (old or state).items() if state.get(k) == v}
                if old is None or len(known) < len(old):  # less is known than before
                    states[each] = known
                    waiting.append(each)
    return [[each for each in follows[i] if each in ways[i]] for i in range(len(lines))]


def _possible(thread: Thread, state: State, line: Instruction, follows: list[int]) -> Iterator[int]:
    _, guard, op, rest = line
    if not op.startswith("BRA") or len(follows) < 2:
        yield from follows
        return
    taken = thread.bit(state, guard.strip().removeprefix("@")) if guard else 1
    if condition := re.match(r"\s*(!?U?P(?:\d|T))\s*,", rest):
        taken = logic(0xC0, [taken, thread.bit(state, condition[1]), 0], width=1)
    if taken != 0:
        yield follows[0]
    if taken != 1:
        yield follows[1]
