"""Dimensions from a Hugging Face config.json, of a Llama or a Mixtral."""

import dataclasses
import json
import math
import os
import pathlib
import sys

from common.errors import SettingError, printable
from common.experts import MixtureConfig
from common.files import read_text, reading
from common.model import ROPE_SCALING, ModelConfig

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
NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)


def read_config(path, seq_len=0):
    """The ModelConfig of a config.json, or of the folder that holds it. It says so if ``seq_len``
    is above the model's max_position_embeddings.

    Raises:
        SettingError: it cannot be read, lacks a dimension, or is of another architecture.
    """
    path = pathlib.Path(path)
    path = path / "config.json" if path.is_dir() else path
    content = read_json(path)
    longest = content.get("max_position_embeddings")
    if type(longest) is int and seq_len > longest:
        _note(f"--seq-len {seq_len} is above max_position_embeddings {longest} in {path}: weights "
              f"that are imported have not seen such positions")
    return config_from(content, path)


def config_from(content, path):
    """The ModelConfig that a dict describes, the content of the config.json ``path``.

    Raises:
        SettingError: see ``read_config``.
    """
    kind = content.get("model_type")
    if kind not in ("llama", "mixtral"):
        raise SettingError(
            f"{path} has model_type {kind!r}: only Llama is supported, and Mixtral, which have "
            f"'llama' and 'mixtral'"
        )
    if kind == "mixtral":
        content = _with_experts(content, path)
    content = _with_rope(content, path)
    for name, plain in PLAIN.items():
        value = content.get(name)
        if value != plain and value is not None:
            raise SettingError(
                f"{path} has {name} {value!r}: only Llama is supported, which has {plain!r}"
            )
    if content.get("tie_word_embeddings"):
        _note(f"{path} has tie_word_embeddings: here the head is a weight of its own; weights that "
              f"are imported start it with the values of the embedding")
    config_class = MixtureConfig if content.get("num_experts") else ModelConfig
    fields = [field for field in dataclasses.fields(config_class)
              if field.name in NEEDED or content.get(field.name) is not None]
    for field in fields:
        _check_field(field, content.get(field.name), path)
    try:
        return config_class(**{field.name: content[field.name] for field in fields})
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from None


def _with_experts(content, path):
    """``content`` of a Mixtral, under the names of MixtureConfig."""
    content = MIXTRAL | content
    if content.get("output_router_logits"):
        _note(f"{path} has output_router_logits: with it transformers adds an auxiliary loss "
              f"that balances the experts. Here nothing adds one: balance them by --balance-rate")
    return content | {"num_experts": content["num_local_experts"],
                      "experts_per_token": content["num_experts_per_tok"]}


def _note(words):
    """Rank 0 says it."""
    if os.environ.get("RANK", "0") == "0":
        print(printable(words), file=sys.stderr)


def _with_rope(content, path):
    """``content`` with rope_theta and rope_scaling as ModelConfig has them: transformers 5 writes
    rope_theta inside rope_parameters, older ones write it beside it."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise SettingError(f"{path}: rope_scaling is {rope!r:.80}: it must be a dict")
    inner = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = {key: rope[key] for key in rope if key not in (*inner, "rope_type", "type")}
    if kind == "default" and not scaling:
        return content | inner | {"rope_scaling": None}
    numbers = all(type(value) in (int, float) and value > 0 for value in scaling.values())
    if kind != "llama3" or scaling.keys() != set(ROPE_SCALING) or not numbers:
        raise SettingError(
            f"{path}: rope_scaling has rope_type {kind!r} with {scaling!r:.200}; only 'llama3' "
            f"(Llama 3.1) is supported, with numbers above 0 as {', '.join(ROPE_SCALING)}"
        )
    scaling = {"rope_type": kind} | {key: scaling[key] for key in ROPE_SCALING}
    return content | inner | {"rope_scaling": scaling}


def _check_field(field, value, path):
    """Refuse a dimension that is missing, or is no number above 0."""
    if value is None:
        raise SettingError(f"{path} lacks {field.name}, which the config.json of a Llama has")
    kinds, most = ((int, float), math.inf) if field.type is float else ((int,), 2**31)
    if field.name != "rope_scaling" and (type(value) not in kinds or not 0 < value < most):
        raise SettingError(
            f"{path} has {field.name} {value!r:.80}: it must be a "
            f"{'number' if field.type is float else 'whole number'} greater than 0"
        )


def read_json(path):
    """The dict in a config.json.

    Raises:
        SettingError: it cannot be read, or holds something else.
    """
    with reading(path):
        content = json.loads(read_text(path))
    if not isinstance(content, dict):
        raise SettingError(f"{path} is no config.json of a model")
    return content
