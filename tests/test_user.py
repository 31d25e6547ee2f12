"""What a user sees: the terminal, metrics.jsonl, and the help."""

import re

import pytest

from common.experts import MixtureConfig
from common.model import PRESETS
from tests.support.processes import SMALL
from tests.support.words import in_order
from tests.test_checkpoint import steps
from tools.bench import flops_per_token, peak_tflops


@pytest.fixture
def result(once):
    return once("ddp.py", 2, f"{SMALL} --steps 5 --log-every 3 --save-every 4 --grad-accum 2 "
                "--val-data {val}")


def test_the_terminal(result):
    bars = [line for line in result.lines if "|" in line and "/5 [" in line]
    start, model, batch, data, final = [line for line in result.lines if line not in bars]
    assert start == "ddp.py on CPU (gloo), rank grid dp 2"
    assert re.fullmatch(r"model tiny: [\d,]+ parameters, float32", model)
    assert batch == "batch 8 = 2 samples x 2 accumulation steps x 2 data-parallel ranks"
    assert re.fullmatch(r"[\d,]+ samples", data)
    shown = "5/5 ... loss= ... grad_norm= ... tokens_per_second= ... val_loss="
    assert in_order(shown, bars[-1]), bars[-1]
    found = re.fullmatch(r"final loss ([\d.]+) \| grad_norm [\d.]+ \| tokens_per_second [\d,.]+ "
                         rf"\| val_loss ([\d.]+) \| saved in {result.out}", final)
    last, evaluated = result.curve("loss")[-1], result.curve("val_loss")[-1]
    assert found and list(found.groups()) == [f"{x:.4g}" for x in (*last, *evaluated)]


def test_lines_of_metrics(result):
    """Every 3 steps, and the first, the last, and those that are saved or evaluated."""
    records = [record for record in result.history if "loss" in record]
    assert [record["step"] for record in records] == [1, 3, 4, 5]
    for record in records:
        assert record.keys() == {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second"}
        assert record["tokens"] == record["step"] * 8 * 32
    assert [record.keys() for record in result.history[4:]] == [{"step", "val_loss"}]
    assert steps(result.out) == [4, 5]


def test_mfu():
    """By the name of a GPU, and by PaLM's count of operations."""
    for name, peak in {"L40": 0, "L40S": 362, "L4": 121, "H100 PCIe": 756, "H100 80GB HBM3": 989,
                       "A100-SXM4-80GB": 312}.items():
        assert peak_tflops(f"NVIDIA {name}") == peak
    # 4 layers of width 128, 4 of 8 heads have keys and values: 6 * (4 * 128 * (3 * 128 + 3 * 352) +
    # 128 * 256) + 6 * 4 * 128 * 128
    tiny = PRESETS["tiny"]
    assert flops_per_token(tiny, 128) == 5_013_504
    mixture = MixtureConfig(**vars(tiny) | {"num_experts": 4, "expert_size": 64})
    assert flops_per_token(mixture, 128) == 2_961_408  # and 4 + 3 * 2 * 64 for 3 * 352


def test_help_comes_once_and_waits_for_no_rank(run):
    """Rank 0 has printed it and ended before rank 1 begins."""
    result = run("ddp.py", 2, "--help", pass_out=False, timeout=60, inject="time.sleep(rank)")
    assert result.output.count("usage:") == 1 and "rror" not in result.output
    said = "all-reduce of the gradients ... optimizer steps in ... --num-key-value-heads X ... run:"
    assert in_order(said, result.output), result.output
