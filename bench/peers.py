"""The peers' table: time to a loss, bytes and lines of other systems and of pycomm.

    python -m pycomm.bench peers --csv bench/results/peers-cpu.csv

All train one model, with their own defaults, on two ranks. The loss after a step does not depend on
the link, so losses and times are measured separately, as in `bench training`: each system trains
once without a limit, for a quarter more steps than the schedule has; and it takes steps on each
link (network namespaces; delay by a program in user space). The time to the loss is the number of
steps after which its loss has come down to that of DDP in float32 at the end of the schedule, times
its mean step. A system that fails gets a row with the line of its output that says why.

A system is a method of `bench training`, set up as its documentation says; other packages are
functions that make a `System`.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.bench.common import arguments, report, tables
from pycomm.bench.common.harness import record
from pycomm.bench.common.report import Column, Report
from pycomm.bench.lab.base import Lab
from pycomm.bench.lab.jobs import Failed, ask
from pycomm.bench.lab.rates import UNLIMITED, bytes_per_second
from pycomm.bench.lab.wan import lab_of, round_trip
from pycomm.bench.training.methods import ONE_BUCKET, TOP_1, Method, System
from pycomm.bench.training.results import steps_to_loss
from pycomm.bench.training.train import Config, ranks_train

RANKS, CONFIG = 2, Config()
RATES, DELAYS = "100mbit,1gbit,10gbit", "0,50"
PATIENCE = 240.0  # seconds of one system's training, or of its steps on a link
SETTLE, STEPS = 3, 20  # untimed and timed steps; else one round and two, of steps between averages
EVERY = 32  # local steps between averages, for all that average parameters


@dataclass(frozen=True)
class Peer:
    """A row of the table: a method, whose label is the system's name."""

    method: Method
    lines: int
    """Lines changed or added in a script with DistributedDataParallel."""
    packages: tuple[str, ...] = ()
    every: int = 1
    """Steps after which communication repeats: times are means over so many."""
    environment: dict[str, str] = field(default_factory=dict)

    def row(self, kind: str) -> dict[str, Any]:
        """Return a row without measurements."""
        row = dict.fromkeys(("kind", "system", "version", "lines", "rate", "delay_ms"), "")
        row |= dict.fromkeys(("ms", "bytes", "curve", "broke"), "")
        return row | {"kind": kind, "system": self.method.label, "lines": str(self.lines)}


def deepspeed(net: nn.Module, lr: float) -> System:
    """DeepSpeed's ZeRO 2."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    engine, optimizer, *_ = deepspeed.initialize(
        model=net,
        optimizer=_adamw(net, lr),
        config={
            "train_micro_batch_size_per_gpu": Config.batch,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )
    return System(engine, optimizer.optimizer, backward=engine.backward, step=engine.step)


def detonation(net: nn.Module, lr: float) -> System:
    """DeMo as DeToNATION has it: SGD by signs of its coded momentum, in place of AdamW."""
    from detonation import DeMoReplicator, DeToSGD

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    optimizer = DeToSGD(
        net.parameters(),
        lr=1e-3,
        sharding_parallel_group=alone,
        replication_parallel_group=dist.group.WORLD,
        replicator=DeMoReplicator(),
    )
    return System(net, optimizer)


def torchft_diloco(net: nn.Module, lr: float) -> System:
    """torchft's DiLoCo: each rank is a replica, the first one has the lighthouse."""
    import torchft
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, ranks, master = dist.get_rank(), dist.get_world_size(), os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))
        address = str(probe.getsockname()[0])  # from which this process reaches the first rank
    lighthouse = None
    if rank == 0:
        lighthouse = LighthouseServer(bind="[::]:29310", min_replicas=ranks)
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{master}:29310"
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    inner = _adamw(net, lr)
    outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = torchft.Manager(
        pg=group,
        load_state_dict=lambda _: None,
        state_dict=lambda: {},
        min_replica_size=ranks,
        use_async_quorum=False,
        # All begin with the same weights; else one fetches them from the other's host by its name,
        # which all namespaces of a machine share.
        init_sync=False,
        timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        replica_id=f"peer_{rank}",
        hostname=address,
    )
    diloco = DiLoCo(manager, [net], inner, outer, sync_every=EVERY, pin_memory=False)
    diloco.__enter__()

    def close() -> None:
        diloco.__exit__(None, None, None)
        manager.shutdown()
        group.shutdown()
        dist.barrier()  # the first rank has the servers of all
        kept.clear()

    kept = [lighthouse, store]  # servers, which live as long as their objects
    return System(net, inner, close=close)


def _adamw(net: nn.Module, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr, (0.9, 0.95))


AVERAGED = {"every": EVERY, "codec": "int4"}
PEERS = (
    Peer(Method("DDP on Gloo, fp32", "gloo"), 0),
    Peer(Method("torch's fp16 hook", "gloo", hook="fp16"), 1),
    # In one bucket: with more its chained collectives start in different orders on Gloo.
    Peer(Method("torch's PowerSGD", "gloo", hook="powersgd:1:10", bucket_mb=ONE_BUCKET), 2),
    Peer(
        Method("DeepSpeed ZeRO 2", "gloo", system=deepspeed),
        6,
        ("deepspeed",),
        environment={"DS_ACCELERATOR": "cpu"},
    ),
    Peer(Method("detonation DeMo", "gloo", system=detonation), 5, ("detonation",)),
    Peer(Method("torchft DiLoCo", "gloo", system=torchft_diloco), 14, ("torchft",), EVERY),
    Peer(Method("pycomm, exact"), 1),
    Peer(Method("pycomm, int4", codec="int4"), 2),
    Peer(Method("pycomm, coded momentum, top-k 1 %", momentum=TOP_1), 2),
    Peer(Method("pycomm, LocalSGD int4", local=AVERAGED), 3, every=EVERY),
)


def last_line(error: Failed) -> str:
    """Return the line of the ranks' output that says why they ended."""
    what, *lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b:", line)]
    return [what, *lines, *errors][-1][:200]


def measured(lab: Lab, peer: Peer, config: Config) -> list[dict[str, float]]:
    """Train with a system; return the record of each step.

    Raises:
        Failed: a rank failed, or has not ended in time.
    """
    found = ask(lab, ranks_train, config, [peer.method], env=peer.environment, limit=PATIENCE)
    return [row for row in found if "step" in row]


# ------------------------------------------------------------------------ measurements


def link(rate: str, delay: float) -> str:
    """Return the text of `lab_of` for links of a rate and a round trip in ms."""
    return f"{rate}@{delay:g}ms" if delay else rate


def losses(peer: Peer) -> dict[str, Any]:
    """Train a system once, without a limit."""
    row = peer.row("loss")
    try:
        found = (f"{name} {importlib.metadata.version(name)}" for name in peer.packages)
        row["version"] = " ".join(found)
        with Lab(RANKS, UNLIMITED) as lab:
            rows = measured(lab, peer, replace(CONFIG, extra=CONFIG.steps // 4))
        judged = [r for r in rows if "held_out" in r]
        row["curve"] = " ".join(f"{r['step']:g}:{r['held_out']:.6f}" for r in judged)
    except importlib.metadata.PackageNotFoundError as error:
        row["broke"] = f'{error}: pip install "pycomm[peers]"'
    except Failed as error:
        row["broke"] = last_line(error)
    return row


def steps(peer: Peer, rate: str, delay: float) -> dict[str, Any]:
    """Let a system take steps on one link.

    Raises:
        LabUnavailable: there are no network namespaces here.
    """
    row = peer.row("step") | {"rate": rate, "delay_ms": f"{delay:g}"}
    settle, count = (SETTLE, STEPS) if peer.every == 1 else (peer.every, 2 * peer.every)
    config = replace(CONFIG, steps=settle + count, evaluate_every=settle + count)
    try:
        with lab_of(RANKS, link(rate, delay)) as lab:
            rows = measured(lab, peer, config)
        first, last = rows[settle - 1], rows[-1]
        mean = {name: (last[name] - first[name]) / count for name in ("seconds", "sent")}
        row |= {"ms": f"{1e3 * mean['seconds']:.2f}", "bytes": f"{mean['sent']:.0f}"}
    except Failed as error:
        row["broke"] = last_line(error)
    return row


COLUMNS = (
    Column("kind", -4),
    Column("rate", -8),
    Column("delay_ms", 8),
    Column("system", -34),
    Column("ms", 8),
    Column("bytes", 9),
    Column("curve", 15, lambda curve: curve.rpartition(" ")[2], "step:loss"),
    Column("broke", -40),
)


def main(argv: Sequence[str]) -> int:
    parser = arguments.Parser(prog="python -m pycomm.bench peers", description=__doc__)
    add = parser.add_argument
    add("--rates", type=arguments.rates, default=RATES, help=f"of links ({RATES})")
    trips = arguments.listed(lambda text: 1e3 * round_trip(f"{text}ms"))
    add("--delays", type=trips, default=DELAYS, help=f"in ms ({DELAYS})")
    add("--peers", default="", help="only those in whose name this pattern is found")
    arguments.add_csv(parser)
    options = parser.parse(argv)
    known = {peer.method.label: peer for peer in PEERS}
    peers = arguments.fitting(parser, "--peers", options.peers, known)
    output = Report(COLUMNS, options, hidden=("version", "lines"))
    for delay in options.delays:  # systems train for minutes before they take steps
        lab_of(RANKS, link(options.rates[0], delay)).close()
    output.header()
    whole = []
    for peer in map(known.__getitem__, peers):
        row = losses(peer)
        output.add(row)
        if not row["broke"]:
            whole.append(peer)
    for delay, rate, peer in itertools.product(options.delays, options.rates, whole):
        output.add(steps(peer, rate, delay))
    rows = (record(row, output.origin) for row in output.rows)
    print(markdown([{k: str(v) for k, v in row.items()} for row in rows]))
    return 0


# ------------------------------------------------------------------------ seconds to the loss

REFERENCE = PEERS[0].method.label


def seconds_to_loss(rows: Sequence[tables.Row]) -> dict[tuple[str, tuple[str, str]], float]:
    """Return the seconds to the reference's loss, by system and link, of systems that reach it."""
    curves = {r["system"]: tables.parse_curve(r["curve"]) for r in rows if r["curve"]}
    if REFERENCE not in curves:
        return {}
    target = curves[REFERENCE][CONFIG.steps]
    counts = {name: steps_to_loss([curve], target) for name, curve in curves.items()}
    return {
        (row["system"], (row["rate"], row["delay_ms"])): count * float(row["ms"]) / 1e3
        for row in rows
        if row["ms"] and (count := counts.get(row["system"])) is not None
    }


def markdown(rows: Sequence[tables.Row]) -> str:
    """Return the table of seconds to the loss, with the times of the first in each column bold.

    Of rows of one system on one link the newest counts.
    """
    rows = tables.newest(rows, "kind", "system", "rate", "delay_ms")
    found = seconds_to_loss(rows)
    links = {(row["rate"], row["delay_ms"]) for row in rows if row["kind"] == "step"}
    links = sorted(links, key=lambda place: (float(place[1]), bytes_per_second(place[0])))
    best = {
        place: min((t for (_, at), t in found.items() if at == place), default=None)
        for place in links
    }
    broken = any(row["broke"] for row in rows)
    names = [f"{rate}, {delay} ms" for rate, delay in links]
    head = ["system", "lines", *names, "MB a step", *["what broke"] * broken]
    lines = []
    for name in dict.fromkeys(row["system"] for row in rows):
        mine = [row for row in rows if row["system"] == name]
        cells = []
        for place in links:
            seconds = found.get((name, place))
            text = "-" if seconds is None else f"{seconds:.1f}"
            cells.append(f"**{text}**" if seconds == best[place] is not None else text)
        sent = [float(r["bytes"]) for r in mine if r["bytes"]]
        cells.append(f"{min(sent) / 1e6:.3f}" if sent else "-")
        why = "; ".join(dict.fromkeys(r["broke"] for r in mine if r["broke"]))
        lines.append([name, mine[0]["lines"], *cells, *[why] * broken])
    return report.markdown(head, lines, left=len(head))
