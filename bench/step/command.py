"""A DDP step beside the shortest one that the link allows, for each method in turns.

    python -m pycomm.bench step
    python -m pycomm.bench step --model 124m --rate 10gbit,1gbit --backend nccl,pycomm
    python -m pycomm.bench step --nodes 2 --ranks-per-node 2 --backend cpu:pycomm,cuda:nccl
    python -m pycomm.bench step --model demo --trainings FSDP2
    python -m pycomm.bench step --stand-in

Ranks train a GPT on links between network namespaces (netlab.py): on GPUs, which ranks share where
there are fewer, in bf16 autocast with fused AdamW; else on the CPU, a smaller one. Every row has
the bytes that a node has sent, the wire's time for them at 95 % of its rate, the bound

    B = max(C, first + wire, C + last * wire) + optimizer

and the ratio to it. C is forward and backward, `first` the time until the first bucket is ready,
`last` the share of the last bucket; `alone` is a step whose hook sends nothing. Where there are no
namespaces, pycomm paces its own sockets, which is checked; other backends then need a lab.

`--stand-in` models the step of a GPU on a virtual clock (stand_in.py), from a checkout: nothing
runs on one. Its parts are launches, copies and Python calls of a bucket, waits of the host in a
step, and the share of the step in which each stage is busy.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pycomm.bench import netlab
from pycomm.bench.common import accelerator, arguments, tables
from pycomm.bench.common.harness import Origin, Row, record
from pycomm.bench.common.report import Report, head, line
from pycomm.bench.figures import charts
from pycomm.bench.figures.drawing import Chart, save
from pycomm.bench.lab import jobs
from pycomm.bench.step import stand_in
from pycomm.bench.step.bound import Pace, wire_seconds
from pycomm.bench.step.stages import StageTime, Trace
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
    device: str
    """ "cpu", or the type of the accelerator"""
    options: argparse.Namespace
    traces: list[Trace] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def environment(self, lab: netlab.Lab) -> dict[str, str]:
        """Return the variables of all ranks."""
        return {"NCCL_SOCKET_IFNAME": lab.interface} if self.device != "cpu" else {}


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


class Answers:
    """Rows of what ranks answer on links of a rate, each as soon as its last answer is there.

    Args:
        setting: what is timed.
        rate: of the links.
        where: how ranks are connected.
        paced: bytes are counted by the group, of one rank.
        add: takes the rows.
    """

    def __init__(
        self, setting: Setting, rate: str, where: str, paced: bool, add: Callable[[Row], object]
    ) -> None:
        self._setting, self._paced, self._add = setting, paced, add
        self._speed = speed_of(rate)
        self._found: dict[str, list[dict[str, Any]]] = {}
        self._pace = Pace(0.0, 0.0, 0.0, 0.0)
        alone = describe("step", setting.model, parameters(setting.config), Method("alone", "none"))
        self._base = replace(alone, ranks=setting.ranks, rate=rate, connection=where)

    def hear(self, answer: dict[str, Any]) -> None:
        """Take an answer of rank.py."""
        name = answer["method"]
        if name == "links":
            rate = 8e-9 * answer["rate"]
            print(f"# links: {answer['sent']} bytes at {rate:.3g} Gbit/s a rank", flush=True)
        elif name == "trace":
            spans = [StageTime(**each) for each in answer["spans"]]
            label = self._setting.methods[-1].label
            self._setting.traces.append((label, self._base.rate, spans))
        elif name == "alone":
            self._add(self._alone(answer))
        else:
            mine = self._found.setdefault(name, [])
            mine.append(answer)
            if len(mine) == self._setting.options.rounds:
                method = next(m for m in self._setting.methods if m.label == name)
                self._add(self._row(method, mine))

    def _alone(self, answer: dict[str, Any]) -> Row:
        parts = answer["parts"]
        compute = parts["forward"] + parts["backward"]
        self._pace = Pace(answer["first"], compute, parts["optimizer"], answer["last"])
        return replace(
            self._base,
            steps=len(answer["seconds"]),
            seconds=statistics.median(answer["seconds"]),
            memory=answer["memory"],
            parts=_parts(parts | {"first": answer["first"]}),
        )

    def _row(self, method: Method, mine: Sequence[dict[str, Any]]) -> Row:
        seconds = [s for one in mine for s in one["seconds"]]
        middle = statistics.fmean(seconds) if method.local else statistics.median(seconds)
        sent = statistics.median(one["sent"] for one in mine)
        if self._paced:
            sent *= self._setting.ranks_per_node
        wire = wire_seconds(sent, self._speed) if self._speed else None
        bound = self._pace.bound(wire) if wire is not None and not method.local else None
        ratio = middle / bound if bound else None
        if self._setting.options.compute:  # the share of the time in which a step computes
            bound, ratio = None, self._setting.options.compute / middle
        return replace(
            self._base,
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


def speed_of(rate: str) -> float:
    """Return bytes per second of links, in the direction from a node; 0: unlimited."""
    return 0.0 if rate == netlab.UNLIMITED else parse_rate(rate.partition("/")[0])[0]


def steps(setting: Setting, rate: str, add: Callable[[Row], object]) -> None:
    """Time all methods on links of a rate.

    Args:
        setting: what is timed.
        rate: of the links.
        add: takes each row, as soon as it is measured.

    Raises:
        Failed: a rank failed, or the links are not what they are to be.
    """
    options, speed = setting.options, speed_of(rate)
    lab, reason = netlab.open_lab(setting.nodes, rate, paced=options.paced)
    methods, paced = setting.methods, 0.0
    if reason:
        print(f"# no lab: {reason}; pycomm paces its sockets, and other backends need a lab")
        methods, paced = [m for m in methods if m.backend == "pycomm"], speed
        lab = netlab.Paced(setting.nodes, f"{8 * speed / setting.ranks_per_node:.0f}bit")
    if not methods:
        return
    with lab:
        shared = accelerator.sharing(setting.ranks) if setting.device != "cpu" else ""
        where = ", ".join(filter(None, [f"tcp ({lab.congestion})", shared]))
        jobs.ask(
            lab,
            "pycomm.bench.step.rank",
            setting.environment(lab),
            ranks_per_node=setting.ranks_per_node,
            heard=Answers(setting, rate, where, bool(reason), add).hear,
            config=asdict(setting.config),
            methods=[asdict(method) for method in methods],
            device=setting.device,
            rounds=options.rounds,
            turn_seconds=options.turn_seconds,
            compute=options.compute,
            paced=paced / setting.ranks_per_node,
            traced=str(Path(options.trace).with_suffix(".json").absolute())
            if options.trace
            else "",
        )


def _parts(seconds: dict[str, float]) -> str:
    return " ".join(f"{name}:{1e3 * value:.1f}" for name, value in seconds.items())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments.Parser(prog="python -m pycomm.bench step", description=__doc__)
    add = parser.add_argument
    cuda = bool(accelerator.kind())
    known = "a name of MODELS, or layers,width,heads,length,vocabulary,batch"
    small = "124m" if cuda else "demo"
    add("--model", type=model, help=f"{known} ({small})")
    first = "gloo,pycomm"
    if cuda:
        first = "nccl,pycomm" if torch.distributed.is_nccl_available() else "pycomm"
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
    what = "write the stages of a step of the last method, as CSV; beside it as PNG, and torch's \
profile as JSON"
    add("--trace", metavar="FILE", help=what)
    add("--cpu", action="store_true", help="use no GPU")
    add("--stand-in", action="store_true", help="model the steps of a GPU with a virtual clock")
    what = "with --stand-in: end with 1 where the engine's goals do not hold, which are told"
    add("--check", action="store_true", help=what)
    add("--picture", metavar="FILE", help="draw the steps beside their bounds, as PNG")
    arguments.add_files(parser)
    options = parser.parse_args(argv)
    if options.nodes < 2 or options.ranks_per_node < 1:
        parser.error("want at least two --nodes, and one rank on each")
    if options.check and not options.stand_in:
        parser.error("--check belongs to --stand-in")
    options.model = options.model or model("124m" if options.stand_in else small)
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench", "step", *argv]))
    report = StepReport(COLUMNS)
    name, config = options.model
    modelled = stand_in.Steps(name, config, options.methods) if options.stand_in else None
    traces: list[Trace] = []
    if modelled is not None:
        origin = replace(origin, device="stand-in for an H200")
        measured, traces = modelled.steps, modelled.traces
    else:
        device = "cpu" if options.cpu else accelerator.kind() or "cpu"
        chosen = methods_of(options.methods, options.backend)
        if options.trainings:
            chosen = [m for m in METHODS if options.trainings.search(m.label) and not m.scheduled]
        places = options.nodes, options.ranks_per_node
        setting = Setting(name, config, chosen, *places, device, options)
        origin = replace(
            origin, device=accelerator.describe() if device != "cpu" else origin.device
        )
        measured, traces = partial(steps, setting), setting.traces

    def add(row: Row) -> None:
        report.add(row)
        if options.csv:  # at once: what comes later may be cut off
            tables.append(Path(options.csv), [record(row, origin)])

    report.note(f"# {origin.device}, torch {torch.__version__}, {name}")
    report.note(head(COLUMNS))
    if options.trace:
        Path(options.trace).parent.mkdir(parents=True, exist_ok=True)
    for rate in options.rate:
        measured(rate, add)
    report.save(origin, json_path=options.json, csv_path=None)
    if options.picture:
        shown = [record(row, origin) for row in report.rows]
        draw(charts.bars_of_steps, shown, Path(options.picture))
    if options.trace:
        shown = [
            {"model": name, "method": method, "rate": rate} | rounded(span) | asdict(origin)
            for method, rate, spans in traces
            for span in spans
        ]
        if shown:
            tables.append(Path(options.trace), shown)
            draw(charts.timeline, shown, Path(options.trace).with_suffix(".png"))
    wrong = modelled.broken if modelled is not None and options.check else []
    for goal in wrong:
        report.note(f"not yet: {goal}")
    return 1 if wrong else 0


def rounded(span: StageTime) -> dict[str, Any]:
    """Return the columns of a span, its times to a microsecond."""
    return asdict(replace(span, begin=round(span.begin, 6), end=round(span.end, 6)))


def draw(
    chart: Callable[[Sequence[dict[str, str]]], Chart], records: list[dict[str, Any]], path: Path
) -> None:
    """Draw a chart of rows as their table would have them."""
    save(chart([{k: str(v) for k, v in one.items()} for one in records]), path)
