"""What docs claim by measurements: the table of each claim, and the command that repeats it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

ALGORITHMS = "pycomm:one_shot,pycomm:two_shot,pycomm:bruck,pycomm:halving_doubling,pycomm:ring,gloo"
METHODS = (
    "^Gloo, (fp32|fp16 hook|PowerSGD rank 4)$|"
    "^pycomm, (exact|int8|int4|EDEN 2 bits of 128|EDEN 1 bit|PowerSGD rank 4)$"
)


@dataclass(frozen=True)
class Claim:
    """A measurement that docs show."""

    text: str
    """what it is, with a link to the page; relative to docs"""
    table: str
    """the table's file name in bench/results"""
    command: str
    """what repeats it, without the --csv"""
    quick: tuple[str, ...] = ()
    """the commands of `make bench`, as words after `python -m pycomm.bench`; empty: not in it"""


def mpi() -> str:
    """Return ",mpi" for a list of backends if an MPI library and mpi4py are installed."""
    found = shutil.which("mpirun") and importlib.util.find_spec("mpi4py")
    return ",mpi" if found else ""


def steps(rate: str) -> str:
    """Return the command that times steps of the demo's model on a link."""
    return (
        f" training --only steps --models demo --rates {rate} --rounds 1 --turn-seconds 2 "
        f"--methods '{METHODS}'"
    )


OF_TWO = "all_reduce -b 8 -e 64M -f 2 -p 2"
BENCH = "python -m pycomm.bench"
CLAIMS = (
    Claim(
        "all-reduces of two ranks in shared memory beside Gloo",
        "all_reduce-cpu.csv",
        f"{BENCH} {OF_TWO} --backend pycomm,gloo -n 30",
        (f" {OF_TWO} --backend pycomm,gloo -n 30",),
    ),
    Claim(
        "operations beside Gloo and MPI ([shared memory](#collectives-in-shared-memory))",
        "collectives-cpu.csv",
        f"{BENCH} {OF_TWO} --backend pycomm,pycomm-shared,gloo,mpi",
        (
            f" {OF_TWO} -n 20 --backend pycomm,pycomm-shared,gloo{mpi()}",
            *(
                f" {op} -b 1M -e 64M -f 64 -p 2 -n 12 --backend pycomm,pycomm-torch,gloo{mpi()}"
                for op in ("all_gather", "reduce_scatter", "broadcast", "all_to_all")
            ),
        ),
    ),
    Claim(
        "which algorithm is fastest at which size ([algorithms](algorithms.md))",
        "algorithms-cpu.csv",
        f"PYCOMM_TRANSPORT=tcp {BENCH} all_reduce -b 8 -e 32K -f 64 -p 16 --backend {ALGORITHMS}",
        tuple(
            f" all_reduce -b 8 -e 32K -f 64 -p {ranks} -n 10 -w 2 --backend {ALGORITHMS}"
            for ranks in (4, 16)
        ),
    ),
    Claim(
        "rates of codecs on one core ([codecs](choosing.md#codec-throughput-on-one-core))",
        "codecs-cpu.csv",
        f"{BENCH} codecs -b 64M -e 64M",
        (" codecs -b 1M -e 1M",),
    ),
    Claim(
        "errors and bits of codecs ([error and bits](choosing.md#error-and-bits))",
        "distortion-cpu.csv",
        f"{BENCH} codecs --errors",
        (" codecs --errors",),
    ),
    Claim(
        "losses by method, and steps of 25 million parameters ([choosing](choosing.md))",
        "training-cpu.csv",
        f"{BENCH} training --models demo,25m --rates 100mbit,1gbit",
    ),
    Claim(
        "losses of SGD with momentum ([SGD](optimizers.md))",
        "sgd-cpu.csv",
        f"{BENCH} training --only losses --models demo --methods SGD --seeds 0,1,2",
    ),
    Claim(
        "steps of the demo's model over four links ([choosing](choosing.md))",
        "steps-cpu.csv",
        f"{BENCH} training --only steps --models demo --rates 50mbit,200mbit,1gbit,10gbit",
        tuple(steps(rate) for rate in ("50mbit", "200mbit", "1gbit", "10gbit")),
    ),
    Claim(
        "the demo: steps and losses at 200 Mbit/s (README)",
        "demo-cpu.csv",
        f"{BENCH}.demo",
        (".demo",),
    ),
    Claim(
        "bytes of FSDP2 beside Gloo ([FSDP2](#fsdp2))",
        "fsdp-cpu.csv",
        f"{BENCH} training --only steps --models demo --methods FSDP2 --rates 1gbit",
        (" training --only steps --models demo --methods FSDP2 --rates 1gbit --rounds 1",),
    ),
    Claim(
        "LocalSGD: losses by form; the share of time that computes ([LocalSGD](#localsgd))",
        "local-sgd-cpu.csv",
        f"{BENCH} training --only losses --methods LocalSGD",
    ),
    Claim(
        "CodedAdamW's own time beside fused AdamW ([its own time](optimizers.md#its-own-time))",
        "optimizers-cpu.csv",
        f"{BENCH} training --only optimizer --models demo,25m",
        (" training --only optimizer --models demo,25m",),
    ),
    Claim(
        "rates of collectives over near and far links beside Gloo and iperf3 ([links](#links), "
        "[throughput](networks.md#throughput), [paths](networks.md#several-paths))",
        "links-cpu.csv",
        f"{BENCH} links rates",
        (
            " links rates --rate 1gbit,10gbit --round-trip 0 --loss 0 "
            "--operation all_reduce,broadcast --iperf-time 3",
            " links rates --round-trip 60ms --loss 0,0.1% --operation all_reduce --repeats 3 "
            "--iperf-time 3",
        ),
    ),
    Claim(
        "round trips of the steps of a group ([round trips](networks.md#round-trips))",
        "wan-cpu.csv",
        f"{BENCH} links steps",
        (" links steps",),
    ),
    Claim(
        "all-reduces over unequal links ([networks](networks.md))",
        "wan-unequal-cpu.csv",
        f"{BENCH} links unequal",
    ),
    Claim(
        "start, memory, sockets of many ranks ([scaling](#scaling-on-one-machine))",
        "scale-cpu.csv",
        f"{BENCH} links scale",
        (" links scale -p 8,16",),
    ),
    Claim(
        "the planner against the machine ([planner](#the-planner))",
        "plan-cpu.csv",
        f"{BENCH} plan",
        (" plan",),
    ),
    Claim(
        "the planner over far links ([planner](#the-planner))",
        "plan-wan-cpu.csv",
        f"{BENCH} plan --kind all_reduce --rate 100mbit@30ms --ranks 2,4 --size 16M",
    ),
    Claim("other systems on the same links ([peers](peers.md))", "peers-cpu.csv", f"{BENCH} peers"),
    Claim(
        "the price of checksums ([reliability](reliability.md#checksums))",
        "checksum-cpu.csv",
        f"{BENCH} all_reduce -b 1M -e 64M -f 8 --backend pycomm,pycomm-unchecked",
    ),
    Claim(
        "the price of encryption ([reliability](reliability.md#encryption))",
        "tls-cpu.csv",
        f"PYCOMM_TRANSPORT=tcp {BENCH} all_reduce -b 1M -e 64M -f 8 --backend pycomm,pycomm-tls",
    ),
    Claim(
        "how soon and by which name faults are told ([reliability](reliability.md))",
        "faults-cpu.csv",
        "python -m tests.faults.table --times 5",
    ),
    Claim("kernels and collectives on a GPU ([GPU](gpu.md))", "gpu-nvidia-h200.csv", "make gpu"),
)


def commands() -> Iterator[tuple[str, str]]:
    """Yield the tables and commands of `make bench`: words after `python -m pycomm.bench`."""
    for claim in CLAIMS:
        for words in claim.quick:
            yield claim.table, words
