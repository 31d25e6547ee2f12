"""The dimensions of a Llama from the config.json of a Hugging Face model."""

import dataclasses
import json
import pathlib

from common.errors import SettingError
from common.model import ModelConfig

# What our model does not do, and the value that a config.json has without it.
PLAIN = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def read_config(path):
    """The ModelConfig of a config.json, or of the folder that holds it.

    Raises:
        SettingError: it cannot be read, lacks a dimension, or is of another architecture.
    """
    path = pathlib.Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise SettingError(f"{path} cannot be read: {reason}") from None
    if not isinstance(found, dict):
        raise SettingError(f"{path} is no config.json of a model")
    for name, plain in PLAIN.items():
        if found.get(name, plain) != plain or (name == "model_type" and name not in found):
            raise SettingError(
                f"{path} has {name} {found.get(name)!r}: only Llama is known, which has {plain!r}"
            )
    values = {}
    for field in dataclasses.fields(ModelConfig):
        value = found.get(field.name)
        if value is None and field.name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads",
        ):
            raise SettingError(f"{path} lacks {field.name}, which the config.json of a Llama has")
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise SettingError(f"{path} has {field.name} {value!r}: it must be a number")
            values[field.name] = value
    return ModelConfig(**values)
