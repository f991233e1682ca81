"""Charts of the result tables: which columns each figure shows, and its labels."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pycomm.bench.common import harness, tables
from pycomm.bench.common.tables import Row
from pycomm.bench.ops import errors
from pycomm.bench.peers.results import REFERENCE, seconds_to_loss
from pycomm.charts import Axis, Chart, Panel, Series
from pycomm.plan import CODINGS, PROCESSORS, Cluster, Link, draw, of_count
from pycomm.plan.sweep import Curves, sweep
from pycomm.plan.units import format_bytes, format_rate, format_time, parse_rate, parse_time


def loss(rows: Sequence[Row]) -> Chart:
    """Plot the loss of the demo's runs against wall time."""
    series = []
    for i, row in enumerate(rows):
        seconds, losses = zip(*tables.parse_curve(row["curve"]), strict=True)
        hover = [
            f"{row['run']}, {t:.1f} s: {held_out:.3f}"
            for t, held_out in zip(seconds, losses, strict=True)
        ]
        series.append(Series(row["run"], seconds, losses, hover, base=i == 0))
    low = min(min(line.y) for line in series)
    high = max(line.y[min(1, len(line.y) - 1)] for line in series)
    room = 0.12 * (high - low) or 0.1
    longest = max(line.x[-1] for line in series)
    first = rows[0]
    return Chart(
        "Loss against wall time",
        f"Byte-level transformer of {int(first['parameters']) / 1e6:.1f} million parameters, DDP "
        f"on 2 ranks, a link of {_link(first['rate'])}; {first['steps']} equal steps in each run",
        [
            Panel(
                Axis("seconds of training", limits=(0, 1.08 * longest)),
                Axis("held-out loss, nats per byte", limits=(low - 2.2 * room, high + room)),
                series,
            )
        ],
        labels="ends",
    )


def bandwidth(rows: Sequence[Row]) -> Chart:
    """Plot time and bytes per second of two-rank all-reduces against size."""
    panels = []
    for column, label, factor, spell, title in (
        ("time_p50", "time of a call", 1e-6, format_time, "Latency: lower is better"),
        ("effbw", "size / time", 1e9, _bandwidth, "Bandwidth: higher is better"),
    ):
        series = []
        for backend in sorted({r["backend"] for r in rows}, key=_backend_order):
            mine = sorted((int(r["size"]), factor * float(r[column])) for r in rows
                          if r["backend"] == backend)  # fmt: skip
            sizes, values = zip(*mine, strict=True)
            name = BACKENDS.get(backend, backend)
            hover = [f"{name}, {_size(size)}: {spell(value)}" for size, value in mine]
            series.append(Series(name, sizes, values, hover, base=backend == "gloo"))
        every = [value for line in series for value in line.y]
        y = Axis(label, True, draw.ticks(min(every), max(every), spell))
        sizes = sorted({int(r["size"]) for r in rows})
        marks = [(size, _size(size)) for size in (8 << shift for shift in range(0, 40, 5))]
        x = Axis("bytes", True, [mark for mark in marks if sizes[0] <= mark[0] <= sizes[-1]])
        panels.append(Panel(x, y, series, title))
    subtitle = f"all_reduce of float32 by 2 ranks on {rows[0]['device']}, all backends in turns"
    return Chart("All-reduce inside a machine", subtitle, panels)


def steps(rows: Sequence[Row]) -> Chart:
    """Plot the time of a training step against the link rate, by method."""
    series = []
    for method in dict.fromkeys(r["method"] for r in rows):
        mine = sorted(
            (_bits(r["rate"]), float(r["seconds"])) for r in rows if r["method"] == method
        )
        rates, seconds = zip(*mine, strict=True)
        hover = [f"{method}, {format_rate(x / 8)}: {format_time(y)}" for x, y in mine]
        series.append(Series(method, rates, seconds, hover, base=method == BASE_METHOD))
    every = [value for line in series for value in line.y]
    places = sorted({_bits(r["rate"]) for r in rows})
    x = Axis("link", True, [(place, format_rate(place / 8)) for place in places])
    y = Axis("step", True, draw.ticks(min(every), max(every), format_time))
    count = int(rows[0]["parameters"]) / 1e6
    return Chart(
        "Training step by link",
        f"Transformer of {count:.1f} million parameters, DDP on 2 ranks with one core each, "
        "links between network namespaces",
        [Panel(x, y, series)],
    )


def round_trips(rows: Sequence[Row]) -> Chart:
    """Plot the round trips of groups far apart against the number of nodes, by backend."""
    panels = []
    for step, title in (("init", "init_process_group"), ("operation", "A small all_reduce")):
        series = []
        for backend in ("pycomm", "gloo"):
            mine = sorted(
                (int(r["nodes"]), float(r["round_trips"]))
                for r in rows
                if (r["step"], r["backend"]) == (step, backend)
            )
            nodes, trips = zip(*mine, strict=True)
            name = BACKENDS.get(backend, backend)
            hover = [f"{name}, {count} nodes: {trip:g} round trips" for count, trip in mine]
            series.append(Series(name, nodes, trips, hover, base=backend == "gloo"))
        most = max(value for line in series for value in line.y)
        places = [(count, str(count)) for count in sorted({int(r["nodes"]) for r in rows})]
        x = Axis("nodes", True, places)
        panels.append(Panel(x, Axis("round trips", limits=(0, 1.1 * most)), series, title))
    return Chart(
        "Round trips of groups far apart",
        f"Nodes {rows[0]['round_trip_ms']} ms from each other, links of {_link(rows[0]['rate'])}; "
        "time divided by the time of a round trip",
        panels,
    )


def losses(rows: Sequence[Row]) -> Chart:
    """Plot the loss against steps, as the mean over the seeds, by method."""
    series = []
    for method in LOSS_METHODS:
        curves = [dict(tables.parse_curve(r["curve"])) for r in rows if r["method"] == method]
        if not curves:
            continue
        places = sorted(place for place in curves[0] if place <= float(rows[0]["steps"]))
        means = [statistics.fmean(curve[place] for curve in curves) for place in places]
        name = method.removeprefix("pycomm, ")
        hover = [
            f"{name}, step {x:.0f}: {y:.3f} (seeds: {len(curves)})"
            for x, y in zip(places, means, strict=True)
        ]
        series.append(Series(name, places, means, hover, base=method == LOSS_METHODS[0]))
    start = max(line.y[1] for line in series)
    end = min(line.y[-1] for line in series)
    return Chart(
        "Loss against steps",
        f"Held-out loss of the demo's model ({int(rows[0]['parameters']) / 1e6:.1f} million "
        "parameters, 2 ranks, AdamW), mean of the seeds",
        [
            Panel(
                Axis("step"),
                Axis("held-out loss, nats per byte", limits=(end - 0.08, start + 0.05)),
                series,
            )
        ],
    )


def error(rows: Sequence[Row]) -> Chart:
    """Plot error against bits, by family of codecs, on normal values and on gradients."""
    bits = [0.05 * 1.06**i for i in range(96)]
    bound = Series("least possible", bits, [2.0 ** (-2 * b) for b in bits])
    ticks = [(b, f"{b:g}") for b in (0.1, 0.3, 1, 2, 4, 8, 16)]
    panels = []
    for values, title in (
        (errors.NORMAL, "Normally distributed values"),
        (errors.GRADIENTS, "Gradients of the demo's model, step 100"),
    ):
        series = []
        for family in errors.FAMILIES:
            mine = [r for r in rows if r["values"] == values and r["family"] == family]
            points = sorted((float(r["bits"]), float(r["error"]), r["codec"]) for r in mine)
            x, y, _ = zip(*points, strict=True)
            hover = [f"{name}: {b:.2f} bits, error {e:.2g}" for b, e, name in points]
            kind = "line" if family in errors.LADDERS else "points"
            series.append(Series(family, x, y, hover, kind))
        powers = [(10.0**p, f"1e{p}" if p else "1") for p in range(-8, 1, 2)]
        panels.append(
            Panel(
                Axis("bits per value", True, ticks, (0.04, 28)),
                Axis("relative squared error", True, powers, (1e-8, 4)),
                series,
                title,
                [bound] if values == errors.NORMAL else [],
            )
        )
    return Chart(
        "What a codec loses, and for how many bits",
        "One coding, without feedback; bits count scales and indices",
        panels,
    )


def planner(rows: Sequence[Row]) -> Chart:
    """Plot predicted against measured times."""
    panels = []
    for kind, title in (("all_reduce", "All-reduces of 1 to 64 MiB"), ("step", "Training steps")):
        mine = [r for r in rows if r["kind"] == kind]
        series = []
        for rate in sorted({r["rate"] for r in mine}, key=_bits):
            cases = [r for r in mine if r["rate"] == rate]
            hover = [
                f"{r['codec']}, {r['ranks']} ranks{_of_size(r)}: predicted "
                f"{format_time(float(r['predicted']))}, took {format_time(float(r['measured']))}"
                for r in cases
            ]
            x = [float(r["measured"]) for r in cases]
            y = [float(r["predicted"]) for r in cases]
            series.append(Series(_link(rate), x, y, hover, kind="points"))
        every = [value for line in series for value in (*line.x, *line.y)]
        low, high = min(every) / 1.3, max(every) * 1.3
        guides = [
            Series("equal, or 30 % off", (low, high), (factor * low, factor * high))
            for factor in (1.0, 1.3, 0.7)
        ]
        marks = draw.ticks(low, high, format_time)
        panels.append(
            Panel(
                Axis("measured", True, marks, (low, high)),
                Axis("predicted", True, marks, (low, high)),
                series,
                title,
                guides,
            )
        )
    ranks = sorted({int(r["ranks"]) for r in rows})
    return Chart(
        "The planner's predictions",
        f"{', '.join(map(str, ranks))} ranks in network namespaces on {rows[0]['cores']} cores; "
        "no codec, int8, int4 and top-k 1 %",
        panels,
    )


def predictions() -> Chart:
    """Plot the planner's sweep of one model over rates and over ranks; nothing is measured."""
    cluster = Cluster(ranks=16, inter=Link.of("10gbe"), processor=PROCESSORS["gpu"])
    found = sweep(of_count(350_000_000, 0.3), cluster, list(CODINGS.values()))
    pays = {codec: rate and _digits(rate) for codec, rate in found.crossovers.items()}
    curves = {name: _rounded(getattr(found, name)) for name in ("by_rate", "by_ranks")}
    return draw.of_sweep(replace(found, crossovers=pays, **curves))


def _rounded(curves: Curves) -> Curves:
    steps = {codec: [_digits(step) for step in steps] for codec, steps in curves.steps.items()}
    return replace(curves, at=[_digits(at) for at in curves.at], steps=steps)


def _digits(value: float) -> float:
    """Return six digits, which are the same on every machine."""
    return float(f"{value:.6g}")


def wan(rows: Sequence[Row]) -> Chart:
    """Plot the rate of large all-reduces against the round trip, and against the loss."""
    largest = {(float(r["round_trip_ms"]), r["loss"], r["backend"]): r for r in rows}
    losses = sorted({loss for _, loss, _ in largest}, key=_share)
    trips = sorted({trip for trip, _, _ in largest})
    middle = max(trips, key=lambda t: len({(loss, b) for trip, loss, b in largest if trip == t}))
    y = Axis("Mbit/s", limits=(0, 210))

    def panel(title: str, x: Axis, places: Mapping[float, tuple[float, str]]) -> Panel:
        series = []
        for backend, name in WAN.items():
            found = [
                (at, float(largest[trip, loss, backend]["mbit_per_s"]))
                for at, (trip, loss) in places.items()
                if (trip, loss, backend) in largest
            ]
            if found:
                xs, ys = zip(*found, strict=True)
                hover = [f"{name}: {rate:.0f} Mbit/s" for rate in ys]
                series.append(Series(name, xs, ys, hover, base=backend == "gloo"))
        return Panel(x, y, series, title)

    by_trip = {trip: (trip, losses[0]) for trip in trips}
    losses = [loss for loss in losses if any(key[:2] == (middle, loss) for key in largest)]
    by_loss = {float(i): (middle, loss) for i, loss in enumerate(losses)}
    return Chart(
        "All-reduce over a link of 200 Mbit/s",
        "16 MiB of float32, two ranks; iperf3 fills the link both ways with its best "
        "number of streams",
        [
            panel("No loss", Axis("round trip, ms", limits=(0, 1.1 * trips[-1])), by_trip),
            panel(
                f"Round trip of {middle:g} ms",
                Axis("packets lost", ticks=[(float(i), loss) for i, loss in enumerate(losses)]),
                by_loss,
            ),
        ],
    )


SHARES = {
    "gloo": "Gloo",
    "equal": "equal shares",
    "measured": "measured",
    "declared": "declared",
    "equal, coded": "equal, int8",
    "declared, coded": "declared, int8",
}
"""Calls of `links unequal`, by how owners' shares follow the links, and their labels."""


def unequal(rows: Sequence[Row]) -> Chart:
    """Plot the times of all-reduces over unequal links as multiples of the bound."""
    series = []
    for rates in dict.fromkeys(r["rates"] for r in rows):
        ratios = {r["call"]: float(r["ratio"]) for r in rows if r["rates"] == rates}
        found = [(float(i), ratios[call]) for i, call in enumerate(SHARES) if call in ratios]
        xs, ys = zip(*found, strict=True)
        # What a node sends and receives, equal ones once.
        links = dict.fromkeys(rate.replace("mbit", "") for rate in rates.split(","))
        counts = [rates.replace("mbit", "").split(",").count(link) for link in links]
        label = ", ".join(
            f"{count} x {link}" if count > 1 else link
            for link, count in zip(links, counts, strict=True)
        )
        hover = [f"{label} Mbit/s: {ratio:.2f} times the bound" for ratio in ys]
        series.append(Series(f"{label} Mbit/s", xs, ys, hover, kind="points"))
    size = _size(max(int(r["bytes"]) for r in rows))  # coded calls count their payloads
    ticks = [(float(i), label) for i, label in enumerate(SHARES.values())]
    most = max(max(line.y) for line in series)
    return Chart(
        "All-reduces over unequal links",
        f"{size} of float32, a link for each rank, a round trip of "
        f"{format_time(parse_time(rows[0]['round_trip']))}; time / the least that links allow",
        [
            Panel(
                Axis("shares of the owners", ticks=ticks, limits=(-0.5, len(ticks) - 0.5)),
                Axis("time / bound", limits=(0, 1.1 * most)),
                series,
            )
        ],
    )


def peers(rows: Sequence[Row]) -> Chart:
    """Plot the seconds to a loss against the rate of the link, by system."""
    steps = [r for r in rows if r["kind"] == "step"]
    target = int(re.findall(r"steps=(\d+)", steps[-1]["settings"])[0])
    found = seconds_to_loss(rows, target)
    delays = sorted({delay for _, (_, delay) in found}, key=float)
    rates = sorted({rate for _, (rate, _) in found}, key=lambda rate: parse_rate(rate)[0])
    times = [t for t in found.values() if t is not None]
    y = Axis("time to the loss", True, draw.ticks(min(times), max(times), format_time))
    x = Axis("link", True, [(parse_rate(rate)[0], _link(rate)) for rate in rates])
    panels = []
    for delay in delays:
        series = []
        for name in dict.fromkeys(name for name, _ in found):
            mine = [(rate, found.get((name, (rate, delay)))) for rate in rates]
            points = [(rate, t) for rate, t in mine if t is not None]
            if points:
                hover = [f"{name}, {_link(rate)}: {format_time(t)}" for rate, t in points]
                at = [parse_rate(rate)[0] for rate, _ in points]
                base = name == REFERENCE
                series.append(Series(name, at, [t for _, t in points], hover, base=base))
        panels.append(Panel(x, y, series, f"Round trip of {delay} ms"))
    return Chart(
        "Time to a loss, beside other systems",
        "Until the held-out loss is that of DDP in float32 at its end; 2 ranks, each system as its "
        "documentation has it; lower is better",
        panels,
    )


def _share(loss: str) -> float:
    return float(loss.rstrip("%"))


# ------------------------------------------------------------------------ labels

BASE_METHOD = "Gloo, fp32"
LOSS_METHODS = (
    "pycomm, exact",
    "pycomm, int8",
    "pycomm, int4",
    "pycomm, EDEN 2 bits of 128",
    "pycomm, EDEN 1 bit",
    "pycomm, PowerSGD rank 4",
    "pycomm, top-k 1 %",
    "pycomm, sign",
    "Gloo, PowerSGD rank 4",
)
BACKENDS = {
    "gloo": "Gloo",
    "mpi": "Open MPI",
    "pycomm": "pycomm",
    "pycomm-shared": "pycomm, shared memory",
}
WAN = {"pycomm": "pycomm", "gloo": "Gloo", "iperf3": "iperf3"}


def _backend_order(name: str) -> int:
    return list(BACKENDS).index(name) if name in BACKENDS else len(BACKENDS)


def _bits(rate: str) -> float:
    return 8 * parse_rate(rate)[0]


def _link(rate: str) -> str:
    """Format "200mbit" as "200 Mbit/s"."""
    return format_rate(parse_rate(rate)[0])


def _size(size: int) -> str:
    text = harness.format_size(size)
    return f"{text} B" if text.isdigit() else f"{text[:-1]} {text[-1]}iB"


def _bandwidth(rate: float) -> str:
    return f"{format_bytes(rate)}/s"


def _of_size(row: Mapping[str, str]) -> str:
    return f", {_size(int(row['size']))}" if int(row["size"]) else ""
