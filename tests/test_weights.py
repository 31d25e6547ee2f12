"""Weights of Hugging Face's Llama and Mixtral, both ways: tools/huggingface. The reference is
transformers."""

import dataclasses
import json
import os
import shutil

import pytest
import torch

from common.experts import use_experts
from common.model import Transformer
from tests.support.compare import furthest, read
from tests.support.sample import needs, rows
from tests.support.words import refused
from tools.huggingface import export, import_hf
from tools.huggingface.config import read_config

GENERATION = "generation_config.json"
safetensors, transformers = needs("safetensors.torch"), needs("transformers")

SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}
TRAIN = "--batch-size 12 --seq-len 32 --dtype float64 --log-every 1 --steps 2"


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
    model.load_state_dict(import_hf.read_weights(folder, model.config))
    return model


def assert_rounded(found, expected, dtype):
    """All tensors of ``found`` are those of ``expected`` in ``dtype``."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype and torch.equal(found[name], tensor.to(dtype)), name


def weights_in(checkpoint):
    return {name.removeprefix("model."): tensor for name, tensor in read(checkpoint).items()
            if name.startswith("model.")}


def change(path, **values):
    """Change a config.json; None takes a name out."""
    path = path / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def contents(folder, name):
    return json.loads((folder / name).read_text())


def import_to(weights, out):
    import_hf.main([str(weights), str(out)])


@rows("dtype, shard", """
float64 | 5GB
bfloat16 | 20KB
""")
def test_every_parameter_is_that_in_the_file(tmp_path, dtype, shard):
    """In a checkpoint bit for bit, and in its type. In a model rounded once, if at all."""
    dtype = getattr(torch, dtype)
    expected = save(tmp_path / "hf", dtype, shard).state_dict()
    if shard == "5GB":  # older versions wrote angles
        angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        path = tmp_path / "hf/model.safetensors"
        safetensors.save_file(safetensors.load_file(path) | angles, path)
    for stray in "a", "z":  # another file is not read
        zeros = {"lm_head.weight": torch.zeros(256, 32)}
        safetensors.save_file(zeros, tmp_path / f"hf/{stray}.safetensors")
    import_to(tmp_path / "hf", tmp_path / "out")
    step = tmp_path / "out/step-00000000"
    assert_rounded(weights_in(step), expected, dtype)
    for own in (torch.float32, torch.float64):
        assert_rounded(ours(tmp_path / "hf", own).state_dict(), expected, own)
    assert contents(tmp_path / "out", "model.json") == vars(read_config(tmp_path / "hf"))


def test_logits_are_those_of_transformers(tmp_path):
    """Far beyond the original context, where scaled angles differ most."""
    reference = save(tmp_path, rope_scaling=dict(SCALING))
    tokens = torch.randint(0, 256, (2, 200), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, model = reference(tokens).logits, ours(tmp_path)
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=2e-4)


def test_a_tied_head_gets_the_values_of_the_embedding(start, tmp_path, capsys):
    """Also in the last stage of a pipeline, which has no embedding."""
    save(tmp_path / "hf", torch.bfloat16, "20KB", tie_word_embeddings=True)
    model = ours(tmp_path / "hf")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    pipeline, one = (start(tmp_path / "hf", *x) for x in (("pp.py", 2), ("single.py", 0)))
    assert furthest(pipeline.curve(), one.curve()) < 1e-10
    capsys.readouterr()
    out = tmp_path / "out"
    import_to(tmp_path / "hf", out)
    note, line = capsys.readouterr().out.splitlines()
    assert "tie_word_embeddings: here the head is trained apart" in note
    assert line.endswith(f"for example: bash run.sh fsdp.py --model {out}/model.json --from "
                         f"{out}/step-00000000 --out runs/mine --lr 1e-5 --warmup-steps 20")
    change(tmp_path / "hf", tie_word_embeddings=False)
    with refused("lacks the tensor lm_head.weight: .* set tie_word"):
        ours(tmp_path / "hf")


# Changes, whether angles are scaled, the base of the angles: rope_theta and rope_scaling apart, the
# type under its older name; no scaling; both places; none
@rows("changes, scaled, theta", """
{"rope_parameters": null, "rope_theta": 500, "rope_scaling": {"type": "llama3", "factor": 4.0,
  "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}
  | 1 | 500
{"rope_parameters": null, "rope_theta": 500} | 0 | 500
{"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 7.0} | 0 | 500
{"rope_parameters": null} | 0 | 10000
""")
def test_a_config_of_older_versions(llama, tmp_path, changes, scaled, theta):
    shutil.copy(llama / "config.json", tmp_path)
    change(tmp_path, **json.loads(changes))
    assert read_config(tmp_path) == dataclasses.replace(
        read_config(llama), rope_theta=theta, rope_scaling=SCALING if scaled else None)


@pytest.fixture(scope="module")
def start(server, corpus, tmp_path_factory):
    """Import the weights in a folder to the folder hf, and train from them."""

    def start(weights, script, world, options="", **kwargs):
        folder = tmp_path_factory.mktemp("run")
        import_to(weights, folder / "hf")
        words = f"--model hf/model.json --from {folder}/hf/step-00000000 --data {corpus}"
        return server.run(script, world, f"{words} {TRAIN} {options}", folder=folder, **kwargs)

    return start


# Writing


@pytest.fixture(scope="module")
def trained(start, llama):
    """A run folder with two checkpoints, each saved by two ranks, of a run that began with imported
    weights."""
    return start(llama, "fsdp.py", 2, "--dtype float32 --save-every 1").out


# The newest checkpoint; another; imported weights, which are exported as they came
@rows("source, options, dtype", """
| | float32
step-00000001 | --dtype bfloat16 | bfloat16
../hf | | bfloat16
""")
def test_transformers_reads_what_is_exported(trained, llama, tmp_path, source, options, dtype):
    """Ours reads it too. What config.json said, and generate needs, is as it was."""
    folder, dtype = tmp_path / "new/hf", getattr(torch, dtype)
    export.main([str(trained / source), str(folder), "--like", str(llama), *options.split()])
    assert sorted(os.listdir(folder)) == ["config.json", GENERATION, "model.safetensors"]
    expected = weights_in(export.find_checkpoint(trained / source))
    found = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert_rounded(found.state_dict(), expected, dtype)
    assert_rounded(ours(folder, dtype).state_dict(), expected, dtype)
    assert read_config(folder) == read_config(llama)
    written, before = contents(folder, "config.json"), contents(llama, "config.json")
    rope = {"rope_theta": before.pop("rope_parameters")["rope_theta"], "rope_scaling": SCALING}
    before["torch_dtype"] = str(dtype).removeprefix("torch.")  # names that transformers 4 reads too
    del before["dtype"]
    assert written == before | rope
    assert contents(folder, GENERATION) == contents(llama, GENERATION)
    assert found.dtype == dtype and found.generation_config.eos_token_id == [2, 5]


def test_a_mixtral_goes_in_and_out(start, tmp_path, capsys):
    """ep.py starts from one on 2 ranks, each with 3 of its 6 experts, at a learning rate of 0. What
    is exported then is the same, to the bit, and gives the same logits, as ours does. Without a
    folder to be like there are no tokens that end a text; and the run's own length."""
    mixtral = save(tmp_path / "mixtral", kind="Mixtral", num_local_experts=6,
                   num_experts_per_tok=3)
    result = start(tmp_path / "mixtral", "ep.py", 2, "--lr 0 --dtype float32")
    export.main([str(result.out), str(tmp_path / "exported")])
    import_to(tmp_path / "exported", tmp_path / "imported")
    said = capsys.readouterr().out
    assert "run.sh ep.py" in said and "names no token that ends a text" in said
    written = contents(tmp_path / "exported", "config.json")
    assert written["eos_token_id"] is None and written["max_position_embeddings"] == 32
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert type(exported) is type(mixtral)
    assert_rounded(exported.state_dict(), mixtral.state_dict(), torch.float32)
    tokens = torch.arange(60).view(3, 20)
    torch.testing.assert_close(ours(tmp_path / "exported")(tokens), mixtral(tokens).logits)


# What is refused

SECOND = "model-00002-of-00005.safetensors"


# A tool, what is done to its input, the words
@rows("tool, damage, words", """
import_hf | change(given, hidden_act=2) | hidden_act 2: only .* is supported
import_hf | change(given, attention_bias=2) | attention_bias 2: only .* is supported
import_hf | change(given, mlp_bias=2) | mlp_bias 2: only .* is supported
import_hf | change(given, attention_dropout=2) | attention_dropout 2: only .* is supported
import_hf | change(given, partial_rotary_factor=2) | partial_rotary_factor 2: only .* is supported
import_hf | change(given, sliding_window=2) | sliding_window 2: only .* is supported
import_hf | change(given, router_jitter_noise=2) | router_jitter_noise 2: only .* is supported
import_hf | change(given, model_type="mistral") | model_type 'mistral'
import_hf | change(given, quantization_config={"bits": 4}) | quantization_config
import_hf | change(given, rope_scaling={"type": "linear", "factor": 2.0})
  | 'linear'.* is not like that of Llama 3.1
import_hf | change(given, rope_scaling={**SCALING, "mscale": 1.0})
  | 'mscale': 1.0.*is not like that of Llama 3.1
import_hf | change(given, vocab_size=None) | lacks vocab_size
import_hf | change(given, num_hidden_layers="three") | num_hidden_layers is 'three': it must be
import_hf | change(given, num_hidden_layers=4) | lacks the tensor model.layers.3.input_layernorm
import_hf | change(given, num_hidden_layers=2) | has the tensor model.layers.2.*, unlike a Llama
import_hf | change(given, vocab_size=300) | of shape \\(256, 32\\), and its config needs \\(300
import_hf | os.truncate(given / "config.json", 9) | config.json is no JSON file:
import_hf | os.truncate(given / SECOND, 5000) | model-00002-of-00005.safetensors is damaged
import_hf | safetensors.save_file(
  {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(1)}, given / SECOND)
  | lacks the tensor model.layers.0
import_hf | (given / "model.safetensors.index.json").write_text("{}") | lacks the tensor
import_hf | (tmp_path / "out").mkdir() | out exists
import_hf | (tmp_path / "out.tmp").mkdir() | out.tmp is in use, or left of a process that was
export | os.truncate(given / "__1_0.distcp", 99) | __1_0.distcp is damaged
export | shutil.rmtree(given) | given is neither a checkpoint nor a run folder
""")
def test_nothing_is_left_behind(llama, trained, tmp_path, tool, damage, words):
    given = tmp_path / "given"
    shutil.copytree(llama if tool == "import_hf" else trained / "step-00000002", given)
    eval(damage)
    before = sorted(tmp_path.rglob("*"))
    with refused(words):
        eval(tool).main([str(given), str(tmp_path / "out")])
    assert sorted(tmp_path.rglob("*")) == before
