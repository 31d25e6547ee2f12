"""Promise 6: the peaks of the runs in the table; the formulas of docs/bytes.md and of oracles.py.
What a run holds and sends is compared with the theory in test_same_run.py."""

import argparse
import ast
import re

import pytest
import torch

from common.model import PRESETS, ModelConfig, Transformer
from common.services import theory
from common.services.counting import bytes_table
from tests.support import oracles
from tests.support.processes import ROOT
from tests.support.sample import sampled, thorough
from tests.support.table import EXACT, SAMPLE
from tests.test_dry_run import count

MODULE = Transformer(ModelConfig(256, 32, 48, 5, 8, 4)).double()  # of the table
P, LAYER, EMBEDDING = (theory.bytes_of(module) for module in (
    MODULE, MODULE.model.layers["0"], MODULE.model.embed_tokens
))
LAST = EMBEDDING + theory.bytes_of(MODULE.model.norm)  # the largest unit, with the head
WHOLE = "single.py", "ddp.py"


PEAKS = [row for row in EXACT
         if row.script in (*WHOLE, "zero.py", "fsdp.py") and row.world in (0, 2, 4)]


@pytest.mark.parametrize("row", sampled(PEAKS, [row for row in PEAKS if row in SAMPLE]),
                         ids=lambda row: row.name)
def test_peaks(once, row):
    found, n, a = row.run(once).summary["peak"], row.world or 1, row.option("--grad-accum")
    parameters, gradients = found["parameters"], found["gradients"]
    if row.script in WHOLE:
        assert parameters == P
        # DDP's bucket, and the last gradient on its way into it. A gradient that is added to one of
        # an earlier micro-batch is freed at once.
        assert gradients == P + (EMBEDDING if row.script == "ddp.py" and a == 1 else 0)
    elif row.script == "zero.py":
        # On top are two buckets in flight; a thread of gloo may still hold the one before.
        assert P + LAYER <= parameters <= P + 3 * LAST
        if "--stage 1" in row.command and a > 1:  # between micro-batches stage 1 has all gradients
            assert gradients >= P
        else:
            assert P / n < gradients <= P / n + 2 * LAST < P
    else:
        shards = n // row.option("--replicate")
        reshard = "--no-reshard" not in row.command
        gathered = (LAST if reshard else P) + LAST  # two units, one ahead of its use, or all
        if a > 1 and torch.__version__ < "2.15":  # frees a unit later in the second micro-batch
            gathered += LAYER
        least = P / shards + (2 * LAYER if reshard else P)
        assert least <= parameters <= 1.01 * (P / shards + gathered)
        assert P / shards < gradients <= P / shards + 3 * LAST
    if a > 1 and "--stage 1" not in row.command and row.script not in WHOLE and n > 1:
        assert gradients < P  # no whole gradients between micro-batches


BYTES = (ROOT / "docs" / "bytes.md").read_text()
SYMBOLS = [name for names in re.findall(r"(?m)^\| ([\w, ]+) \| [^|]+ \|$", BYTES)
           for name in names.split(", ") if name != "symbol"]


def row(section, command):
    """The cells of a row in a table of docs/bytes.md, without that of the command."""
    text = BYTES.partition(f"\n## {section}")[2].partition("\n## ")[0]
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{command}` |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def theory_of(command, n, **options):
    """What common/services/theory.py says of a command of docs/bytes.md."""
    script, *flags = command.split()
    defaults = dict(
        config=PRESETS["tiny"], param_dtype=torch.float32, compute_dtype=torch.float32,
        batch_size=16, seq_len=128, grad_accum=1, activation_checkpointing=False, replicate=1,
        stage=2, reshard_after_forward="--no-reshard-after-forward" not in flags, inner_steps=1,
        outer_momentum=0.9,
        sequence_parallel="--no-sequence-parallel" not in flags, attention="ring",
    )
    for name in ("stage", "attention", "replicate", "replicas"):
        if f"--{name}" in flags:
            value = flags[flags.index(f"--{name}") + 1]
            defaults[name] = int(value) if value.isdecimal() else value
    args = argparse.Namespace(**defaults | options)
    name = script.removesuffix(".py")
    more = {"single": [], "diloco": [n, 0]}.get(name, [n])  # the first step is counted
    return getattr(theory, name)(args, *more)


@thorough
@pytest.mark.parametrize("command, most", [("tp.py", 0.33), ("cp.py", 0.27)])
def test_activations_fall_with_the_number_of_ranks(run, corpus, command, most):
    options = f"--batch-size 2 --seq-len 512 --steps 3 --save-every 0 --data {corpus}"
    one, four = (
        run(command, world, options, out=f"out-{world}").summary["peak"]["activations"]
        for world in (1, 4)
    )
    assert 0 < four < most * one


def value(formula, **symbols):
    """The number that a formula of docs/bytes.md stands for, such as a(2G-F+P)(s-1)/s."""
    tokens = re.findall(r"grad_kv|kv|KV|[A-Za-z]|\d+|[-+/()]", formula)
    assert "".join(tokens) == formula.replace(" ", "")
    python = ""
    for before, token in zip(["("] + tokens, tokens):
        product = before not in "-+/(" and token not in "-+/)"
        python += ("*" if product else "") + token
    return eval(python, symbols)


def test_the_formulas_are_those_of_the_theory():
    """The cells, as numbers, for sizes that have nothing in common."""
    n, a, R, L, B, T, D, H, KV, K = 6, 5, 2, 11, 60, 42, 190, 14, 7, 26
    config = ModelConfig(257, D, 51, L, H, KV, K)
    with torch.device("meta"):
        model = Transformer(config)
    P, F = theory.bytes_of(model), theory.bytes_of(model.model.norm, model.lm_head)
    N = sum(p.nbytes for p in model.parameters() if p.ndim == 1)
    s, X, e, t = n // R, B * T * D * 2, B * T * D * 4, B * T * 4
    kv = 2 * (B // a) * KV * (T // n) * K * 2
    symbols = {"n": n, "a": a, "R": R, "L": L, "H": H, "KV": KV, "P": P, "N": N, "s": s,
               "G": P / 2, "F": F / 2, "X": X, "e": e, "t": t, "kv": kv, "grad_kv": 2 * kv}
    assert symbols.keys() <= set(SYMBOLS)
    for command in (
        "single.py", "ddp.py", "zero.py --stage 1", "zero.py --stage 2", "fsdp.py",
        "fsdp.py --no-reshard-after-forward", "fsdp.py --replicate R", "tp.py",
        "tp.py --no-sequence-parallel", "cp.py", "cp.py --attention ulysses",
        "diloco.py --replicas R",
    ):
        expected = theory_of(
            command.replace(" R", " 2"), n, config=config, compute_dtype=torch.bfloat16,
            grad_accum=a, batch_size=B, seq_len=T,
        )
        _, *held, sent = row("Formulas", command)
        for cell, kind in zip(held, ("parameters", "gradients", "optimizer_states")):
            assert value(cell.partition(";")[0], **symbols) == pytest.approx(expected[kind][1])
        # On top is the number of targets, which is all-reduced where ranks have different samples.
        targets = 16 * (n - 1) / n if command.startswith(("ddp", "zero", "fsdp")) else 0
        targets = 16 * (s - 1) / s if command.startswith("diloco") else targets
        assert value(sent, **symbols) == pytest.approx(expected["sent"][1] - targets), command


@thorough
@pytest.mark.parametrize("command, n, rank, stage", [
    ("hybrid_3d.py --tp 2 --cp 2 --pp 2 --activation-checkpointing --dtype bfloat16", 8, 0, 0),
    ("hybrid_3d.py --tp 2 --cp 2 --pp 2 --activation-checkpointing --dtype bfloat16", 8, 6, 1),
    ("hybrid_3d.py --tp 2 --pp 2 --replicate 2 --grad-accum 2 --dtype float32", 8, 7, 1),
    ("hybrid_3d.py --replicate 2 --grad-accum 2 --microbatches 2 --dtype float32", 4, 0, 0),
    ("hybrid_3d.py --tp 2 --no-sequence-parallel --vocab-size 65536 --dtype float32", 4, 3, 0),
    ("hybrid_3d.py --tp 2 --cp 2 --num-experts 8 --ep 4 --grad-accum 2 --dtype bfloat16", 8, 5, 0),
    ("hybrid_3d.py --tp 2 --pp 2 --num-experts 8 --activation-checkpointing --dtype float32", 8, 4,
     1),
    ("hybrid_3d.py --tp 2 --pp 2 --num-experts 8 --ep 2 --replicate 2 --dtype float32", 8, 0, 0),
    ("hybrid_3d.py --tp 2 --num-experts 8 --ep 2 --activation-checkpointing --dtype bfloat16", 8, 0,
     0),
    ("ep.py --num-experts 8 --ep 1 --grad-accum 2 --dtype float32", 4, 1, 0),
    ("ep.py --num-experts 8 --ep 2 --activation-checkpointing --dtype bfloat16", 4, 0, 0),
    ("ep.py --num-experts 8 --ep 2 --no-reshard-after-forward --dtype float32", 4, 3, 0),
])
def test_the_formulas_of_ep_and_hybrid_3d(command, n, rank, stage):
    """On any rank, also of a later stage. On top is the norm for clipping: in hybrid_3d.py a number
    for each parameter of the stage."""
    found, expected = count(command, n, rank), oracles.expected(command, n, stage=stage)
    for kind in ("parameters", "gradients"):
        assert found["held"][kind] == expected[kind] > 0
    most = 8 if command.startswith("ep.py") else 400
    assert found["theory"] == {} and 0 < found["sent"] - expected["sent"] < most


def test_the_table_of_a_run():
    """With the theory beside it, or without."""
    held = {"parameters": 10}
    title, first, *_, last = bytes_table(3, held, held | {"in all": 1000}, 2000, {})
    assert title.split("  ")[-1] == " at the peak" and first.split() == ["parameters", "10", "10"]
    assert last == f"sent in a step{'2,000':>22}"
    title, first, *_, last = bytes_table(
        3, held, held | {"in all": 1000}, 2000, {"parameters": ("P", 10), "sent": ("2P", 20)}
    )
    assert title.endswith("at the peak   theory") and first.endswith(" 10   P = 10")
    assert last.endswith(" 2P = 20")


def test_every_symbol_has_one_meaning():
    """Those of all formulas, and of the scripts' docstrings, are in the table of docs/bytes.md,
    each once."""
    assert len(SYMBOLS) == len(set(SYMBOLS)) > 20
    source = (ROOT / "common" / "services" / "theory.py").read_text()
    formulas = " ".join(re.findall(r'"([^"]*[(/+][^"]*)"', source))
    cells = BYTES.partition("\n## Formulas")[2].partition("\n## ")[0]
    cells = " ".join(" ".join(line.split("|")[3:]) for line in cells.splitlines() if "`" in line)
    words = set(re.findall(r"grad_kv|(?<![a-z])kv|KV|[A-Z]|(?<![a-z])[a-z](?![a-z.])", cells))
    assert len(words) > 10 and words <= set(SYMBOLS), words - set(SYMBOLS)
    assert set(re.findall(r"\b[A-Z]\b", formulas)) <= set(SYMBOLS)
    for path in (*ROOT.glob("*.py"), *ROOT.glob("common/*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        words = set(re.findall(r"\b\d*([A-Z])\b", docstring)) - {"A", "C"}  # of pp.py's picture
        assert words <= set(SYMBOLS), (path, words - set(SYMBOLS))
