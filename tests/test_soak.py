"""Kills at random moments, over all scripts: every run ends as if nothing had happened.

    bash run.sh test tests/test_soak.py --all --kills 500 --seed 7
"""

import os
import random
import resource
import signal
import time

from tests.sample import thorough
from tests.test_checkpoint import assert_bit_equal, tensors
from tests.test_launch import RUN, children, curve, finish, left_over, start, wait_until
from tests.test_same_run import MODEL

COMMANDS = ["single.py", "ddp.py", "zero.py --stage 2", "fsdp.py", "tp.py", "cp.py", "pp.py",
            "hybrid_3d.py --tp 2"]
OPTIONS = (f"{MODEL} --seq-len 32 --batch-size 8 --log-every 1 --warmup-steps 3 --dtype float64 "
           "--save-every 1 --check-replicas 3")


def a_process(processes, launcher):
    os.kill(random.choice(processes), signal.SIGKILL)


def the_launcher(processes, launcher):
    os.kill(launcher, signal.SIGKILL)


def all_at_once(processes, launcher):
    for pid in (launcher, *processes):
        os.kill(pid, signal.SIGKILL)


def a_process_that_has_stopped(processes, launcher):
    victim = random.choice(processes)
    os.kill(victim, signal.SIGSTOP)
    time.sleep(random.uniform(0, 2))
    os.kill(victim, signal.SIGKILL)


def preempt(processes, launcher):
    os.kill(launcher, random.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]))


def preempt_and_kill(processes, launcher):
    """While it saves because it was asked to."""
    preempt(processes, launcher)
    time.sleep(random.uniform(0, 0.5))
    for pid in (launcher, *processes):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended
            pass


KILLS = [a_process, the_launcher, all_at_once, a_process_that_has_stopped, preempt,
         preempt_and_kill, "a full disk"]


def lines(folder):
    log = folder / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


@thorough
def test_kills_at_random_moments(server, corpus, tmp_path, pytestconfig):
    kills, seed = pytestconfig.getoption("--kills"), pytestconfig.getoption("--seed")
    random.seed(seed)
    plan = (KILLS * kills)[:kills]  # every kind as often
    random.shuffle(plan)
    for place, command in enumerate(COMMANDS):
        own = plan[place :: len(COMMANDS)]
        script, *more = command.split()
        folder = tmp_path / script
        folder.mkdir()
        options = [*more, *OPTIONS.split(), "--data", corpus, "--steps", str(20 + 10 * len(own))]
        world = 0 if script == "single.py" else 2
        whole = server.run(script, world, options, folder=folder, out="whole").out
        run = [*RUN, script, *options, "--out", folder / "out"]
        number = {} if script == "single.py" else {"NPROC": "2"}
        for kill in own:
            if kill == "a full disk":  # files can grow no further: the next save fails
                before = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
                process = start(run, folder, **number)
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
                ours, found, _ = finish(process).partition("could not be written to")
                assert found and "Traceback" not in ours, ours
            else:
                process = start(run, folder, **number)
                enough = lines(folder / "out") + random.randint(1, 6)
                wait_until(lambda: lines(folder / "out") >= enough or process.poll() is not None)
                time.sleep(random.uniform(0, 0.2))
                assert process.poll() is None, finish(process)
                kill(children(process.pid) or [process.pid], process.pid)
                finish(process)
            wait_until(lambda: not left_over(folder / "out"))
        server.run(script, world, options, folder=folder)
        assert curve(folder / "out") == curve(whole), f"{command}: {own}"
        last = 20 + 10 * len(own)
        assert_bit_equal(tensors(folder / "out", last), tensors(whole, last))
