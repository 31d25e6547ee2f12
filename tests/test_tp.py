"""tp.py: the curve of single.py, Megatron's collectives, and words for what cannot be split."""

import json

import pytest
import torch

from common.model import ModelConfig, Transformer
from tests.sample import sampled, thorough
from tests.test_same_run import EXACT, furthest

FOUR_HEADS = f"{EXACT} --num-key-value-heads 4"  # enough for 4 ranks
LAYERS, B, T, D, V = 3, 8, 32, 64, 256
SIZES = (
    f"--vocab-size {V} --hidden-size {D} --intermediate-size 128 --num-hidden-layers {LAYERS} "
    f"--batch-size {B} --num-attention-heads 4 --num-key-value-heads 4 --seq-len {T} --steps 4 "
    "--save-every 0"
)
MODULE = Transformer(ModelConfig(V, D, 128, LAYERS, 4, 4))
TENSORS = len(list(MODULE.parameters()))
P = sum(p.nbytes for p in MODULE.parameters())
NORMS = sum(p.nbytes for p in MODULE.parameters() if p.ndim == 1)


@pytest.mark.parametrize("world, grad_accum", sampled([(1, 2), (2, 1), (2, 2), (4, 2)], [(2, 2)]))
@pytest.mark.parametrize("command", ["tp.py", "tp.py --no-sequence-parallel"])
def test_equals_single(run, single, corpus, command, world, grad_accum):
    result = run(command, world, f"{FOUR_HEADS} --data {corpus} --grad-accum {grad_accum} "
                                 "--check-samples")
    assert furthest(result.curve(), single(FOUR_HEADS)) < 1e-10


@pytest.mark.parametrize("command, world", [
    ("tp.py", 2), ("tp.py", 4), ("tp.py --no-sequence-parallel", 2),
])
def test_first_gradients_equal_those_of_single(run, corpus, command, world):
    options = f"{FOUR_HEADS} --data {corpus} --steps 1"
    expected = torch.load(run("tests/first_gradients.py single.py", 0, options, out="single").out
                          / "gradients.pt")
    gradients = torch.load(run(f"tests/first_gradients.py {command}", world, options).out
                           / "gradients.pt")
    assert gradients.keys() == expected.keys() and len(expected) == 9 * 2 + 3
    for name in expected:
        assert expected[name].norm() > 1e-4
        assert (gradients[name] - expected[name]).abs().max() < 1e-12, name


@pytest.mark.parametrize("world", sampled([2, 4], [2]))
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_collectives_are_megatrons(run, corpus, sequence_parallel, world):
    """Per layer, forward as backward: 2 all-gathers and 2 reduce-scatters, or 2 all-reduces."""
    flag = "" if sequence_parallel else "--no-sequence-parallel"
    out = run("tp.py", world, f"{SIZES} {flag} --data {corpus}").out
    found = json.loads((out / "summary.json").read_text())
    kinds = {c["collective"]: (c["calls"], c["bytes"]) for c in found["collectives"]}
    ring = (world - 1) / world
    X = B * T * D * 4
    # Loss: 3 numbers per token. Clipping: a norm per tensor, once. Norms: their gradients, once.
    rest = 2 * ring * (3 * B * T * 4 + TENSORS * 4)
    if sequence_parallel:
        calls = 4 * LAYERS + 2  # and one each for embedding and head
        assert kinds == {
            "all-gather": (calls, calls * X * ring), "reduce-scatter": (calls, calls * X * ring),
            "all-reduce": (3 + 1 + 1, rest + 2 * ring * NORMS),
        }
    else:
        calls = 4 * LAYERS + 2
        assert kinds == {"all-reduce": (calls + 3 + 1, calls * 2 * X * ring + rest)}
    assert found["sent"] == found["theory"]["sent"]["bytes"] + 2 * ring * TENSORS * 4
    assert found["held"]["parameters"] == found["held"]["gradients"] == (P - NORMS) / world + NORMS


@thorough
def test_traffic_with_bfloat16_checkpointing_and_accumulation(run, corpus):
    for i, options in enumerate((
        "--dtype bfloat16", "--dtype bfloat16 --no-sequence-parallel",
        "--activation-checkpointing --grad-accum 2",
        "--activation-checkpointing --dtype bfloat16 --no-sequence-parallel",
    )):
        out = run("tp.py", 2, f"{SIZES} {options} --data {corpus}", out=f"out-{i}").out
        found = json.loads((out / "summary.json").read_text())
        assert found["sent"] == found["theory"]["sent"]["bytes"] + TENSORS * 4, options


@thorough
def test_activations_fall(run, corpus):
    """With sequence parallelism by the number of ranks, all but the tokens; without, the stream
    stays whole."""
    peak = {}
    for options in ("", "--no-sequence-parallel"):
        for world in (1, 2, 4):
            out = run("tp.py", world, f"{SIZES} --seq-len 128 {options} --data {corpus}",
                      out=f"{world}{options}").out
            peak[options, world] = (
                json.loads((out / "summary.json").read_text())["peak"]["activations"]
            )
    for world in (2, 4):
        share = peak["", world] / peak["", 1]
        assert 1 / world <= share < 1.35 / world  # what is gathered for a matrix is whole briefly
        assert peak["--no-sequence-parallel", world] > 1.15 * peak["", world]


@pytest.mark.parametrize("options, message", [
    ("--num-attention-heads 6 --num-key-value-heads 2 --hidden-size 48",
     "--num-attention-heads 6 cannot be split over 4"),
    ("--num-key-value-heads 2",
     "--num-key-value-heads 2 cannot be split over 4 tensor-parallel ranks: use a multiple of 4"),
    ("--intermediate-size 90", "--intermediate-size 90 cannot be split"),
    ("--vocab-size 257", "--vocab-size 257 cannot be split"),
    ("--seq-len 30", "--seq-len 30 cannot be split"),
])
def test_bad_input(run, options, message):
    (line,) = run("tp.py", 4, options, expect_ok=False).lines
    assert message in line


def test_different_rows_are_noticed(run, corpus):
    options = f"{SIZES} --data {corpus}"
    result = run("tests/different_rows.py tp.py", 2, f"{options} --check-samples", expect_ok=False)
    assert (sum("have read different samples" in line for line in result.lines) == 1
            and all(result.statuses))
    assert run("tp.py", 2, f"{options} --check-samples", out="same").ok
