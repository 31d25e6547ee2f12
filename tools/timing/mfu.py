"""Model FLOPs utilisation (MFU): what a model computes in a step, and what a GPU could."""

import re

# Dense matrix products in bfloat16, from NVIDIA's data sheets, in 10^12 operations per second.
PEAK_TFLOPS = {"B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835,
               "H100": 989, "H20": 148, "A100": 312, "A40": 150, "A10G": 70, "L40S": 362, "L4": 121}


def flops_per_token(config, seq_len):
    """Floating-point operations per token of a forward and a backward pass, as PaLM counts them
    (arXiv:2204.02311, appendix B): 6 for each parameter of a matrix product that a token meets, and
    for attention 12 x layers x heads x head_dim x T, of which a causal mask leaves half."""
    width, mlp = config.num_attention_heads * config.head_dim, 3 * config.intermediate_size
    if getattr(config, "num_experts", 0):
        mlp = config.num_experts + 3 * config.experts_per_token * config.expert_size
    attention = 2 * width + 2 * config.num_key_value_heads * config.head_dim
    layers = config.num_hidden_layers * config.hidden_size * (attention + mlp)
    products = layers + config.hidden_size * config.vocab_size
    return 6 * products + 6 * config.num_hidden_layers * width * seq_len


def peak_tflops(name):
    return next((peak for known, peak in PEAK_TFLOPS.items()
                 if re.search(rf"\b{known}\b", name)), 0)  # an L40 is no L4
