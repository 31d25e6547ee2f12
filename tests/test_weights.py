"""Weights of Hugging Face's Llama and Mixtral, both ways: tools/huggingface. The reference is
transformers."""

import dataclasses
import functools
import json
import os
import pathlib
import shlex
import shutil
import sys

import pytest
import torch

from common.errors import SettingError
from common.experts import use_experts
from common.materialise import materialise
from common.model import Transformer
from common.model_options import add_model_options
from common.options import option_parser, parse_options
from common.services import checkpoint_files, run_folder
from common.services.hf_config import read_config
from common.tokens import add_text_options
from tests.support.sample import sampled
from tests.test_run_folder import hash_again
from tests.test_same_run import furthest
from tools.huggingface import export, import_hf
from tools.huggingface.weights import load_weights

GENERATION = "generation_config.json"
NEEDS = "pip install -r examples/requirements.txt"
safetensors = pytest.importorskip("safetensors.torch", reason=NEEDS)
transformers = pytest.importorskip("transformers", reason=NEEDS)

SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}
TRAIN = "--model out --batch-size 12 --seq-len 32 --dtype float64 --log-every 1 --steps 2"


def save(folder, dtype=torch.float32, shard="5GB", kind="Llama", **config):
    """Write a small model with grouped heads, whose weights are large and whose norms are not 1.
    Returns it, in ``dtype``."""
    torch.manual_seed(1)
    model_class, config_class = (getattr(transformers, f"{kind}{name}")
                                 for name in ("ForCausalLM", "Config"))
    model = model_class(config_class(**{
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
    """A folder with shards in bfloat16, scaled angles and special tokens."""
    folder = tmp_path_factory.mktemp("llama")
    save(folder, torch.bfloat16, "20KB", rope_scaling=dict(SCALING), bos_token_id=1,
         eos_token_id=[2, 5])
    assert len(list(folder.glob("*.safetensors"))) == 5
    return folder


def ours(folder, dtype=torch.float32):
    """Our model with the weights of a folder."""
    model = use_experts(Transformer(read_config(folder))).to(dtype)
    materialise(model, "cpu", 0)
    load_weights(model, folder)
    return model


def assert_rounded(found, expected, dtype):
    """All tensors of ``found`` are those of ``expected`` in ``dtype``."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype and torch.equal(found[name], tensor.to(dtype)), name


def change(path, **values):
    """Change a config.json; None takes a name out."""
    path = path / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def contents(folder, name):
    return json.loads((folder / name).read_text())


def resave(path, edit):
    """Change the tensors in a safetensors file."""
    tensors = safetensors.load_file(path).items()
    safetensors.save_file({name: edit(tensor) for name, tensor in tensors}, path)


# Reading


@pytest.mark.parametrize("dtype, shard", [(torch.float64, "5GB"), (torch.bfloat16, "20KB")])
def test_every_parameter_is_that_in_the_file(tmp_path, dtype, shard):
    """In an imported checkpoint bit for bit, and in its type. In a model rounded once, if at all.
    """
    expected = save(tmp_path / "hf", dtype, shard).state_dict()
    angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    safetensors.save_file(angles, tmp_path / "hf" / "more.safetensors")  # older versions wrote them
    import_hf.import_weights(tmp_path / "hf", tmp_path / "out")
    step = tmp_path / "out" / "step-00000000"
    assert_rounded(checkpoint_files.read(step), expected, dtype)
    # A file for each: DCP would hold in memory all that it writes into one
    assert len(list(step.glob("*.distcp"))) == len(expected)
    for own in (torch.float32, torch.float64):
        assert_rounded(ours(tmp_path / "hf", own).state_dict(), expected, own)
    assert read_config(tmp_path / "out") == read_config(tmp_path / "hf")


def test_logits_are_those_of_transformers(tmp_path):
    """Far beyond the original context, where scaled angles differ most."""
    reference = save(tmp_path, rope_scaling=dict(SCALING))
    tokens = torch.randint(0, 256, (2, 200), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, model = reference(tokens).logits, ours(tmp_path)
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=2e-4)
        model.config = dataclasses.replace(model.config, rope_scaling=None)
        assert (model(tokens) - expected).abs().max() > 0.1


def test_a_tied_head_gets_the_values_of_the_embedding(start, tmp_path, capsys):
    """Also in the last stage of a pipeline, which has no embedding."""
    save(tmp_path / "hf", torch.bfloat16, "20KB", tie_word_embeddings=True)
    model = ours(tmp_path / "hf")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    start(tmp_path / "hf", "pp.py", 2, inject=f"load_again({str(tmp_path / 'hf')!r})")
    out = f"{tmp_path}/it's out"
    import_hf.main([str(tmp_path / "hf"), out])
    printed = capsys.readouterr()
    assert "tie_word_embeddings: here the head is a weight of its own" in printed.err
    command = printed.out.split(" such as: ")[1]
    assert shlex.split(command) == ["bash", "run.sh", "fsdp.py", "--model", out, "--out", out]
    assert json.loads(pathlib.Path(out, "config.json").read_text())["tie_word_embeddings"] is False
    change(tmp_path / "hf", tie_word_embeddings=False)
    with pytest.raises(SettingError, match="lacks the tensor lm_head.weight"):
        ours(tmp_path / "hf")


def test_a_config_of_older_versions(llama, tmp_path):
    """rope_theta and rope_scaling apart, the type under its older name; null; and none at all."""
    expected = read_config(llama)
    assert expected.rope_scaling == SCALING and expected.rope_theta == 500
    plain = dataclasses.replace(expected, rope_scaling=None)
    older = {("type" if key == "rope_type" else key): value for key, value in SCALING.items()}
    inner = {"rope_type": "default", "rope_theta": 500.0}
    shutil.copy(llama / "config.json", tmp_path)
    for values, found in (  # one change after the other
        ({"rope_parameters": None, "rope_theta": 500, "rope_scaling": older}, expected),
        ({"rope_scaling": None}, plain), ({"rope_parameters": inner, "rope_theta": 7.0}, plain),
        ({"rope_parameters": None, "rope_theta": None},
         dataclasses.replace(plain, rope_theta=10000.0)),
    ):
        change(tmp_path, **values)
        assert read_config(tmp_path) == found


# Training


@pytest.fixture(scope="module")
def start(server, corpus, tmp_path_factory):
    """Import the weights in a folder to a run folder, out, and train from them."""

    def start(weights, script, world, options="", **kwargs):
        folder = tmp_path_factory.mktemp("run")
        import_hf.import_weights(weights, folder / "out")
        options = f"{TRAIN} --data {corpus} {options}"
        return server.run(script, world, options, folder=folder, **kwargs)

    return start


@pytest.mark.parametrize("command, world", sampled(RUNS := [
    ("tp.py", 2), ("zero.py --stage 2", 3), ("fsdp.py", 3),
], RUNS[:1]))
def test_every_script_starts_from_the_weights(start, llama, command, world):
    """On the curve of single.py. load_weights gives each rank the same, if it has all at once."""
    inject = "" if command[:4] == "zero" else f"load_again({str(llama)!r})"
    found = start(llama, command, world, inject=inject)
    assert furthest(found.curve(), start(llama, "single.py", 0).curve()) < 1e-10


# Writing


@pytest.fixture(scope="module")
def trained(start, llama):
    """A run folder with imported weights and two checkpoints, each saved by two ranks."""
    return start(llama, "fsdp.py", 2, "--dtype float32 --save-every 1").out


SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.mark.parametrize("source, options, dtype, files", [
    ("", "", torch.float32, ["model.safetensors"]),  # the newest checkpoint
    ("step-00000001", "--dtype bfloat16 --max-shard-size 0.00003", torch.bfloat16, SHARDS),
    # Imported weights are exported as they came.
    ("step-00000000", "", torch.bfloat16, ["model.safetensors"]),
])
def test_transformers_reads_what_is_exported(
    trained, llama, tmp_path, source, options, dtype, files
):
    """Ours reads it too. What config.json said, and generate needs, is as it was."""
    folder = tmp_path / "new" / "hf"
    export.main([str(trained / source), str(folder), *options.split()])
    index = ["model.safetensors.index.json"] * (len(files) > 1)
    assert sorted(os.listdir(folder)) == ["config.json", GENERATION, *files, *index]
    begin = (folder / files[0]).read_bytes()[:8]
    assert int.from_bytes(begin, "little") % 8 == 0  # so that the tensors are aligned
    expected = checkpoint_files.read(trained / (source or "step-00000002"))
    found = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert_rounded(found.state_dict(), expected, dtype)
    assert_rounded(ours(folder, dtype).state_dict(), expected, dtype)
    assert read_config(folder) == read_config(llama)
    for name in index:
        size = json.loads((folder / name).read_text())["metadata"]["total_size"]
        assert size == sum(tensor.nbytes for tensor in found.state_dict().values())
    name = str(dtype).removeprefix("torch.")
    assert contents(folder, "config.json") == contents(llama, "config.json") | {
        "dtype": name, "tie_word_embeddings": False}
    assert contents(folder, GENERATION) == contents(llama, GENERATION)
    assert found.dtype == dtype and found.generation_config.eos_token_id == [2, 5]


def test_the_config_of_a_run_that_has_changed_it(trained, llama, tmp_path):
    """Also of one that began with a checkpoint of the run that has imported the weights."""
    config, imported = read_config(llama), export.folder_of_import(trained / "step-00000002")
    assert imported == trained
    later = tmp_path / "step-00000002"
    run_folder.Claim(tmp_path, None, "0" * 16, str(trained / "step-00000002")).take()
    assert export.folder_of_import(later) == trained
    change = functools.partial(dataclasses.replace, config)
    found = contents(llama, "config.json") | {"dtype": "float16", "tie_word_embeddings": False}
    theta = {"rope_theta": 7.0, "rope_scaling": SCALING, "max_position_embeddings": 300}
    for new, seq_len, values in (
        (config, 256, {}), (change(vocab_size=9), None, {"vocab_size": 9}),
        (change(rope_theta=7.0), 300, theta),
    ):
        expected = {name: value for name, value in found.items()
                    if name != "rope_parameters" or values != theta}
        assert export.huggingface_config(new, torch.float16, seq_len, trained) == expected | values
    plain = export.huggingface_config(config, torch.float16, 64)  # no weights were imported
    assert plain["max_position_embeddings"] == 128 and plain["eos_token_id"] is None


def test_sequences_longer_than_those_of_the_model(llama, capsys):
    for length, said in (256, ""), (257, "--seq-len 257 is above max_position_embeddings 256 in "):
        parser = option_parser("")
        add_model_options(parser)
        add_text_options(parser)
        parse_options(parser, ["--model", str(llama), "--seq-len", str(length)])
        found = capsys.readouterr().err
        assert found.startswith(said) and bool(found) == bool(said)


def test_a_file_has_at_most_so_many_bytes():
    """Or one tensor, which is larger."""
    sizes = {"a": 3, "b": 4, "c": 1, "d": 9, "e": 1}
    assert export.split(sizes, 7) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_a_mixtral_goes_in_and_out(start, tmp_path, capsys):
    """ep.py starts from one on 2 ranks, each with 3 of its 6 experts, at a learning rate of 0. What
    is exported then is the same, to the bit, and gives the same logits, as ours does."""
    mixtral = save(tmp_path / "mixtral", kind="Mixtral", num_local_experts=6,
                   num_experts_per_tok=3)
    result = start(tmp_path / "mixtral", "ep.py", 2, "--lr 0 --dtype float32",
                   inject=f"load_again('{tmp_path}/mixtral')")
    export.main([str(result.out), str(tmp_path / "exported")])
    import_hf.main([str(tmp_path / "exported"), str(tmp_path / "imported")])
    assert "run.sh ep.py" in capsys.readouterr().out
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert type(exported) is type(mixtral)
    assert_rounded(exported.state_dict(), mixtral.state_dict(), torch.float32)
    tokens = torch.arange(60).view(3, 20)
    torch.testing.assert_close(ours(tmp_path / "exported")(tokens), mixtral(tokens).logits)


# What is refused


CONFIGS = [  # what a config.json has instead, and what the error says beside its path
    *[({name: 2}, f"{name} 2: only Llama") for name in (
        "hidden_act", "attention_bias", "mlp_bias", "attention_dropout", "partial_rotary_factor",
        "sliding_window", "router_jitter_noise")],
    ({"model_type": "mistral"}, "model_type 'mistral'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'.*only 'llama3'"),
    ({"rope_scaling": SCALING | {"mscale": 1.0}}, "'mscale': 1.0.*only 'llama3'"),
    ({"rope_scaling": SCALING | {"factor": 0}}, "'factor': 0.*above 0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers 0"), ({"vocab_size": True}, "vocab_size True"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"), ({"vocab_size": None}, "lacks vocab_si"),
    # What the files do not have:
    ({"num_hidden_layers": 4}, "lacks the tensor model.layers.3.input_layernorm.weight"),
    ({"num_hidden_layers": 2}, "has the tensor model.layers.2.*, unlike a Llama of its config"),
    ({"vocab_size": 300}, r"embed_tokens.weight of shape \(256, 32\), and its config needs \(300"),
]
SECOND = "model-00002-of-00005.safetensors"
NOT_IMPORTED = [(functools.partial(change, **values), f"given.*{words}|{words}.*given")
         for values, words in CONFIGS] + [
    (lambda hf: os.truncate(hf / SECOND, 5000), f"{SECOND} cannot be read"),
    (lambda hf: (hf / SECOND).write_bytes((hf / SECOND).read_bytes().replace(
        b'"data_offsets":[0,', b'"data_offsets":[2,', 1)), f"{SECOND} cannot be read"),
    (lambda hf: resave(hf / SECOND, torch.Tensor.char), "is in I8: only F64, F32, F16, BF16"),
    (lambda hf: resave(hf / SECOND, lambda tensor: tensor / 0), "given has .* not finite"),
    (lambda hf: shutil.copy(hf / SECOND, hf / "again.safetensors"), "has .* in two files"),
]


def other_vocabulary(step):
    run = json.loads((step / "run.json").read_text())
    run["must stay the same"]["--vocab-size"] = 9
    (step / "run.json").write_text(json.dumps(run))
    hash_again(step)


NOT_EXPORTED = [
    (lambda step: (step / "__1_0.distcp").unlink(), "__1_0.distcp cannot be read"),
    (other_vocabulary, r"shape \(256, 32\), and its config"),
    (shutil.rmtree, "given is neither a checkpoint nor a run folder"),
]


@pytest.mark.parametrize("tool, damage, words", [
    *((import_hf, *row) for row in NOT_IMPORTED), *((export, *row) for row in NOT_EXPORTED),
])
def test_nothing_is_left_behind(llama, trained, tmp_path, tool, damage, words):
    given = tmp_path / "given"
    shutil.copytree(llama if tool is import_hf else trained / "step-00000002", given)
    damage(given)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SettingError, match=words):
        tool.main([str(given), str(tmp_path / "out")])
    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_package_is_one_line(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SettingError, match="pip install safetensors"):
        ours(llama)


def test_a_number_too_large_for_the_type():
    with pytest.raises(SettingError, match="x has numbers too large for torch.float16: take --dty"):
        export.write_parts(None, torch.tensor([1e5]), {"x": None}, torch.float16)
