"""Nothing is lost, and nothing goes wrong in silence: each fault ends the run in one line, with a
status that is not 0; the checkpoints before it are whole; and the same command goes on from them to
the end of a run that nothing has disturbed, bit for bit (single.py and ddp.py: that each script
resumes bit for bit is in test_same_run.py)."""

import re

import pytest

from tests.support.processes import SMALL
from tests.support.sample import sampled
from tests.test_checkpoint import assert_bit_equal, steps, tensors
from tests.test_refusals import in_order

OPTIONS = f"{SMALL} --steps 8 --log-every 1 --warmup-steps 3 --save-every 3 --keep 9"
COMMANDS = [
    ("single.py", 0), ("ddp.py", 2), ("zero.py --stage 2", 2), ("fsdp.py", 2), ("tp.py", 2),
    ("cp.py", 2), ("pp.py", 2), ("hybrid_3d.py --tp 2", 2),
]

LOST = "a collective of rank 0 failed ... another process has ended ... --timeout"
NOT_SAVED = "step 6 is not saved ... is not finite: lower --lr"
NOT_WRITTEN = "could not be written to ... File too large ... raise the limit ... are intact"
FULL_DISK = "at(5, resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, 20_000), on={})"
STAGES_RETURN = ("changed(common.model.Transformer, 'forward', "
                 "lambda x, *_, **__: {} if x.ndim else x)")  # all stages but the last

# A command, the number of processes and further options; what is injected (names of inject.py);
# what the line says, "" if the process is killed; the steps of the checkpoints that are left.
FAULTS = [
    # A gradient that overflows in the norm, in a step that is not logged
    *[(*command, "--log-every 9", "gradients_times(1e30, 5)", NOT_SAVED, [3])
      for command in COMMANDS],
    ("single.py", 0, "", "gradients_times(1e30, 5)",  # in one that is logged
     "at step 5 the loss is ... norm nan ... were finite at step 4: lower --lr", [3]),
    ("single.py", 0, "", "after(common.materialise, 'materialise', lambda _, model, *args: "
     "next(model.parameters()).data.fill_(torch.nan))", "not finite: look at the weights", []),
    # A stage that returns something else than the next one expects
    ("hybrid_3d.py --pp 2", 2, "", STAGES_RETURN.format("x.double()"),
     "a stage returns (4, 32, 32) torch.float64 ... (4, 32, 32)", []),
    ("pp.py --schedule zbv", 2, "", STAGES_RETURN.format("(x, x)"),
     "a stage returns a tuple ... (2, 32, 32)", []),
    # Whatever a layer refuses
    ("hybrid_3d.py --pp 2", 2, "", "before(common.model.MLP, 'forward', "
     "lambda *_: common.errors.refuse([(True, 'my words')]))", "error: my words", []),
    # A process that dies, and one that is silent until SIGTERM ends it
    ("ddp.py", 2, "", "at(5, signal_self, 'SIGKILL', on=1)", LOST, [3]),
    ("hybrid_3d.py --pp 2", 2, "--timeout 5",
     "at(5, signal.signal, signal.SIGTERM, signal.SIG_DFL, on=1); at(5, time.sleep, 600, on=1)",
     LOST, [3]),
    # A process that is killed while it writes step 6, or removes step 2
    *[("single.py", 0, "--save-every 2 --keep 2", f"{when} and signal_self('SIGKILL'))", "", left)
      for when, left in [
          ("before(os, 'fsync', lambda _: [*pathlib.Path('out').glob('step-*6.*.tmp')]", [2, 4]),
          ("after(pathlib.Path, 'unlink', lambda _, path, **__: path.match('step-*2.*.old/__*')",
           [4, 6])]],
    # A second signal, a second later, ends the run at once
    ("single.py", 0, "", "at(2, signal_self, 'SIGTERM'); at(2, time.sleep, 1.1); "
     "at(2, signal_self, 'SIGTERM')", "", []),
    # Ctrl-C before the first step ends it at once too
    ("single.py", 0, "", "signal.signal(signal.SIGINT, signal.default_int_handler); "
     "before(common.materialise, 'materialise', lambda *_: signal.raise_signal(signal.SIGINT))",
     "", []),
    # A disk that is full
    ("ddp.py", 2, "", FULL_DISK.format(0), NOT_WRITTEN, [3]),
    ("ddp.py", 2, "--async-save --save-every 8", FULL_DISK.format(1), NOT_WRITTEN, []),
    # A wrong mask, of data and of held-out data
    *[(command, world, "--val-data copy --val-every 1", masked, words, [])
      for command, world in (("single.py", 0), ("pp.py", 2))
      for masked, words in (("no_targets()", "the first batch are 0: if all ... -100"),
                            ("at(2, no_targets)", "no held-out sample has a target"))],
    # Data workers that cannot start, or die, or find other data
    ("single.py", 0, "--workers 1", "tempfile.tempdir = '/tmp' + 67 * '/'",
     "TMPDIR is ... at most 70", []),
    ("single.py", 0, "--workers 2",
     "at(5, lambda: os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL))",
     "DataLoader worker (pid", [3]),
    ("single.py", 0, "--workers 1",  # one that stands still keeps no run that fails from ending
     "at(5, lambda: os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)); "
     "at(5, lambda: common.errors.refuse([(True, 'my words')]))", "error: my words", [3]),
    ("single.py", 0, "",  # which torch may say while another error is described
     "calls = []; at(2, json.loads, ''); before(common.launch, '_describe', lambda _: "
     "calls or calls.append(1) or torch.empty(2**60))", "can't allocate memory", []),
    ("single.py", 0, "--data copy --workers 1",
     "before(common.data, 'load_batches', lambda *_: os.truncate('copy', 100))",
     "copy has changed since the run began", []),
    # A loop that somebody has edited
    ("single.py", 0, "", "Report.log = lambda *_: None", "log was not called in step 1: ", []),
    ("single.py", 0, "", "at(2, sys.exit, 'my words')", "error: my words", []),
]


@pytest.mark.parametrize("command, world, options, inject, words, left", sampled(
    FAULTS, [fault for fault in FAULTS[1:] if "--timeout" not in fault[2] and fault[0] in (
        "single.py", "ddp.py", "hybrid_3d.py --pp 2", "pp.py --schedule zbv")]))
def test_a_fault(run, once, corpus, tmp_path, command, world, options, inject, words, left):
    (tmp_path / "copy").write_text("text " * 20_000)
    options = f"{OPTIONS} --data {corpus} {options}"
    result = run(command, world, options, inject=inject, expect_ok=False)
    assert all(result.statuses), result.output
    assert not re.search("Traceback|Full Schedule", result.output), result.output
    lines = [line.rpartition("\r")[2] for line in result.lines if "error:" in line]
    assert [in_order(words, line) for line in lines] == [True] * bool(words), lines
    assert steps(result.out) == left
    if words in (NOT_SAVED, NOT_WRITTEN):  # who dies, or hears of it in a save, leaves its begin
        assert not list(result.out.glob("step-*.tmp"))
    if left and words in ("", NOT_WRITTEN):
        goes_on(run(command, world, options), left[-1], once(command, world, OPTIONS))


def test_later_batches_without_targets(run, corpus):
    """They have no weight."""
    result = run("ddp.py", 2, f"{OPTIONS} --data {corpus}", inject="at(4, no_targets)")
    assert [bool(record["loss"]) for record in result.history] == [True] * 4 + [False] * 4


def goes_on(again, step, whole):
    """A run ``again`` has resumed after ``step``, and is bit for bit the ``whole`` run."""
    assert f"resuming after step {step}\n" in again.output and " 8/8 [" in again.output
    assert [record["step"] for record in again.history] == list(range(1, 9))
    assert_bit_equal(tensors(again.out), tensors(whole.out))
    assert not [*again.out.glob("*.tmp"), *again.out.glob("*.old")]


@pytest.mark.parametrize("inject, said", [("sys.stderr = None", 0), ("", 1)])
def test_output_never_ends_a_run(run, once, corpus, inject, said):
    """A disk is full; and a stream is closed, as by 2>&-."""
    inject += "\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    result = run("single.py", 0, f"{OPTIONS} --data {corpus}", inject=inject)
    assert result.curve() == once("single.py", 0, OPTIONS).curve()
    assert result.output.count("output is lost ") == said


# Signals


@pytest.mark.parametrize("command, world, name, options", sampled(SIGNALS := [
    ("ddp.py", 2, "SIGTERM", "--async-save --workers 1"),
    ("single.py", 0, "SIGUSR1", "--save-every 0"),
    ("pp.py", 2, "SIGINT", ""), ("hybrid_3d.py --tp 2", 2, "SIGTERM", ""),
], SIGNALS[:2]))
def test_a_signal_to_one_rank_lets_all_save(run, once, corpus, command, world, name, options):
    """They end with status 0; the same command goes on to the same end. A launcher may deliver the
    signal twice, and to data workers too. One that is ignored, as by nohup, stays so."""
    options = f"{OPTIONS} --data {corpus} {options}"
    ignored = "SIGINT" if name == "SIGTERM" else "SIGTERM"
    result = run(command, world, options, inject=(
        # A shell that starts the tests in the background lets them ignore SIGINT.
        f"signal.signal(signal.{name}, signal.SIG_DFL)\n"
        f"signal.signal(signal.{ignored}, signal.SIG_IGN); at(2, signal_self, '{ignored}')\n"
        + 2 * f"at(4, os.killpg, 0, signal.{name}, on={max(world - 1, 0)})\n"))
    if "--save-every 0" in options:
        assert re.fullmatch("stopped after step [45] of 8, and not saved", result.lines[-1])
        assert steps(result.out) == []
        return
    first, last = steps(result.out)
    assert first == 3 and last in (4, 5)
    assert f"stopped after step {last} of 8, saved" in result.lines[-1]
    if command == "ddp.py":
        goes_on(run(command, world, options), last, once(command, world, OPTIONS))
