"""What a user sees: the terminal, the run folder, and how a run ends."""

import dataclasses
import json
import re

import pytest
import torch

from common.model import PRESETS
from common.options import default_dtype, option_parser, parse_options
from common.services import report
from common.services.checkpoint_files import list_checkpoints, step_of
from common.services.counting import HELD, bytes_table

SMALL = "--hidden-size 32 --seq-len 32 --batch-size 8"


@pytest.fixture(scope="module")
def result(once):
    """A run on 2 ranks, whose peak is 0.1 TFLOP/s each."""
    return once("ddp.py", 2, f"{SMALL} --steps 5 --log-every 3 --save-every 4 --grad-accum 2 "
                "--val-data {val} --profile",
                inject="common.services.report._peak_tflops = lambda device: 0.1")


def test_the_terminal(result):
    bars = [line for line in result.lines if "|" in line and "/5 [" in line]
    start, model, batch, data, final, traces, *table, note = [
        line for line in result.lines if line not in bars]
    assert start == "ddp.py: 2 processes on cpu (gloo), rank grid dp 2"
    assert re.fullmatch(r"model tiny: [\d,]+ parameters, float32", model)
    assert batch == "batch 8 = 2 samples x 2 accumulation steps x 2 data-parallel ranks"
    assert re.fullmatch(r"[\d,]+ samples of 32 tokens in .*corpus.txt", data)
    for words in ("5/5", "loss", "val loss", "grad norm", "tokens/s"):
        assert words in bars[-1]
    assert re.match(r"final loss [\d.]+ \| val loss [\d.]+ \| [\d,]+ tokens/s \| MFU .*run-", final)
    assert traces == f"traces of a few steps: {result.out}/trace-rank*.json"
    assert re.split("  +", table[0]) == [
        "bytes on rank 0", "after backward", "at the peak", "theory"]
    assert note.startswith("in all is less than the sum")
    rows = [re.split(r"  +", line) for line in table[1:]]
    assert [(row[0], " = " in row[-1]) for row in rows] == [
        ("parameters", True), ("gradients", True), ("optimizer states", True),
        ("activations", False), ("in all", False), ("sent in a step", True)]
    assert rows[0][1] == rows[0][2] == rows[0][3].removeprefix("P = ")
    for moment, shown in ("held", rows[3][1]), ("peak", rows[3][2]):
        assert shown == f"{result.summary[moment]['activations']:,}"


def test_the_table_of_a_compiled_run():
    """It has no sum: what compiled layers keep is not seen. On a GPU it has what was allocated."""
    sizes = dict.fromkeys([*HELD, "in all"], 1000)
    *_, activations, allocated, _ = bytes_table(0, sizes, sizes, 0, {}, 5000, compiled=True)
    assert re.split("  +", activations) == [
        "activations", "1,000", "1,000", "without what compiled layers keep"]
    assert allocated.split() == ["torch", "allocated", "5,000"]


def test_metrics_lines_and_the_share_of_the_peak(result):
    records = [record for record in result.history if "loss" in record]
    assert [record["step"] for record in records] == [1, 3, 5]
    flops = dataclasses.replace(PRESETS["tiny"], hidden_size=32, head_dim=4).flops_per_token(32)
    for record in records:
        assert record.keys() == {
            "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu"}
        assert record["tokens"] == record["step"] * 8 * 32
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / 0.2e12)
    assert f"MFU {result.summary['mfu']:.1%}" in result.output
    assert [step_of(path) for path in list_checkpoints(result.out)] == [4, 5]


def test_counting_can_be_left_out_and_its_error_ends_nothing(run, corpus):
    options = f"{SMALL} --steps 3 --data {corpus}"
    uncounted = run("single.py", 0, f"{options} --no-count", out="uncounted",
                    inject="tempfile.tempdir = '/tmp' + 67 * '/'")  # only workers need a short one
    assert uncounted.lines[0] == "single.py: 1 process on cpu"
    fails = run("single.py", 0, options, out="fails", inject=(
        "counting.StepCounter.watch = counting._keep_error(lambda *_: 1 / 0)\n"
        "import atexit; atexit.register(print, 'at the end')"))
    assert "bytes were not counted: ZeroDivisionError: division by zero" in fails.output
    assert fails.lines[-1] == "at the end"  # where loggers finish
    for result in (uncounted, fails):
        assert "sent in a step" not in result.output and "held" not in result.summary
        assert result.curve("loss") == uncounted.curve("loss")
        assert result.summary["loss"] == uncounted.curve("loss")[-1][0]


def test_bfloat16_is_the_default_where_hardware_has_it(monkeypatch):
    for has_it in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                            lambda including_emulation: has_it or including_emulation)
        gpu = default_dtype(torch.device("cuda", 0))
        assert gpu == ("bfloat16" if has_it else "float32")
    assert default_dtype(torch.device("cpu")) == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = parse_options(option_parser(""), ["--device", "cpu"])
    assert args.compute_dtype == torch.float32


def test_the_peak_of_a_gpu(monkeypatch):
    """In 10^12 operations per second, by its name."""
    for name, peak in {"L40": 0, "L40S": 362, "L4": 121, "H100 PCIe": 756, "H100 80GB HBM3": 989,
                       "A100-SXM4-80GB": 312}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: f"NVIDIA {name}")
        assert report._peak_tflops(torch.device("cuda")) == peak


def test_profile_writes_a_trace_per_rank(result):
    # What a torch with CUDA says on a machine without GPUs
    said = re.sub("ERROR.*DeviceProperties.*\n", "", result.output).lower()
    assert "error" not in said and "warn" not in said and "usdt" not in said  # of Kineto
    for rank in (0, 1):
        events = json.loads((result.out / f"trace-rank{rank}.json").read_text())["traceEvents"]
        names = " ".join(event.get("name", "") for event in events)
        assert "allreduce" in names and "ProfilerStep#3" in names
        assert "ProfilerStep#2" not in names  # that one is counted, which takes its time


def test_help_comes_once_and_waits_for_no_rank(run):
    """Rank 0 has printed it and ended before rank 1 begins."""
    result = run("ddp.py", 2, "--help", pass_out=False, timeout=60, inject="time.sleep(rank)")
    assert result.output.count("usage:") == 1
    assert run("single.py", 0, "--help", pass_out=False).lines[0].startswith("usage: single.py")
    for words in ("all-reduce of the gradients", "--num-key-value-heads N",
                  "optimizer steps in the whole run", "run folder:"):
        assert words in result.output
