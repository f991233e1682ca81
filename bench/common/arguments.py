"""Command-line arguments of the benchmarks: shared types and one-line error messages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

from pycomm import _C
from pycomm.bench.common import harness
from pycomm.bench.lab import rates as link_rates


class Parser(argparse.ArgumentParser):
    """Parser of a command: it shows the description as it is, and reports an error in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """Return a one-line error: the unknown word, the nearest known one, and all known ones."""
    names = list(known)
    near = _C.closest(word, names)
    guess = f", did you mean {near}?" if near else "."
    return f"there is no {what} {word!r}{guess} Use one of {', '.join(names)}"


def one_of(what: str, known: Collection[str]) -> Callable[[str], str]:
    """Return an argparse type that accepts one of the known words."""

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(unknown(what, text, known))
        return text

    return parse


def some_of(what: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse type that accepts distinct known words joined by commas."""
    check = one_of(what, known)

    def parse(text: str) -> list[str]:
        return _once([check(word) for word in text.split(",")], text)

    return parse


def all_or_one_of(what: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse type that accepts one of the known words, or "all" for each of them."""
    check = one_of(what, [*known, "all"])

    def parse(text: str) -> list[str]:
        return list(known) if check(text) == "all" else [text]

    return parse


def size(text: str) -> int:
    """Call parse_size with an exception that argparse prints."""
    try:
        return harness.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rates(text: str) -> list[str]:
    """Parse links' rates, as netlab takes them, joined by commas."""
    try:
        for word in text.split(","):
            link_rates.parse(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text.split(",")


def count(text: str) -> int:
    """Parse a whole number >= 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no count: want a whole number from 0 on")
    return int(text)


def counts(text: str) -> list[int]:
    """Parse whole numbers >= 0 joined by commas."""
    return [count(word) for word in text.split(",")]


def seconds(text: str) -> float:
    """Parse a number of seconds > 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: want seconds above 0")
    return value


def codecs(text: str) -> list[str]:
    """Parse codecs joined by commas; a codec may itself contain commas: "topk:0.01,values=int8".

    Raises:
        argparse.ArgumentTypeError: a codec or one of its options is unknown.
    """
    found: list[str] = []
    for word in text.replace(";", ",").split(","):
        if found and "=" in word and ":" not in word.partition("=")[0]:
            found[-1] += f",{word}"  # an option of the previous codec
        else:
            found.append(word)
    for codec in found:
        core_spec(codec)
    return _once(found, text)


def core_spec(text: str) -> str:
    """Return a codec's text in the core's form, "none" for none. Short names are accepted.

    Raises:
        argparse.ArgumentTypeError: the codec or one of its options is unknown.
    """
    if text == "none":
        return text
    try:
        return _C.Codec(text).spec
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from None


def _once(words: list[str], text: str) -> list[str]:
    if len(set(words)) < len(words):
        raise argparse.ArgumentTypeError(f"{text!r} names something twice")
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
    if options.factor <= 1:
        parser.error(f"-f {options.factor:g} must be larger than 1")
    return list(harness.sizes(options.first, options.last, options.factor))


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the output files."""
    add = parser.add_argument
    add("-J", "--json", "--output_file", metavar="FILE", help="write all rows to this file")
    add("--csv", metavar="FILE", help="append all rows to this file")
