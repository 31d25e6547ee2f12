"""The examples: scripts brought to other models train as one process does, and resume. Of three of
them the one process is a copy of single.py, with a plain model or optimizer."""

import difflib
import functools
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.support.compare import furthest, saved
from tests.support.processes import BARE, ROOT, edited
from tests.support.sample import needs, rows, thorough
from tests.test_checkpoint import hash_again
from tests.test_porting import port
from tools.huggingface import export

NEEDS = {"fsdp_gpt2": ["transformers"], "tp_llama": ["transformers", "safetensors"],
         "fsdp_lora": ["safetensors"]}
TRAINING = ("--batch-size 24 --grad-accum 2 --steps 4 --warmup-steps 1 --dtype float64 --lr 0.01 "
            "--seed 3 --log-every 1 --save-every 2")
MODEL = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 2 --num-attention-heads 8 "
         "--num-key-value-heads 2")
# The kinds of tests/ports.md that bring single.py to what an example trains
KINDS = {"cp_documents": "documents", "fsdp_lora": "adapters", "fsdp_muon": "Muon"}


@pytest.fixture(scope="module")
def checkpoint(once):
    """Of a Llama."""
    options = f"{MODEL} --seq-len 32 --batch-size 8 --steps 20"
    return once("single.py", 0, options).out / "step-00000020"


@pytest.fixture(scope="module")
def base(checkpoint, tmp_path_factory):
    """A folder with the same Llama."""
    needs("safetensors")
    folder = tmp_path_factory.mktemp("base") / "llama"
    export.main([str(checkpoint), str(folder)])
    return folder


@pytest.fixture(scope="module")
def lines(corpus, tmp_path_factory):
    """A file with documents of many lengths, one on each line."""
    path = tmp_path_factory.mktemp("documents") / "lines"
    words = open(corpus).read().split()
    path.write_text("".join(word + "\n  "[i % 7 % 3] for i, word in enumerate(words)))
    return path


@pytest.fixture(scope="module")
def start(server, request, lines, corpus, tmp_path_factory):
    """Run an example: ``start(name, world, options)``. ``world`` 0: single.py, brought to the
    same."""
    val = "--val-every 3 --val-batches 1 --val-data"
    text = f"--data {corpus} {val} {corpus}"
    own = {
        "ddp_convnet": "", "fsdp_gpt2": f"--data {lines} --seq-len 24",
        "tp_llama": f"--from-pretrained BASE {text} --seq-len 32",
        "cp_documents": f"--data {lines} {val} {lines} {MODEL} --seq-len 48",
        "fsdp_lora": f"--base CHECKPOINT {text} {MODEL} --seq-len 24 --lora-rank 4 --lora-alpha 6",
        "fsdp_muon": f"{text} {MODEL} --seq-len 24",
    }

    def start(name, world, options="", folder=None, inject="write_counts()", **kwargs):
        needs(*NEEDS.get(name, ()))
        folder = folder or tmp_path_factory.mktemp(name)
        script, options = f"examples/{name}.py", f"{TRAINING} {own[name]} {options}"
        for word in "BASE", "CHECKPOINT":
            if word in options:
                options = options.replace(word, str(request.getfixturevalue(word.lower())))
        if not world:
            script = edited(folder / "copy", "single.py", *port(KINDS[name], "single.py"))
            inject = "unrounded_muon()"
        return server.run(script, world, options, inject=inject, folder=folder, **kwargs)

    return start


@pytest.fixture(scope="module")
def example(start):
    """The same, each run once."""
    return functools.cache(start)


# An example, ranks, its model, other options; bytes of its optimizer's states, and what it sends,
# by the formulas of its docstring, or of cp.py's, in commit 3e519c2. On top are AdamW's counts of
# steps; for clipping, a number for each tensor that is trained. In the last row a rank of
# fsdp_muon.py has no matrix, and some have no rows of one.
@rows("name, world, model, more, states, sent", """
* cp_documents | 2 | | | | 689408
* ddp_convnet | 3 | --grad-accum 6 | --grad-accum 2 | |
* fsdp_lora | 2 | | | 28784 | 449000
* fsdp_muon | 2 | | | 189724 | 732848
cp_documents | 2 | | --attention ulysses | |
tp_llama | 2 | | | |
tp_llama | 2 | | --no-sequence-parallel | |
fsdp_gpt2 | 4 | --dropout 0 | --replicate 2 | |
cp_documents | 4 | | --activation-checkpointing selective | |
fsdp_lora | 4 | | --activation-checkpointing | 14448 | 673500
fsdp_muon | 4 | --num-hidden-layers 4 | | 124076 | 1620192
fsdp_muon | 8 | --num-hidden-layers 1 --num-key-value-heads 1 | --grad-accum 1 | |
""")
def test_follows_one_process(example, name, world, model, more, states, sent):
    """The convnet: one process that accumulates the same micro-batches, since BatchNorm sees how
    the batch is cut."""
    expected = example(name, int(name not in KINDS), model)
    found = example(name, world, f"{model} {more}".strip())
    assert len(found.curve()) == 4 and furthest(found.curve(), expected.curve()) < 1e-10
    if name == "ddp_convnet":
        assert {"samples", "samples_per_second"} <= found.history[-1].keys()
        rates = [rate for (rate,) in found.curve("lr")]
        assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    elif name != "fsdp_gpt2":
        assert furthest(found.curve("val_loss"), expected.curve("val_loss")) < 1e-10
    counts = found.counts()
    assert states in ("", counts["held"]["optimizer states"])
    assert not sent or counts["sent"] == pytest.approx(sent, abs=1)


@rows("name", """
* ddp_convnet
fsdp_muon
fsdp_lora
fsdp_gpt2
tp_llama
cp_documents
""")
def test_resumes_bit_for_bit_and_on_other_ranks(example, start, tmp_path, name):
    """On other ranks, with dropout, or with statistics of what a rank sees, it only goes on in the
    same direction."""
    whole = example(name, 2, "")
    expected = saved(whole, 4)
    within = 0.5 if name in ("fsdp_gpt2", "ddp_convnet") else 1e-10
    for world in (2, 1):
        folder = tmp_path / str(world)
        shutil.copytree(whole.out, folder / "out", ignore=shutil.ignore_patterns("*4"))
        again = start(name, world, folder=folder)
        assert "after step 2" in again.output
        found = saved(again, 4)
        assert found.keys() == expected.keys()
        assert world == 1 or all(torch.equal(found[name], expected[name]) for name in found)
        assert furthest(again.curve("loss")[-1:], whole.curve("loss")[-1:]) < within


# An example, its script, and how many lines of the script's ``main`` it has not
@rows("name, script, number", """
diloco | fsdp.py | 23
cp_documents | cp.py | 12
ddp_convnet | ddp.py | 22
fsdp_gpt2 | fsdp.py | 16
fsdp_lora | fsdp.py | 23
fsdp_muon | fsdp.py | 26
tp_llama | tp.py | 13
trainer_fsdp | examples/trainer.py | 4
""")
def test_main_of_an_example_is_that_of_its_script(name, script, number):
    """A change of a script reaches its examples: `diff` shows what is theirs, and no more."""
    mains = [(ROOT / path).read_text().partition("\ndef main(")[2].partition("\n\n\n")[0]
             for path in (script, f"examples/{name}.py")]
    lines = difflib.unified_diff(*(main.splitlines() for main in mains), n=0)
    gone = [line for line in lines if re.match(r"-(?!-).*\w", line)]
    assert len(gone) == number, gone


@thorough
def test_an_example_finds_what_it_imports(tmp_path):
    """From any folder, without PYTHONPATH."""
    needs("transformers")
    for path in (ROOT / "examples").glob("*_*.py"):
        if path.stem not in ("__init__", "trainer_fsdp"):
            subprocess.run([sys.executable, path, "--help"], cwd=tmp_path, env=BARE, check=True,
                           stdout=subprocess.DEVNULL)


def test_another_base_is_refused(example, start, checkpoint, tmp_path):
    """One byte is enough, in a resume or on one of two ranks."""
    resumed = example("fsdp_lora", 2, "").out.parent
    for rank in range(2):
        shutil.copytree(checkpoint, tmp_path / f"rank{rank}" / "base")
    other = tmp_path / "rank1/base"
    with open(other / "run.json", "a") as file:
        file.write(" ")
    hash_again(other)
    for folder, base, code in (
        (resumed, other, ""), (tmp_path, "base", "os.chdir(f'rank{rank}')")
    ):
        result = start("fsdp_lora", 2, f"--base {base}", folder, inject=code, expect_ok=False)
        assert not result.ok and "hash_of_base is " in result.output


@thorough
def test_peft_reads_the_adapters(start, base, tmp_path):
    """They are exported at the end of a run, also if it is asked to stop there; not where it stops
    before. A checkpoint has nothing else."""
    peft, transformers = needs("peft"), needs("transformers")
    folder = tmp_path / "adapters"
    options = f"--export {folder} --lr 0.05"
    start("fsdp_lora", 2, options, tmp_path, inject="at(2, signal_self, 'SIGTERM')")
    assert not folder.exists()
    result = start("fsdp_lora", 2, options, tmp_path, inject="at(4, signal_self, 'SIGTERM')")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (4, 6, 7)
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    state = peft.PeftModel.from_pretrained(model, folder).state_dict()
    adapters = {name.removeprefix("model."): tensor
                for name, tensor in saved(result, 4).items() if name[:6] == "model."}
    assert len(adapters) == 2 * 2 * 7  # of each matrix of two layers
    for name, tensor in adapters.items():
        found = state[f"base_model.model.{name.removesuffix('weight')}default.weight"]
        assert torch.equal(found, tensor.to(found.dtype)) and ".lora_" in name and tensor.any()


def test_the_targets_of_lines(tmp_path):
    """A padded token is none."""
    needs("transformers")
    from examples.fsdp_gpt2 import read_lines

    (tmp_path / "lines").write_text("abcdef\n\nab\n")
    first, second = read_lines(tmp_path / "lines", 3)
    assert first["input_ids"].tolist() == [97, 98, 99] and first["labels"].tolist() == [98, 99, 100]
    assert second["input_ids"].tolist() == [97, 0, 0]
    assert second["labels"].tolist() == [98, -100, -100]


@thorough
def test_the_trainer_and_the_same_with_fsdp(run):
    one, two = (
        np.array([line.split()[3::2] for line in result.lines], float)
        for result in (run("examples/trainer.py", 0, pass_out=False),
                       run("examples/trainer_fsdp.py", 2, pass_out=False)))
    assert one.shape == (20, 2)
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)
