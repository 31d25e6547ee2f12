"""examples/fsdp_lora.py trains what a plain loop trains, and PEFT reads what it writes."""

import json
import re
import shutil

import pytest
import torch

from common.data import BatchSampler
from common.materialise import draw_weight
from common.model import Transformer
from common.services.hf_config import read_config
from common.options import option_parser, parse_options
from common.services import checkpoint_files
from common.services.hf_weights import load_weights
from common.step import decay_groups, set_learning_rate
from common.tokens import TokenDataset
from tests.support.processes import ROOT
from tests.support.sample import sampled, thorough
from tests.test_same_run import furthest
from tools import dry_run

NEEDS = "pip install -r examples/requirements.txt"
peft = pytest.importorskip("peft", reason=NEEDS)
transformers = pytest.importorskip("transformers", reason=NEEDS)

SCRIPT = "examples/fsdp_lora.py"
OPTIONS = "--batch-size 24 --seq-len 24 --steps 6 --lr 0.02 --warmup-steps 2"
ADAPTERS = "--log-every 1 --lora-rank 4 --lora-alpha 6 --dtype float64"
LAYERS, MATRICES, T = 2, 7, 24


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a Llama with two layers and grouped heads."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, initializer_range=0.1,
    )).save_pretrained(folder)
    return folder


@pytest.fixture
def lora(run, base, corpus):
    """Run the example: ``lora(world, options)``. Evaluations between the steps change nothing."""

    def lora(world, options="", model=base, **kwargs):
        data = f"--data {corpus} --val-data {corpus} --val-every 2 --val-batches 1"
        return run(f"{SCRIPT} --model {model} {data} {OPTIONS} {ADAPTERS} {options}", world,
                   **kwargs)

    return lora


def plain_curve(base, corpus):
    """The losses and norms of a loop that has neither FSDP nor adapters as modules: it adds the
    changes to the weights."""
    args = parse_options(option_parser(""), [*OPTIONS.split(), "--dtype", "float64"])
    config = read_config(base)
    model = Transformer(config).double()
    load_weights(model, base)
    pairs = {}
    for name, weight in model.requires_grad_(False).named_parameters():
        if "_proj." in name:
            shape = 4, weight.shape[1]
            slices = tuple(slice(0, size) for size in shape)
            A = draw_weight(name.replace(".weight", ".lora_A.weight"), slices, shape, config, 0)
            pairs[name] = (A.double().requires_grad_(),
                           torch.zeros(len(weight), 4, dtype=torch.float64, requires_grad=True))
    assert len(pairs) == LAYERS * MATRICES
    trained = [matrix for pair in pairs.values() for matrix in pair]
    optimizer = torch.optim.AdamW(decay_groups(trained, args.weight_decay), args.lr, args.betas)
    dataset, curve = TokenDataset(corpus, T), []
    for step, rows in enumerate(BatchSampler(len(dataset), 24, stop=args.steps)):
        set_learning_rate(optimizer, step, args)
        inputs, targets = map(torch.stack, zip(*(dataset[row] for row in rows)))
        changed = {name: model.get_parameter(name) + 6 / 4 * B @ A
                   for name, (A, B) in pairs.items()}
        loss = torch.func.functional_call(model, changed, (inputs, targets)) / targets.numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        curve.append([loss.item(), norm.item()])
    return curve


@pytest.mark.parametrize("world, more", sampled([
    (2, "--grad-accum 3"), (3, ""), (4, "--replicate 2 --grad-accum 2"),
    (2, "--no-reshard-after-forward --activation-checkpointing"),
], [(3, "")]))
def test_follows_a_plain_loop(lora, base, corpus, world, more):
    """It resumes too: test_examples.py."""
    expected = plain_curve(base, corpus)
    assert expected[0][0] - expected[-1][0] > 0.1
    assert furthest(lora(world, more).curve(), expected) < 1e-10


def test_another_base_is_refused(lora, base, tmp_path):
    """One row of one matrix is enough, in a resume or on one of two ranks."""
    lora(1, "--steps 2")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[-1].mul_(1.01)
    model.save_pretrained(tmp_path / "rank1" / "base")
    result = lora(1, "--steps 4", model=tmp_path / "rank1" / "base", expect_ok=False)
    assert not result.ok and "the hash of the base is " in result.output
    shutil.copytree(base, tmp_path / "rank0" / "base")
    result = lora(2, "--no-resume", model="base", expect_ok=False,
                  inject="os.chdir(f'rank{rank}')")
    assert not result.ok and "the hash of the base is " in result.output
    result = lora(1, "--no-resume", model="tiny", expect_ok=False)
    assert not result.ok and "tiny has no .safetensors file with weights" in result.output


@pytest.mark.parametrize("world, more", sampled([
    (2, ""), (2, "--dtype bfloat16 --grad-accum 2"), (4, "--replicate 2"),
    (2, "--no-reshard-after-forward --grad-accum 2"),
], [(2, "")]))
def test_bytes_and_collectives(lora, world, more):
    """Beside the formulas. On top come AdamW's count of steps, and the norm for clipping, a number
    per tensor."""
    summary = lora(world, f"--save-every 0 {more}").summary
    theory = {kind: size["bytes"] for kind, size in summary["theory"].items()}
    held = {kind: summary["held"][kind.replace("_", " ")] for kind in theory if kind != "sent"}
    tensors, size = 2 * LAYERS * MATRICES, 4 if "bfloat16" in more else 8
    held["optimizer_states"] -= 4 * tensors
    assert held == {kind: theory[kind] for kind in held} and min(held.values()) > 0
    s = 2 if "--replicate" in more else world
    norms = 2 * tensors * size * (s - 1) / s
    assert summary["sent"] - theory["sent"] == pytest.approx(norms, abs=1)
    calls = {}
    for entry in summary["collectives"]:
        calls[entry["collective"]] = calls.get(entry["collective"], 0) + entry["calls"]
    a = 2 if "--grad-accum" in more else 1
    assert calls["all-gather"] == (LAYERS + 2 if "--no-reshard" in more else a * (2 * LAYERS + 2))
    assert calls["reduce-scatter"] == a * LAYERS


@thorough
def test_a_dry_run_counts_the_same(lora, base):
    summary = lora(2, "--save-every 0").summary
    found = dry_run.count_apart(
        str(ROOT / SCRIPT), f"--model {base} {OPTIONS} {ADAPTERS}".split(), 2, 0, 2)
    assert found["held"] == summary["held"] and found["peak"]["parameters"] > 0
    sent = [[{key: part[key] for key in ("collective", "calls", "bytes")} for part in each]
            for each in (found["collectives"], summary["collectives"])]
    assert sent[0] == sent[1] != []


def test_a_run_that_is_stopped_exports_at_its_end(lora, tmp_path):
    """And not before: PEFT would read adapters that are not trained to the end."""
    folder = tmp_path / "adapters"
    stopped = lora(2, f"--export {folder}", inject="at(4, signal_self, 'SIGTERM')")
    assert re.search("stopped after step [45] of 6, saved", stopped.output)
    assert not folder.exists()
    again = lora(2, f"--export {folder}")
    assert re.search("resuming after step [45]", again.output)
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"]


def test_peft_reads_the_adapters(lora, base, tmp_path):
    """It computes the same logits, and merges the same weights. A checkpoint has nothing else."""
    result = lora(3, f"--export {tmp_path}/adapters")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["r"] == 4 and len(config["target_modules"]) == MATRICES
    reference = transformers.LlamaForCausalLM.from_pretrained(base).double()
    reference = peft.PeftModel.from_pretrained(reference, tmp_path / "adapters")
    adapters = checkpoint_files.read(result.out / "step-00000006")
    assert len(adapters) == 2 * LAYERS * MATRICES and all(".lora_" in name for name in adapters)

    model = Transformer(read_config(base)).double().requires_grad_(False)
    load_weights(model, base)
    tokens = torch.arange(2 * T).view(2, T) * 7 % 256
    before = model(tokens)
    for name, A in adapters.items():
        if name.endswith(".lora_A.weight"):
            B = adapters[name.replace("lora_A", "lora_B")]
            model.get_parameter(name.replace(".lora_A", "")).add_(6 / 4 * B @ A)
    logits = model(tokens)
    assert (logits - before).abs().max() > 0.5
    # Llama's norms and angles are in float32 in transformers.
    torch.testing.assert_close(reference(tokens).logits, logits, rtol=0, atol=2e-5)
    merged = reference.merge_and_unload().state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(merged[name], parameter, rtol=0, atol=1e-12)
