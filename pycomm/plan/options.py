"""The command line's words for models, links and processors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pycomm.plan import codecs, units
from pycomm.plan.cluster import LINKS, PROCESSORS, Cluster, Link, Processor, Rates
from pycomm.plan.model import Model, of_text
from pycomm.plan.probed import Probe

T = TypeVar("T")
HELP = {
    "model": "number of parameters (25M, 7B), or file.py:function that returns a module",
    "compute": "time of a step of one rank alone, without communication: 120ms",
    "link": f"between nodes: a rate (1gbit, 3GB/s) or one of {', '.join(LINKS)}",
    "intra": "inside a node, likewise",
    "processor": f"that encodes and decodes: {' or '.join(PROCESSORS)}",
}


def _typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """For argparse, which prints this error and not a ValueError's."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _rate(text: str) -> float:
    return units.parse_rate(text)[0]


def _codings(text: str) -> list[codecs.Coding]:
    names = [name for name in text.replace(";", ",").split(",") if name]
    found = [codecs.find(name) for name in names]
    return found if codecs.NONE in found else [codecs.NONE, *found]


def add_what(parser: argparse.ArgumentParser, ranks: int | None = None) -> None:
    """Model, cluster and codecs; `ranks` is the default."""
    add = parser.add_argument
    add("model", help=HELP["model"])
    must = ranks is None
    add("--ranks", "-n", type=int, default=ranks, required=must, help="number of ranks")
    add("--ranks-per-node", "-l", type=int, default=1, help="default 1")
    add("--link", default="10gbe", help=HELP["link"] + " (10gbe)")
    add("--latency", type=_typed(units.parse_time), help="of that link, one way: 50us")
    add("--intra", default="shm", help=HELP["intra"] + " (shm)")
    add("--intra-latency", type=_typed(units.parse_time))
    add("--compute", type=_typed(units.parse_time), help=HELP["compute"])
    add("--bf16", action="store_true", help="gradients have 16 bits, and codecs win less")
    add("--bucket-mb", type=float, help="DDP's bucket_cap_mb, if it is given")
    add("--codec", type=_typed(_codings), help="comma-separated (all)")
    add("--max-error", type=float, help="largest relative squared error that is advised (0.3)")
    add("--processor", choices=list(PROCESSORS), default="core", help=HELP["processor"])
    add("--memory-bandwidth", type=_typed(_rate), help="of that processor: 12GB/s, 2TB/s")
    add("--codec-throughput", type=_typed(_rate), help="each way, of every codec: 5GB/s")
    add("--cores", type=float, default=2.0, help="that each rank has (2)")
    add("--compute-on-cores", action="store_true", help="the model trains on these cores, too")
    add("--probe", type=_typed(Probe.read), help="file of `plan probe`: links, cores and codecs")


def add_events(parser: argparse.ArgumentParser) -> None:
    """Simulation, and what only it can show."""
    add = parser.add_argument
    add("--simulate", action="store_true", help="by events, not by formulas")
    add("--slow-rank", type=_typed(_factor), action="append", default=[], metavar="RANK:FACTOR")
    add("--slow-node", type=_typed(_factor), action="append", default=[], metavar="NODE:FACTOR")


def _factor(text: str) -> tuple[int, float]:
    place, _, factor = text.partition(":")
    if not factor or float(factor) <= 0:
        raise ValueError(f"cannot read {text!r}: want 3:1.5, that is number 3 is 1.5 times slower")
    return int(place), float(factor)


def model(options: argparse.Namespace) -> Model:
    value_bytes = 2 if options.bf16 else 4
    return of_text(
        options.model, options.compute, value_bytes=value_bytes, bucket_mb=options.bucket_mb
    )


def cluster(options: argparse.Namespace, ranks: int) -> Cluster:
    """The cluster of the options; what was probed goes before what was said of it."""
    probe: Probe | None = options.probe
    if probe is not None:
        return probe.cluster(
            ranks, options.ranks_per_node, compute_on_cores=options.compute_on_cores
        )
    return Cluster(
        ranks=ranks,
        ranks_per_node=options.ranks_per_node,
        inter=Link.of(options.link, options.latency),
        intra=Link.of(options.intra, options.intra_latency),
        processor=_processor(options),
        cores=options.cores,
        compute_on_cores=options.compute_on_cores,
    )


def _processor(options: argparse.Namespace) -> Processor:
    found = PROCESSORS[options.processor]
    if options.memory_bandwidth:
        found = replace(found, memory=options.memory_bandwidth)
    if options.codec_throughput:
        rate = options.codec_throughput
        same = Rates(encode=rate, decode=rate, decode_add=rate, encode_fed=rate)
        found = replace(found, rates=dict.fromkeys(codecs.CODINGS, same))
    return found


def chosen(options: argparse.Namespace) -> list[codecs.Coding]:
    return options.codec or list(codecs.CODINGS.values())


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", "-J", type=Path, help="write everything to this file; - prints it"
    )


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """To a file, or to the standard output if it is "-"."""
    text = json.dumps(record, indent=1)
    if str(path) == "-":
        print(text)
    else:
        path.write_text(text + "\n")
