"""The examples: scripts brought to other models train as one process does, and resume."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from common import checkpoint
from tests.processes import PATIENCE, ROOT, ProcessServer
from tests.sample import sampled, thorough

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
TRANSFORMERS = ["transformers", "transformers.models.gpt2.modeling_gpt2",
                "transformers.models.llama.modeling_llama"]
OPTIONS = "--batch-size 24 --steps 8 --log-every 1 --save-every 4 --dtype float64 --lr 0.01"


@pytest.fixture(scope="module")
def examples(request, tmp_path_factory):
    """Runs an example in a folder of its own: ``examples(script, world, options)``."""
    with ProcessServer(*TRANSFORMERS * HAS_TRANSFORMERS) as server:
        def run(name, world, options, out=None, **kwargs):
            if name in ("fsdp_gpt2", "tp_llama") and not HAS_TRANSFORMERS:
                pytest.skip(f"examples/{name}.py is left out: it needs transformers; "
                            "pip install -r examples/requirements.txt")
            folder = out or tmp_path_factory.mktemp(name)
            return server.run(f"examples/{name}.py", world, f"{OPTIONS} {options}", folder=folder,
                              **kwargs)

        yield run


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a small Llama of Hugging Face, with grouped heads."""
    if not HAS_TRANSFORMERS:
        return "nowhere"
    folder = tmp_path_factory.mktemp("llama")
    code = (
        "import torch; from transformers import LlamaConfig, LlamaForCausalLM;"
        "torch.manual_seed(1);"
        "LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2,"
        "num_attention_heads=4, num_key_value_heads=2, vocab_size=256))"
        f".save_pretrained({str(folder)!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=PATIENCE)
    return str(folder)


def options_of(name, llama, corpus):
    return {
        "fsdp_gpt2": f"--data {corpus}.lines --seq-len 24",
        "ddp_convnet": "",
        "tp_llama": f"--from-pretrained {llama} --data {corpus} --seq-len 32",
    }[name]


@pytest.fixture(scope="module", autouse=True)
def lines(corpus):
    """The corpus in lines of many lengths."""
    with open(corpus) as text, open(f"{corpus}.lines", "w") as file:
        for i, word in enumerate(text.read().split()):
            file.write(word + (" " if i % 7 % 3 else "\n"))


def furthest(curve, other):
    assert len(curve) == len(other) == 8
    return max(abs(a - b) for row, reference in zip(curve, other) for a, b in zip(row, reference))


RUNS = [("fsdp_gpt2", 2, ""), ("fsdp_gpt2", 3, ""), ("fsdp_gpt2", 4, "--replicate 2"),
        ("ddp_convnet", 2, ""), ("ddp_convnet", 3, ""), ("tp_llama", 2, ""),
        ("tp_llama", 2, "--no-sequence-parallel")]


@pytest.mark.parametrize("name, world, more", sampled(RUNS, [RUNS[1], RUNS[3], RUNS[5]]))
def test_follows_one_process(examples, llama, corpus, name, world, more):
    """One process that accumulates the same micro-batches: BatchNorm sees how a batch is cut."""
    options = options_of(name, llama, corpus) + (" --dropout 0" if name == "fsdp_gpt2" else "")
    accumulate = f"--grad-accum {2 if name == 'tp_llama' else 2 * world}"
    expected = examples(name, 1, f"{options} {accumulate}").curve()
    result = examples(name, world, f"{options} --grad-accum 2 {more}")
    assert furthest(result.curve(), expected) < 1e-10


NAMES = ["fsdp_gpt2", "ddp_convnet", "tp_llama"]


@pytest.mark.parametrize("name", sampled(NAMES, NAMES[:1]))
def test_resumes_bit_for_bit_and_on_other_ranks(examples, llama, corpus, tmp_path, name):
    """With dropout on at the same world size; at another world size in the same direction."""
    options = options_of(name, llama, corpus)
    whole = examples(name, 2, options)
    cut = examples(name, 2, f"{options} --steps 4", out=tmp_path)
    if name == "ddp_convnet":  # its schedule depends on --steps: the whole run's checkpoint instead
        (cut.out / "step-00000004").rename(tmp_path / "unused")
        (whole.out / "step-00000004").rename(cut.out / "step-00000004")
    again = examples(name, 2, options, out=tmp_path)
    assert "resuming after step 4" in again.output
    found, expected = (
        checkpoint.read(out / "step-00000008", prefix="") for out in (again.out, whole.out)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    (again.out / "step-00000008").rename(tmp_path / "done")
    other = examples(name, 1, options, out=tmp_path)
    assert "resuming after step 4" in other.output and other.history[-1]["step"] == 8
    assert abs(other.history[-1]["loss"] - whole.history[-1]["loss"]) < 0.5


@thorough
def test_the_convnet_learns(examples):
    result = examples("ddp_convnet", 2, "--steps 150 --dtype float32 --lr 0.05")
    assert float(re.search(r"held-out set: (\S+)", result.output)[1]) > 0.6


# As a user starts them: without PYTHONPATH

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def start(command, cwd, **environment):
    return subprocess.run(
        command, cwd=cwd, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=PATIENCE,
    )


@thorough
def test_as_a_module_under_torchrun(tmp_path):
    result = start([sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc-per-node=2", "-m", "examples.ddp_convnet", "--steps", "4",
                    "--out", str(tmp_path / "out")], ROOT)
    assert result.returncode == 0, result.stderr
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2


@thorough
def test_by_run_sh_from_any_folder(tmp_path):
    result = start(["bash", str(ROOT / "run.sh"), "examples/ddp_convnet.py", "--steps", "4"],
                   tmp_path, PYTHON=sys.executable, NPROC="2")
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "runs" / "ddp_convnet" / "metrics.jsonl").read_text().splitlines()
    assert {"images", "images_per_second"} <= json.loads(log[-1]).keys()


@thorough
def test_the_trainer_and_the_same_with_fsdp(run):
    plain = start([sys.executable, "-m", "examples.trainer"], ROOT)
    assert plain.returncode == 0 and len(plain.stdout.splitlines()) == 20, plain.stderr
    torchrun = start([sys.executable, "-m", "torch.distributed.run", "--standalone",
                      "--nproc-per-node=2", "-m", "examples.trainer_fsdp"], ROOT)
    on_4_ranks = run("examples/trainer_fsdp.py", 4, pass_out=False)
    for output in (torchrun.stdout, on_4_ranks.output):
        numbers = [[float(word) for word in line.split()[3::2]]
                   for line in (plain.stdout + output).splitlines()]
        assert len(numbers) == 40, (torchrun.stderr, on_4_ranks.output)
        assert max(abs(a - b) for row, other in zip(numbers[:20], numbers[20:])
                   for a, b in zip(row, other)) < 1e-10


# As a reader compares them


@pytest.mark.parametrize("script, example", [
    ("fsdp.py", "fsdp_gpt2.py"), ("ddp.py", "ddp_convnet.py"), ("tp.py", "tp_llama.py"),
    ("examples/trainer.py", "trainer_fsdp.py"),
])
def test_the_diff_is_small(script, example):
    diff = subprocess.run(["diff", ROOT / script, ROOT / "examples" / example],
                          capture_output=True, text=True).stdout
    assert 10 < sum(line.startswith(">") for line in diff.splitlines()) <= 45


def test_what_is_lifted_is_unchanged():
    text = (ROOT / "fsdp.py").read_text()
    shard = text[text.index("def shard("): text.index("def reshard(")]
    assert shard in (ROOT / "examples" / "trainer_fsdp.py").read_text()
