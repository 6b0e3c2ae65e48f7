"""A rank that is killed, and one that hangs: all ranks end soon and say why, and the same command resumes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_distribution import assert_close_models, pools_recipe, replace_parallel

from intbmoe.train import RunDirectory, train

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from dataclasses import replace
from test_distribution import pools_recipe
from intbmoe.train import train
from intbmoe.train.step import Stepper

root, kind = Path(sys.argv[1]), sys.argv[2]
once = root / "done"
again = once.exists()
take = Stepper.take

def trouble(self, step, *arguments):
    if step == 5 and os.environ["RANK"] == "1" and not again:
        once.touch()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
    return take(self, step, *arguments)

Stepper.take = trouble
if again and os.environ["RANK"] == "0":
    time.sleep(2)  # the other has time to find what an earlier start of rank 0 has left
recipe = pools_recipe()
patience = 8.0 if kind == "hang" and not again else recipe.train.patience
train(replace(recipe, train=replace(recipe.train, patience=patience)), root)
"""


def launch(folder, kind, *options):
    script = folder / "script.py"
    script.write_text(SCRIPT)
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *options]
    began = time.monotonic()
    done = subprocess.run([*command, script, folder, kind], env=environment, capture_output=True, text=True)
    return done, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_a_lost_rank_ends_all_and_the_same_command_goes_on(tmp_path, kind):
    done, seconds = launch(tmp_path, kind)
    assert done.returncode != 0
    assert seconds < 60 + 30 * (kind == "hang")  # torchrun gives a hanging rank 30 s to end
    if kind == "kill":
        assert "Signal 9 (SIGKILL)" in done.stderr
    else:
        assert "rank 0 has lost another rank, which has ended or has not answered for train.patience=8" in done.stderr
    run = RunDirectory.of(pools_recipe(), tmp_path)
    assert not run.finished
    assert (run.path / "checkpoints/step-00000003/state.json").is_file()
    done, _ = launch(tmp_path, kind)
    assert done.returncode == 0, done.stderr
    straight = train(replace_parallel(pools_recipe(), "ddp"), tmp_path / "straight", quiet=True)
    assert_close_models(run, straight)


@pytest.mark.slow
def test_torchrun_restarts_by_itself(tmp_path):
    done, _ = launch(tmp_path, "kill", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists()
    assert RunDirectory.of(pools_recipe(), tmp_path).finished
