"""Kills at random moments, over all scripts: every run ends as if nothing had happened.

    bash run.sh test tests/test_soak.py --all --kills 500 --seed 7
"""

import contextlib
import os
import random
import signal
import time

import pytest

from tests.support.processes import Result
from tests.support.sample import thorough
from tests.test_checkpoint import assert_bit_equal, tensors
from tests.test_launch import OPTIONS, RUN, children, finish, left_over, logged, start, wait_until

COMMANDS = ["single.py", "ddp.py", "zero.py --stage 2", "fsdp.py", "tp.py", "cp.py", "pp.py",
            "hybrid_3d.py --tp 2", "diloco.py --inner-steps 3"]


KILLS = ["a process", "the launcher", "all at once", "preempt", "preempt and kill"]


def kill(kind, processes, launcher):
    """By a signal that asks the run to stop, or by SIGKILL, also while it saves because of one."""
    if kind.startswith("preempt"):
        os.kill(launcher, random.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]))
        time.sleep(random.uniform(0, 0.5))
    if kind == "preempt":
        return
    victims = {"a process": [random.choice(processes)], "the launcher": [launcher]}
    for pid in victims.get(kind, [launcher, *processes]):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGKILL)


def disturb(kind, run, folder):
    """Start a run, and end it after a few more steps."""
    process, enough = start(run, folder, NPROC="2"), logged(folder / "out") + random.randint(1, 6)
    wait_until(lambda: logged(folder / "out") >= enough or process.poll() is not None)
    time.sleep(random.uniform(0, 0.2))
    assert process.poll() is None, finish(process)
    kill(kind, children(process.pid) or [process.pid], process.pid)
    finish(process)
    wait_until(lambda: not left_over(folder))


@thorough
@pytest.mark.parametrize("place", range(len(COMMANDS)))
def test_kills_at_random_moments(server, corpus, tmp_path, pytestconfig, place):
    kills, seed = pytestconfig.getoption("--kills"), pytestconfig.getoption("--seed")
    random.seed(seed)
    plan = (KILLS * kills)[:kills]  # every kind as often
    random.shuffle(plan)
    script, *more = COMMANDS[place].split()
    own = plan[place :: len(COMMANDS)]
    world, last = 0 if script == "single.py" else 2, 8 + 8 * len(own)
    options = [*more, *OPTIONS.split(), "--save-every", "1", "--data", corpus, "--steps", str(last)]
    whole = server.run(script, world, options, folder=tmp_path, out="whole").out
    random.seed(f"{seed} {place}")
    (tmp_path / "work").mkdir()
    for kind in own:
        run = RUN if world else ["env", "-u", "NPROC", *RUN]
        disturb(kind, [*run, script, *options, "--out", "out"], tmp_path / "work")
    out = server.run(script, world, options, folder=tmp_path / "work").out
    found, expected = (Result([0], "", folder) for folder in (out, whole))
    assert found.curve("step", "loss", "grad_norm") == expected.curve(
        "step", "loss", "grad_norm"), own
    assert_bit_equal(tensors(out, last), tensors(whole, last))
