"""The examples: scripts brought to other models train as one process does, and resume. One process
trains what a plain loop trains."""

import difflib
import functools
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from common.checkpoint import hash_of
from tests.support.compare import furthest, read
from tests.support.processes import BARE, ROOT
from tests.support.sample import needs, table, thorough
from tools.huggingface import export

NEEDS = {"fsdp_gpt2": ["transformers"], "tp_llama": ["transformers", "safetensors"],
         "fsdp_lora": ["safetensors"]}
TRAINING = "--batch-size 24 --steps 4 --warmup-steps 1 --dtype float64 --lr 0.01 --seed 3"
MODEL = "--hidden-size 32 --intermediate-size 48 --num-attention-heads 8 --num-key-value-heads 2"
DOCUMENTS = f"--seq-len 48 {MODEL} --num-hidden-layers 2"
MUON = f"--seq-len 24 {MODEL} --num-hidden-layers 2"
LAYERS, MATRICES = 2, 7  # of the base model of fsdp_lora.py
LAST = "step-00000004"


@pytest.fixture(scope="module")
def checkpoint(once):
    """Of a Llama."""
    options = f"{MODEL} --num-hidden-layers {LAYERS} --seq-len 32 --batch-size 8 --steps 20"
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
    path.write_text("".join(word + (" " if i % 7 % 3 else "\n") for i, word in enumerate(words)))
    return path


@pytest.fixture(scope="module")
def start(server, request, lines, corpus, tmp_path_factory):
    """Run an example: ``start(name, world, options)``."""
    val = "--val-every 3 --val-batches 1 --val-data"
    text = f"--data {corpus} {val} {corpus}"
    own = {
        "ddp_convnet": "", "fsdp_gpt2": f"--data {lines} --seq-len 24",
        "tp_llama": f"--from-pretrained BASE {text} --seq-len 32",
        "cp_documents": f"--data {lines} {val} {lines} {DOCUMENTS}",
        "fsdp_lora": f"--base CHECKPOINT {text} {MUON} --lora-rank 4 --lora-alpha 6",
        "fsdp_muon": f"{text} {MUON}",
    }

    def start(name, world, options="", folder=None, inject="write_counts()", **kwargs):
        needs(*NEEDS.get(name, ()))
        options = f"{TRAINING} --log-every 1 --save-every 2 {own[name]} {options}"
        for word in "BASE", "CHECKPOINT":
            if word in options:
                options = options.replace(word, str(request.getfixturevalue(word.lower())))
        return server.run(f"examples/{name}.py", world, options, inject=inject,
                          folder=folder or tmp_path_factory.mktemp(name), **kwargs)

    return start


@pytest.fixture(scope="module")
def example(start):
    """The same, each run once."""
    return functools.cache(start)


# An example, ranks, its model, other options; of optimizer states the bytes held, and all bytes
# sent, by the formulas of this file in commit f660e7d. In the last row a rank of fsdp_muon.py has
# no matrix, and some have no rows of one.
@pytest.mark.parametrize("name, world, model, more, takes", table("""
* cp_documents | 2 | | | 494164 689408
* ddp_convnet | 3 | | |
fsdp_lora | 2 | | | 28784 449000
fsdp_muon | 2 | | | 189724 732848
cp_documents | 2 | | --attention ulysses |
tp_llama | 2 | | |
tp_llama | 2 | | --no-sequence-parallel |
fsdp_gpt2 | 4 | --dropout 0 | --replicate 2 |
cp_documents | 4 | | --activation-checkpointing selective |
fsdp_lora | 4 | | --activation-checkpointing | 14448 673500
fsdp_muon | 4 | --num-hidden-layers 4 | | 124076 1620192
fsdp_muon | 8 | --num-hidden-layers 1 --num-key-value-heads 1 | --grad-accum 1 |
"""))
def test_follows_one_process(example, name, world, model, more, takes):
    """The convnet: one process that accumulates the same micro-batches, since BatchNorm sees how
    the batch is cut."""
    cut = 2 * world if name == "ddp_convnet" else 2
    expected = example(name, 1, f"--grad-accum {cut} {model}".strip())
    found = example(name, world, f"--grad-accum 2 {model} {more}".strip())
    assert len(expected.curve()) == 4
    evaluated = name not in ("fsdp_gpt2", "ddp_convnet")
    for names in (["loss", "grad_norm"], ["val_loss"])[:1 + evaluated]:
        assert furthest(found.curve(*names), expected.curve(*names)) < 1e-10
    if name == "ddp_convnet":
        assert {"samples", "samples_per_second"} <= found.history[-1].keys()
        assert found.curve("lr") == [[pytest.approx(0.01 * (1 - i / 4))] for i in range(4)]
    if takes:
        counts = found.counts()
        assert f"{counts['held']['optimizer states']} {counts['sent']:.0f}" == takes


@pytest.mark.parametrize("name", table("""
* ddp_convnet
fsdp_muon
fsdp_lora
fsdp_gpt2
tp_llama
cp_documents
"""))
def test_resumes_bit_for_bit_and_on_other_ranks(example, start, tmp_path, name):
    """On other ranks, with dropout, or with statistics of what a rank sees, it only goes on in the
    same direction."""
    whole = example(name, 2, "--grad-accum 2")
    expected = read(whole.out / LAST)
    within = 0.5 if name in ("fsdp_gpt2", "ddp_convnet") else 1e-10
    for world in (2, 1):
        shutil.copytree(whole.out, tmp_path / f"{world}" / "out", ignore=lambda *_: [LAST])
        again = start(name, world, "--grad-accum 2", folder=tmp_path / f"{world}")
        assert "after step 2" in again.output and again.history[-1]["step"] == 4
        found = read(again.out / LAST)
        assert found.keys() == expected.keys()
        equal = [torch.equal(found[name], tensor) for name, tensor in expected.items()]
        assert all(equal) if world == 2 else not all(equal)
        assert abs(again.curve("loss")[-1][0] - whole.curve("loss")[-1][0]) < within


# How many lines of its script's ``main`` an example has not
OTHERWISE = {
    "diloco": 23, "cp_documents": 10, "ddp_convnet": 22, "fsdp_gpt2": 16, "fsdp_lora": 23,
    "fsdp_muon": 26, "tp_llama": 13, "trainer_fsdp": 4,
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_main_of_an_example_is_that_of_its_script(name):
    """A change of a script reaches its examples: `diff` shows what is theirs, and no more."""
    script = {"diloco": "fsdp.py", "trainer_fsdp": "examples/trainer.py"}.get(
        name, f"{name.partition('_')[0]}.py")
    mains = [(ROOT / path).read_text().partition("\ndef main(")[2].partition("\n\n\n")[0]
             for path in (script, f"examples/{name}.py")]
    lines = difflib.unified_diff(*(main.splitlines() for main in mains), n=0)
    gone = [line for line in lines if re.match(r"-(?!-).*\w", line)]
    assert len(gone) == OTHERWISE[name], gone


@thorough
def test_an_example_finds_what_it_imports(tmp_path):
    """From any folder, without PYTHONPATH."""
    needs("transformers")
    for path in (ROOT / "examples").glob("*_*.py"):
        if path.stem not in ("__init__", "trainer_fsdp"):
            subprocess.run([sys.executable, path, "--help"], cwd=tmp_path, env=BARE, check=True,
                           stdout=subprocess.DEVNULL)


# Loss and norm of three steps, and the loss of held-out data, as plain loops gave them in commit
# f660e7d: each document by itself; adapters that are added to the weights; torch's Muon
@pytest.mark.parametrize("name, expected", table("""
cp_documents | 5.55954785 1.05140131 5.22077128 1.49894994 4.83511976 1.53710466 4.5936786
fsdp_lora | 4.53315906 0.01830473 4.5362972 0.0226978 4.54226541 0.06465526 4.53049957
fsdp_muon | 5.5671154 1.18701467 5.19471949 1.57481037 4.78941531 1.97531752 4.49306231
"""))
def test_one_process_is_a_plain_loop(example, name, expected):
    run = example(name, 1, "--grad-accum 2")
    found = sum(run.curve()[:3] + run.curve("val_loss")[:1], [])
    assert found == pytest.approx([*map(float, expected.split())])


# fsdp_lora.py


def test_another_base_is_refused(example, start, checkpoint, tmp_path):
    """One byte is enough, in a resume or on one of two ranks."""
    resumed = example("fsdp_lora", 1, "--grad-accum 2").out.parent
    for rank in range(2):
        shutil.copytree(checkpoint, tmp_path / f"rank{rank}" / "base")
    other = tmp_path / "rank1" / "base"
    with open(other / "run.json", "a") as file:
        file.write(" ")
    sums = {path: hash_of(path) for path in other.iterdir() if path.name != "SHA256SUMS"}
    (other / "SHA256SUMS").write_text("".join(
        f"{digest}  {path.name}\n" for path, digest in sums.items()))
    for world, folder, options, code in (
        (1, resumed, f"--base {other}", ""),
        (2, tmp_path, "--base base", "os.chdir(f'rank{rank}')"),
    ):
        result = start("fsdp_lora", world, options, folder, inject=code, expect_ok=False)
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
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (4, 6, MATRICES)
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    state = peft.PeftModel.from_pretrained(model, folder).state_dict()
    adapters = {name.removeprefix("model."): tensor
                for name, tensor in read(result.out / LAST).items() if name[:6] == "model."}
    assert len(adapters) == 2 * LAYERS * MATRICES
    for name, tensor in adapters.items():
        found = state[f"base_model.model.{name.removesuffix('weight')}default.weight"]
        assert torch.equal(found, tensor.to(found.dtype)) and ".lora_" in name and tensor.any()


def test_the_targets_of_lines(tmp_path):
    """A padded token is none."""
    needs("transformers")
    from examples.fsdp_gpt2 import read_lines

    (tmp_path / "lines").write_text("abcdef\n\nab\n")
    samples = [[sample[name].tolist() for name in ("input_ids", "labels")]
               for sample in read_lines(tmp_path / "lines", 3)]
    assert samples == [[[97, 98, 99], [98, 99, 100]], [[97, 0, 0], [98, -100, -100]]]


@thorough
def test_the_trainer_and_the_same_with_fsdp(run):
    one, two = (
        torch.tensor([[float(word) for word in line.split()[3::2]] for line in result.lines])
        for result in (run("examples/trainer.py", 0, pass_out=False),
                       run("examples/trainer_fsdp.py", 2, pass_out=False)))
    assert one.shape == (20, 2)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
