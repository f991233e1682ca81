"""Command line options for models, links and processors."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pycomm import units
from pycomm.plan import codecs
from pycomm.plan.cluster import LINKS, PROCESSORS, Cluster, Link, Mover
from pycomm.plan.model import Model, of_count
from pycomm.plan.probe.result import ClusterProbe

T = TypeVar("T")
LINK = (
    "between nodes: a rate (1gbit, 3GB/s; tcp:40gbit where a core moves the bytes, dma:40gbit "
    f"where a card does) or one of {', '.join(LINKS)}; far ones as sent/received, round trip and "
    "loss: 20mbit/50mbit,60ms,0.1%% (10gbe)"
)


def shown(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return an argparse type that tells what is wrong in the words of its error."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except (ValueError, OSError, RuntimeError) as error:
            raise argparse.ArgumentTypeError(str(error).partition("\n")[0]) from None

    return read


def _rate(text: str) -> float:
    return units.parse_rate(text)[0]


def _count(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r}: want a whole number above 0")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r}: want a number above 0")
    return value


def _step_time(text: str) -> float:
    seconds = units.parse_time(text)
    if seconds <= 0:
        raise ValueError(f"{text!r}: a step takes longer than that")
    return seconds


def _output(text: str) -> Path:
    """Return a file that can be written; an error is found before anything is computed."""
    path = Path(text)
    is_new = not path.exists()
    with path.open("a"):
        if is_new:  # who computes nothing leaves nothing
            path.unlink(missing_ok=True)  # another rank may have been here
    return path


def _codings(text: str) -> list[codecs.Coding]:
    # A comma before key=value belongs to a codec's name: eden:bits=2,size=128.
    names = [name.strip() for name in re.split(r"[;,](?!\s*\w+=)", text) if name.strip()]
    if not names:
        raise ValueError(f"{text!r} names no codec")
    found = list(dict.fromkeys(codecs.find(name) for name in names))
    return found if codecs.NONE in found else [codecs.NONE, *found]


def _share(text: str) -> float:
    if (value := _positive(text)) > 1:
        raise ValueError(f"{text!r} is above 1")
    return value


count, positive, share = shown(_count), shown(_positive), shown(_share)
file = shown(_output)
"""Types for argparse: a whole number above 0, a number above 0, one up to 1, a writable file."""


def add_what(parser: argparse.ArgumentParser) -> None:
    """Add the options of model, cluster and codecs."""
    add = parser.add_argument
    what = "number of parameters (25M, 7B); pycomm.plan.of_tensors plans a module's"
    add("model", type=shown(units.parse_count), help=what)
    add("--ranks", "-n", type=count, required=True, help="number of ranks")
    add("--ranks-per-node", "-l", type=count, default=1, help="default 1")
    add("--link", default="10gbe", help=LINK)
    add("--intra", default="shm", help="inside a node, likewise (shm)")
    what = "time of a step of one rank alone, without communication: 120ms"
    add("--compute", type=shown(_step_time), required=True, help=what)
    add("--bf16", action="store_true", help="gradients have 16 bits, and codecs win less")
    add("--codec", type=shown(_codings), help="comma-separated (all)")
    most = "largest relative squared error that is advised (0.3)"
    add("--max-error", type=positive, help=most)
    add("--processor", choices=list(PROCESSORS), default="core", help="that codes (core)")
    add("--memory-bandwidth", type=shown(_rate), help="of that processor: 12GB/s, 2TB/s")
    add("--cores", type=positive, default=2.0, help="that each rank has (2)")
    add("--compute-on-cores", action="store_true", help="the model trains on these cores, too")
    what = "file of `plan probe`: links, cores and codecs"
    add("--probe", type=shown(ClusterProbe.read), help=what)


def model(options: argparse.Namespace) -> Model:
    value_bytes = 2 if options.bf16 else 4
    return of_count(options.model, options.compute, value_bytes=value_bytes)


def cluster(options: argparse.Namespace, ranks: int) -> Cluster:
    """Return the cluster of the options; probed figures take precedence over given ones."""
    probe: ClusterProbe | None = options.probe
    if probe is not None:
        return probe.cluster(
            ranks, options.ranks_per_node, compute_on_cores=options.compute_on_cores
        )
    processor = PROCESSORS[options.processor]
    if options.memory_bandwidth:
        processor = replace(processor, memory=options.memory_bandwidth)
    # Ranks on cores communicate over TCP by default; GPUs have network cards beside them, and
    # inside a node neither uses TCP.
    between: Mover = "tcp" if processor.is_core else "dma"
    return Cluster(
        ranks=ranks,
        ranks_per_node=options.ranks_per_node,
        inter=Link.of(options.link, mover=between),
        intra=Link.of(options.intra, mover="dma"),
        processor=processor,
        cores=options.cores,
        compute_on_cores=options.compute_on_cores,
    )


def chosen(options: argparse.Namespace) -> list[codecs.Coding]:
    return options.codec or list(codecs.CODINGS.values())
