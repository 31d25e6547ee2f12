"""The examples: scripts brought to other models train as one process does, and resume. One process
trains what a plain loop trains."""

import difflib
import functools
import itertools
import json
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch

from common.checkpoint import hash_of, load, open_checkpoint
from common.data import BatchSampler, TokenDataset, add_text_options
from common.materialise import draw_weight, materialise
from common.model import Transformer, add_model_options, model_config
from common.options import option_parser, parse_options
from common.step import decay_groups, set_learning_rate
from tests.support import inject
from tests.support.compare import read
from tests.support.processes import BARE, ROOT
from tests.support.sample import needs, sampled, table, thorough
from tools.counting import theory
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


# An example, ranks, its model, other options. In the last row a rank of fsdp_muon.py has no matrix,
# and some have no rows of one.
@pytest.mark.parametrize("name, world, model, more", table("""
* cp_documents | 2 | |
* ddp_convnet | 3 | |
fsdp_lora | 2 | |
fsdp_muon | 2 | |
cp_documents | 2 | | --attention ulysses
tp_llama | 2 | |
tp_llama | 2 | | --no-sequence-parallel
fsdp_gpt2 | 4 | --dropout 0 | --replicate 2
cp_documents | 4 | | --activation-checkpointing selective
fsdp_lora | 4 | | --activation-checkpointing
fsdp_muon | 4 | --num-hidden-layers 4 |
fsdp_muon | 8 | --num-hidden-layers 1 --num-key-value-heads 1 | --grad-accum 1
"""))
def test_follows_one_process(example, request, name, world, model, more):
    """The convnet: one process that accumulates the same micro-batches, since BatchNorm sees how
    the batch is cut. What is held and sent is what the docstring says."""
    cut = 2 * world if name == "ddp_convnet" else 2
    expected = example(name, 1, f"--grad-accum {cut} {model}".strip())
    found = example(name, world, f"--grad-accum 2 {model} {more}".strip())
    assert len(expected.curve()) == 4
    evaluated = name not in ("fsdp_gpt2", "ddp_convnet")
    for names in (["loss", "grad_norm"], ["val_loss"])[:1 + evaluated]:
        one, other = (torch.tensor(result.curve(*names)) for result in (found, expected))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    if name == "ddp_convnet":
        assert {"samples", "samples_per_second"} <= found.history[-1].keys()
        assert found.curve("lr") == [[pytest.approx(0.01 * (1 - i / 4))] for i in range(4)]
    if name == "cp_documents" and not more:  # what cp.py sends
        args = settings(f"{DOCUMENTS} --grad-accum 2", attention="ring")
        assert found.counts()["sent"] == theory.cp(args, world)["sent"][1]
    if name in ("fsdp_lora", "fsdp_muon") and world in (2, 4):
        sizes = lora_sizes if name == "fsdp_lora" else muon_sizes
        args = settings(f"{MUON} --grad-accum 2 {model}", replicate=1, cpu_offload=False,
                        reshard_after_forward=True)
        states, sent, trained, counted = sizes(args, world)
        # On top: AdamW's count of steps; for clipping, a number for each tensor that is trained.
        counts = found.counts()
        assert counts["held"]["optimizer states"] == states + 4 * counted
        norms = 2 * trained * 8 * (world - 1) / world
        assert counts["sent"] == pytest.approx(sent + norms, abs=1)


def lora_sizes(args, n):
    """Bytes of optimizer states, bytes sent, tensors that are trained, and by AdamW."""
    from examples.fsdp_lora import add_adapters

    with torch.device("meta"):
        model = Transformer(args.config).double()
    add_adapters(model, model.model.layers.values(), 4, 6, torch.float64)
    P, A = (sum(p.nbytes for p in model.parameters() if p.requires_grad or frozen)
            for frozen in (True, False))
    F = theory.bytes_of(model.model.embed_tokens, model.model.norm, model.lm_head)
    tensors, sent = 2 * MATRICES * LAYERS, (2 * (2 * P - F + A) + 16) * (n - 1) / n
    return 2 * A / n, sent, tensors, tensors


def muon_sizes(args, n):
    matrices = [p for name, p in plain_model(args).named_parameters() if "_proj." in name]
    layers = args.config.num_hidden_layers
    M, parts = sum(p.nbytes for p in matrices), theory.fsdp(args, n)
    return (parts["optimizer_states"][1] - M / n, parts["sent"][1] + 2 * M / n * (n - 1) / n,
            9 * layers + 3, 2 * layers + 3)


RESUMES = ["fsdp_muon", "ddp_convnet", "fsdp_lora", "fsdp_gpt2", "tp_llama", "cp_documents"]


@pytest.mark.parametrize("name", sampled(RESUMES, RESUMES[1:2]))
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


# Plain loops


def settings(options, **more):
    parser = option_parser("")
    add_model_options(parser)
    add_text_options(parser)
    parser.set_defaults(**more)
    args = parse_options(parser, f"{TRAINING} {options}".split())
    args.config = model_config(args)
    return args


def by_hand(args, data, trained, optimizers, mean_loss):
    """The losses and norms of the first three steps, and then the loss of the first batch without a
    seed, which is evaluated. ``mean_loss(inputs, targets)``"""
    dataset, curve = TokenDataset(data, args.seq_len), []

    def batches(**options):
        for rows in BatchSampler(len(dataset), 24, **options):
            yield map(torch.stack, zip(*(dataset[row] for row in rows)))

    for step, batch in enumerate(batches(seed=args.seed, stop=3)):
        set_learning_rate(optimizers, step, args)
        loss = mean_loss(*batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, args.max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        curve.append([loss.item(), norm.item()])
    with torch.no_grad():
        return curve, mean_loss(*next(batches(stop=1))).item()


def plain_model(args):
    with torch.device("meta"):
        model = Transformer(args.config).double()
    materialise(model, "cpu", args.seed)
    return model


def adamw(parameters, args):
    return torch.optim.AdamW(decay_groups(parameters, args.weight_decay), args.lr, args.betas)


def documents_by_hand(request, corpus):
    """Each document by itself: with plain causal attention, and with positions from 0 on."""
    args = settings(DOCUMENTS)
    model = plain_model(args)

    def mean_loss(inputs, targets):
        loss = 0.0
        for row, row_targets in zip(inputs, targets):
            borders = [0, *(row == ord("\n")).nonzero().flatten().add(1).tolist(), 48]
            for document in itertools.starmap(slice, zip(borders, borders[1:])):
                if document.start < document.stop:
                    loss += model(row[None, document], row_targets[None, document])
        return loss / targets.numel()

    return by_hand(args, request.getfixturevalue("lines"), list(model.parameters()),
                   [adamw(model.parameters(), args)], mean_loss)


def lora_by_hand(request, corpus):
    """Without adapters as modules: the changes are added to the weights."""
    args, pairs = settings(MUON), {}
    model = Transformer(args.config).double()
    reader, _ = open_checkpoint(request.getfixturevalue("checkpoint"))
    load(reader, dict(model.named_parameters()), {})
    for name, weight in model.requires_grad_(False).named_parameters():
        if "_proj." in name:
            shape = 4, weight.shape[1]
            slices = tuple(slice(0, size) for size in shape)
            A = draw_weight(name.replace(".weight", ".lora_A.weight"), slices, shape, args.config,
                            args.seed)
            pairs[name] = (A.double().requires_grad_(),
                           torch.zeros(len(weight), 4, dtype=torch.float64, requires_grad=True))
    assert len(pairs) == LAYERS * MATRICES

    def mean_loss(inputs, targets):
        changed = {name: model.get_parameter(name) + 6 / 4 * B @ A
                   for name, (A, B) in pairs.items()}
        return torch.func.functional_call(model, changed, (inputs, targets)) / targets.numel()

    trained = [matrix for pair in pairs.values() for matrix in pair]
    return by_hand(args, corpus, trained, [adamw(trained, args)], mean_loss)


def muon_by_hand(request, corpus):
    """With torch's Muon."""
    args = settings(MUON)
    model = plain_model(args)
    matrices, rest = ([p for name, p in model.named_parameters() if ("_proj." in name) == within]
                      for within in (True, False))
    muon = torch.optim.Muon(matrices, args.lr, args.weight_decay, adjust_lr_fn="match_rms_adamw")
    with mock.patch.multiple(torch.Tensor, bfloat16=torch.Tensor.bfloat16, to=torch.Tensor.to):
        inject.unrounded_muon()
        return by_hand(args, corpus, matrices + rest, [muon, adamw(rest, args)],
                       lambda inputs, targets: model(inputs, targets) / targets.numel())


@pytest.mark.parametrize("name, loop", [
    ("cp_documents", documents_by_hand), ("fsdp_lora", lora_by_hand), ("fsdp_muon", muon_by_hand)])
def test_one_process_is_a_plain_loop(example, request, corpus, name, loop):
    run, (curve, val_loss) = example(name, 1, "--grad-accum 2"), loop(request, corpus)
    torch.testing.assert_close(torch.tensor(run.curve()[:3]), torch.tensor(curve),
                               rtol=0, atol=1e-10)
    assert run.curve("val_loss")[0] == pytest.approx([val_loss], abs=1e-10)


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
