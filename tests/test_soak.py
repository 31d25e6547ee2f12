"""Kills at random moments, over all scripts: every run ends as if nothing had happened.

    bash run.sh test tests/test_soak.py --all --kills 500 --seed 7
"""

import contextlib
import os
import random
import signal
import time

from tests.support.commands import RUN, children, finish, left_over, logged, start, wait_until
from tests.support.compare import assert_bit_equal, saved
from tests.support.processes import SMALL
from tests.support.sample import rows, thorough

OPTIONS = f"{SMALL} --log-every 1 --dtype float64 --save-every 1"
KILLS = ["a process", "the launcher", "all at once", "preempt", "preempt and kill"]


def kill(kind, processes, launcher):
    """By a signal that asks the run to stop, or by SIGKILL, also while it saves because of one."""
    if kind.startswith("preempt"):
        os.kill(launcher, random.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]))
        time.sleep(random.uniform(0, 0.5))
    if kind == "preempt":
        return
    victims = [random.choice(processes)] if kind == "a process" else [launcher, *processes]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGKILL)
        if kind == "the launcher":  # those that it has started train on without it
            time.sleep(random.uniform(0, 0.5))


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
@rows("place, command, world", """
0 | single.py | 0
1 | ddp.py | 2
2 | zero.py | 2
3 | fsdp.py --async-save | 2
4 | tp.py | 2
5 | cp.py | 2
6 | pp.py | 2
7 | hybrid_3d.py --tp 2 | 2
""")
def test_kills_at_random_moments(server, corpus, tmp_path, pytestconfig, place, command, world):
    kills, seed = pytestconfig.getoption("--kills"), pytestconfig.getoption("--seed")
    random.seed(seed)
    plan = (KILLS * kills)[:kills]  # every kind as often
    random.shuffle(plan)
    own = plan[place::8]
    last = 8 + 8 * len(own)
    options = [*OPTIONS.split(), "--data", corpus, "--steps", str(last)]
    whole = server.run(command, world, options, folder=tmp_path, out="whole")
    random.seed(f"{seed} {place}")
    (tmp_path / "work").mkdir()
    run = RUN if world else ["env", "-u", "NPROC", *RUN]
    for kind in own:
        disturb(kind, [*run, *command.split(), *options, "--out", "out"], tmp_path / "work")
    found = server.run(command, world, options, folder=tmp_path / "work")
    names = "step", "loss", "grad_norm"
    assert found.curve(*names) == whole.curve(*names), own
    assert_bit_equal(saved(found, last), saved(whole, last))
