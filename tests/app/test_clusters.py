"""The command line on two nodes: what ``srun`` or ``torchrun`` starts there, each a fork of this process."""

import json
import os
from pathlib import Path

import pytest
import torch
from command_lines import TINY
from forks import exit_code, fork, forked, free_port
from lightning.pytorch.utilities import rank_zero_only

from lightning_ga.errors import UserError
from lightning_ga.fit.oom_messages import of_rank
from lightning_ga.train import main, print_error

pytestmark = pytest.mark.distributed
TRAIN = (
    *(*TINY, "data.batch_size=16", "accumulate.micro_batch_size=8"),
    *("trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1"),
)
SRUN = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"},
    **{"SLURM_NNODES": "2", "SLURM_NODELIST": "127.0.0.1", "SLURM_LOCALID": "0"},
    **{"SLURM_PROCID": "{node}", "SLURM_NODEID": "{node}"},
}
TORCHRUN = {
    **{"RANK": "{node}", "GROUP_RANK": "{node}", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"},
    **{"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1"},
}


def test_a_rank_tells_its_own_trouble(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank tells mistakes; memory that ran out on another is told there."""
    monkeypatch.setattr(rank_zero_only, "rank", 3)
    for error in (UserError("a mistake"), of_rank(UserError("Memory ran out"), 4)):
        print_error(str(error), error)
    told = capsys.readouterr().err
    assert "a mistake" not in told
    assert told.startswith("Error on rank 3: Memory ran out")


def on_two_nodes(folder: Path, variables: dict[str, str]) -> int:
    """Start one process for each of two nodes."""
    nodes = [fork(on_node, node, folder, variables) for node in range(2)]
    return max((exit_code(node) for node in nodes), key=abs)


def on_node(node: int, folder: Path, variables: dict[str, str]) -> int:
    """Train on one node; what is printed goes to a file."""
    os.environ.update({name: value.format(node=node) for name, value in variables.items()})
    (folder / f"host{node}").mkdir()
    os.chdir(folder / f"host{node}")
    with (folder / f"out{node}.txt").open("w") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    try:
        main([*TRAIN, f"hydra.run.dir={folder}/job-7"])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("variables", [SRUN, TORCHRUN], ids=["srun", "torchrun"])
def test_two_nodes(tmp_path: Path, variables: dict[str, str]) -> None:
    """One training of windows over two ranks; the first alone has a folder, and prints plan and result."""
    variables = {**variables, "MASTER_PORT": str(free_port())}
    done = forked(on_two_nodes, tmp_path, variables, folder=tmp_path)
    one, two = ((tmp_path / f"out{node}.txt").read_text() for node in range(2))
    assert done.code == 0, one + two + done.output
    assert one.count("Result after") == 1
    assert "Result after" not in two
    assert "Plan" not in two
    (result,) = tmp_path.rglob("result.json")
    assert [len(list(tmp_path.rglob(name))) for name in (".hydra", "train.log")] == [1, 1]
    plan = json.loads((result.parent / "plan.json").read_text())["plan"]
    assert (plan["effective_batch_size"], plan["world_size"], plan["factor"]) == (32, 2, 2)
    assert torch.load(result.parent / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4
