"""cp.py: each attention is exact, sends what it says, and the ring never sees a whole sequence."""

import functools
import json

import pytest
import torch

from tests.sample import sampled, thorough
from tests.test_same_run import BASE, EXACT, MODEL, furthest

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BATCH = 2, 4, 2, 12, 24  # of BASE

# Attention, world size, further options; 3 ranks need another sequence, 4 with ulysses more heads
RUNS = [
    ("ring", 1, ""),
    ("ring", 2, ""),
    ("ring", 2, "--grad-accum 2 --activation-checkpointing"),
    ("ring", 3, "--seq-len 36"),
    ("ring", 3, "--seq-len 36 --grad-accum 2"),
    ("ring", 4, ""),
    ("ring", 4, "--grad-accum 2"),
    ("ulysses", 2, ""),
    ("ulysses", 2, "--grad-accum 2 --activation-checkpointing"),
    ("ulysses", 4, "--num-key-value-heads 4 --grad-accum 2"),
    ("allgather", 2, "--grad-accum 2 --activation-checkpointing"),
    ("allgather", 3, "--seq-len 36"),
    ("allgather", 4, "--grad-accum 2"),
]
SAMPLE = [RUNS[0], RUNS[2], RUNS[3], RUNS[9], RUNS[11]]  # without --all


def option(options, name, otherwise):
    words = options.split()
    return int(words[words.index(name) + 1]) if name in words else otherwise


def expected_traffic(attention, n, options, size, gradient_size):
    """By (collective, group): how many there are in a step, and what one rank sends in them. In
    bytes, of ``size`` per key or value, ``gradient_size`` per element of their gradients."""
    accum, T = option(options, "--grad-accum", 1), option(options, "--seq-len", 32)
    kv_heads = option(options, "--num-key-value-heads", KV_HEADS)
    times = LAYERS * accum
    forward = 2 if "--activation-checkpointing" in options else 1
    positions = BATCH // accum * T // n * HEAD_DIM
    kv, q = 2 * kv_heads * positions, HEADS * positions  # elements on a rank
    if attention == "ring" and n == 1:
        return {}
    gathered = (n - 1) * kv
    if attention == "ring":
        transfers = [forward * kv * size, kv * size, kv * gradient_size]
        return {("send", "cp"): (times * (forward + 2) * (n - 1), times * sum(transfers) * (n - 1))}
    if attention == "ulysses":
        calls = times * (forward + 1) * 4
        return {("all-to-all", "cp"): (calls,
                                       times * (forward + 1) * (kv + 2 * q) * size * (n - 1) // n)}
    return {
        ("all-gather", "cp"): (times * (forward + 1), times * (forward + 1) * gathered * size),
        ("reduce-scatter", "cp"): (times, times * gathered * gradient_size),
    }


def check_traffic(out, attention, n, options, size, gradient_size):
    summary = json.loads((out / "summary.json").read_text())
    counted = {(c["collective"], c["group"]): (c["calls"], c["bytes"])
               for c in summary["collectives"]}
    counted.pop(("all-reduce", "cp"), None)  # the logged loss
    _, gradients = counted.pop(("all-reduce", "world"))
    P = summary["theory"]["parameters"]["bytes"]
    assert gradients == pytest.approx(2 * P * (n - 1) / n)
    expected = expected_traffic(attention, n, options, size, gradient_size)
    assert counted == {key: (calls, pytest.approx(size)) for key, (calls, size) in expected.items()}
    assert summary["theory"]["sent"]["bytes"] == pytest.approx(
        gradients + sum(b for _, b in counted.values())
    )


@pytest.mark.parametrize("attention, world_size, options", sampled(RUNS, SAMPLE))
def test_equals_single_and_sends_what_it_says(run, single, corpus, attention, world_size, options):
    result = run("cp.py", world_size, f"{EXACT} --data {corpus} --attention {attention} {options}")
    reference = options.replace("--activation-checkpointing", "").replace("--grad-accum 2", "")
    assert furthest(result.curve(), single(f"{EXACT} {reference.strip()}".strip())) < 1e-10
    check_traffic(result.out, attention, world_size, options, 8, 8)


@pytest.fixture(scope="module")
def first_gradients(server, corpus, tmp_path_factory):
    def load(command, world_size, options=""):
        folder = tmp_path_factory.mktemp("gradients")
        options = f"{EXACT} --data {corpus} --steps 1 {options}"
        result = server.run(f"tests/first_gradients.py {command}", world_size, options,
                            folder=folder)
        return torch.load(result.out / "gradients.pt")

    return functools.cache(load)


@pytest.mark.parametrize("attention, world_size, options", sampled([
    ("ring", 2, ""), ("ring", 4, ""), ("ulysses", 2, ""), ("allgather", 4, ""),
    ("ring", 2, "--compile"), ("ulysses", 2, "--compile"), ("allgather", 2, "--compile"),
], [("allgather", 2, "--compile")]))
def test_first_gradients_equal_those_of_single(first_gradients, attention, world_size, options):
    """Compiled too: torch 2.11 loses the gradient of a collective in a graph without a word."""
    expected = first_gradients("single.py", 0)
    options = f"--grad-accum 2 --attention {attention} {options}"
    gradients = first_gradients("cp.py", world_size, options)
    assert gradients.keys() == expected.keys() and len(expected) == 9 * LAYERS + 3
    for name in expected:
        assert expected[name].norm() > 1e-4
        assert (gradients[name] - expected[name]).abs().max() < 1e-12, name


@pytest.mark.parametrize("attention", sampled(["ring", "ulysses", "allgather"], ["allgather"]))
def test_bfloat16_learns_and_sends_half(run, corpus, attention):
    options = (f"{BASE} --data {corpus} --dtype bfloat16 --steps 40 --lr 0.01 "
               f"--attention {attention}")
    result = run("cp.py", 2, options)
    losses = [loss for (loss,) in result.curve("loss")]
    assert losses[0] > 5.4 and losses[-1] < 3.2
    check_traffic(result.out, attention, 2, "", 2, 4)  # in the ring the gradients travel in float32


@thorough
def test_compiled_layers_follow(run, single, corpus):
    """The ring is what a graph has to break at."""
    result = run("cp.py", 2, f"{EXACT} --data {corpus} --compile")
    assert furthest(result.curve(), single(EXACT)) < 1e-10
    check_traffic(result.out, "ring", 2, "", 8, 8)


@pytest.mark.parametrize("world_size", sampled([1, 2, 3, 4], [1, 3]))
def test_all_agree_with_plain_attention(run, world_size):
    """Outputs and gradients, grouped heads, float64, float32 and bfloat16."""
    assert "all agree" in run("tests/attention_agrees.py", world_size, pass_out=False).output


def test_no_whole_sequence_in_the_ring(run):
    assert "no whole sequence" in run("tests/attention_shapes.py", 4, pass_out=False).output


@pytest.mark.parametrize("attention", sampled(["ring", "ulysses", "allgather"], ["ring"]))
def test_activations_fall_with_the_ranks(run, corpus, attention):
    options = (f"{MODEL} --seq-len 256 --batch-size 4 --steps 3 --save-every 0 --data {corpus} "
               f"--attention {attention} --num-key-value-heads 4")
    peaks = []
    for world_size in (1, 2, 4):
        out = run("cp.py", world_size, options, out=f"cp{world_size}").out
        peaks.append(json.loads((out / "summary.json").read_text())["peak"]["activations"])
    assert peaks[1] < 0.55 * peaks[0] and peaks[2] < 0.3 * peaks[0], peaks


@pytest.mark.parametrize("world_size, options, message", [
    (4, "--seq-len 36", "--seq-len 36 cannot be cut into 8 equal chunks, 2 for each of 4 ranks"),
    (4, "--seq-len 6", "such as 8"),
    (2, "--seq-len 6 --attention allgather",
     "cannot be cut into 4 equal chunks, 2 for each of 2 ranks"),
    (2, "--seq-len 7 --attention ulysses",
     "cannot be cut into 2 equal chunks, 1 for each of 2 ranks"),
    (4, "--attention ulysses", "--num-key-value-heads 2 cannot be shared evenly by 4 ranks"),
    (3, "--attention ulysses --seq-len 36",
     "--num-attention-heads 4 cannot be shared evenly by 3 ranks"),
    (2, "--attention flash", "--attention: invalid choice: 'flash' (choose from"),
])
def test_bad_input(run, world_size, options, message):
    result = run("cp.py", world_size, f"{BASE} {options}", expect_ok=False)
    (line,) = result.lines
    assert all(result.statuses) and line.startswith("cp.py: error: ") and message in line
