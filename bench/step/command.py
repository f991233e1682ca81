"""A DDP step beside the shortest one that the link allows, for each method in turns.

    python -m pycomm.bench step
    python -m pycomm.bench step --model 124m --rate 10gbit,1gbit --backend nccl,pycomm
    python -m pycomm.bench step --nodes 2 --ranks-per-node 2 --backend cpu:pycomm,cuda:nccl
    python -m pycomm.bench step --model demo --trainings FSDP2

Ranks train a GPT on links between network namespaces (netlab.py): on GPUs, which ranks share where
there are fewer, in bf16 autocast with fused AdamW; else on the CPU, a smaller one. Every row has
the bytes that a node has sent, the wire's time for them at 95 % of its rate, the bound

    B = max(C, first + wire, C + last * wire) + optimizer

and the ratio to it. C is forward and backward, `first` the time until the first bucket is ready,
`last` the share of the last bucket; `alone` is a step whose hook sends nothing. Where there are no
namespaces, pycomm paces its own sockets, which is checked; other backends then need a lab.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from pycomm.bench import netlab
from pycomm.bench.common import arguments
from pycomm.bench.common.harness import Origin, Row, record
from pycomm.bench.common.report import Report, head, line
from pycomm.bench.figures.drawing import save
from pycomm.bench.lab import jobs
from pycomm.bench.step.bound import Pace, wire_seconds
from pycomm.bench.step.picture import picture
from pycomm.bench.training.methods import METHODS, ONE_BUCKET, Method
from pycomm.bench.training.results import describe
from pycomm.bench.training.train import MODELS, Config, parameters
from pycomm.plan.units import parse_rate

NAMES = {
    "exact": Method(""),
    "bf16": Method("", hook="bf16"),
    "fp16": Method("", hook="fp16"),
    "powersgd:4": Method("", hook="powersgd:4"),
    "int8": Method("", codec="int8"),
    "int4": Method("", codec="int4"),
    "sign": Method("", momentum="sign"),
}
"""The methods by name; sign travels as the momentum of CodedAdamW."""
OF_TORCH = ("exact", "bf16", "fp16", "powersgd:4", "int4")
"""Those of backends that are not pycomm's."""
GPU_ONLY = "bf16"  # torch's hook refuses CPUs, which have the one of fp16
SHARED_GPU = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""What lets NCCL use a GPU that ranks share, by their links; each has an NCCL_HOSTID, too."""
COLUMNS = (
    *(("method", -28, ""), ("rate", -9, ""), ("ms", 8, ".1f"), ("MB/node", 9, ".2f")),
    *(("wire ms", 8, ".1f"), ("bound ms", 9, ".1f"), ("of bound", 8, ".2f")),
    *(("MiB", 7, ".0f"), ("parts", -40, "")),
)


class StepReport(Report):
    """The table of steps."""

    def add(self, row: Row) -> None:
        self.rows.append(row)
        scaled = {"ms": (row.seconds, 1e3), "MB/node": (row.wire_bytes, 1e-6)}
        scaled |= {"wire ms": (row.wire_seconds, 1e3), "bound ms": (row.bound, 1e3)}
        scaled |= {"of bound": (row.ratio, 1.0), "MiB": (row.memory, 2.0**-20)}
        found = {name: value * by for name, (value, by) in scaled.items() if value is not None}
        self.note(line(self.columns, vars(row) | found))


@dataclass(frozen=True)
class Setting:
    """What is timed, and where."""

    model: str
    config: Config
    methods: Sequence[Method]
    nodes: int
    ranks_per_node: int
    cuda: bool
    options: argparse.Namespace

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def environment(self, lab: netlab.Lab) -> dict[str, str]:
        """Return the variables of all ranks."""
        if not self.cuda or torch.cuda.device_count() >= self.ranks:
            return {}
        return SHARED_GPU | {"NCCL_SOCKET_IFNAME": lab.interface}


def backends(text: str) -> list[str]:
    """Return the backends of "nccl,pycomm,cpu:pycomm,cuda:nccl", of which the last is one."""
    found: list[str] = []
    for word in text.split(","):
        if found and ":" in word and ":" in found[-1]:
            found[-1] += f",{word}"
        else:
            found.append(word)
    return found


def model(text: str) -> tuple[str, Config]:
    """Return a known model, or one of "layers,width,heads,length,vocabulary,batch"."""
    if text in MODELS:
        return text, MODELS[text]
    try:
        layers, width, heads, context, vocabulary, batch = map(int, text.split(","))
    except ValueError:
        words = f"{', '.join(MODELS)}, or layers,width,heads,length,vocabulary,batch"
        raise argparse.ArgumentTypeError(f"there is no model {text!r}: want {words}") from None
    shape = {"layers": layers, "width": width, "heads": heads, "context": context}
    return text, Config(**shape, vocabulary=vocabulary, batch=batch)


def methods_of(names: Sequence[str], carriers: Sequence[str]) -> list[Method]:
    """Return each method on each backend that has it."""
    found = []
    for backend in carriers:
        for name in names:
            if "pycomm" in backend and NAMES[name].hook:
                continue
            if "pycomm" not in backend and name not in OF_TORCH:
                continue
            # PowerSGD on Gloo aborts with more than one bucket.
            mb = ONE_BUCKET if (backend, name) == ("gloo", "powersgd:4") else Method.bucket_mb
            label = f"{backend}, {name}"
            found.append(replace(NAMES[name], label=label, backend=backend, bucket_mb=mb))
    return found


def steps(setting: Setting, rate: str) -> Iterator[Row]:
    """Time all methods on links of a rate, and yield their rows.

    Raises:
        Failed: a rank failed, or the links are not what they are to be.
    """
    speed = 0.0 if rate == netlab.UNLIMITED else parse_rate(rate.partition("/")[0])[0]
    lab, reason = netlab.open_lab(setting.nodes, rate, paced=setting.options.paced)
    methods, paced = setting.methods, 0.0
    if reason:
        print(f"# no lab: {reason}; pycomm paces its sockets, and other backends need a lab")
        methods, paced = [m for m in methods if "pycomm" in m.backend], speed
        lab = netlab.Paced(setting.nodes, f"{8 * speed / setting.ranks_per_node:.0f}bit")
    if not methods:
        return
    with lab:
        found = jobs.ask(
            lab,
            "pycomm.bench.step.rank",
            setting.environment(lab),
            ranks_per_node=setting.ranks_per_node,
            config=asdict(setting.config),
            methods=[asdict(method) for method in methods],
            device="cuda" if setting.cuda else "cpu",
            rounds=setting.options.rounds,
            turn_seconds=setting.options.turn_seconds,
            compute=setting.options.compute,
            paced=paced / setting.ranks_per_node,
        )
        where = f"tcp ({lab.congestion})"
    for one in found:
        if one["method"] == "links":
            print(f"# links: {one['sent']} bytes at {8e-9 * one['rate']:.3g} Gbit/s a rank")
    (alone,) = (one for one in found if one["method"] == "alone")
    parts = alone["parts"]
    compute = parts["forward"] + parts["backward"]
    pace = Pace(alone["first"], compute, parts["optimizer"], alone["last"])
    base = replace(
        describe("step", setting.model, parameters(setting.config), Method("alone", "none")),
        ranks=setting.ranks,
        rate=rate,
        connection=where,
    )
    yield replace(
        base,
        steps=len(alone["seconds"]),
        seconds=statistics.median(alone["seconds"]),
        memory=alone["memory"],
        parts=_parts(parts | {"first": alone["first"]}),
    )
    for method in methods:
        mine = [one for one in found if one["method"] == method.label]
        seconds = [s for one in mine for s in one["seconds"]]
        middle = statistics.fmean(seconds) if method.local else statistics.median(seconds)
        sent = statistics.median(one["sent"] for one in mine)
        if reason:  # counted by the group, of one rank
            sent *= setting.ranks_per_node
        wire = wire_seconds(sent, speed) if speed else None
        bound = pace.bound(wire) if wire is not None and not method.local else None
        ratio = middle / bound if bound else None
        if setting.options.compute:  # the share of the time in which a step computes
            bound, ratio = None, setting.options.compute / middle
        yield replace(
            base,
            method=method.label,
            backend=method.backend,
            codec=method.codec or method.momentum or "none",
            hook=method.hook,
            steps=len(seconds),
            seconds=middle,
            wire_bytes=sent,
            wire_seconds=wire,
            bound=bound,
            ratio=ratio,
            memory=max(one["memory"] for one in mine),
            parts=_parts(mine[-1]["parts"]),
        )


def _parts(seconds: dict[str, float]) -> str:
    return " ".join(f"{name}:{1e3 * value:.1f}" for name, value in seconds.items())


def device() -> str:
    """Return the GPU's name and driver; "" without one."""
    if not torch.cuda.is_available():
        return ""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        out = "unknown"
    return f"{torch.cuda.get_device_name(0)} (driver {out.splitlines()[0]})"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments.Parser(prog="python -m pycomm.bench step", description=__doc__)
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    known = "a name of MODELS, or layers,width,heads,length,vocabulary,batch"
    small = "124m" if cuda else "demo"
    add("--model", type=model, default=small, help=f"{known} ({small})")
    first = "nccl,pycomm" if cuda else "gloo,pycomm"
    add("--backend", type=backends, default=first, help=f"such as cpu:pycomm,cuda:nccl ({first})")
    what = "of links, as tc has them"
    add("--rate", type=arguments.rates, default="10gbit,1gbit", help=what)
    add("--nodes", type=arguments.count, default=2, help="(2)")
    add("--ranks-per-node", type=arguments.count, default=1, help="which share the node's link (1)")
    some = [name for name in NAMES if name != ("fp16" if cuda else GPU_ONLY)]
    known = arguments.some_of("method", NAMES)
    add("--methods", type=known, default=some, help=f"of {', '.join(NAMES)} ({', '.join(some)})")
    what = "instead: methods of `bench training` in whose label this pattern is found"
    add("--trainings", metavar="PATTERN", type=re.compile, help=what)
    add("--rounds", type=arguments.count, default=2, help="turns of every method on a link (2)")
    what = "of timed steps a turn, but at least two (1)"
    add("--turn-seconds", type=arguments.seconds, default=1.0, help=what)
    what = "that a timed step computes at least, as a faster or larger model's would"
    add("--compute", type=arguments.seconds, default=0.0, help=what)
    add("--paced", action="store_true", help="no namespaces: pycomm paces its own sockets")
    add("--cpu", action="store_true", help="use no GPU")
    add("--picture", metavar="FILE", help="draw the steps beside their bounds, as PNG")
    arguments.add_files(parser)
    options = parser.parse_args(argv)
    if options.nodes < 2 or options.ranks_per_node < 1:
        parser.error("want at least two --nodes, and one rank on each")
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench", "step", *argv]))
    report = StepReport(COLUMNS)
    cuda = torch.cuda.is_available() and not options.cpu
    chosen = methods_of(options.methods, options.backend)
    if options.trainings:
        chosen = [m for m in METHODS if options.trainings.search(m.label) and not m.scheduled]
    name, config = options.model
    setting = Setting(name, config, chosen, options.nodes, options.ranks_per_node, cuda, options)
    origin = replace(origin, device=device() if cuda else origin.device)
    report.note(f"# {origin.device}, torch {torch.__version__}, {name}, {setting.ranks} ranks")
    report.note(head(COLUMNS))
    for rate in options.rate:
        for row in steps(setting, rate):
            report.add(row)
    report.save(origin, json_path=options.json, csv_path=options.csv)
    if options.picture:
        shown = [record(row, origin) for row in report.rows]
        save(picture([{k: str(v) for k, v in one.items()} for one in shown]), Path(options.picture))
    return 0
