"""Command-line arguments of the benchmarks: shared types and one-line error messages."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pycomm import _C
from pycomm.arguments import guess, nearest
from pycomm.bench.common import harness
from pycomm.bench.lab import rates as link_rates
from pycomm.bench.lab import wan
from pycomm.bench.lab.namespaces import MOST_NODES
from pycomm.plan.options import shown


class Parser(argparse.ArgumentParser):
    """Parser of a command: it shows the description as it is, and reports an error in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | options)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options, and as `command` the whole line, which rows of results have."""
        options = self.parse_args(argv)
        options.command = f"{self.prog} {shlex.join(argv)}".rstrip()
        return options

    def refuse(self, argv: Sequence[str], what: str, *options: str) -> None:
        """Exit the program if there is one of these options, which have no meaning beside what."""
        blank = argparse.Namespace(**dict.fromkeys(action.dest for action in self._actions))
        given = vars(self.parse_args(argv, blank))
        for option in options:
            if given[option] not in (None, []):
                self.error(f"{what} has no --{option.replace('_', '-')}: leave it out")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """Return a one-line error: the unknown word, the nearest known one, and all known ones."""
    names = list(known)
    near = nearest(word, names)
    guess = f", did you mean {near}?" if near else "."
    return f"there is no {what} {word!r}{guess} Use one of {', '.join(names)}"


def listed(parse: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """Return an argparse type of values joined by commas."""
    return shown(lambda text: [parse(word) for word in text.split(",")])


def checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return an argparse type of texts that a function parses."""

    def kept(text: str) -> str:
        parse(text)
        return text

    return shown(kept)


def one_of(what: str, known: Collection[str]) -> Callable[[str], str]:
    """Return an argparse type that accepts one of the known words."""

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(unknown(what, text, known))
        return text

    return shown(parse)


def some_of(what: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse type that accepts distinct known words joined by commas."""
    check = one_of(what, known)
    return shown(lambda text: _once([check(word) for word in text.split(",")], text))


def fitting(
    parser: argparse.ArgumentParser, option: str, pattern: str, known: Collection[str]
) -> list[str]:
    """Return the names in which a pattern is found; exit the program if there are none."""
    try:
        found = [name for name in known if re.search(pattern, name)]
    except re.error as error:
        parser.error(f"{option} {pattern!r} is no pattern: {error}")
    if not found:
        meant = guess(pattern, known)
        parser.error(f"{option} {pattern!r} fits none of these: {meant}{'; '.join(known)}")
    return found


def all_or_one_of(what: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse type that accepts one of the known words, or "all" for each of them."""
    check = one_of(what, [*known, "all"])
    return lambda text: list(known) if check(text) == "all" else [text]


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no count: want a whole number from 0 on")
    return int(text)


def _nodes(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= MOST_NODES:
        raise ValueError(f"{text!r}: want 2 to {MOST_NODES}, which links join")
    return int(text)


size, sizes = shown(harness.parse_size), listed(harness.parse_size)
count, counts = shown(_count), listed(_count)
nodes = shown(_nodes)
"""a number of nodes of a lab"""
rates, far_rates = listed(checked(link_rates.parse)), listed(checked(wan.parse))
"""links' rates, as netlab takes them; far ones also with a round trip and a loss"""


@shown
def codecs(text: str) -> list[str]:
    """Parse codecs joined by commas; a codec may itself contain commas: "topk:0.01,values=int8"."""
    found = re.split(r"[;,](?!\w+=)", text)  # what follows else is an option of the previous codec
    for codec in found:
        _C.Codec(codec)  # an error says which codec or option is unknown
    return _once(found, text)


def _once(words: list[str], text: str) -> list[str]:
    if len(set(words)) < len(words):
        raise ValueError(f"{text!r} names something twice")
    return words


def add_sizes(parser: argparse.ArgumentParser, first: str, last: str, factor: float) -> None:
    """Add nccl-tests' options -b, -e and -f."""
    add = parser.add_argument
    what = f"smallest size: bytes, or K, M, G of 1024 ({first})"
    add("-b", "--minbytes", dest="first", type=size, default=first, metavar="SIZE", help=what)
    what = f"no size is larger ({last})"
    add("-e", "--maxbytes", dest="last", type=size, default=last, metavar="SIZE", help=what)
    what = f"from one size to the next ({factor:g})"
    add("-f", "--stepfactor", dest="factor", type=float, default=factor, metavar="F", help=what)


def checked_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[int]:
    """Return the sizes of -b, -e and -f; exit the program if they are inconsistent."""
    if options.last < options.first:
        parser.error(f"-e {options.last} is smaller than -b {options.first}")
    if not 1 < options.factor < math.inf:
        parser.error(f"-f {options.factor:g} must be larger than 1")
    return list(harness.sizes(options.first, options.last, options.factor))


def add_csv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", metavar="FILE", type=Path, help="append all rows to this file")
