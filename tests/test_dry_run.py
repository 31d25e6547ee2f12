"""tools/dry_run.py counts what a real run counts, without running it."""

import json
import operator
import re

import pytest

from common.model import PRESETS
from tests.support.processes import ROOT, edited
from tests.support.sample import needs, rows, table, thorough
from tools import dry_run as tool

GPU = json.loads((ROOT / "docs/data/gpu_memory.json").read_text())
# Script and options, its world size, and the ranks to play. Tokens go to all experts, balanced as
# a dry run assumes; no text has the byte 255, so it is one document.
RUNS = table("""
single.py --grad-accum 2 --activation-checkpointing | 0 | 0
* ddp.py --grad-accum 2 --dtype bfloat16 --activation-checkpointing --num-hidden-layers 2 | 2 | 1
zero.py --stage 2 --grad-accum 2 --dtype bfloat16 --batch-size 12 | 3 | 2
fsdp.py --replicate 2 --activation-checkpointing --dtype bfloat16 | 4 | 3
tp.py --activation-checkpointing --vocab-size 8192 --batch-size 32 | 2 | 0
cp.py --activation-checkpointing | 4 | 3
cp.py --attention ulysses --num-key-value-heads 4 | 2 | 1
pp.py | 4 | 0 2
pp.py --schedule dualpipev | 2 | 1
hybrid_3d.py --tp 2 --cp 2 --pp 2 | 8 | 0 6
ep.py --num-experts 4 --experts-per-token 4 --ep 2 --activation-checkpointing | 4 | 0 3
hybrid_3d.py --num-experts 4 --experts-per-token 4 --tp 2 --ep 2 | 4 | 0 3
examples/diloco.py --inner-steps 1 --grad-accum 2 --dtype bfloat16 | 4 | 3
examples/fsdp_gpt2.py --dropout 0.1 | 2 | 0
examples/cp_documents.py --separator 255 | 2 | 1
""")


@pytest.fixture
def dry_run(run, tmp_path):
    def dry_run(*words, **kwargs):
        """What the tool prints, and what it writes with --json."""
        path = tmp_path / "dry.json"
        result = run("tools/dry_run.py", 0, ["--json", path, *words], pass_out=False, **kwargs)
        return result, json.loads(path.read_text()) if path.exists() else None

    return dry_run


@pytest.fixture
def count(dry_run):
    def count(command, world_size, rank=0, nproc_per_node=8, **kwargs):
        """What a dry run counts as one rank."""
        script, *more = command.split()
        return dry_run("--rank", rank, "--nproc-per-node", nproc_per_node, world_size,
                       ROOT / script, "--dtype", "float32", *more, **kwargs)[1]

    return count


SMALL = "--num-hidden-layers 2 --batch-size 1 --seq-len 64"


# Numbers that the formulas gave in commit f660e7d: PaLM's count, and the scores of attention once
# more in the backward pass; so of experts too, in a product of groups, of which some have a row
# more. A rank of a ring, whose attention is not always causal, has half of them. Recomputing layers
# is one more forward pass of each, without its last product, whose result nobody needs; selective
# checkpointing repeats no product and no attention.
@rows("command, world, operations", """
single.py | 1 | 161480704
single.py --activation-checkpointing selective | 1 | 161480704
single.py --activation-checkpointing | 1 | 199229440
cp.py | 2 | 80740352
ep.py --num-experts 3 --expert-size 64 --dtype bfloat16 | 1 | 95715328
""")
def test_floating_point_operations(count, command, world, operations):
    assert count(f"{command} {SMALL}", world)["operations"] == operations


def test_selective_checkpointing_keeps_some(count):
    again = " --activation-checkpointing"
    least, some, most = (count(f"single.py {SMALL}{more}", 1)["peak"]["activations"]
                         for more in (again, f"{again} selective", ""))
    assert least < some < most


SENT = operator.itemgetter("collective", "group", "calls", "bytes")


@pytest.mark.parametrize("command, world, ranks", RUNS)
def test_it_counts_what_a_run_counts(run, count, corpus, command, world, ranks):
    """Each collective with its calls and bytes; parameters, gradients and optimizer states to the
    byte. Activations too, unless a thread of gloo still holds a tensor that it has sent: on a busy
    machine it may hold several, so there is a second and a third attempt. The run is on a CPU, so
    the dry run counts what the CPU's kernels keep."""
    if "gpt2" in command:
        needs("transformers")
    cpu = "from tools.counting import stand_ins; stand_ins.as_on_gpus = lambda: None"
    dry = {int(rank): count(command, world or 1, rank, inject=cpu) for rank in str(ranks).split()}
    options = ["--steps", 4, "--save-every", 0, "--data", corpus]  # the third is counted
    for attempt in range(3):
        result = run(command, world, options, out=f"out{attempt}", inject="write_counts()")
        peaks = []
        for rank, counted in dry.items():
            real = result.counts(rank)
            sent = sorted(map(SENT, real["collectives"]))
            assert sorted(map(SENT, counted["collectives"])) == sent
            for kind in ("parameters", "gradients", "optimizer states"):
                assert counted["held"].get(kind, 0) == real["held"].get(kind, 0), kind
            for kind in ("activations", "in all"):
                peaks.append((counted["peak"][kind], real["peak"][kind]))
        if all(predicted <= held <= 1.03 * predicted for predicted, held in peaks):
            return
    raise AssertionError(f"predicted and counted peaks: {peaks}")


ON_GPU = {row["command"]: row for row in GPU["runs"] if row["dry_run"]}


@rows("command", "\n* " + "\n".join(sorted(ON_GPU, key=len)))
def test_it_counts_what_a_gpu_held(dry_run, command):
    """As StepCounter counted it there: each kernel keeps what the one of the GPU keeps."""
    row, (script, *options) = ON_GPU[command], command.split()
    _, found = dry_run("--rank", 0, 1, ROOT / script, *options)
    assert found["peak"]["in all"] == pytest.approx(row["counted"], rel=0.002)
    assert row["counted"] == pytest.approx(row["dry_run"], rel=0.002)


@thorough
def test_activations_of_ring_attention_fall(count):
    """To what docs/planning.md says of its first three numbers of ranks. All but a constant falls
    as 1/n, while layers hold most."""
    page = (ROOT / "docs/planning.md").read_text()
    (command,) = re.findall(r"dry_run --rank 0 8 (cp\.py .*)", page)
    (ranks,) = re.findall(r"(?m)^\| ranks n of `cp.py` \| (.*) \|$", page)
    (figures,) = re.findall(r"(?m)^\| activations at the peak, GB .*?\) \| (.*) \|$", page)
    found = [count(command, int(n))["peak"]["activations"] for n in ranks.split(" | ")[:3]]
    assert [f"{size / 1e9:.4g}" for size in found] == figures.split(" | ")[:3]
    one, two, four = found
    assert one - two == 2 * (two - four) > 0


def test_rank_0_of_a_pipeline(count):
    """It is asked for, though the last stage, with the head, holds more."""
    assert count("pp.py --vocab-size 32768 --batch-size 4 --microbatches 4", 2)["rank"] == 0


@thorough
def test_the_ranks_of_a_pipeline(tmp_path, capsys, count):
    """Without --rank it is the stage that holds most: here the last, which has the head. --dtype
    auto is as on a GPU; a real run on the CPU would be in float32."""
    options = ("--vocab-size 32768 --batch-size 4 --microbatches 4 --dtype auto "
               "--schedule interleaved1f1b")
    tool.main(["--nproc-per-node", "1", "--json", f"{tmp_path}/dry.json", "2", f"{ROOT}/pp.py",
               *options.split()])
    lines = capsys.readouterr().out.splitlines()
    most = json.loads((tmp_path / "dry.json").read_text())
    assert most["rank"] == 1 and "as rank 1 of 2, a dry run" in lines[0]
    assert re.fullmatch(r"model tiny: 9,127,040 parameters, bfloat16", lines[1])  # of both stages
    assert most["bubble"] == 1 / 9 and "bubble: at least 11.1% of a step" in lines
    assert most["between_machines"] > 0
    assert count("hybrid_3d.py --pp 2 --microbatches 2", 4)["bubble"] == 1 / 3


def test_more_ranks_than_rows(count):
    """FSDP pads each parameter to one row a rank, as its formula does."""
    found = count("fsdp.py --num-hidden-layers 2 --batch-size 256", 256)  # k_proj has 64 rows
    norms = 2 * 4 * (9 * 2 + 3)
    assert found["sent"] == round(found["theory"]["sent"]["bytes"] + norms * 255 / 256)
    for kind in ("parameters", "gradients"):
        assert found["held"][kind] == found["theory"][kind]["bytes"]


# Of an all-to-all of 8 ranks 4 / 7; a ring crosses machines at 2 of 8 edges; rank 0 sends to rank
# 1. With all axes it counts at all: what a stage gets must have the shape and the type it expects.
@rows("command, n, nproc_per_node, shares", """
cp.py --attention ulysses | 8 | 4 | {"all-to-all": 0.571428571, "all-reduce": 0.25}
pp.py | 4 | 2 | {"send": 0}
hybrid_3d.py --dp 2 --cp 2 --tp 2 --pp 2 --grad-accum 2 --no-sequence-parallel --dtype bfloat16
  | 16 | 8 | {"send": 1}
""")
def test_what_crosses_machines(count, command, n, nproc_per_node, shares):
    counted = count(command, n, 0, nproc_per_node)
    found = {part["collective"]: part["between_machines"] / part["bytes"]
             for part in counted["collectives"]}
    shares = json.loads(shares)
    assert {name: found[name] for name in shares} == pytest.approx(shares)


def test_it_reads_and_writes_nothing(dry_run, tmp_path):
    """Not the data, not the run folder. The table has the formulas of the script."""
    words = (f"--rank 0 --nproc-per-node 64 64 {ROOT}/fsdp.py --dtype float32 "
             "--data /no/such/file --out earlier --model llama3-8b --num-hidden-layers 1 "
             "--batch-size 64")
    result, found = dry_run(*words.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dry.json"]
    assert {"held", "peak", "sent", "theory", "collectives"} < found.keys()
    assert found["between_machines"] == 0
    size = found["theory"]["parameters"]["bytes"]
    (row,) = [line for line in result.lines if line.startswith("parameters ")]
    assert row.startswith(f"parameters {size:25,.0f}") and row.endswith(f"   P/s = {size:,.0f}")


def test_a_folder_of_hugging_face(dry_run, tmp_path):
    """Its config.json is the model. An example that loads a base reads none: here is none."""
    config = vars(PRESETS["tiny"]) | {"model_type": "llama", "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    single = ROOT / "single.py"
    _, found = dry_run("--rank", 0, 1, single, "--model", tmp_path)
    assert found == dry_run("--rank", 0, 1, single, "--vocab-size", 300)[1] | {
        "description": [f"model {tmp_path}: 815,232 parameters, bfloat16", found["description"][1]]}
    needs("safetensors")  # fsdp_lora.py needs it
    script = ROOT / "examples/fsdp_lora.py"
    _, found = dry_run("--rank", 0, 2, script, "--model", tmp_path, "--base", "no/such/checkpoint")
    assert found["between_machines"] == 0  # 8 ranks are on a machine


@thorough
def test_ddp_under_another_name(count, tmp_path):
    """A step is counted after torch has rebuilt DDP's buckets, in each script that has DDP."""
    name = "DistributedDataParallel"
    copy = edited(tmp_path / "copy", "ddp.py", (f"import {name}", f"import {name} as DDP"),
                  (f"= {name}(", "= DDP("))
    small = "--vocab-size 8192 --batch-size 2"
    found, of_script = count(f"{copy} {small}", 2), count(f"ddp.py {small}", 2)
    assert found["peak"] == of_script["peak"]


@rows("offers, words", """
| return loss.item()
WITHOUT_VALUES = {'shown': lambda loss: None} | floating-point operations
WITHOUT_VALUES = {'show': lambda loss: None} | names show, which is not in
import os; os.abort() | copy/single.py: the process that counted was killed
""")
def test_a_script_that_reads_a_value(dry_run, tmp_path, offers, words):
    """It is refused, or names a function, and what is called instead. A kill is named."""
    loop = "            micro_loss.backward()\n"
    copy = edited(
        tmp_path / "copy", "single.py", (loop, "            print(shown(micro_loss))\n" + loop),
        ("def main(", f"def shown(loss):\n    return loss.item()\n\n\n{offers}\ndef main("))
    result, _ = dry_run(1, copy, expect_ok=False)
    assert result.ok == ("'shown'" in offers) and words in result.lines[-1], result.output
