"""Weights of Hugging Face's Llama, both ways: --init-from, and tools/export.py. transformers is the
reference."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from common import options
from common.services import checkpoint
from common.data import BatchSampler, TokenDataset
from common.errors import SettingError
from common.model import ModelConfig, Transformer
from common.services.hf_weights import load_weights, read_config
from tests.processes import ROOT
from tests.sample import sampled, thorough
from tools import export

NEEDS = "pip install -r examples/requirements.txt"
pytest.importorskip("safetensors", reason=NEEDS)
transformers = pytest.importorskip("transformers", reason=NEEDS)

SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}
TRAIN = "--batch-size 12 --seq-len 32 --dtype float64 --log-every 1"
FILE = "model-0000{}-of-00005.safetensors"


def save(folder, dtype=torch.float32, shard="5GB", **config):
    """Write a small Llama with grouped heads, whose weights are large and whose norms are not 1.
    Returns it, in ``dtype``."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
        "rope_theta": 500.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, **config,
    }))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with shards in bfloat16 and scaled angles, and the same model in float64."""
    folder = tmp_path_factory.mktemp("llama")
    model = save(folder, torch.bfloat16, "20KB", rope_scaling=dict(SCALING))
    assert len(list(folder.glob("*.safetensors"))) == 5
    return folder, model.double()


@pytest.fixture
def copied(llama, tmp_path):
    """A copy of that folder, to be changed."""
    return shutil.copytree(llama[0], tmp_path / "copied")


def ours(folder, dtype=torch.float32):
    """Our model with the weights of a folder."""
    model = Transformer(read_config(folder)).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    load_weights(model, folder)
    return model


def change(path, **values):
    """Change a config.json; None takes a name out."""
    path = path / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def resave(path, edit):
    """Change the tensors in a safetensors file."""
    from safetensors.torch import load_file, save_file

    save_file(edit(load_file(path)), path)


# Reading


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_every_parameter_is_that_in_the_file(tmp_path, stored, shard):
    """Whatever its type there: bit for bit, or rounded once."""
    expected = save(tmp_path, stored, shard).state_dict()
    for dtype in (torch.float32, torch.float64):
        found = ours(tmp_path, dtype).state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == dtype and torch.equal(found[name], tensor.to(dtype)), name


@pytest.mark.parametrize("scaling", [None, SCALING])
def test_logits_are_those_of_transformers(tmp_path, scaling):
    """Far beyond the original context, where scaled angles differ most."""
    reference = save(tmp_path, rope_scaling=scaling and dict(scaling))
    tokens = torch.randint(0, 256, (2, 200), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, model = reference(tokens).logits, ours(tmp_path)
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=2e-4)
        model.config = dataclasses.replace(model.config, rope_scaling=None if scaling else SCALING)
        assert (model(tokens) - expected).abs().max() > 0.1


def test_a_tied_head_gets_the_values_of_the_embedding(tmp_path):
    reference = save(tmp_path, tie_word_embeddings=True)
    model = ours(tmp_path)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=0, atol=1e-4)
    assert "its head trained apart from its embedding" in parse(f"--init-from {tmp_path}").model
    change(tmp_path, tie_word_embeddings=False)
    with pytest.raises(SettingError, match="lacks the tensor lm_head.weight"):
        ours(tmp_path)


def test_a_config_of_older_versions(copied):
    """rope_theta and rope_scaling apart, the type under its older name; null; and none at all."""
    expected = read_config(copied)
    assert expected.rope_scaling == SCALING and expected.rope_theta == 500
    plain = dataclasses.replace(expected, rope_scaling=None)
    older = {("type" if key == "rope_type" else key): value for key, value in SCALING.items()}
    for values, found in (
        ({"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": older}, expected),
        ({"rope_scaling": None}, plain),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 7.0},
         plain),
        ({"rope_parameters": None, "rope_theta": None},
         dataclasses.replace(plain, rope_theta=10000.0)),
    ):
        change(copied, **values)
        assert read_config(copied) == found


def test_angles_in_the_file_are_passed_over(copied):
    """Older versions wrote them."""
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    resave(copied / FILE.format(1), lambda tensors: tensors | more)
    ours(copied)


# Training


@pytest.fixture(scope="module")
def expected(llama, once):
    """The run of single.py from these weights."""
    return once("single.py", 0, f"{TRAIN} --init-from {llama[0]} --steps 2")


def test_the_first_loss_is_that_of_transformers(expected, llama, corpus):
    """Which computes norms and angles in float32 also in float64."""
    dataset = TokenDataset(corpus, 32, "auto", 256)
    rows = next(iter(BatchSampler(len(dataset), 12, stop=1)))
    inputs, targets = (torch.stack(part) for part in zip(*(dataset[i] for i in rows)))
    loss = F.cross_entropy(llama[1](inputs).logits.flatten(0, 1), targets.flatten()).item()
    assert expected.history[0]["loss"] == pytest.approx(loss, abs=1e-5) and loss > 6
    assert re.search(rf"model of {llama[0]} \(\w+\): 39,648 parameters", expected.output)


RUNS = [
    ("ddp.py", 2), ("zero.py --stage 2", 3), ("fsdp.py", 3), ("tp.py", 2), ("cp.py", 2),
    ("pp.py", 2), ("hybrid_3d.py --tp 2 --pp 2", 4),
]
# What each rank holds of the weights
SHARES = {("fsdp.py", 3): 1 / 3, ("tp.py", 2): 1 / 2, ("pp.py", 2): 1 / 2,
          ("hybrid_3d.py --tp 2 --pp 2", 4): 1 / 4}
READS = """
import math
from torch.distributed.checkpoint import HuggingFaceStorageReader
before(HuggingFaceStorageReader, "read_data", lambda _, plan, planner: (
    print(sum(math.prod(item.lengths) for item in plan.items), file=open(f"reads-{rank}", "a"))
))
"""


@pytest.mark.parametrize("command, world", sampled(RUNS, [("tp.py", 2), ("pp.py", 2)]))
def test_every_script_starts_from_the_weights(run, expected, llama, corpus, tmp_path, command,
                                              world):
    """On the curve of single.py. Each rank reads what it holds, and together they read no number
    more than once."""
    found = run(command, world, f"{TRAIN} --init-from {llama[0]} --data {corpus} --steps 2",
                inject=READS)
    for row, other in zip(found.curve(), expected.curve(), strict=True):
        assert row == pytest.approx(other, abs=1e-10)
    if share := SHARES.get((command, world)):
        read = [sum(map(int, (tmp_path / f"reads-{rank}").read_text().split()))
                for rank in range(world)]
        norms = 7 * 32  # which tensor-parallel ranks both hold
        assert sum(read) == 39648 + norms * ("tp" in command)
        assert max(read) < 39648 * share * 1.3 + 300


def test_a_tied_head_in_a_pipeline(run, corpus, tmp_path):
    """The last stage alone reads the embedding a second time: reading waits for no other rank."""
    save(tmp_path / "tied", torch.bfloat16, "20KB", tie_word_embeddings=True)
    options = f"{TRAIN} --init-from {tmp_path / 'tied'} --data {corpus} --steps 2"
    expected = run("single.py", 0, options, out="single").curve()
    for row, other in zip(run("pp.py", 2, options).curve(), expected, strict=True):
        assert row == pytest.approx(other, abs=1e-10)


def test_a_resumed_run_reads_no_weights_again(run, expected, copied, corpus):
    """The path may change too: it is no setting of the run."""
    options = f"{TRAIN} --data {corpus}"
    run("single.py", 0, f"{options} --init-from {copied} --steps 1 --lr 0")
    for path in copied.glob("model*"):
        path.unlink()
    moved = copied.rename(copied.with_name("moved"))
    again = run("single.py", 0, f"{options} --init-from {moved} --steps 2 --lr 0")
    assert "resuming after step 1" in again.output
    assert again.history[0]["loss"] == expected.history[0]["loss"]  # of the weights
    assert again.history[1]["loss"] < 12
    anew = run("single.py", 0, f"{options} --init-from {moved} --steps 2 --no-resume",
               expect_ok=False)
    assert anew.statuses == [1] and "moved has no .safetensors file: only" in anew.lines[-1]


def test_machines_with_other_weights_do_not_start(run, llama, copied, corpus, tmp_path):
    """Each rank finds a folder of its own, of which one file is another's: the sizes are equal."""
    other = copied.rename(tmp_path / "rank1")
    shutil.copytree(llama[0], tmp_path / "rank0" / "llama")
    save(other / "llama", torch.bfloat16, "20KB", rope_scaling=dict(SCALING), initializer_range=0.3)
    result = run("fsdp.py", 2, f"{TRAIN} --init-from llama --data {corpus}",
                 inject="os.chdir(f'rank{rank}')", expect_ok=False)
    assert result.statuses == [1, 1]
    assert any(re.search(r"error: --model is of llama \(\w+\) on rank 0 and of llama \(\w+\) on "
                         r"rank 1: start all ranks with the same", line) for line in result.lines)


# What is wrong, in one line


def parse(text):
    return options.parse_options(options.option_parser("a script"), text.split())


@pytest.mark.parametrize("text, message", [
    ("--hidden-size 64", "--hidden-size 64 contradicts --init-from .*, whose config.json has 32"),
    ("--rope-theta 1e4", "--rope-theta 10000.0 contradicts --init-from .* has 500.0: leave out"),
    ("--model tiny", "--model tiny with hidden_size 128 contradicts --init-from .* has 32"),
])
def test_what_the_command_line_must_not_say(llama, text, message):
    with pytest.raises(SettingError, match=message):
        parse(f"--init-from {llama[0]} {text}")
    args = parse(f"--init-from {llama[0]} --hidden-size 32")  # it may repeat the file
    assert vars(args.config) == json.loads(json.dumps(vars(read_config(llama[0]))))


def test_the_weights_do_not_lie_in_the_run_folder(copied):
    for out in (copied, copied.parent):
        with pytest.raises(SettingError, match="copied lies in --out .*: choose another --out"):
            parse(f"--init-from {copied} --out {out}")
    parse(f"--init-from {copied} --out {copied}/run")


@pytest.mark.parametrize("values, message", [
    ({"hidden_act": "gelu"}, "hidden_act 'gelu': only Llama is supported, which has 'silu'"),
    ({"model_type": "mistral"}, "model_type 'mistral'"), ({"model_type": None}, "model_type None"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'.*only 'llama3'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'.*only 'llama3'"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_type 'default'"),
    ({"rope_scaling": [8]}, r"rope_scaling is \[8\]: it must be a dict"),
    ({"rope_scaling": SCALING | {"mscale": 1.0}}, "'mscale': 1.0}; only 'llama3'"),
    ({"rope_scaling": SCALING | {"factor": "8"}}, "'factor': '8'.*with numbers above 0"),
    ({"rope_scaling": SCALING | {"factor": 0}}, "'factor': 0.*with numbers above 0"),
    ({"hidden_size": 32.5}, "hidden_size 32.5: it must be a whole number greater than 0"),
    ({"hidden_size": 10**400}, "hidden_size 1000.*: it must be a whole number"),
    ({"vocab_size": True}, "vocab_size True"), ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
    ({"head_dim": 7}, "head_dim 7 is odd"), ({"vocab_size": None}, "lacks vocab_size"),
    # What the files do not have:
    ({"num_hidden_layers": 4}, "lacks the tensor model.layers.3.input_layernorm.weight"),
    ({"num_hidden_layers": 2}, "has the tensor model.layers.2.*, unlike a Llama of its config"),
    ({"vocab_size": 300}, r"embed_tokens.weight of shape \(256, 32\), and its config needs \(300"),
    ({"tie_word_embeddings": True, "vocab_size": 255}, r"shape \(256, 32\), and .* \(255, 32\)"),
])
def test_a_config_of_another_model(copied, values, message):
    change(copied, **values)
    with pytest.raises(SettingError, match=message) as error:
        ours(copied)
    assert str(copied) in str(error.value)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def become_a_fifo(path):
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "truncated": (2, truncate, "model-00002-of-00005.safetensors cannot be read"),
    "a pointer of Git LFS": (1, lambda path: path.write_text("version https://git-lfs"),
                             "model-00001-of-00005.safetensors cannot be read"),
    "a FIFO": (1, become_a_fifo, "model-00001-of-00005.safetensors cannot be read .it is not a re"),
    "not there": (3, pathlib.Path.unlink, "lacks the tensor model.layers.1"),
    "integers": (2, lambda path: resave(path, lambda tensors: {
        name: tensor.to(torch.int8) for name, tensor in tensors.items()
    }), "in torch.int8: only torch.float64, torch.float32, torch.float16, torch.bfloat16 are supp"),
    "twice": (2, lambda path: shutil.copy(path, path.with_name("again.safetensors")),
              "has .* in two files"),
    "config is a FIFO": (0, become_a_fifo, "config.json cannot be read: it is not a regular file"),
    "no config": (0, pathlib.Path.unlink, "config.json cannot be read: No such file"),
    "config is a list": (0, lambda path: path.write_text("[]"), "is no config.json of a model"),
    "config is no JSON": (0, lambda path: path.write_text("{"), "cannot be read: it is no JSON"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_folder_that_is_damaged(copied, case):
    number, damage, message = DAMAGE[case]
    damage(copied / (FILE.format(number) if number else "config.json"))
    with pytest.raises(SettingError, match=message):
        ours(copied)


def test_a_missing_package_is_one_line(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SettingError, match="pip install safetensors"):
        ours(llama[0])


def test_a_script_ends_with_one_line(run, copied, corpus):
    """Also if only the other stage holds the tensor that is wrong."""
    change(copied, vocab_size=250)
    result = run("pp.py", 2, f"{TRAIN} --init-from {copied} --data {corpus} --steps 1",
                 expect_ok=False)
    assert result.statuses == [1, 1] and "Traceback" not in result.output
    (line,) = [line for line in result.lines if "error" in line]
    assert line.startswith(f"pp.py: error: {copied} has model.embed_tokens.weight of shape")


# Writing


@pytest.fixture(scope="module")
def trained(llama, once):
    """A run folder with two checkpoints, each saved by two ranks."""
    train = TRAIN.replace("float64", "float32")
    return once("fsdp.py", 2, f"{train} --init-from {llama[0]} --steps 2 --save-every 1").out


def test_transformers_reads_what_is_exported(trained, llama, tmp_path, capsys):
    """The newest checkpoint of a run folder, in one file. Ours reads it too."""
    assert export.main([str(trained), str(tmp_path / "hf")]) is None
    assert "step-00000002 -> " in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "config.json", "hf", "model.safetensors"
    ]
    own = checkpoint.read(trained / "step-00000002")
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    assert reference.dtype == torch.float32
    found = reference.state_dict()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    assert not torch.equal(own["lm_head.weight"], llama[1].lm_head.weight.float())  # it has trained
    model = ours(tmp_path / "hf")
    assert model.config == read_config(llama[0])
    tokens = torch.arange(120)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=0, atol=1e-4)
    config = reference.config
    assert (config.max_position_embeddings, config.eos_token_id, config.bos_token_id) == (
        128, None, None
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shards_in_another_type(trained, tmp_path, dtype):
    step, folder = trained / "step-00000001", tmp_path / "a" / "hf"
    export.main([str(step), str(folder), "--dtype", dtype, "--max-shard-size", "0.00003"])
    files = sorted(folder.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert all(path.stat().st_size < 30_000 + 4_000 for path in files)  # and its header
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert model.dtype == getattr(torch, dtype)
    found, again = model.state_dict(), ours(folder).state_dict()
    for name, tensor in checkpoint.read(step).items():
        assert torch.equal(found[name], tensor.to(model.dtype)), name
        assert torch.equal(again[name], found[name].float()), name


def break_settings(**values):
    def edit(step):
        run = json.loads((step / "run.json").read_text())
        run["must stay the same"] |= values
        (step / "run.json").write_text(json.dumps(run))
        checkpoint.write_hash(step / "run.json")
    return edit


def save_alone(folder, settings, tensors, step):
    """A checkpoint of ``tensors``, without a run."""
    tensors = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    optimizer = torch.optim.SGD(tensors.values())
    checkpoint.Checkpoints(folder, (settings, {}), tensors, optimizer, stop=9).save(step)


def grow(step):
    """As if one number were larger than float16 holds."""
    tensors = checkpoint.read(step)
    tensors["model.norm.weight"][3] = 1e5
    settings = json.loads((step / "run.json").read_text())["must stay the same"]
    shutil.rmtree(step)
    save_alone(step.parent, settings, tensors, 2)


BROKEN = {
    "damaged": (lambda step: (step / "__1_0.distcp").write_bytes(b"other"), "__1_0.distcp is dama"),
    "cut off": (lambda step: (step / "__1_0.distcp.sha256").unlink(), "is not a checkpoint"),
    "no index": (lambda step: (step / ".metadata").unlink(), ".metadata cannot be checked"),
    "another model": (break_settings(**{"--model-type": "gpt2"}), "has model_type 'gpt2': only"),
    "no model": (break_settings(**{"--hidden-size": None}), "run.json lacks hidden_size"),
    "another shape": (break_settings(**{"--vocab-size": 9}), r"shape \(256, 32\), and its config"),
    "too large": (grow, "model.norm.weight has numbers too large for torch.float16: take --dt"),
    "no checkpoint": (shutil.rmtree, "is neither a checkpoint nor a run folder with one"),
    "in the way": (lambda step: (step.parent / "hf").mkdir(), "hf exists: name a folder"),
    "another export": (lambda step: (step.parent / "hf.tmp").mkdir(), "hf.tmp exists: another e"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_exported(trained, tmp_path, case):
    """In one line, and nothing is left behind."""
    step = shutil.copytree(trained / "step-00000002", tmp_path / "step-00000002")
    damage, message = BROKEN[case]
    damage(step)
    before = sorted(tmp_path.iterdir())
    where = tmp_path if case == "no checkpoint" else step
    with pytest.raises(SettingError, match=message):
        export.main([str(where), str(tmp_path / "hf"), "--dtype", "float16"])
    assert sorted(tmp_path.iterdir()) == before


def peak(function):
    """By how many bytes the memory of this process grows, at most, while ``function`` runs."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    status = pathlib.Path("/proc/self/status")
    before, = re.findall(r"VmRSS:\s+(\d+) kB", status.read_text())
    function()
    after, = re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())
    return (int(after) - int(before)) * 1024


@thorough
def test_an_export_takes_the_memory_of_its_largest_tensor(tmp_path):
    """Of 145 MB it holds up to 25 MB: a tensor of 6 MB four times, as torch.load reads it. In a
    process of its own: memory that the tests have freed would hide, or add to, what it takes."""
    def save(name, config):
        model = Transformer(config)
        settings = {f"--{name.replace('_', '-')}": value for name, value in vars(config).items()}
        save_alone(tmp_path / name, settings, model.state_dict(), 1)
        return [parameter.nbytes for parameter in model.parameters()]

    save("small", ModelConfig(64, 16, 32, 1, 1, 1))  # takes the memory of what export imports
    sizes = save("large", ModelConfig(4096, 384, 3072, 8, 8, 8))
    code = ("from tests.test_weights import export, peak; print(*(peak(lambda: export.main("
            "[name, f'{name}-hf', '--dtype', 'bfloat16'])) for name in ('small', 'large')))")
    output = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, text=True,
                            env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    grown = int(output.stdout.split()[-1])
    assert sum(sizes) > 13 * max(sizes) and grown < 5 * max(sizes), (grown, max(sizes))
