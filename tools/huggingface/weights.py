"""The weights of a Llama or Mixtral: our names and those of Hugging Face."""

import torch

from common.experts import use_experts
from common.model import Transformer

# The matrices of an expert
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def empty_state(config):
    """The state dict of the whole model of ``config``, on the meta device."""
    with torch.device("meta"):
        return use_experts(Transformer(config)).state_dict()


def their_names(name, shape):
    """The names of our parameter ``name`` there, a list: a Mixtral has each expert apart, which our
    model stacks."""
    name = name.replace(".mlp.router.", ".block_sparse_moe.gate.")
    layer, is_stacked, matrix = name.partition(".mlp.experts.")
    if not is_stacked:
        return [name]
    experts = f"{layer}.block_sparse_moe.experts"
    return [f"{experts}.{i}.{MIXTRAL[matrix]}.weight" for i in range(shape[0])]


def is_bias(name):
    """Whether a tensor is a bias by which our router chooses experts: a Mixtral has none."""
    return name.endswith(".mlp.bias")
