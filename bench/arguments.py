"""The command line's words: errors in one line that say what is possible, and shared types."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

from pycomm import _C
from pycomm.bench import harness


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """One line: what there is no such thing as, what is nearest, and what there is."""
    names = list(known)
    near = difflib.get_close_matches(word, names, 1)
    guess = f", did you mean {near[0]}?" if near else "."
    return f"there is no {what} {word!r}{guess} Use one of {', '.join(names)}"


def one_of(what: str, known: Collection[str]) -> Callable[[str], str]:
    """A type for argparse: a word of these."""

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(unknown(what, text, known))
        return text

    return parse


def some_of(what: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """A type for argparse: words of these, joined by commas, each once."""
    check = one_of(what, known)

    def parse(text: str) -> list[str]:
        return _once([check(word) for word in text.split(",")], text)

    return parse


def all_or_one_of(what: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """A type for argparse: a word of these, or "all" for each of them."""
    check = one_of(what, [*known, "all"])

    def parse(text: str) -> list[str]:
        return list(known) if check(text) == "all" else [text]

    return parse


def size(text: str) -> int:
    """parse_size for argparse, which prints this error."""
    try:
        return harness.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rates(text: str) -> list[str]:
    """Rates of links as tc writes them, joined by commas."""
    try:
        for word in text.split(","):
            _C.parse_rate(word)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text.split(",")


def count(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no count: want a whole number from 0 on")
    return int(text)


def codecs(text: str) -> list[str]:
    """Codecs joined by commas; one may have commas of its own: "topk:0.01,values=int8".

    Raises:
        argparse.ArgumentTypeError: one of them is unknown, or its options are.
    """
    found: list[str] = []
    for word in text.replace(";", ",").split(","):
        if found and "=" in word and ":" not in word.partition("=")[0]:
            found[-1] += f",{word}"  # an option of the codec before
        else:
            found.append(word)
    for codec in found:
        core_spec(codec)
    return _once(found, text)


def real_codecs(text: str) -> list[str]:
    """The same without "none"."""
    found = codecs(text)
    if "none" in found:
        raise argparse.ArgumentTypeError("'none' is no codec that could be timed; leave it out")
    return found


def core_spec(text: str) -> str:
    """A codec's text as the core has it, "none" for none. Short names are those of pycomm.codecs.

    Raises:
        argparse.ArgumentTypeError: it is unknown, or its options are.
    """
    if text == "none":
        return text
    try:
        return _C.Codec(text).spec
    except RuntimeError:  # not in the core's own words, then in those of people
        pass
    try:
        return _C.Codec(_parsed(text)).spec
    except (RuntimeError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from None


def _parsed(text: str) -> str:
    name = text.partition(":")[0].split("+")[0]
    try:
        from pycomm.codecs import ALIASES, CODECS
        from pycomm.codecs import codec as parse
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        words = ", ".join(["none", *_C.codec_names()])
        raise ValueError(f"without torch, {text!r} is not known: use one of {words}") from None
    known = list(dict.fromkeys(("none", *ALIASES, *CODECS)))
    if name not in known:
        raise ValueError(unknown("codec", name, known))
    return parse(text).spec()


def _once(words: list[str], text: str) -> list[str]:
    if len(set(words)) < len(words):
        raise argparse.ArgumentTypeError(f"{text!r} names something twice")
    return words


def add_sizes(parser: argparse.ArgumentParser, first: str, last: str, factor: float) -> None:
    """nccl-tests' -b, -e, -f."""
    add = parser.add_argument
    add(
        *("-b", "--minbytes"),
        dest="first",
        type=size,
        default=first,
        metavar="SIZE",
        help=f"smallest size: bytes, or K, M, G of 1024 ({first})",
    )
    add(
        *("-e", "--maxbytes"),
        dest="last",
        type=size,
        default=last,
        metavar="SIZE",
        help=f"no size is larger ({last})",
    )
    add(
        *("-f", "--stepfactor"),
        dest="factor",
        type=float,
        default=factor,
        metavar="FACTOR",
        help=f"from one size to the next ({factor:g})",
    )


def checked_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[int]:
    """The sizes of -b, -e and -f; ends the program if they make no sense."""
    if options.last < options.first:
        parser.error(f"-e {options.last} is smaller than -b {options.first}")
    if options.factor <= 1:
        parser.error(f"-f {options.factor:g} must be larger than 1")
    return list(harness.sizes(options.first, options.last, options.factor))


def add_files(parser: argparse.ArgumentParser) -> None:
    """Where rows go."""
    add = parser.add_argument
    add("-J", "--json", "--output_file", metavar="FILE", help="write all rows to this file")
    add("--csv", metavar="FILE", help="append all rows to this file")
