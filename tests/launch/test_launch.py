"""Ranks that srun or mpirun has started get the variables that torchrun would have set."""

from __future__ import annotations

import os

import pytest

import pycomm
from pycomm.env import env
from pycomm.launch import variables

# As srun of Slurm 22.05 exports them to the third of four tasks on two nodes.
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",  # of the job; the step has four
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[01-02,07]",
    "SLURM_STEP_NODELIST": "node[02,07]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
# As mpirun of Open MPI 5.0 exports them, and Hydra of MPICH 4.3.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-node1-17284@1",
    "PMIX_RANK": "1",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_FD": "9",
}


FOUND = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def test_a_task_of_srun_is_a_rank():
    found = variables(SRUN)
    port = int(found.pop("MASTER_PORT"))
    assert found == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "node02",
    }
    assert 15000 <= port < 25000


def test_a_task_of_mpirun_is_a_rank():
    wanted = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for given in (OPEN_MPI, HYDRA):
        found = variables(given)
        assert {name: found[name] for name in wanted} == wanted
        assert found["MASTER_ADDR"] == "127.0.0.1"


def test_each_slurm_step_has_a_port_of_its_own():
    others = {**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert variables(others)["MASTER_PORT"] == variables(SRUN)["MASTER_PORT"]
    steps = {variables({**SRUN, "SLURM_STEP_ID": str(n)})["MASTER_PORT"] for n in range(20)}
    assert len(steps) > 15


@pytest.mark.parametrize("ports", ["29600-29603", "29600"])
def test_the_store_listens_on_an_allowed_port(ports):
    low, _, high = ports.partition("-")
    for job in range(20):
        given = {**SRUN, "SLURM_JOB_ID": str(job), "PYCOMM_PORTS": ports}
        assert int(low) <= int(variables(given)["MASTER_PORT"]) <= int(high or low)


def test_what_torchrun_has_set_stays():
    torchrun = {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "there",
        "MASTER_PORT": "1",
    }
    assert variables({**SRUN, **torchrun}) == {}
    assert variables({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}) == {}


def test_single_variables_that_the_user_has_set_stay():
    found = variables({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "WORLD_SIZE": "4"})
    assert found == {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def test_a_contradicting_variable_is_an_error():
    with pytest.raises(pycomm.Error, match="WORLD_SIZE=2 is set, and Slurm says 4"):
        variables({**SRUN, "WORLD_SIZE": "2"})
    with pytest.raises(pycomm.Error, match="RANK=0 is set, and Open MPI says 1"):
        variables({**OPEN_MPI, "RANK": "0"})


def test_a_batch_script_and_a_plain_process_are_no_ranks():
    batch = {"SLURM_JOB_ID": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    assert variables(batch) == {}
    assert variables({"HOME": "/root"}) == {}


def test_mpirun_counts_more_than_slurms_daemons():
    # mpirun has started one daemon on each of three nodes, as a step without its own node.
    daemon = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "7"}
    ranks = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "12"}
    found = variables({**daemon, **ranks, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert found["RANK"] == "9"
    assert found["WORLD_SIZE"] == "12"
    assert found["MASTER_ADDR"] == "node01"


def test_mpirun_on_several_hosts_needs_an_address():
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(pycomm.Error, match="-x MASTER_ADDR=host"):
        variables(several)
    assert variables({**several, "MASTER_ADDR": "node1"})["RANK"] == "1"


def test_srun_with_pmi_tells_more_than_pmi():
    assert variables({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4"})["LOCAL_RANK"] == "0"
    alone = variables({"PMI_RANK": "2", "PMI_SIZE": "4", "MASTER_ADDR": "node1"})
    assert alone == {"RANK": "2", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}


def test_a_heterogeneous_job_is_refused():
    with pytest.raises(pycomm.Error, match="heterogeneous"):
        variables({**SRUN, "SLURM_HET_SIZE": "2"})


def test_a_number_that_is_none_is_named():
    with pytest.raises(pycomm.Error, match="SLURM_LOCALID='' is not an integer"):
        variables({**SRUN, "SLURM_LOCALID": ""})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("gpu-[009-012,20],login", "gpu-009"),
        ("gpu-[7,9]", "gpu-7"),
        ("a,b[1-2]", "a"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("n[1-4]-ib.site", "n1-ib.site"),
    ],
)
def test_the_first_host_of_a_list_is_that_of_rank_0(nodes, first):
    assert variables({**SRUN, "SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("text", "here"),
    [("2(x3),1", ["2", "2", "2", "1"]), ("4", ["4"]), ("1,3(x2)", ["1", "3", "3"])],
)
def test_each_node_has_its_number_of_ranks(text, here):
    given = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": text}
    found = [
        variables({**given, "SLURM_NODEID": str(node)})["LOCAL_WORLD_SIZE"]
        for node in range(len(here))
    ]
    assert found == here


def test_launch_env_sets_what_is_missing_and_says_what(monkeypatch):
    for name in FOUND:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**SRUN, "MASTER_ADDR": "here", "MASTER_PORT": "99"}.items():
        monkeypatch.setenv(name, value)
    env.cache_clear()
    try:
        assert env().rank is None
        found = pycomm.launch_env()
        assert found == {name: os.environ[name] for name in found}
        assert set(found) == set(FOUND)
        assert env().rank == 2  # what was read before is read again
        assert pycomm.launch_env() == {}
    finally:
        for name in found:
            os.environ.pop(name)
        monkeypatch.undo()
        env.cache_clear()
