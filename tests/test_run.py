"""Promise 5: a kill costs steps, never a run. Each fault ends the run with a status that is not 0;
the checkpoints before it are whole; and the same command goes on from them to the end of a run that
nothing has disturbed, bit for bit (of single.py, ddp.py and fsdp.py; of each script: test_soak.py
and test_same_run.py). What a run hears, prints and logs."""

import json
import re
import signal

import pytest

import single
from tests.support.commands import left_over, wait_until
from tests.support.compare import assert_bit_equal
from tests.support.processes import SMALL
from tests.support.sample import rows
from tests.support.words import in_order, refused
from tests.test_checkpoint import steps, tensors

OPTIONS = f"{SMALL} --steps 8 --log-every 1 --warmup-steps 3 --save-every 3 --keep 9"
NOT_FINITE = "the loss is ... gradient norm nan: one of them, ... is not finite: lower --lr (0.00"
REFUSE = "common.options.refuse([(True, 'my words')])"
SILENT = "(signal.signal(signal.SIGTERM, signal.SIG_DFL), time.sleep(60))"
FULL = "no space left on device, or a limit on the size of files"
FULL_DISK = "at(5, resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, 20_000), on=1)"
WRITES = ("before(os, 'fsync', lambda _: [*pathlib.Path('out').glob('step-*6.tmp')] and "
          "signal_self('SIGKILL'))")
AGAIN = "at(2, signal_self, 'SIGTERM'); at(2, time.sleep, 0.6); "


# A command, the number of processes and further options; what is injected (names of inject.py);
# what the line says, nothing if there is none; the steps of the checkpoints that are left. Three
# rows are of steps that are not logged, so of each script; then a gradient that overflows in one
# that is; whatever a layer refuses; a process that dies, and one that is silent, in a step, before
# a save and in it; one that is killed while it writes step 6, when it has, and while it removes
# step 2; a second signal, a second later, and one before the first step, which end the run at once;
# a disk that is full, or cannot be written; a data worker that outlives its run for seconds, and so
# does not lock the folder, and one that dies; what somebody's loop says; a run that dies while it
# evaluates, when it has saved.
@rows("command, world, options, inject, words, left", """
* single.py | 0 | --log-every 9 | gradients_times(1e30, 5) | at step 6 {NOT_FINITE} | 3
* ddp.py | 2 | --log-every 9 | gradients_times(1e30, 5) | at step 6 {NOT_FINITE} | 3
zero.py --stage 2 | 2 | --log-every 9 | gradients_times(1e30, 5) | at step 6 {NOT_FINITE} | 3
fsdp.py | 2 | --log-every 9 | gradients_times(1e30, 5) | at step 6 {NOT_FINITE} | 3
tp.py | 2 | --log-every 9 | gradients_times(1e30, 5) | at step 6 {NOT_FINITE} | 3
cp.py | 2 | --log-every 9 | gradients_times(1e30, 5) | at step 6 {NOT_FINITE} | 3
pp.py | 2 | --log-every 9 | gradients_times(1e30, 5) | at step 6 {NOT_FINITE} | 3
hybrid_3d.py --tp 2 | 2 | --log-every 9 | gradients_times(1e30, 5) | at step 6 {NOT_FINITE} | 3
* single.py | 0 | | gradients_times(1e30, 5) | at step 5 {NOT_FINITE} | 3
* single.py | 0 | | before(common.model.MLP, 'forward', lambda *_: {REFUSE}) | error: my words |
* hybrid_3d.py --pp 2 | 2 | | before(common.model.MLP, 'forward', lambda *_: {REFUSE})
  | error: my words |
* ddp.py | 2 | | at(5, signal_self, 'SIGKILL', on=0) | | 3
fsdp.py | 2 | --async-save | at(5, time.sleep, 3); at(6, signal_self, 'SIGKILL', on=1) | | 3
ddp.py | 2 | --timeout 5 | at(5, lambda: {SILENT}, on=1) | | 3
ddp.py | 2 | --timeout 5 | before(Run, 'save', lambda *_: rank and {SILENT}) | |
ddp.py | 2 | --timeout 5 | before(common.run, 'start_save', lambda *_: rank and {SILENT}) | |
* single.py | 0 | --save-every 2 --keep 2 | {WRITES} | | 2 4
* single.py | 0 | --save-every 2 --keep 2 --async-save | {WRITES}
  | | 2 4
* single.py | 0 | --save-every 2 --keep 2 | after(pathlib.Path, 'rename', lambda _, path, *__:
  path.match('*6.tmp') and signal_self('SIGKILL')) | | 2 4 6
* single.py | 0 | --save-every 2 --keep 2 --async-save | after(pathlib.Path, 'rename', lambda _,
  path, *__: path.match('*6.tmp') and signal_self('SIGKILL')) | | 2 4 6
* single.py | 0 | --save-every 2 --keep 2 | after(os, 'unlink', lambda *_, **__:
  not pathlib.Path('out/step-00000002').exists() and signal_self('SIGKILL')) | | 4 6
* single.py | 0 | --save-every 2 --keep 2 --async-save | after(os, 'unlink', lambda *_, **__:
  not pathlib.Path('out/step-00000002').exists() and signal_self('SIGKILL')) | | 4 6
* single.py | 0 | | {AGAIN} {AGAIN} at(2, signal_self, 'SIGTERM') | |
* single.py | 0 | | signal.signal(signal.SIGINT, signal.default_int_handler);
  before(common.materialise, 'materialise', lambda *_: signal.raise_signal(signal.SIGINT)) | |
* ddp.py | 2 | | {FULL_DISK} | {FULL} | 3
* ddp.py | 2 | --async-save --save-every 7 | {FULL_DISK} | {FULL} |
* single.py | 0 | | at(5, lambda: (os.unlink('out/metrics.jsonl'), os.mkdir('out/metrics.jsonl')))
  | --out ... cannot be read or written: [Errno 21] | 3
* single.py | 0 | --workers 1 | at(5, signal_self, 'SIGKILL') | | 3
* single.py | 0 | --workers 2 | at(5, lambda:
  os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)) | | 3
* single.py | 0 | | at(2, sys.exit, 'my words') | my words |
* ddp.py | 2 | --val-data stdlib --val-batches 1 --val-every 3
  | before(Run, 'validation_loss', lambda *_: signal_self('SIGKILL')) | | 3
pp.py | 2 | --val-data stdlib --val-batches 1 --val-every 6
  | before(Run, 'validation_loss', lambda *_: signal_self('SIGKILL')) | | 3 6
single.py | 0 | --val-data stdlib --val-batches 1 --val-every 8
  | before(Run, 'validation_loss', lambda *_: signal_self('SIGKILL')) | | 3 6 8
""", NOT_FINITE=NOT_FINITE, REFUSE=REFUSE, SILENT=SILENT, WRITES=WRITES, AGAIN=AGAIN, FULL=FULL,
      FULL_DISK=FULL_DISK)
def test_a_fault(run, once, corpus, command, world, options, inject, words, left):
    options = f"{OPTIONS} --data {corpus} {options}"
    result = run(command, world, options, inject=inject, expect_ok=False)
    assert all(result.statuses), result.output
    left = [*map(int, str(left).split())]
    assert steps(result.out) == left
    if words:
        if "--pp" not in command:  # there another rank loses its peer
            assert "Traceback" not in result.output, result.output
        lines = [line for line in result.lines if "error:" in line or words in line]
        assert lines and all(in_order(words, line) for line in lines), result.output
    elif left:
        goes_on(run(command, world, options), left[-1], once(command, world, OPTIONS))


def test_a_data_worker_ends_with_a_run_that_dies_while_it_starts(run, corpus):
    """Torch looks for the parent of a worker as soon as it has read: that one is gone."""
    inject = ("before(os, 'setpgrp', lambda: (os.kill(os.getppid(), signal.SIGKILL), "
              "time.sleep(0.5), pathlib.Path('worker').write_text(str(os.getpid()))))")
    result = run("single.py", 0, f"{OPTIONS} --data {corpus} --workers 1", inject=inject,
                 expect_ok=False)
    worker = result.out.parent / "worker"
    wait_until(worker.exists)
    wait_until(lambda: worker.read_text() and not left_over(result.out.parent))


def goes_on(again, step, whole):
    """A run ``again`` has resumed after ``step``, and is bit for bit the ``whole`` run."""
    resuming = rf"step-{step:08d} after step {step}(; the code was \w+, is \w+)?\n"  # injected
    assert re.search(resuming, again.output) and " 8/8 [" in again.output
    assert [step for step, _ in again.curve("step", "loss")] == list(range(1, 9))
    assert again.curve() == whole.curve()
    assert_bit_equal(tensors(again.out), tensors(whole.out))
    assert not list(again.out.glob("*.tmp"))


# Signals


@rows("command, world, name, options", """
* ddp.py | 2 | SIGTERM | --async-save --workers 1
fsdp.py | 2 | SIGUSR1 |
pp.py | 2 | SIGINT |
hybrid_3d.py --tp 2 | 2 | SIGTERM | --workers 1
""")
def test_a_signal_to_one_rank_lets_all_save(run, once, corpus, command, world, name, options):
    """They end with status 0; the same command goes on to the same end. A launcher may deliver the
    signal twice, and to data workers too: to the group, from a process that is not their parent."""
    options = f"{OPTIONS} --data {corpus} {options}"
    kill = f"at(4, subprocess.call, ['sh', '-c', 'kill -s {name[3:]} 0'], on={world - 1})\n"
    result = run(command, world, options, inject="import subprocess\n" + 2 * kill)
    first, last = steps(result.out)
    assert first == 3 and last in (4, 5)
    assert result.lines[-1] == (
        f"stopped after step {last} of 8, saved: the same command continues from there")
    if command == "ddp.py":
        goes_on(run(command, world, options), last, once(command, world, OPTIONS))


DURING_SAVE = ("sent = []; before(os, 'fsync', lambda _: [*pathlib.Path('out').glob('*{}.tmp')] "
               "and not sent and (sent.append(1), signal_self('SIGTERM')))")


# In a save, also of the last step, in an evaluation, and while data workers start: the run ends
# after the next step
@rows("options, inject, last_line, left", f"""
| at(8, signal_self, 'SIGTERM') | final loss ... saved in | 3 6 8
--workers 1 | before(os, 'setpgrp', lambda: callable(signal.getsignal(signal.SIGTERM)) and
  os.killpg(0, signal.SIGTERM)) | stopped after step 1 | 1
| {DURING_SAVE.format(6)} | stopped after step 7 of 8, saved | 3 6 7
| {DURING_SAVE.format(8)} | final loss ... saved in | 3 6 8
--val-data {{val}} --val-every 4 --val-batches 1
  | before(Run, 'validation_loss', lambda run: run.done < 5 and signal_self('SIGTERM'))
  | stopped after step 5 | 3 5
--save-every 0 | at(4, signal_self, 'SIGTERM') | stopped after step 4 ... nothing is saved |
""")
def test_when_a_signal_comes(run, corpus, held_out, options, inject, last_line, left):
    options = f"{OPTIONS} --data {corpus} {options}".replace("{val}", held_out)
    result = run("single.py", 0, options, inject=inject)
    assert in_order(last_line, result.lines[-1]), result.lines[-1]
    assert steps(result.out) == [*map(int, str(left).split())]
    assert [record["step"] for record in run("single.py", 0, options).history
            if "loss" in record] == list(range(1, 9))


def test_without_out_nothing_is_written(run, corpus, tmp_path):
    """A line at the start says so, and one after a signal."""
    result = run("ddp.py", 2, f"{OPTIONS} --data {corpus}", pass_out=False,
                 inject="at(4, signal_self, 'SIGTERM')")
    assert "nothing is saved: there is no --out" in result.lines
    assert result.lines[-1] == "stopped after step 4 of 8, nothing is saved"
    assert not list(tmp_path.iterdir())


# The run folder

ANOTHER = """
import runpy
def start_another():
    os.mkdir("out/step-00000009.tmp")
    if not (pid := os.fork()):
        runpy.run_path(sys.argv[0], run_name="__main__")
    os.waitpid(pid, 0)
"""


def test_two_starts_of_one_folder(run, once, corpus):
    """The second is refused, and does not disturb the first: a save stays that is on its way."""
    result = run("single.py", 0, f"{OPTIONS} --data {corpus}",
                 inject=f"{ANOTHER}\nat(5, start_another)")
    (line,) = [line for line in result.lines if "error:" in line]
    assert line == (f"single.py: error: --out {result.out}: another process uses this folder: wait "
                    "until it ends, or choose another one")
    assert (result.out / "step-00000009.tmp").exists()
    assert_bit_equal(tensors(result.out), tensors(once("single.py", 0, OPTIONS).out))


@pytest.fixture
def start(corpus, tmp_path, capsys):
    """Run single.py in this process: gives what it prints, and the steps in its metrics.jsonl."""

    def start(options, out="out"):
        options = f"{SMALL} --data {corpus} --log-every 1 --out {tmp_path / out} {options}"
        single.main(options.split())
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        numbers = [json.loads(line)["step"] for line in lines if "step" in line]
        return capsys.readouterr().out, numbers

    return start


def test_a_run_goes_on(start, run, corpus, tmp_path):
    """The first lines say what has changed. Lines of metrics.jsonl after the checkpoint go, and
    half a line; a run without a checkpoint begins again. The process has its own handlers again."""
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
    handlers = [*map(signal.getsignal, numbers)]
    start("--steps 2")
    assert [*map(signal.getsignal, numbers)] == handlers
    with open(tmp_path / "out/metrics.jsonl", "a") as file:
        file.write('{"step": 3}\n\na note\n{"step": 4')
    said, lines = start("--steps 4 --lr 0.1")
    assert in_order(f"resuming {tmp_path}/out/step-00000002 after step 2; --steps was 2, is 4 ... "
                    "; --lr was 0.002, is 0.1", said)
    assert lines == [1, 2, 3, 4]
    said, lines = start("--steps 4")
    nothing = f"nothing to train: {tmp_path}/out has done all of --steps 4: raise it, or for a new"
    assert said.endswith(f"{nothing} run take another --out\n") and lines == [1, 2, 3, 4]
    again = run("hybrid_3d.py", 2, f"{SMALL} --data {corpus} --steps 5")
    (line,) = re.findall("resuming .*", again.output)
    assert "Config(" not in line  # a mixture's, of which both have the same
    for number in 3, 2:
        said, lines = start(f"--steps {number} --save-every 0", "unsaved")
        assert lines == [1, 2, 3][:number] and said.endswith("nothing is saved\n")


def test_a_run_goes_on_from_another(start, tmp_path):
    start("--steps 2")
    source = tmp_path / "out/step-00000002"
    options = f"--from {source} --rope-theta 99"  # for longer texts
    for saves in "--save-every 0", "":  # the second start too, since the first has saved nothing
        said, lines = start(f"--steps 3 {options} {saves}", "new")
        assert in_order(f"resuming {source} after step 2 ... ; rope_theta was 10000.0, is 99", said)
        assert lines == [3]
    with refused("rope_theta is 99.0 in .* and 10000.0 in this run"):
        start("--steps 5", "new")
    said, lines = start(f"--steps 5 {options}", "new")  # its own comes first
    assert "new/step-00000003 after step 3" in said and lines == [3, 4, 5]
    assert steps(tmp_path / "out") == [2] and steps(tmp_path / "new") == [3, 5]
