"""The command line on two hosts under ``torchrun``: two agents on this one, or two network namespaces."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from forks import exit_code, fork, forked, free_port
from lightning.pytorch.utilities import rank_zero_only

from lightning_ga.errors import UserError
from lightning_ga.fit.messages import of_rank
from lightning_ga.train import main, print_error

pytestmark = pytest.mark.distributed
QUICK = ("model=mlp", "model.hidden=[32]", "debug=default", "data.batch_size=16")
TRAIN = (*QUICK, "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", "accumulate.micro_batch_size=8")
LAST_RESORT = 600  # seconds
HOSTS = """
set -e
mount -t tmpfs none /run && mkdir /run/netns
ip netns add one && ip netns add two
ip link add one0 netns one type veth peer name two0 netns two
ip -n one addr add 10.1.1.1/24 dev one0 && ip -n two addr add 10.1.1.2/24 dev two0
for host in one two; do ip -n $host link set ${host}0 up && ip -n $host link set lo up; done
"""


def agent(node: int, address: str, port: int) -> list[str]:
    """What is typed on one host."""
    rendezvous = ["--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1"]
    rendezvous += [f"--master_addr={address}", f"--master_port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, "-m", "lightning_ga.train", *TRAIN]


def namespaces() -> bool:
    """Whether this user may make network namespaces and connect them."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "-rnm", "sh", "-c", HOSTS], capture_output=True, check=False).returncode == 0


def run_all(commands: Sequence[Sequence[str]], folder: Path) -> list[str]:
    """Run commands at once, each in an empty folder; what they printed, if all end with 0."""
    running = []
    for number, command in enumerate(commands):
        work = folder / f"host{number}"
        work.mkdir()
        with (folder / f"out{number}.txt").open("w") as out:
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            running.append(
                subprocess.Popen(command, cwd=work, env=variables, stdout=out, stderr=out, start_new_session=True)
            )
    try:
        codes = [process.wait(timeout=LAST_RESORT) for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    printed = [(folder / f"out{number}.txt").read_text() for number in range(len(commands))]
    assert codes == [0] * len(commands), printed
    return printed


def check(work: Path) -> None:
    """One result, of windows over two ranks."""
    results = list(work.rglob("result.json"))
    assert len(results) == 1
    plan = json.loads((results[0].parent / "plan.json").read_text())["plan"]
    assert (plan["effective_batch_size"], plan["world_size"], plan["factor"]) == (32, 2, 2)
    assert len(list(work.rglob(".hydra"))) == 1  # only the first rank has a folder
    assert len(list(work.rglob("train.log"))) == 1
    steps = torch.load(results[0].parent / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert steps == 4


def test_a_rank_tells_its_own_trouble(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank tells mistakes; memory that ran out on another is told there."""
    monkeypatch.setattr(rank_zero_only, "rank", 3)
    for error in (UserError("a mistake"), of_rank(UserError("Memory ran out"), 4)):
        print_error(str(error), error)
    told = capsys.readouterr().err
    assert "a mistake" not in told
    assert told.startswith("Error on rank 3: Memory ran out")


def srun(folder: Path, arguments: list[str], **variables: str) -> int:
    """Start one task on each of two nodes, as ``srun`` does; each is a fork of this process."""
    tasks = [fork(task, node, folder, arguments, variables) for node in range(2)]
    return max((exit_code(each) for each in tasks), key=abs)


def task(node: int, folder: Path, arguments: list[str], variables: dict[str, str]) -> int:
    """Train on one node; what is printed goes to a file."""
    os.environ.update(variables, SLURM_PROCID=str(node), SLURM_NODEID=str(node))
    (folder / f"host{node}").mkdir()
    os.chdir(folder / f"host{node}")
    with (folder / f"out{node}.txt").open("w") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.slow
def test_tasks_that_srun_starts(tmp_path: Path) -> None:
    """Lightning finds rank and address in SLURM's variables; no torchrun is needed."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    slurm |= {"SLURM_NNODES": "2", "SLURM_NODELIST": "127.0.0.1", "SLURM_LOCALID": "0"}
    arguments = [*TRAIN, f"hydra.run.dir={tmp_path}/job-7"]
    environment = {**slurm, "MASTER_PORT": str(free_port())}
    done = forked(srun, tmp_path, arguments, environment=environment, folder=tmp_path)
    one, two = ((tmp_path / f"out{node}.txt").read_text() for node in range(2))
    assert done.code == 0, one + two + done.output
    assert one.count("Result after") == 1
    assert "Result after" not in two
    check(tmp_path)


def on_one_host(folder: Path) -> list[str]:
    """What two agents on this host print."""
    port = free_port()
    return run_all([agent(node, "127.0.0.1", port) for node in range(2)], folder)


def on_two_hosts(folder: Path) -> list[str]:
    """What agents in two network namespaces print, connected by a virtual cable: nothing goes over the loopback."""
    agents = [
        f"ip netns exec {host} env GLOO_SOCKET_IFNAME={host}0 {shlex.join(agent(node, '10.1.1.1', 29500))}"
        for node, host in enumerate(("one", "two"))
    ]
    script = f"{HOSTS}\n{agents[1]} > two.txt 2>&1 & other=$!\n{agents[0]} && wait $other"
    return [*run_all([["unshare", "-rnm", "sh", "-c", script]], folder), (folder / "host0" / "two.txt").read_text()]


@pytest.mark.slow
def test_two_agents(tmp_path: Path) -> None:
    """On two hosts where this user may make them, else on one: the first alone prints plan and result."""
    one, two = on_two_hosts(tmp_path) if namespaces() else on_one_host(tmp_path)
    assert one.count("Result after") == 1
    assert "Result after" not in two
    assert "Plan" not in two
    check(tmp_path)
