"""The examples: scripts brought to other models train as one process does, and resume."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from common.data import BatchSampler
from common.errors import SettingError
from common.materialise import materialise
from common.model import Transformer
from common.options import option_parser, parse_options
from common.services import checkpoint_files
from common.step import decay_groups, set_learning_rate
from common.tokens import TokenDataset
from examples import cp_documents
from tests.support.processes import PATIENCE, ROOT, ProcessServer
from tests.support.sample import sampled, thorough

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
TRANSFORMERS = ["transformers", "transformers.models.gpt2.modeling_gpt2",
                "transformers.models.llama.modeling_llama"]
OPTIONS = "--batch-size 24 --steps 8 --log-every 1 --save-every 4 --dtype float64 --lr 0.01"

DOCUMENTS = ("--seq-len 48 --hidden-size 32 --intermediate-size 48 --num-hidden-layers 2 "
             "--num-attention-heads 8 --num-key-value-heads 2")


@pytest.fixture(scope="module")
def example(tmp_path_factory, corpus):
    """Run an example, each once: ``example(name, world, options)``."""
    folder = tmp_path_factory.mktemp("data")
    words = open(corpus).read().split()
    lines = "".join(word + (" " if i % 7 % 3 else "\n") for i, word in enumerate(words))
    (folder / "lines").write_text(lines)  # of many lengths
    if HAS_TRANSFORMERS:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        LlamaForCausalLM(LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=256,
        )).save_pretrained(folder)
    own = {
        "ddp_convnet": "", "fsdp_gpt2": f"--data {folder}/lines --seq-len 24",
        "tp_llama": f"--from-pretrained {folder} --data {corpus} --val-data {corpus} --seq-len 32",
        "cp_documents": f"--data {folder}/lines --val-data {folder}/lines {DOCUMENTS}",
        "fsdp_lora": f"--model {folder} --data {corpus} --seq-len 32",
        "fsdp_muon": f"--data {corpus} --seq-len 32 --hidden-size 32 --intermediate-size 48 "
                     "--num-attention-heads 8 --num-hidden-layers 2",
    }
    with ProcessServer(*TRANSFORMERS * HAS_TRANSFORMERS) as server:
        def run(name, world, options, out=None):
            if name in ("fsdp_gpt2", "tp_llama", "fsdp_lora") and not HAS_TRANSFORMERS:
                pytest.skip(f"examples/{name}.py is left out: it needs transformers; "
                            "pip install -r examples/requirements.txt")
            return server.run(f"examples/{name}.py", world, f"{OPTIONS} {own[name]} {options}",
                              folder=out or tmp_path_factory.mktemp(name))

        yield functools.cache(run)


RUNS = [("fsdp_gpt2", 3, ""), ("fsdp_gpt2", 4, "--replicate 2"), ("ddp_convnet", 3, ""),
        ("tp_llama", 2, ""), ("tp_llama", 2, "--no-sequence-parallel"), ("cp_documents", 2, ""),
        ("cp_documents", 2, "--attention ulysses"),
        ("cp_documents", 4, "--activation-checkpointing selective")]


@pytest.mark.parametrize("name, world, more", sampled(RUNS, [RUNS[5]]))
def test_follows_one_process(example, name, world, more):
    """The convnet: one process that accumulates the same micro-batches, since BatchNorm sees how
    the batch is cut."""
    options = "--dropout 0" if name == "fsdp_gpt2" else ""
    cut = 2 * world if name == "ddp_convnet" else 2
    expected = example(name, 1, f"{options} --grad-accum {cut}")
    found = example(name, world, f"{options} --grad-accum 2 {more}")
    assert len(expected.curve()) == 8
    for names in (["loss", "grad_norm"], ["val_loss"] * (name in ("tp_llama", "cp_documents"))):
        one, other = (torch.tensor(result.curve(*names)) for result in (found, expected))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


RESUMES = [  # an example, and by how much its last loss may differ on other ranks: with dropout, or
    # statistics of what a rank sees, it goes on in the same direction
    ("fsdp_gpt2", 0.5), ("ddp_convnet", 0.5), ("tp_llama", 1e-10), ("cp_documents", 1e-10),
    ("fsdp_lora", 1e-10), ("fsdp_muon", 1e-10),
]


@pytest.mark.parametrize("name, within", sampled(RESUMES, RESUMES[4:]))
def test_resumes_bit_for_bit_and_on_other_ranks(example, tmp_path, name, within):
    whole = example(name, 2, "")
    last = "step-00000008"
    expected = checkpoint_files.read(whole.out / last, prefix="")
    for world, before in ((2, "whole"), (1, "once more")):
        (whole.out / last).rename(tmp_path / before)
        again = example(name, world, "", out=whole.out.parent)
        assert "resuming after step 4" in again.output and again.history[-1]["step"] == 8
        found = checkpoint_files.read(again.out / last, prefix="")
        assert found.keys() == expected.keys()
        equal = [torch.equal(found[name], tensor) for name, tensor in expected.items()]
        assert all(equal) if world == 2 else not all(equal)
        assert abs(again.curve("loss")[-1][0] - whole.curve("loss")[-1][0]) < within


def test_the_loss_in_bfloat16_has_more_than_3_digits(example):
    """It is computed in float32, from logits in bfloat16."""
    result = example("fsdp_gpt2", 2, "--dtype bfloat16 --steps 2")
    losses = torch.tensor(result.curve("loss"), dtype=torch.float64)
    assert len(losses) == 2 and (losses.bfloat16().double() != losses).all()


@pytest.fixture(scope="module")
def document_by_document(example):
    """The curve of a loop in one process that gives the model each document by itself: with plain
    causal attention, and with positions from 0 on."""
    run = example("cp_documents", 1, "--steps 3 --grad-accum 2")
    (path,) = re.findall(r" tokens in (\S+)", run.output)
    parser = option_parser("")
    args = parse_options(parser, f"{DOCUMENTS} --dtype float64 --lr 0.01 --steps 3".split())
    with torch.device("meta"):
        model = Transformer(args.config).double()
    materialise(model, "cpu", 0)
    optimizer = torch.optim.AdamW(decay_groups(model.parameters(), args.weight_decay), args.lr,
                                  args.betas)
    dataset, curve, number = TokenDataset(path, 48), [], 0
    for step, rows in enumerate(BatchSampler(len(dataset), 24, stop=3)):
        set_learning_rate(optimizer, step, args)
        loss = 0.0
        for inputs, targets in (dataset[row] for row in rows):
            borders = [0, *(inputs == ord("\n")).nonzero().flatten().add(1).tolist(), 48]
            for first, last in zip(borders, borders[1:]):
                if first < last:
                    document = slice(first, last)
                    part = model(inputs[None, document], targets[None, document]) / (24 * 48)
                    part.backward()
                    loss, number = loss + part.item(), number + 1
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        curve.append([loss, norm.item()])
    assert number > 3 * 24 * 4
    return torch.tensor(curve)


@pytest.mark.parametrize("world, attention", sampled(
    [(1, "ring"), (4, "ring"), (4, "ulysses"), (8, "ulysses")], [(4, "ring"), (4, "ulysses")]))
def test_packed_documents_do_not_see_each_other(example, document_by_document, world, attention):
    """With more ranks than the 2 key/value heads."""
    result = example("cp_documents", world, f"--steps 3 --grad-accum 2 --attention {attention}")
    found = torch.tensor(result.curve())
    torch.testing.assert_close(found, document_by_document, rtol=0, atol=1e-10)
    assert result.summary["sent"] == result.summary["theory"]["sent"]["bytes"]  # as in cp.py


@pytest.mark.parametrize("world", sampled([1, 4, 8], [4]))
def test_attention_within_documents(run, world):
    """Outputs and gradients; documents of one token, of one chunk, across chunks and ranks, as long
    as the sequence. Blocks that no query sees are not computed."""
    assert "all agree" in run("tests/support/documents.py", world, pass_out=False).output


def test_attention_within_documents_is_causal():
    with pytest.raises(SettingError, match="causal: give it is_causal=True"):
        cp_documents.ring_attention(*torch.zeros(3, 1, 2, 4, 8), group=None, documents=[None],
                                    is_causal=False)


@thorough
def test_the_convnet_learns(example):
    result = example("ddp_convnet", 2, "--steps 150 --dtype bfloat16 --lr 0.05")
    assert float(re.search(r"held-out set: (\S+)", result.output)[1]) > 0.6
    assert {"images", "images_per_second"} <= result.history[-1].keys()


@thorough
def test_the_trained_llama_is_exported(example, tmp_path):
    result = example("tp_llama", 2, f"--dtype float32 --export {tmp_path}/trained")
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tmp_path / "trained")
    trained = checkpoint_files.read(result.out / "step-00000008")
    assert all(torch.equal(trained[name], p) for name, p in model.named_parameters())


# As a user starts them: without PYTHONPATH

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def start(*command, cwd=ROOT):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "NPROC": "2"}
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@thorough
def test_as_a_module_and_by_run_sh_from_any_folder(tmp_path):
    options = "--steps", "4", "--out", tmp_path / "out"
    start(*TORCHRUN, "-m", "examples.ddp_convnet", *options)
    start("bash", ROOT / "run.sh", "examples/ddp_convnet.py", "--steps", "4", cwd=tmp_path)
    first, second = (
        [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (tmp_path / "out", tmp_path / "runs" / "ddp_convnet")
    )
    assert len(first) == 2 and first == second


@thorough
def test_the_trainer_and_the_same_with_fsdp():
    plain = start(sys.executable, "-m", "examples.trainer")
    sharded = start(*TORCHRUN, "-m", "examples.trainer_fsdp")
    one, other = (
        torch.tensor([[float(word) for word in line.split()[3::2]] for line in output.splitlines()])
        for output in (plain, sharded)
    )
    assert one.shape == (20, 2)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
