"""Figures of README and docs: the result table, the chart and the command of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pycomm.bench.common import tables
from pycomm.bench.common.tables import Row
from pycomm.bench.figures import charts
from pycomm.charts import Chart


@dataclass(frozen=True)
class Figure:
    """A picture, docs/img/NAME.png, and the source of its data."""

    name: str
    table: str
    """the table's file name in bench/results"""
    chart: Callable[[Sequence[Row]], Chart]
    command: str
    """the command that makes the table"""
    note: str = ""

    def of(self, results: Path) -> Chart:
        return self.chart(tables.read(results / self.table))


FIGURES = (
    Figure(
        "loss",
        "demo-cpu.csv",
        charts.loss,
        "python -m pycomm.bench.demo --csv bench/results/demo-cpu.csv",
    ),
    Figure(
        "bandwidth",
        "collectives-cpu.csv",
        charts.bandwidth,
        "python -m pycomm.bench all_reduce -p 2 --backend pycomm,pycomm-shared,gloo,mpi "
        "--csv bench/results/collectives-cpu.csv",
        "Shared memory: tensors that the group has allocated, which peers reduce in place.",
    ),
    Figure(
        "steps",
        "steps-cpu.csv",
        charts.steps,
        "python -m pycomm.bench training --only steps --models demo "
        "--rates 1gbit --csv bench/results/steps-cpu.csv",
    ),
    Figure(
        "losses",
        "training-cpu.csv",
        charts.losses,
        "python -m pycomm.bench training --only losses --models demo --seeds 0,1,2 "
        "--csv bench/results/training-cpu.csv",
        "Feedback is on wherever a codec can have it, as pycomm.compress has it.",
    ),
    Figure(
        "error",
        "distortion-cpu.csv",
        charts.error,
        "python -m pycomm.bench codecs --errors --csv bench/results/distortion-cpu.csv",
    ),
    Figure(
        "round-trips",
        "wan-cpu.csv",
        charts.round_trips,
        "python -m pycomm.bench.wan --csv bench/results/wan-cpu.csv",
    ),
    Figure(
        "planner",
        "plan-cpu.csv",
        charts.planner,
        "python -m pycomm.bench.validate_plan --csv bench/results/plan-cpu.csv",
    ),
    Figure(
        "wan",
        "wan-throughput-cpu.csv",
        charts.wan,
        "python -m pycomm.bench.wan.throughput --csv bench/results/wan-throughput-cpu.csv",
        "Each transfer has what the transports choose by themselves: pycomm bbr, Gloo the system's "
        "reno.",
    ),
    Figure(
        "unequal",
        "wan-unequal-cpu.csv",
        charts.unequal,
        "python -m pycomm.bench.wan.unequal --csv bench/results/wan-unequal-cpu.csv",
        "A link that is given as 20/50 sends 20 and receives 50 Mbit/s. The bound counts payload "
        "alone; headers add some 7 %.",
    ),
    Figure(
        "peers",
        "peers-cpu.csv",
        charts.peers,
        "python -m pycomm.bench peers --csv bench/results/peers-cpu.csv",
        "A system that never comes down to that loss, or broke, has no line.",
    ),
    Figure(
        "predictions",
        "predictions.csv",
        charts.predictions,
        "python -m pycomm.bench.predictions --csv bench/results/predictions.csv",
        "The grey band follows what is advised: the finest codec that is about as fast as the "
        "fastest, if it saves 5 % of a step and its error is at most 0.3.",
    ),
)
