"""Promise 5: bytes held and sent per rank, counted from the run, are those of the theory."""

import inspect
import json
import re

import pytest

import cp
import ddp
import fsdp
import hybrid_3d
import pp
import single
import tp
import zero
from common.model import ModelConfig, Transformer
from tests.processes import ROOT
from tests.sample import sampled, thorough

# Sizes that 4 ranks divide: nothing is padded.
MODEL = ("--vocab-size 256 --hidden-size 64 --intermediate-size 128 --num-hidden-layers 3 "
         "--num-attention-heads 4")
OPTIONS = f"{MODEL} --num-key-value-heads 2 --seq-len 16 --batch-size 8 --steps 4 --save-every 0"
CONFIG = ModelConfig(256, 64, 128, 3, 4, 2)


def bytes_of(module):
    return sum(p.nbytes for p in module.parameters())


MODULE = Transformer(CONFIG)
P, LAYER = bytes_of(MODULE), bytes_of(MODULE.model.layers["0"])
EMBEDDING = HEAD = bytes_of(MODULE.lm_head)
NORM = bytes_of(MODULE.model.norm)
TENSORS = len(list(MODULE.parameters()))
LARGEST = max(p.nbytes for p in MODULE.parameters())
COUNT = 8  # the number of targets in the global batch, which is all-reduced


@pytest.fixture
def summary(run, corpus):
    def summary(command, world, options="", out="out"):
        result = run(command, world, f"{OPTIONS} --data {corpus} {options}", out=out)
        return json.loads((result.out / "summary.json").read_text())

    return summary


def sent(summary, *collectives):
    return sum(c["bytes"] for c in summary["collectives"] if c["collective"] in collectives)


def calls(summary, collective):
    return sum(c["calls"] for c in summary["collectives"] if c["collective"] == collective)


def check_states(summary, share):
    """AdamW's two states per parameter, and a count of the steps per tensor."""
    assert summary["held"]["optimizer states"] == 2 * P / share + 4 * TENSORS


@pytest.mark.parametrize("world", [0, 2, 4])
def test_whole_models(summary, world):
    found = summary("ddp.py" if world else "single.py", world)
    assert found["held"]["parameters"] == found["peak"]["parameters"] == P
    assert found["held"]["gradients"] == P
    # DDP's bucket, and the last gradient on its way into it
    assert found["peak"]["gradients"] == P + (EMBEDDING if world else 0)
    check_states(found, 1)
    assert found["sent"] == (2 * (P + COUNT) * (world - 1) / world if world else 0)


@pytest.mark.parametrize("world", sampled([2, 4], [2]))
@pytest.mark.parametrize("stage", [1, 2])
def test_zero(summary, stage, world):
    found = summary(f"zero.py --stage {stage}", world)
    assert found["held"]["parameters"] == P
    # Peaks: on top are two buckets in flight; a thread of gloo may still hold the one before.
    assert P + LAYER <= found["peak"]["parameters"] <= P + 3 * LAYER
    assert found["held"]["gradients"] == P / world
    assert P / world < found["peak"]["gradients"] <= P / world + 2 * LAYER
    assert found["peak"]["gradients"] < P  # never a full set
    check_states(found, world)
    assert sent(found, "reduce-scatter") == sent(found, "all-gather") == P * (world - 1) / world
    norms = 2 * 4 * TENSORS * (world - 1) / world  # for clipping: a number per tensor, all-reduced
    targets = 2 * COUNT * (world - 1) / world
    assert sent(found, "all-reduce") == norms + targets
    assert found["sent"] == sent(found, "all-gather") * 2 + norms + targets


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world, replicas", sampled([(2, 1), (4, 1), (4, 2)], [(2, 1), (4, 2)]))
def test_fsdp(summary, world, replicas, reshard):
    shards = world // replicas
    flag = "" if reshard else "--no-reshard-after-forward"
    found = summary(f"fsdp.py --replicate {replicas} {flag}", world)
    assert found["held"]["parameters"] == P / shards
    assert found["held"]["gradients"] == P / shards
    check_states(found, shards)
    # Peaks: either two groups, one of them ahead of its use, or all.
    last = NORM + HEAD
    gathered = (last + LAYER if reshard else P) + LAYER
    least = P / shards + (2 * LAYER if reshard else P)
    assert least <= found["peak"]["parameters"] <= 1.01 * (P / shards + gathered)
    assert P / shards < found["peak"]["gradients"] <= P / shards + last + 2 * LAYER
    ring = (shards - 1) / shards
    assert sent(found, "all-gather") == (2 * P - last if reshard else P) * ring
    assert sent(found, "reduce-scatter") == P * ring
    norms = 2 * 4 * TENSORS * ring
    replication = 2 * P / shards * (replicas - 1) / replicas
    assert sent(found, "all-reduce") == replication + norms + 2 * COUNT * (world - 1) / world
    assert found["theory"]["sent"]["bytes"] + norms == found["sent"]


def test_accumulation(summary):
    """A further micro-batch adds a reduction to stage 2, gathers and a reduction to FSDP, nothing
    to others."""
    ring, norms = 1 / 2, 4 * TENSORS
    for command, expected in (
        ("ddp.py", 2 * P * ring), ("zero.py --stage 1", 2 * P * ring + norms),
        ("zero.py --stage 2", 3 * P * ring + norms),
        ("fsdp.py", 2 * (3 * P - NORM - HEAD) * ring + norms),
        ("fsdp.py --no-reshard-after-forward", 3 * P * ring + norms),
    ):
        found = summary(command, 2, "--grad-accum 2", command)
        assert found["sent"] == expected + 2 * COUNT * ring, command
        assert found["held"]["gradients"] == (P if command == "ddp.py" else P / 2)
        if "zero" in command:  # between micro-batches stage 1 has whole gradients
            assert (found["peak"]["gradients"] >= P) == ("stage 1" in command)


@pytest.mark.parametrize("command", ["zero.py --stage 2", "fsdp.py"])
def test_accumulation_holds_no_whole_gradients(summary, command):
    """Sharded gradients, and on top the two groups whose gradients are being reduced."""
    found = summary(command, 2, "--grad-accum 2 --num-hidden-layers 10")
    whole = P + 7 * LAYER
    assert whole / 2 < found["peak"]["gradients"] <= whole / 2 + 2 * LAYER < 0.75 * whole


BYTES = (ROOT / "docs" / "bytes.md").read_text()
SYMBOLS = [name for names in re.findall(r"(?m)^\| ([\w, ]+) \| [^|]+ \|$", BYTES)
           for name in names.split(", ") if name != "symbol"]
P4 = 3_215_872  # of the counted bytes in docs/bytes.md: the default model, on 4 ranks
HEAD4 = 4 * (256 * 128 + 128)  # its last norm and head
TABLE = {
    "single.py": single.theory(P4), "ddp.py": ddp.theory(P4, 4),
    "zero.py --stage 1": zero.theory(P4, 4, 1, 1), "zero.py --stage 2": zero.theory(P4, 4, 1, 2),
    "fsdp.py": fsdp.theory(P4, HEAD4, 4, 4, 4, 1, 1, True),
    "fsdp.py --no-reshard-after-forward": fsdp.theory(P4, HEAD4, 4, 4, 4, 1, 1, False),
    "fsdp.py --replicate 2": fsdp.theory(P4, HEAD4, 4, 4, 4, 2, 1, True),
}


def row(section, command):
    """The cells of a row in a table of docs/bytes.md, without that of the command."""
    text = BYTES.partition(f"\n## {section}")[2].partition("\n## ")[0]
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{command}` |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.mark.parametrize("command", TABLE)
def test_the_counted_bytes_are_the_theory(command):
    """What was counted is the theory: on top are only step counts and the norm for clipping."""
    cells = [int(cell.replace(",", "")) for cell in row("Counted: parameters", command)]
    expected = {kind: value for kind, (formula, value) in TABLE[command].items()}
    assert cells[0] == expected["parameters"] and cells[1] == expected["gradients"]
    assert 0 <= cells[3] - expected["optimizer_states"] <= 4 * 39
    assert 0 <= cells[4] - expected["sent"] <= 234


@thorough
@pytest.mark.parametrize("command", ["tp.py", "tp.py --no-sequence-parallel", "cp.py",
                                     "cp.py --attention ulysses", "cp.py --attention allgather"])
def test_the_counted_activations(run, corpus, command):
    options = f"--batch-size 2 --seq-len 512 --steps 4 --save-every 0 --data {corpus}"
    for world, cell in zip((1, 2, 4), row("Counted: activations", command)):
        for attempt in range(4):  # a thread of gloo may hold what it has sent a moment too long
            found = run(command, world, options, out=f"out-{world}-{attempt}").summary
            if found["peak"]["activations"] == int(cell.replace(",", "")):
                break
        else:
            raise AssertionError(f"{world} ranks: {found['peak']['activations']}, not {cell}")


def value(formula, **symbols):
    """The number that a formula of docs/bytes.md stands for, such as a(2G-E+P)(s-1)/s."""
    tokens = re.findall(r"grad_kv|kv|KV|[A-Za-z]|\d+|[-+/()]", formula)
    assert "".join(tokens) == formula.replace(" ", "")
    python = ""
    for before, token in zip(["("] + tokens, tokens):
        product = before not in "-+/(" and token not in "-+/)"
        python += ("*" if product else "") + token
    return eval(python, symbols)


def test_the_formulas_are_those_of_the_scripts():
    """The cells, as numbers, for sizes that have nothing in common."""
    n, a, R, L, B, T, D, H, KV, K, P, N, E = 6, 5, 2, 11, 60, 42, 13, 14, 7, 17, 19_000, 230, 3100
    s, G, X, x, t = n // R, P / 2, B * T * D * 4, B * T * D * 2, B * T * 4
    kv = 2 * (B // a) * KV * (T // n) * K * 2
    symbols = {"n": n, "a": a, "R": R, "L": L, "H": H, "KV": KV, "P": P, "N": N, "s": s, "G": G,
               "E": E / 2, "X": X, "x": x, "t": t, "kv": kv, "grad_kv": 2 * kv}
    assert symbols.keys() <= set(SYMBOLS)
    targets = 16 * (n - 1) / n  # the number of targets, all-reduced
    sizes = P, N, B, T, D, L, n, 4, 2
    heads = P, B, T, H, KV, K, L, n, a, 2, 4
    for command, theory, more in (
        ("single.py", single.theory(P), 0), ("ddp.py", ddp.theory(P, n), targets),
        ("zero.py --stage 1", zero.theory(P, n, a, 1), targets),
        ("zero.py --stage 2", zero.theory(P, n, a, 2), targets),
        ("fsdp.py", fsdp.theory(P, E, 4, 2, n, 1, a, True), targets),
        ("fsdp.py --no-reshard-after-forward",
         fsdp.theory(P, E, 4, 2, n, 1, a, False), targets),
        ("fsdp.py --replicate R", fsdp.theory(P, E, 4, 2, n, R, a, True), targets),
        ("tp.py", tp.theory(*sizes, True, False, False), 0),
        ("tp.py --no-sequence-parallel", tp.theory(*sizes, False, False, False), 0),
        ("cp.py", cp.theory(*heads, "ring", False), 0),
        ("cp.py --attention ulysses", cp.theory(*heads, "ulysses", False), 0),
    ):
        _, *held, sent = row("Formulas", command)
        for cell, kind in zip(held, ("parameters", "gradients", "optimizer_states")):
            assert value(cell.partition(";")[0], **symbols) == pytest.approx(theory[kind][1])
        assert value(sent, **symbols) == pytest.approx(theory["sent"][1] - more), command


@pytest.mark.parametrize("script", [single, ddp, zero, fsdp, tp, cp, pp, hybrid_3d])
def test_every_symbol_has_one_meaning(script):
    """Those of the formulas are in the table of docs/bytes.md, each once."""
    assert len(SYMBOLS) == len(set(SYMBOLS)) > 20
    arguments = inspect.signature(script.theory).parameters
    short = {name for name in arguments if len(name) == 1 or name.isupper()}
    assert short and short <= set(SYMBOLS)
