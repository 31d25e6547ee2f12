"""Promises 1, 4, 5 and 6: every script, at every world size and with every option, trains what
single.py trains; what it saves is the same, and any other script resumes it; resumed by itself, it
ends in the same bits; and it holds and sends what the theory says, of hybrid_3d.py what
tests/support/table.py has."""

import argparse
import collections
import json
import re

import pytest
import torch

from common.model import PRESETS, ModelConfig, Transformer
from tests.support.compare import assert_bit_equal, assert_near, furthest, saved
from tests.support.processes import ROOT
from tests.support.sample import rows, thorough
from tests.support.table import EXACT, OPTIONS, ROWS, Row
from tools.counting.theory import bytes_of, fsdp

WITHIN = {"float64": 1e-10, "float32": 5e-4, "bfloat16": 0.05}
LAYERS, HIDDEN, BATCH, T = 5, 32, 24, 24  # of the table
TENSORS = 9 * LAYERS + 3  # parameters
MODULE = Transformer(ModelConfig(256, HIDDEN, 48, LAYERS, 8, 4)).double()
P, LAYER, EMBEDDING = (bytes_of(module) for module in (
    MODULE, MODULE.model.layers["0"], MODULE.model.embed_tokens
))
LAST = EMBEDDING + bytes_of(MODULE.model.norm)  # the largest unit, with the head
WHOLE, SHARDED = ("single.py", "ddp.py"), ("zero.py", "fsdp.py")


def reference(row):
    """The row of single.py: in float32 also for bfloat16."""
    return Row("single.py", 0, "exact" if row.dtype == "float64" else "float32")


# The claims: each takes a row, and ``run``, which gives the Result of a row.


def curve(row, run):
    """The loss and the norm of the gradients of each step."""
    found, expected = run(row), run(reference(row))
    names = ("step", "loss", "grad_norm") if row.dtype != "bfloat16" else ("step", "loss")
    assert furthest(found.curve(*names), expected.curve(*names)) < WITHIN[row.dtype]
    losses = [loss for (loss,) in found.curve("loss")]
    assert len(losses) == 3 and losses[0] > 5.4 and losses[-1] < losses[0] - 0.3
    assert any(torch.tensor(loss).bfloat16().item() != loss for loss in losses)  # never rounded
    assert "model tiny: 55,136 parameters" in found.output  # of all ranks and stages


def validation(row, run):
    found, names = run(row), ("step", "val_loss")
    expected = run(reference(row)).curve(*names)
    assert furthest(found.curve(*names)[-1:], expected) < WITHIN[row.dtype]
    assert f"val_loss {found.curve('val_loss')[-1][0]:.4g} |" in found.output


def tensors(row, run):
    """Weights, and optimizer states, which are averages of all gradients: these show a wrong factor
    on gradients, which AdamW hides from the weights."""
    found = saved(run(row))
    assert_near(found, saved(run(reference(row))))
    assert len(found) == 4 * TENSORS


def resumed(row, run):
    """A run that resumes is bit for bit what it was, in every weight and optimizer state."""
    again = run(row).again()
    assert again.curve() == run(row).curve()[2:]
    expected = run(reference(row)).again().curve("step", "val_loss")
    assert [step for step, _ in expected] == [3]
    assert furthest(again.curve("step", "val_loss"), expected) < WITHIN[row.dtype]
    assert_bit_equal(saved(again), saved(run(row)))


def held_and_sent(row, run):
    """Held and sent is what the theory says. On top come AdamW's count of steps, and the norms for
    clipping: a number per tensor where ranks have parts of it, or one per stage."""
    counts = run(row).counts()
    held, theory, size = counts["held"], counts["theory"], 8 if row.dtype == "float64" else 4
    if row.script == "hybrid_3d.py":
        part, sent = map(int, re.findall(r"\d+", row.takes))
        theory = {"parameters": part, "gradients": part, "optimizer_states": 2 * part, "sent": sent}
    assert held["parameters"] == theory["parameters"] > 0
    assert held["gradients"] == theory["gradients"]
    more = held["optimizer states"] - theory["optimizer_states"]
    assert 0 < more <= 4 * TENSORS and more % 4 == 0

    norms = {"zero.py": TENSORS, "fsdp.py": TENSORS, "tp.py": TENSORS, "pp.py": 1}
    ranks = (row.world or 1) // (row.option("--replicate") if row.script == "fsdp.py" else 1)
    expected = 2 * size * norms.get(row.script, 0) * (ranks - 1) / ranks
    more = counts["sent"] - theory["sent"]
    if row.script == "hybrid_3d.py":  # for each dimension of a mesh
        assert 0 <= more <= 3 * (2 * TENSORS * size / 2) + 40
    elif row.script == "tp.py" and row.compiled:
        # aot_eager also repeats each layer's last reduce-scatter, which nothing needs.
        last = LAYERS * size * BATCH * T * HIDDEN * (ranks - 1) / ranks
        assert more - expected == pytest.approx(last, abs=1) or abs(more - expected) < 1
    else:
        assert abs(more - expected) < 1


def collectives(row, run):
    calls = collections.Counter()
    for entry in run(row).counts()["collectives"]:
        calls[entry["collective"]] += entry["calls"]
    expected = {kind: int(number) for number, kind in re.findall(r"(\d+) ([a-z-]+)", row.takes)}
    assert calls == expected


def compiled(row, run):
    """Compiled layers are called in every step, also in the third, which is counted."""
    (line,) = [line for line in run(row).lines if line.startswith("calls ")]  # of count_compiled
    first, *rest = json.loads(line.removeprefix("calls "))
    assert len(rest) == 2 and set(rest) == {rest[0]} and first >= rest[0] > 0, (first, rest)


def peaks(row, run):
    """Parameters and gradients: how many units are whole at a time."""
    found, n, a = run(row).counts()["peak"], row.world or 1, row.option("--grad-accum")
    parameters, gradients = found["parameters"], found["gradients"]
    if row.script == "cp.py":
        assert parameters == P
    elif row.script == "pp.py":  # the hidden states that it sends are none
        assert gradients == run(row).counts()["held"]["gradients"]
    elif row.script in WHOLE:
        assert parameters == P
        # DDP's bucket, and the last gradient on its way into it. A gradient that is added to one of
        # an earlier micro-batch is freed at once.
        assert gradients == P + (EMBEDDING if row.script == "ddp.py" and a == 1 else 0)
        whole = run(reference(row)).counts()["peak"]["activations"]
        assert 0 < found["activations"] <= 1.1 * whole / min(a, 2)
    elif "--stage 1" in row.command and a > 1:  # between micro-batches it has all gradients
        assert gradients >= P and P + P / n <= parameters
    else:
        shards = n // row.option("--replicate")
        reshard = row.script == "fsdp.py" and "--no-reshard" not in row.command
        gathered = (LAST if reshard else P) + LAST  # two units, one ahead of its use, or all
        if a > 1 and torch.__version__ < "2.15":  # frees a unit later in the second micro-batch
            gathered += LAYER
        least = P / shards + (2 * LAYER if reshard else P)
        assert least <= parameters <= 1.01 * (P / shards + gathered)
        assert P / shards < gradients <= P / shards + 3 * LAST


def claims_of(row):
    yield from (curve, validation, held_and_sent)
    if row.dtype == "float64":
        yield tensors
    if row.exact:
        yield resumed
    if row.compiled:
        yield compiled
    if row.takes and row.script != "hybrid_3d.py":
        yield collectives
    known = (*WHOLE, *SHARDED, "cp.py", "pp.py")
    if row.exact and row.script in known and row.world in (0, 2, 4):
        yield peaks


@pytest.mark.parametrize("command, world, kind, takes", ROWS)
def test_a_row(once, command, world, kind, takes):
    row = Row(command, world, kind, takes)
    for claim in claims_of(row):
        claim(row, lambda row: row.run(once))


SCRIPTS = sorted({row.script for row in EXACT})


@thorough
@rows("number, command, world", """
0 | single.py | 0
1 | ddp.py | 3
2 | zero.py --stage 1 | 2
3 | fsdp.py --replicate 2 | 4
4 | tp.py | 2
5 | cp.py --attention ulysses | 2
6 | pp.py --schedule zbv | 2
7 | hybrid_3d.py --dp 2 --tp 2 | 4
""")
def test_resumes_what_others_saved(once, number, command, world):
    """A row of each other script, another one for each reader. The rest of the run is that of
    single.py."""
    of_scripts = [[row for row in EXACT if row.script == script] for script in SCRIPTS
                  if script not in command]
    chosen = [others[number % len(others)] for others in of_scripts]
    folders = [str(row.run(once).out) for row in chosen]
    reader = once(command, world, f"{OPTIONS} --dtype float64",
               inject=f"ignored(); resumed({folders}, train=False)")
    for number, row in enumerate(chosen):
        found = reader.again(number).curve()
        assert furthest(found, EXACT[0].run(once).curve()[2:]) < 1e-10, row


def test_the_theory_of_more_ranks_than_rows():
    """Of a Llama 3 8B, as docs/planning.md has it. That dry runs count so: test_dry_run.py."""
    args = argparse.Namespace(
        config=PRESETS["llama3-8b"], grad_accum=1, replicate=1, reshard_after_forward=True,
        cpu_offload=False, param_dtype=torch.float32, compute_dtype=torch.bfloat16)
    sent = [fsdp(args, n)["sent"][1] for n in (1024, 2048, 4096, 8192, 16_384)]
    args.replicate = 16
    sent.append(fsdp(args, 16_384)["sent"][1])
    shown = " | ".join(f"{size / 1e9:.3g}" for size in sent)
    assert f"(../tests/test_same_run.py)) | {shown} |" in (ROOT / "docs/planning.md").read_text()
