"""Invalid arguments raise at the call, in an error that names them.

Operations refuse them on every rank and before anything is sent: each check makes invalid calls and
then a valid one, which only succeeds if no rank has sent anything or waited for another rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import backend
from pycomm._build import load_c10d
from pycomm.local_sgd import Streamed
from pycomm.policy import Guard, Policy, Rule
from tests.torch import interpreter
from tests.torch.harness import check_sum
from tests.torch.pool import on_ranks

CPU = torch.device("cpu")


@on_ranks(2)
def test_negative_split_sizes_are_refused(rank, size):
    around_in, around_out = torch.full((6, 1000), 5.0 + rank), torch.zeros(6, 1000)
    given, out = around_in[2:4], around_out[2:4]
    huge = 2**62
    for splits in ([-1, 3], [3, -1], [-(2**40), 2**40 + 2], [huge, 2 - huge], [2**63 - 1, 1]):
        for asynchronous in (False, True):
            with pytest.raises(pycomm.Error, match=f"rank {rank}: all_to_all_single: .*at least 0"):
                dist.all_to_all_single(out, given, splits, splits, async_op=asynchronous)
            with pytest.raises(pycomm.Error, match=r"split sizes of the output .*at least 0"):
                dist.all_to_all_single(out, given, splits, [1, 1], async_op=asynchronous)
    # Four of these sizes wrap around to the right sum.
    with pytest.raises(pycomm.Error, match="split sizes"):
        dist.all_to_all_single(out, given, [huge] * 4 + [2], [huge] * 4 + [2])
    assert not around_out.any()
    check_sum()


@on_ranks(2)
def test_a_list_wrong_on_every_rank_raises(rank, size):
    zeros = [torch.zeros(3) for _ in range(size)]
    for asynchronous in (False, True):
        with pytest.raises(pycomm.Error, match="all_gather: the part for this rank itself has 2"):
            dist.all_gather(zeros, torch.ones(2), async_op=asynchronous)
        with pytest.raises(pycomm.Error, match=r"reduce_scatter: the part for this .* has 2"):
            dist.reduce_scatter(torch.ones(3), [torch.ones(2)] * 2, async_op=asynchronous)
        with pytest.raises(pycomm.Error, match=r"all_to_all: the part for .* itself has 2"):
            dist.all_to_all(zeros, [torch.ones(2)] * 2, async_op=asynchronous)
    check_sum()


def of_rank_0(texts: list[str]) -> None:
    own, *others = texts
    name = own.split(": ")[1]
    for text in others:
        assert f"rank 0 refused its {name}, whose part for itself has " in text


@on_ranks(3, then=of_rank_0, timeout=60, deadline=180)
@pytest.mark.parametrize(
    "name",
    [
        *("all_to_all_single", "all_to_all", "gather", "scatter"),
        *("all_gather", "all_gather_coalesced", "reduce_scatter"),
    ],
)
def test_a_part_wrong_for_one_rank_fails_on_all(rank, size, name):
    """A call is wrong on the first rank, and right on the others."""
    first, x = rank == 0, torch.ones(5)
    out, one = torch.zeros(6), [1] * size
    splits = [2, *one[1:]] if first else one
    right, list_ = [[torch.zeros(n) for n in numels] for numels in (one, splits)]
    native, longer = backend.find(), [torch.zeros(2), *right[1:]]  # on all ranks

    def call() -> None:
        if name == "all_to_all_single":
            dist.all_to_all_single(out[: sum(splits)], x[:size], splits, one)
        elif name == "all_to_all":
            dist.all_to_all(list_, right)
        elif name == "gather":
            dist.gather(x[:1], list_ if first else None, dst=0)
        elif name == "all_gather":
            dist.all_gather(longer, x[:1])
        elif name == "all_gather_coalesced":
            native.allgather_coalesced([[part] for part in longer], [x[:1]]).wait()
        elif name == "reduce_scatter":
            dist.reduce_scatter(out[:1], longer)
        else:
            dist.scatter(out[:1], list_ if first else None, src=0)
        dist.barrier()  # a gather may have ended where it has only sent

    with pytest.raises(pycomm.Error) as caught:
        call()
    assert not isinstance(caught.value, pycomm.Timeout)
    assert rank != 0 or str(caught.value).startswith(f"rank 0: {name}: ")
    if rank == 0:  # it could go on to anything, and would leave the others to their deadline
        time.sleep(0.5)
    return str(caught.value)


@on_ranks(2)
def test_outputs_that_share_memory_are_refused_at_the_call(rank, size):
    native: Any = backend.find()
    x, buffer = torch.ones(4), torch.zeros(12)
    lists = {
        "twice": [buffer[:4]] * 2,
        "half": [buffer[4:8], buffer[2:6]],
        "inside": [buffer.view(3, 4)[0], buffer.as_strided((4,), (2,), 1)],
        "columns": [torch.zeros(4, 2)[:, 0]] * 2,
    }
    for outputs in lists.values():
        calls: list[Callable[[], Any]] = [
            partial(native.allgather, [outputs], [x]),
            partial(native.allgather_coalesced, [[out] for out in outputs], [x]),
            partial(native.alltoall, outputs, [x, x], options("AllToAll")),
            partial(native.gather, [outputs], [x], options("Gather", rank)),
        ]
        if outputs[0].data_ptr() != outputs[1].data_ptr():  # else both get the same sum
            calls.append(
                partial(native.allreduce_coalesced, outputs, options("AllreduceCoalesced"))
            )
        for call in calls:
            with pytest.raises(pycomm.Error, match=f"rank {rank}: .* share memory with each other"):
                call()
    check_sum()
    # What lies beside or in between each other is taken, and so is what is empty.
    matrix = torch.zeros(4, 2)
    dist.all_gather(list(matrix.unbind(1)), x * (rank + 1))
    assert matrix.tolist() == [[1.0, 2.0]] * 4
    dist.all_gather(list(buffer[:8].chunk(2)), x * (rank + 1))
    assert buffer.tolist() == [1.0] * 4 + [2.0] * 4 + [0.0] * 4
    dist.all_gather([buffer[:0]] * 2, x[:0])
    check_sum()


def options(call: str, root: int | None = None, tensor: int = 0) -> Any:
    """Return torch's options of a call."""
    made = getattr(c10d, f"{call}Options")()
    if root is not None:
        made.rootRank = root
    if tensor:
        made.rootTensor = tensor
    return made


@on_ranks(2)
def test_invalid_roots_peers_and_tags_are_refused(rank, size):
    x = torch.ones(3)
    group = dist.group.WORLD
    native: Any = backend.find()
    for root in (7, -1, size, 2**31, 2**32, -(2**32)):
        wrong = pytest.raises(pycomm.Error, match=f"rank {rank}: .*the root is {root}, but")
        for asynchronous in (False, True):
            if abs(root) < 2**31:
                with wrong:
                    dist.broadcast(x, group_src=root, async_op=asynchronous)
                with wrong:
                    dist.reduce(x, group_dst=root, async_op=asynchronous)
        for name, *given in (
            ("broadcast", [x]),
            ("reduce", [x]),
            ("gather", [], [x]),
            ("scatter", [x], []),
        ):
            with wrong if abs(root) < 2**31 else pytest.raises((pycomm.Error, TypeError)):
                getattr(native, name)(*given, options(name.capitalize(), root))
    for name in ("broadcast", "reduce"):
        with pytest.raises(pycomm.Error, match="the root tensor is 0, not 1"):
            getattr(native, name)([x], options(name.capitalize(), 0, tensor=1))
    for peer in (-1, size):
        with pytest.raises(pycomm.Error, match=f"send: the destination is {peer}, but"):
            group.send([x], peer, 0)
        with pytest.raises(pycomm.Error, match=f"recv: the source is {peer}, but"):
            group.recv([x], peer, 0)
    for call in (group.send, group.recv):
        with pytest.raises(pycomm.Error, match="the tag is -1, but tags begin at 0"):
            call([x], 1 - rank, -1)
    with pytest.raises(pycomm.Error, match="the tag is -3"):
        group.recv_anysource([x], -3)
    check_sum()


def bad_tensors() -> dict[str, tuple[torch.Tensor, str]]:
    """Return tensors that no operation accepts, and words of the error."""
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    shrunk = torch.ones(8)
    shrunk.untyped_storage().resize_(4)
    view = torch.ones(4, 4)[1:, 2:]
    view.untyped_storage().resize_(40)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    return {
        "meta": (torch.ones(4, device="meta"), "tensor on meta"),
        "sparse": (torch.ones(4).to_sparse_coo(), "sparse tensor|can only sum|sparse"),
        "rows": (torch.ones(4, 4).to_sparse_csr(), "sparse tensor"),
        "nested": (nested, "nested tensor"),
        "quantized": (quantized, "quantized tensor"),
        "freed": (freed, "storage has been resized"),
        "shrunk": (shrunk, "storage has been resized"),
        "shrunk view": (view, "storage has been resized"),
    }


def all_calls(x: torch.Tensor, rank: int, size: int) -> dict[str, Callable[[], Any]]:
    """Return every operation, with the same tensor as each tensor argument."""
    native: Any = backend.find()
    lists, first = [x] * size, rank == 0
    calls: dict[str, tuple[Any, ...]] = {
        "all_reduce": (native.allreduce, [x], options("Allreduce")),
        "all_reduce_coalesced": (
            native.allreduce_coalesced,
            [torch.ones(4), x],
            options("AllreduceCoalesced"),
        ),
        "broadcast": (native.broadcast, [x], options("Broadcast", 0)),
        "reduce": (native.reduce, [x], options("Reduce", 0)),
        "gather": (native.gather, [lists] if first else [], [x], options("Gather", 0)),
        "scatter": (native.scatter, [x], [lists] if first else [], options("Scatter", 0)),
        "all_gather": (native.allgather, [lists], [x], options("Allgather")),
        "all_gather_coalesced": (native.allgather_coalesced, [[x]] * size, [x]),
        "all_gather_single": (native._allgather_base, x, x, options("Allgather")),
        "reduce_scatter": (native.reduce_scatter, [x], [lists], options("ReduceScatter")),
        "reduce_scatter_single": (native._reduce_scatter_base, x, x, options("ReduceScatter")),
        "all_to_all": (native.alltoall, lists, lists, options("AllToAll")),
        "all_to_all_single": (native.alltoall_base, x, x, [], [], options("AllToAll")),
        "send": (native.send, [x], 1 - rank, 0),
        "recv": (native.recv, [x], 1 - rank, 0),
        "recvAnySource": (native.recv_anysource, [x], 0),
    }
    return {name: partial(*call) for name, call in calls.items()}


@on_ranks(2)
def test_tensors_without_values_are_refused(rank, size):
    for kind, (x, words) in bad_tensors().items():
        for name, call in all_calls(x, rank, size).items():
            if kind == "sparse" and name == "all_reduce":
                continue  # the one that accepts them
            with pytest.raises(pycomm.Error, match=f"rank {rank}: {name}: .*({words})"):
                call()
    check_sum()


WRITTEN = {
    "all_reduce", "all_reduce_coalesced", "broadcast", "scatter", "all_gather",
    "all_gather_coalesced", "reduce_scatter", "all_to_all", "recv", "recvAnySource",
}  # fmt: skip


@on_ranks(2)
def test_overlapping_outputs_are_refused(rank, size):
    x = torch.ones(1).expand(4)
    for name, call in all_calls(x, rank, size).items():
        if name in WRITTEN or (rank == 0 and name in {"reduce", "gather"}):
            with pytest.raises(pycomm.Error, match=f"{name}: .*share one place in memory"):
                call()
    check_sum()
    # The arguments are converted to the expected type.
    out = torch.zeros(8)
    dist.all_gather_into_tensor(out, torch.ones(1).expand(4))
    assert out.tolist() == [1.0] * 8
    with pytest.raises(pycomm.Error, match="share one place in memory"):
        dist.all_gather_into_tensor(torch.zeros(1).expand(8), torch.ones(4))
    check_sum()


@on_ranks(2)
def test_lists_that_do_not_fit_are_refused(rank, size):
    native: Any = backend.find()
    x = torch.ones(2)
    gather, scatter, coalesced, to_all = (
        options(name) for name in ("Allgather", "ReduceScatter", "AllreduceCoalesced", "AllToAll")
    )
    for call, *given in (
        (native.allgather, [], [x], gather),
        (native.allgather, [[x, x]], [], gather),
        (native.allgather, [[x]], [x], gather),
        (native.allgather, [[x, x]], [x, x], gather),
        (native.allgather_coalesced, [[], []], []),
        (native.allgather_coalesced, [[x]], [x]),
        (native.allgather_coalesced, [[x], []], [x]),
        (native.allreduce, [], options("Allreduce")),
        (native.allreduce_coalesced, [], coalesced),
        (native.allreduce_coalesced, [x, x.int()], coalesced),
        (native.reduce_scatter, [x], [[x, x, x]], scatter),
        (native.reduce_scatter, [x], [[x, x.double()]], scatter),
        (native.alltoall, [], [], to_all),
        (native.alltoall, [x, x], [x], to_all),
        (native.alltoall_base, x, x.int(), [], [], to_all),
        (native.alltoall_base, x, x, [2], [2], to_all),
        (native.alltoall_base, x, x, [1, 1, 0], [1, 1, 0], to_all),
        (native._allgather_base, torch.ones(3), x, gather),
        (native._allgather_base, torch.ones(4).int(), x, gather),
        (native._reduce_scatter_base, x, torch.ones(5), scatter),
        (native.send, [x, x], 1 - rank, 0),
        (native.recv, [], 1 - rank, 0),
    ):
        with pytest.raises(pycomm.Error, match=f"rank {rank}: "):
            call(*given)
    three, eight = torch.ones(3), torch.ones(3).to(torch.float8_e8m0fnu)
    for words, call in {
        "all_reduce: .*band.*float32": lambda: dist.all_reduce(three, op=dist.ReduceOp.BAND),
        "all_reduce: cannot reduce dtype Float8_e8m0fnu": lambda: dist.all_reduce(eight),
        "all_gather_single: .* 2 times 3 values": lambda: native._allgather_base(
            torch.ones(7), three, gather
        ),
        "all_to_all_single: .*sum is its dimension 0, 4": lambda: dist.all_to_all_single(
            torch.ones(4), torch.ones(4), [1, 2], [2, 2]
        ),
        "all_to_all_single: dimension 0 of the input, 5": lambda: dist.all_to_all_single(
            torch.ones(4), torch.ones(5)
        ),
        "sparse_all_reduce: can only sum": lambda: dist.all_reduce(
            three.to_sparse(), op=dist.ReduceOp.MAX
        ),
    }.items():
        with pytest.raises(pycomm.Error, match=f"rank {rank}: {words}"):
            call()
    with pytest.raises(pycomm.Error, match="cannot make a tensor of -1"):
        native.allocate_tensor(-1, dtype=torch.float32, device=CPU)
    for numel in (2**62, 2**61 + 1, 2**63 - 1):
        with pytest.raises(pycomm.Error, match="cannot make a tensor of"):
            native.allocate_tensor(numel, dtype=torch.float64, device=CPU)
    check_sum()


@on_ranks(2)
def test_layouts_that_no_memory_holds_are_refused(rank, size):
    layout = load_c10d().Layout()
    layout.add(64, "quant:bits=8", 0)
    for numel in (2**62, 2**61 - 60, 2**64 - 4):
        with pytest.raises(pycomm.Error, match="no memory holds"):
            layout.add(numel, "quant:bits=8", 0)
    native: Any = backend.find()
    with pytest.raises(pycomm.Error, match="share one place in memory"):
        native.compressed_all_reduce(torch.ones(1).expand(64), layout, [(0, 0)], 1, 1)
    with pytest.raises(pycomm.Error, match="sides must be 0 or 1"):
        native.compressed_all_reduce(torch.ones(64), layout, [(0, 2)], 1, 1)
    check_sum()


@on_ranks(2)
def test_a_monitored_barrier_says_where_to_look(rank, size):
    if rank == 0:
        return
    with pytest.raises(pycomm.Timeout) as caught:
        dist.group.WORLD.monitored_barrier(timedelta(milliseconds=100), False)
    assert (
        "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for "
        "send/recv from rank 0. Please check rank 0 logs for faulty rank. Original exception: "
        "rank 0 did not come"
    ) in str(caught.value)


# ------------------------------------------------------- public functions and programs


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(8, 8))


def local(**options: Any) -> pycomm.LocalSGD:
    return pycomm.LocalSGD(nn.Linear(8, 8), **{"every": 4, **options})


def options_of(function: Callable[..., Any], name: str, *values: Any) -> list[Callable[[], Any]]:
    return [lambda value=value: function(**{name: value}) for value in values]


NUMBERS = ("4", None, 2.5, True, [4])
NUMPY: list[Callable[[], Any]] = [
    lambda: local(every=np.int64(3)).every,
    lambda: local(lr=np.float32(0.5)).lr,
    lambda: Policy("int8", warmup=np.int32(3)).warmup,
    lambda: Policy("int8", schedule=((np.int64(3), "int4"),)).schedule[0][0],
    lambda: Policy("auto", error=np.float64(0.5)).error,
    lambda: Rule(codec="int8", min_numel=np.int64(5)).min_numel,
    lambda: Guard(every=np.int64(4)).every,
    lambda: pycomm.Feedback("decay", np.float32(0.5)).decay,
    lambda: pycomm.compress(wrapped(), seed=np.uint64(2**63)).reducer.seed,
]
REFUSED: list[Callable[[], Any]] = [
    *(lambda what=what: pycomm.compress(what) for what in ("x", None, 8)),
    *(lambda s=s: pycomm.compress(wrapped(), s) for s in (None, 8, b"int8", object(), ["int4"])),
    *(lambda f=f: pycomm.compress(wrapped(), feedback=f) for f in (0.9, 1, "xx", object(), [1])),
    *(lambda s=s: pycomm.compress(wrapped(), seed=s) for s in ("x", None, 1.5, -1, 2**70, True)),
    *options_of(local, "every", *NUMBERS, 0),
    *options_of(local, "lr", "x", None, float("nan"), True, 0),
    *options_of(local, "momentum", "x", None, 1.0),
    *options_of(local, "codec", None, 8),
    *options_of(local, "feedback", 0.5),
    *options_of(local, "optimizer", 3),
    *options_of(local, "exchange", None, "blocking", Streamed, 3),
    *options_of(local, "process_group", dist.GroupMember.NON_GROUP_MEMBER),
    *options_of(Streamed, "fragments", *NUMBERS, 0),
    *options_of(Streamed, "overlap", *NUMBERS, -1),
    *options_of(Streamed, "mixing", "x", None, 1.0),
    lambda: pycomm.LocalSGD("x", every=3),
    *(lambda what=what: pycomm.codec(what) for what in (None, 8, "", b"int8")),
    *(lambda what=what: Policy(what) for what in (None, 8)),
    *options_of(Policy, "rules", None, ["x"], "x"),
    *options_of(Policy, "error", "4", float("inf"), float("nan"), 0),
    *options_of(Policy, "warmup", "x", 1.5, -1),
    *options_of(Policy, "guard", True, False, 3),
    *options_of(Policy, "schedule", (5, "int4"), "int4", ((5,),)),
    *options_of(Policy, "candidates", "int4", (8,)),
    *(lambda what=what: Rule(codec=what) for what in (None, 8)),
    lambda: Rule(codec="int8", name=5),
    lambda: Rule(codec="int8", min_numel="5"),
    lambda: Rule(codec="int8", dtype="float32"),
    *options_of(Guard, "every", *NUMBERS, 0),
    *options_of(Guard, "share", "x", float("nan"), 2),
    *options_of(Guard, "limit", "x", float("nan")),
    *options_of(Guard, "escalate", None, "no"),
    lambda: pycomm.Feedback("decay", decay="x"),
    lambda: pycomm.CompressionState(8),
    lambda: pycomm.HookState("int8", None),
    lambda: pycomm.HookState("int8", nn.Linear(3, 3)),
    lambda: pycomm.state_of(5),
    lambda: pycomm.Options(bogus=3),
]

# These calls must leave no trace.
INSIDE = ("object has no attribute", "not supported between", "not iterable", "\n")


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        act()
    return str(caught.value)


@on_ranks(1, timeout=60, deadline=180)
def test_every_public_function_names_what_it_refuses(rank, size):
    state = pycomm.compress(wrapped(), "int4")
    of_state: list[Callable[[], Any]] = [
        lambda: state.rescale("x"),
        lambda: state.rescale(-1),
        lambda: state.rescale(0),
        lambda: state.rescale(1e39),
        lambda: state.rescale(2.0, names="0.weight"),
        lambda: state.rescale(2.0, names=["0.weight"]),
        lambda: state.load_state_dict({}),
        lambda: state.load_state_dict({"model": 1}),
        lambda: state.load_state_dict(5),
        lambda: state.adopt_state(3),
        lambda: state.set_policy(7),
    ]
    for number, act in enumerate([*REFUSED, *of_state]):
        text = refusal(act)
        assert not any(words in text for words in INSIDE), (number, text)
    # A refused call has changed nothing.
    assert dist.get_world_size() == size
    assert state.decisions["weight"].reason


@on_ranks(1, timeout=60, deadline=180)
def test_numbers_of_numpy_are_numbers(rank, size):
    for number, act in enumerate(NUMPY):
        assert type(act()) in (int, float), number


@pytest.mark.parametrize(
    ("command", "environment", "says"),
    [
        (["pycomm.doctor"], {"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not an integer"),
        (
            ["pycomm.doctor"],
            {"RANK": "0", "WORLD_SIZE": "2", "PYCOMM_HEALTH": "xx"},
            "PYCOMM_HEALTH='xx' is invalid",
        ),
        (
            ["pycomm.plan", "probe", "--out", os.devnull],
            {"RANK": "0", "WORLD_SIZE": "1"},
            "one rank has no links",
        ),
        (["pycomm.bench", "step", "--turn-seconds", "-3"], {}, "want a number above 0"),
        (["pycomm.bench", "step", "--turn-seconds", "nan"], {}, "want a number above 0"),
        (
            ["pycomm.bench", "training", "--only", "losses", "--csv", "/etc/passwd"],
            {},
            "/etc/passwd has other columns",
        ),
    ],
)
def test_programs_say_in_one_line_what_is_wrong(command, environment, says):
    done = interpreter.run("-m", *command, variables=environment, timeout=110)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_wrong_variable_is_no_broken_binary():
    """It would be compiled again, for minutes, and then not load either."""
    code = "from pycomm._build import load_c10d; load_c10d()"
    done = interpreter.run("-c", code, variables={"PYCOMM_LINK": "0"}, timeout=110)
    assert "compiling" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "pycomm.errors.Error: PYCOMM_LINK=0 is invalid: expected a rate"
    )


def test_the_doctor_finds_a_variable_that_python_refuses():
    options = {"variables": {"PYCOMM_HEALTH": "xx"}, "timeout": 110}
    done = interpreter.run("-m", "pycomm.doctor", **options)
    assert done.returncode == 1
    assert "PROBLEM" in done.stdout
    assert "PYCOMM_HEALTH='xx' is invalid: expected on, off" in done.stdout
    assert "self-test" in done.stdout  # which is left out
    assert "Traceback" not in done.stdout + done.stderr


def test_an_interrupt_is_told_in_one_line(monkeypatch, capsys):
    main = pytest.importorskip("pycomm.bench.__main__")

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "run", interrupted)
    assert main.main([]) == 130
    assert capsys.readouterr().err == "python -m pycomm.bench: interrupted\n"
