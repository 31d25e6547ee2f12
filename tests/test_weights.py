"""Weights of Hugging Face's Llama, both ways: --init-from, and tools/export.py. transformers is the
reference."""

import dataclasses
import json
import pathlib
import re
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F

from common import arguments, checkpoint
from common.data import BatchSampler, TokenDataset
from common.errors import SettingError
from common.huggingface import load_weights, read_config
from common.model import LLAMA_3_1, PRESETS, ModelConfig, Transformer, rotary_table
from tests.processes import ROOT
from tests.sample import sampled, thorough
from tools import export, plan

NEEDS = "pip install -r examples/requirements.txt"
pytest.importorskip("safetensors", reason=NEEDS)
transformers = pytest.importorskip("transformers", reason=NEEDS)

SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}
TRAIN = "--batch-size 12 --seq-len 32 --dtype float64 --log-every 1"


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
    assert len(list(folder.glob("*.safetensors"))) > 3
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


def test_the_angles_of_llama_3_1():
    """Pairs that keep their speed, that turn 8 times more slowly, and those between."""
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=1, rope_theta=500000.0, rope_scaling=dict(LLAMA_3_1),
        max_position_embeddings=131072,
    )
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    expected = LlamaRotaryEmbedding(config).inv_freq
    cos, sin = rotary_table(torch.tensor(1), 128, 500000.0, torch.float64, LLAMA_3_1)
    found = torch.atan2(sin, cos)
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=0)
    slower = 500000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128) / found
    assert slower.min() == pytest.approx(1) and slower.max() == pytest.approx(8)
    assert ((slower > 1.01) & (slower < 7.99)).sum() > 3


def test_presets_are_those_of_the_models():
    assert PRESETS["llama3-405b"].rope_scaling == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert PRESETS["llama3-8b"].rope_scaling is PRESETS["llama3-70b"].rope_scaling is None


def test_a_tied_head_gets_the_values_of_the_embedding(tmp_path):
    reference = save(tmp_path, tie_word_embeddings=True)
    model = ours(tmp_path)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=0, atol=1e-4)
    args = parse(f"--init-from {tmp_path}")
    assert "its head trained apart from its embedding" in arguments.describe(args, model)
    change(tmp_path, tie_word_embeddings=False)
    with pytest.raises(SettingError, match="lacks the tensor lm_head.weight"):
        ours(tmp_path)


def test_a_config_of_older_versions(copied):
    """rope_theta and rope_scaling apart, the type under its older name; null; and none at all."""
    expected = read_config(copied)
    assert expected.rope_scaling == SCALING and expected.rope_theta == 500
    older = {("type" if key == "rope_type" else key): value for key, value in SCALING.items()}
    change(copied, rope_parameters=None, rope_theta=500.0, rope_scaling=older)
    assert read_config(copied) == expected
    plain = dataclasses.replace(expected, rope_scaling=None)
    change(copied, rope_scaling=None)
    assert read_config(copied) == plain
    change(copied, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rope_theta=7.0)
    assert read_config(copied) == plain
    change(copied, rope_parameters=None, rope_theta=None)
    assert read_config(copied).rope_theta == 10000


def test_angles_in_the_file_are_passed_over(copied):
    """Older versions wrote them."""
    from safetensors.torch import load_file, save_file

    path = copied / "model-00001-of-00005.safetensors"
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(path) | more, path)
    ours(copied)


# Training


def first_batch(corpus):
    dataset = TokenDataset(corpus, 32, "auto", 256)
    rows = next(iter(BatchSampler(len(dataset), 12, stop=1)))
    return (torch.stack(part) for part in zip(*(dataset[i] for i in rows)))


@pytest.fixture(scope="module")
def expected(llama, corpus, server, tmp_path_factory):
    """The first loss of transformers' model, and single.py's curve."""
    inputs, targets = first_batch(corpus)
    loss = F.cross_entropy(llama[1](inputs).logits.flatten(0, 1), targets.flatten())
    result = server.run("single.py", 0, f"{TRAIN} --init-from {llama[0]} --data {corpus} --steps 2",
                        folder=tmp_path_factory.mktemp("single"))
    assert f"model of {llama[0]}: 39,648 parameters" in result.output
    return loss.item(), result


def test_the_first_loss_is_that_of_transformers(expected):
    """Which computes norms and angles in float32 also in float64."""
    loss, single = expected
    assert single.history[0]["loss"] == pytest.approx(loss, abs=1e-5) and loss > 6


RUNS = [
    ("ddp.py", 2), ("zero.py --stage 1", 2), ("zero.py --stage 2", 3), ("fsdp.py", 2),
    ("fsdp.py", 3), ("fsdp.py --replicate 2", 4), ("tp.py", 2),
    ("cp.py", 2), ("pp.py", 2),
    ("pp.py --schedule zbv", 1), ("hybrid_3d.py --tp 2 --pp 2", 4),
    ("hybrid_3d.py --tp 2 --cp 2 --microbatches 2", 4),
]


@pytest.mark.parametrize("command, world", sampled(RUNS, [RUNS[3], RUNS[8]]))
def test_every_script_starts_from_the_weights(run, expected, llama, corpus, command, world):
    found = run(command, world, f"{TRAIN} --init-from {llama[0]} --data {corpus} --steps 2")
    for row, other in zip(found.curve(), expected[1].curve(), strict=True):
        assert row == pytest.approx(other, abs=1e-10)


READS = """
import atexit, json, os, safetensors
from torch.distributed.tensor import DTensor
real, read = safetensors.safe_open, {}
class Part:
    def __init__(self, part, name): self.part, self.name = part, name
    def __getattr__(self, name): return getattr(self.part, name)
    def __getitem__(self, slices):
        found = self.part[slices]
        read[self.name] = read.get(self.name, 0) + found.numel()
        return found
class File:
    def __init__(self, *args, **options): self.file = real(*args, **options)
    def __enter__(self): self.file.__enter__(); return self
    def __exit__(self, *args): return self.file.__exit__(*args)
    def keys(self): return self.file.keys()
    def get_slice(self, name): return Part(self.file.get_slice(name), name)
safetensors.safe_open = File
import common.optimizer
groups = common.optimizer.decay_groups
held = []
def note(parameters, decay):
    parameters = list(parameters)
    held.append(sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters))
    return groups(parameters, decay)
common.optimizer.decay_groups = note
atexit.register(lambda: open(f"reads-{rank}.json", "w").write(json.dumps([held[0], read])))
"""
WHOLE = 39648


@pytest.mark.parametrize("command, world, share", sampled(
    [("fsdp.py", 2, 1 / 2), ("fsdp.py", 3, 1 / 3), ("tp.py", 2, 1 / 2), ("pp.py", 2, 1 / 2),
     ("hybrid_3d.py --tp 2 --pp 2", 4, 1 / 4)],
    [("tp.py", 2, 1 / 2)],
))
def test_each_rank_reads_what_it_holds(run, llama, corpus, tmp_path, command, world, share):
    """No number more, and none twice; a norm that all hold is read by all."""
    run(f"tests/injected.py {command}", world,
        f"{TRAIN} --init-from {llama[0]} --data {corpus} --steps 1 --save-every 0",
        env={"INJECT": READS})
    for rank in range(world):
        held, read = json.loads((tmp_path / f"reads-{rank}.json").read_text())
        assert sum(read.values()) == held < WHOLE * share * 1.3 + 300
        if "pp" in command:
            assert 10 < len(read) < 22


def test_a_resumed_run_reads_no_weights_again(run, expected, copied, corpus):
    """The path may change too: it is no setting of the run."""
    options = f"{TRAIN} --data {corpus}"
    run("single.py", 0, f"{options} --init-from {copied} --steps 1 --lr 0")
    for path in copied.glob("model*"):
        path.unlink()
    moved = copied.rename(copied.with_name("moved"))
    again = run("single.py", 0, f"{options} --init-from {moved} --steps 2 --lr 0")
    assert "resuming after step 1" in again.output
    assert again.history[0]["loss"] == expected[1].history[0]["loss"]  # of the weights
    assert again.history[1]["loss"] < 12
    anew = run("single.py", 0, f"{options} --init-from {moved} --steps 2 --no-resume",
               expect_ok=False)
    assert anew.statuses == [1] and "moved has neither model.safetensors" in anew.lines[-1]


def test_machines_with_other_weights_do_not_start(run, llama, copied, corpus, tmp_path):
    """Each rank finds a folder of its own, of which one file is another's: the sizes are equal."""
    other = copied.rename(tmp_path / "rank1")
    shutil.copytree(llama[0], tmp_path / "rank0" / "llama")
    save(other / "llama", torch.bfloat16, "20KB", rope_scaling=dict(SCALING), initializer_range=0.3)
    result = run("tests/injected.py fsdp.py", 2, f"{TRAIN} --init-from llama --data {corpus}",
                 env={"INJECT": "os.chdir(f'rank{rank}')"}, expect_ok=False)
    assert result.statuses == [1, 1]
    assert any("error: the hash of some weights in --init-from is" in line and line.endswith(
        "on rank 1: start all ranks with the same") for line in result.lines), result.output


# What is wrong, in one line


def parse(options):
    return arguments.parse_arguments(arguments.argument_parser("a script"), options.split())


@pytest.mark.parametrize("options, message", [
    ("--hidden-size 64", "--hidden-size 64 contradicts --init-from .*, whose config.json has 32"),
    ("--rope-theta 1e4", "--rope-theta 10000.0 contradicts --init-from .* has 500.0: leave out"),
    ("--rope-scaling null", "--rope-scaling None contradicts --init-from .* has {'rope_type': 'll"),
    ("--model tiny", "--model tiny with hidden_size 128 contradicts --init-from .* has 32"),
    ("--model huge", "--model huge: no such preset"),
])
def test_the_command_line_must_not_contradict_the_file(llama, options, message):
    with pytest.raises(SettingError, match=message):
        parse(f"--init-from {llama[0]} {options}")


def test_the_command_line_may_repeat_the_file(llama):
    again = f"--rope-scaling {json.dumps(SCALING)}".replace(" {", "\0{").replace(" ", "")
    args = parse(f"--init-from {llama[0]} --hidden-size 32 " + again.replace("\0", " "))
    assert args.config == read_config(llama[0])
    assert vars(args.config) == json.loads(json.dumps(vars(args.config)))  # as run.json has it
    repeated, config = plan.model_options(str(llama[0]))
    parsed = arguments.parse_arguments(arguments.argument_parser("a script"), repeated)
    assert parsed.config == config == args.config


@pytest.mark.parametrize("options, message", [
    ("--rope-scaling nonsense", "argument --rope-scaling: nonsense is no JSON"),
    ("--rope-scaling 3", "rope_scaling is 3: it must be a dict"),
    ('--rope-scaling {"rope_type":"llama3","factor":8}', "rope_scaling has factor: with rope_type"),
    ('--rope-scaling {"type":"yarn","factor":8}', "rope_scaling has rope_type 'yarn': only"),
    ("--init-from=", "--init-from: it is empty"),
    ("--init-from nowhere", "nowhere cannot be read: No such file or directory"),
])
def test_bad_options(options, message):
    with pytest.raises(SettingError, match=message):
        parse(options)


@pytest.mark.parametrize("values, message", [
    ({"hidden_act": "gelu"}, "hidden_act 'gelu': only Llama is supported, which has 'silu'"),
    ({"attention_bias": True}, "attention_bias True"),
    ({"model_type": "mistral"}, "model_type 'mistral'"), ({"model_type": None}, "model_type None"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn': only 'llama3'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear': only 'llama3'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_type 'default'"),
    ({"rope_scaling": [8]}, r"rope_scaling is \[8\]: it must be a dict"),
    ({"rope_scaling": SCALING | {"factor": "8"}}, "factor '8': it must be a number greater than 0"),
    ({"rope_scaling": SCALING | {"factor": float("inf")}}, "factor inf: it must be a number"),
    ({"rope_scaling": SCALING | {"mscale": 1.0}}, "mscale: with rope_type 'llama3' it has factor"),
    ({"rope_scaling": SCALING | {"low_freq_factor": 4.0}}, "the second must be greater"),
    ({"hidden_size": 32.5}, "hidden_size 32.5: it must be a whole number greater than 0"),
    ({"hidden_size": 10**400}, "hidden_size 1000.*: it must be a whole number"),
    ({"vocab_size": True}, "vocab_size True"), ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
    ({"head_dim": 7}, "head_dim 7 is odd"), ({"vocab_size": None}, "lacks vocab_size"),
    # What the files do not have:
    ({"num_hidden_layers": 4}, "lacks the tensor model.layers.3.input_layernorm.weight and 8 more"),
    ({"num_hidden_layers": 2}, "has the tensor model.layers.2.* and 8 more tensors, which a Ll"),
    ({"vocab_size": 300}, r"embed_tokens.weight of shape \(256, 32\), and its config needs \(300"),
    ({"tie_word_embeddings": True, "vocab_size": 255}, r"shape \(256, 32\), and .* \(255, 32\)"),
])
def test_a_config_of_another_model(copied, values, message):
    change(copied, **values)
    with pytest.raises(SettingError, match=message) as error:
        ours(copied)
    assert str(copied) in str(error.value)


def truncate(folder):
    path = folder / "model-00002-of-00005.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def as_integers(folder):
    from safetensors.torch import load_file, save_file

    path = folder / "model-00002-of-00005.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}, path)


def rename_in_index(name):
    def rename(folder):
        path = folder / "model.safetensors.index.json"
        path.write_text(path.read_text().replace("model-00002-of-00005.safetensors", name))
    return rename


DAMAGE = {
    "truncated": (truncate, "model-00002-of-00005.safetensors cannot be read"),
    "not there": (lambda f: (f / "model-00003-of-00005.safetensors").unlink(),
                  "model-00003-of-00005.safetensors cannot be read .there is no such file.: down"),
    "a pointer of Git LFS": (
        lambda f: (f / "model-00001-of-00005.safetensors").write_text("version https://git-lfs"),
        "model-00001-of-00005.safetensors cannot be read",
    ),
    "integers": (as_integers, "in I8: only F64, F32, F16, BF16 are supported"),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(),
                 "has neither model.safetensors nor model.safetensors.index.json"),
    "index is no JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"),
                         "index.json cannot be read: it is no JSON"),
    "index is a list": (lambda f: (f / "model.safetensors.index.json").write_text("[]"),
                        "is no model.safetensors.index.json of a model"),
    "index is empty": (lambda f: (f / "model.safetensors.index.json").write_text("{}"),
                       "does not say which files"),
    "index leads elsewhere": (rename_in_index("../x.safetensors"), "does not say which files"),
    "a file twice": (
        lambda f: (shutil.copy(f / "model-00002-of-00005.safetensors", f / "again"),
                   rename_in_index("again")(f),
                   shutil.copy(f / "again", f / "model-00001-of-00005.safetensors")),
        "in two files",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read: No such"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_folder_that_is_damaged(copied, case):
    damage, message = DAMAGE[case]
    damage(copied)
    with pytest.raises(SettingError, match=message):
        ours(copied)


def test_a_missing_package_is_one_line(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SettingError, match="pip install safetensors"):
        ours(llama[0])


@pytest.mark.parametrize("command, world", sampled(
    [("single.py", 0), ("pp.py", 2)], [("pp.py", 2)]
))
def test_a_script_ends_with_one_line(run, copied, corpus, command, world):
    """Also if only the other stage holds the tensor that is wrong."""
    change(copied, vocab_size=250)
    result = run(command, world, f"{TRAIN} --init-from {copied} --data {corpus} --steps 1",
                 expect_ok=False)
    assert all(status == 1 for status in result.statuses)
    (line,) = [line for line in result.lines if "error" in line]
    assert line.startswith(f"{command}: error: {copied} has model.embed_tokens.weight of shape")
    assert "Traceback" not in result.output


# Writing


@pytest.fixture(scope="module")
def trained(server, llama, corpus, tmp_path_factory):
    """A run folder with two checkpoints, each saved by two ranks."""
    options = f"{TRAIN} --init-from {llama[0]} --data {corpus} --steps 2 --save-every 1"
    return server.run("fsdp.py", 2, options.replace("float64", "float32"),
                      folder=tmp_path_factory.mktemp("trained")).out


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
    step = trained / "step-00000001"
    export.main([str(step), str(tmp_path / "a" / "hf"), "--dtype", dtype,
                 "--max-shard-size", "0.00003"])
    files = sorted((tmp_path / "a" / "hf").glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert all(path.stat().st_size < 30_000 + 4_000 for path in files)  # and its header
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "a" / "hf")
    assert found.dtype == getattr(torch, dtype)
    for name, tensor in checkpoint.read(step).items():
        assert torch.equal(found.state_dict()[name], tensor.to(found.dtype)), name
    again = ours(tmp_path / "a" / "hf").state_dict()
    assert all(torch.equal(again[name], tensor.float())
               for name, tensor in found.state_dict().items())


def test_which_tensors_share_a_file():
    sizes = {"a": 4, "b": 4, "c": 1, "d": 20, "e": 3, "f": 7}
    assert export.split(sizes, 9) == [["a", "b", "c"], ["d"], ["e"], ["f"]]
    assert export.split(sizes, 10) == [["a", "b", "c"], ["d"], ["e", "f"]]
    assert export.split(sizes, 1000) == [list(sizes)]


@thorough
def test_the_example_with_transformers_model_exports_at_its_end(run, llama, corpus, tmp_path):
    options = (f"--from-pretrained {llama[0]} --data {corpus} --seq-len 32 --steps 2 "
               f"--batch-size 4 --lr 0.01 --export {tmp_path / 'hf'}")
    result = run("examples/tp_llama.py", 2, options)
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for name, tensor in checkpoint.read(result.out / "step-00000002").items():
        assert torch.equal(found[name], tensor), name
        assert not torch.equal(tensor, llama[1].state_dict()[name].float())
    again = run("examples/tp_llama.py", 2, f"{options} --no-resume", expect_ok=False)
    assert "hf exists: name a folder that does not, or remove it" in again.output
    assert (result.out / "step-00000002").exists()  # refused before the earlier run moves aside


def break_settings(**values):
    def edit(step):
        path = step / "run.json"
        run = json.loads(path.read_text())
        run["must stay the same"] |= values
        path.write_text(json.dumps(run))
        checkpoint.write_hashes(step, ["run.json"])
    return edit


def grow(step):
    """As if one number were larger than float16 holds."""
    tensors = checkpoint.read(step)
    tensors["model.norm.weight"][3] = 1e5
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    settings = json.loads((step / "run.json").read_text())["must stay the same"]
    shutil.rmtree(step)
    checkpoint.Checkpoints(step.parent, settings, tensors, optimizer, stop=9).save(2)


BROKEN = {
    "damaged": (lambda step: (step / "__1_0.distcp").write_bytes(b"other"), "__1_0.distcp is dama"),
    "cut off": (lambda step: (step / "__1_0.distcp.sha256").unlink(), "is not a checkpoint"),
    "no index": (lambda step: (step / ".metadata").unlink(), ".metadata cannot be checked"),
    "another model": (break_settings(**{"--model-type": "gpt2"}), "has model_type 'gpt2': only"),
    "no model": (break_settings(**{"--hidden-size": None}), "run.json lacks hidden_size"),
    "more layers": (break_settings(**{"--num-hidden-layers": 4}), "lacks the tensor model.layers"),
    "fewer layers": (break_settings(**{"--num-hidden-layers": 2}), "has the tensor model.layers"),
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
    """Of 118 MB in one file it holds 12 MB: a tensor of 6 MB, and the part that was saved."""
    config = ModelConfig(4096, 384, 3072, 8, 8, 8)
    model = Transformer(config)
    total = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    assert total > 13 * largest
    run, _ = arguments.run_settings(parse(""), vars(config), {})
    checkpoint.Checkpoints(tmp_path, run, model.state_dict(keep_vars=True),
                           torch.optim.SGD(model.parameters()), stop=1).save(1)
    del model
    grown = peak(lambda: export.main([str(tmp_path), str(tmp_path / "hf"), "--dtype", "bfloat16"]))
    assert grown < 3 * largest, (grown, largest, total)


# Around it


@thorough
def test_a_dry_run_reads_the_dimensions_and_no_weights(server, copied, tmp_path):
    for path in copied.glob("model*"):
        path.unlink()
    result = server.run(
        "tools/dry_run.py", 0,
        ["--rank", 1, 2, ROOT / "fsdp.py", "--init-from", copied, "--seq-len", 32],
        folder=tmp_path, pass_out=False,
    )
    assert f"model of {copied}: 39,648 parameters" in result.output
