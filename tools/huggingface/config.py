"""The dimensions in a Hugging Face config.json, of a Llama or a Mixtral, and our ModelConfig.

A script's --model reads a JSON file with our own names, which import_hf.py writes.
"""

import dataclasses
import json
import pathlib

from common.experts import MixtureConfig
from common.model import PRESETS, ModelConfig
from common.options import SettingError

# Options that our model does not have, with the value that turns each off in a config.json.
PLAIN = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0,
    "partial_rotary_factor": 1, "sliding_window": None, "router_jitter_noise": 0,
    "quantization_config": None,
}
# Where the defaults of a Mixtral are not those of a Llama
MIXTRAL = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6,
}


def config_file(path):
    """The config.json of a folder; what is no folder, as it is."""
    path = pathlib.Path(path)
    return path / "config.json" if path.is_dir() else path


def read_json(path):
    """The JSON object in a file. Raises SettingError if there is something else."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise SettingError(f"{path} is no JSON file: {error}") from None
    if not isinstance(content, dict):
        raise SettingError(f"{path} is no JSON file with an object: it begins {content!r:.20}")
    return content


def read_config(path):
    """The ModelConfig of a config.json, or of its folder; of a Mixtral a MixtureConfig. Raises
    SettingError if it lacks a dimension, or is of another architecture."""
    path = config_file(path)
    content, config_class = read_json(path), ModelConfig
    kind = content.get("model_type")
    if kind not in ("llama", "mixtral"):
        raise SettingError(f"{path} has model_type {kind!r}: only 'llama' and 'mixtral' are "
                           f"supported")
    if kind == "mixtral":
        config_class, content = MixtureConfig, MIXTRAL | content
        content["num_experts"] = content["num_local_experts"]
        content["experts_per_token"] = content["num_experts_per_tok"]
    content = content | rope_of(content)
    for name, plain in PLAIN.items():
        if content.get(name) not in (None, plain):
            raise SettingError(f"{path} has {name} {content[name]!r:.80}: only {plain!r} is "
                               f"supported")
    for field in dataclasses.fields(ModelConfig)[:5]:  # the sizes of a Llama
        if content.get(field.name) is None:
            raise SettingError(f"{path} lacks {field.name}, which that of a Llama has")
    names = [field.name for field in dataclasses.fields(config_class)]
    try:
        return config_class(**{x: content[x] for x in names if content.get(x) is not None})
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from None


def rope_of(content):
    """rope_theta and rope_scaling as ModelConfig has them. transformers 5 writes both, and
    partial_rotary_factor, into rope_parameters; older versions write rope_theta beside it."""
    rope = dict(content.get("rope_scaling") or content.get("rope_parameters") or {})
    inner = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor")
             if name in rope}
    kind, older = rope.pop("rope_type", None), rope.pop("type", None)
    kind = kind or older or "default"
    if kind == "default":
        return inner | {"rope_scaling": None}
    return inner | {"rope_scaling": {"rope_type": kind, **rope}}


def described(config):
    """What a config.json says of a ModelConfig. Names are from before transformers 5, which still
    reads them."""
    values, kind = dict(vars(config)), "Llama"
    if values.pop("num_experts", 0):
        kind = "Mixtral"
        values["num_local_experts"] = config.num_experts
        values["num_experts_per_tok"] = values.pop("experts_per_token")
        values["intermediate_size"] = values.pop("expert_size")
    return values | {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}


def add_preset(name):
    """If ``name`` is the path of a config.json, or of its folder, let --model of a script take it
    in this process. Returns whether it is."""
    file = config_file(name)
    found = file.is_file() and "model_type" in read_json(file)
    if found:
        PRESETS[name] = read_config(name)
    return found
