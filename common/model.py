"""A small Llama: the model that every script trains. It does not know how it is parallelised.

RMSNorm before each sub-layer (arXiv:1910.07467), rotary position embeddings (arXiv:2104.09864),
also scaled as in Llama 3.1, SwiGLU (arXiv:2002.05202) and grouped-query attention
(arXiv:2305.13245); no biases, no dropout, an untied output head. Parameter names and shapes are
those of Hugging Face's ``LlamaForCausalLM``.

In the shapes below, B is the number of sequences, T the length of a sequence, D ``hidden_size``,
H and KV the numbers of query and key/value heads, K ``head_dim``, V ``vocab_size``, S the number
of keys. In this file all sizes are local: what this process holds. In the scripts B, T and V are
the global sizes, and local shapes are written out, such as (B/dp, T/cp, D).
"""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.errors import refuse


@dataclasses.dataclass
class ModelConfig:
    """The dimensions of the model, under the names of Hugging Face's ``LlamaConfig``."""

    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    rope_scaling: dict | None = None  # Llama 3.1's, see rotary_table; None: nothing is scaled

    def __post_init__(self):
        heads = self.num_attention_heads
        self.num_key_value_heads = kv_heads = self.num_key_value_heads or heads
        refuse([
            (self.head_dim is None and self.hidden_size % heads,
             f"num_attention_heads {heads} does not divide hidden_size {self.hidden_size}: change "
             f"one of them, or give head_dim"),
            (heads % kv_heads,
             f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}: each "
             f"key/value head serves equally many query heads"),
            (self.num_hidden_layers > MAX_LAYERS,  # they are built one by one, also by a dry run
             f"num_hidden_layers is {self.num_hidden_layers}: it must be at most {MAX_LAYERS}"),
        ])
        self.head_dim = self.head_dim or self.hidden_size // heads
        refuse([(self.head_dim % 2,
                 f"head_dim {self.head_dim} is odd: rotary embeddings rotate pairs, so choose "
                 f"hidden_size and num_attention_heads so that their quotient is even")])

    def flops_per_token(self, seq_len):
        """Floating-point operations per token of a forward and a backward pass, as PaLM counts them
        (arXiv:2204.02311, appendix B): 6 for each parameter of a matrix product, and for attention
        12 x layers x heads x head_dim x T, of which a causal mask leaves half."""
        width = self.num_attention_heads * self.head_dim
        layer = self.hidden_size * (
            2 * width + 2 * self.num_key_value_heads * self.head_dim + 3 * self.intermediate_size
        )
        products = self.num_hidden_layers * layer + self.hidden_size * self.vocab_size
        return 6 * products + 6 * self.num_hidden_layers * width * seq_len


ROPE_SCALING = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)


def _llama3(hidden, intermediate, layers, heads, scaling=None):
    return ModelConfig(
        128256, hidden, intermediate, layers, heads, 8, None, 1e-5, 500000.0, rope_scaling=scaling
    )


LLAMA_3_1 = {"rope_type": "llama3", **dict(zip(ROPE_SCALING, (8.0, 1.0, 4.0, 8192)))}
MAX_LAYERS = 10_000
MAX_LOGITS = 2**24  # above it the loss is computed in chunks
PRESETS = {
    "tiny": ModelConfig(256, 128, 352, 4, 8, 4),  # 0.8 M parameters
    "small": ModelConfig(256, 384, 1024, 6, 6, 2),  # 9.6 M
    "medium": ModelConfig(50304, 768, 2048, 12, 12, 4),  # 153 M, GPT-2's vocabulary, padded
    "llama3-1b": _llama3(2048, 8192, 16, 32),  # 1.5 B, with an untied head
    "llama3-8b": _llama3(4096, 14336, 32, 32),  # 8.0 B
    "llama3-70b": _llama3(8192, 28672, 80, 64),  # 70.6 B
    # 405.9 B; this size came with Llama 3.1 only, which scales rotary angles
    "llama3-405b": _llama3(16384, 53248, 126, 128, LLAMA_3_1),
}


def rotary_table(positions, head_dim, theta, dtype, scaling=None):
    """Cosines and sines of the rotary angles, (..., T, K/2) each, for positions (..., T).

    ``scaling`` is Llama 3.1's, for contexts longer than the original one. Pairs that turn less than
    ``low_freq_factor`` times within the original context turn ``factor`` times more slowly. Pairs
    that turn more than ``high_freq_factor`` times stay as they are. Those between are interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).to(dtype) / head_dim
    positions_per_radian = theta**exponents  # (K/2,)
    if scaling:
        factor, low, high, original = (scaling[key] for key in ROPE_SCALING)
        turns = original / (2 * math.pi * positions_per_radian)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        positions_per_radian = positions_per_radian / (kept + (1 - kept) / factor)
    angles = positions.to(dtype)[..., None] / positions_per_radian
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotate each pair (x[i], x[i + K/2]) of x (B, H, T, K) by the angle of its position."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # the same for every head
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


def causal_attention(q, k, v):
    """Plain causal attention: q (B, H, T, K), k and v (B, KV, T, K) -> (B, H, T, K)."""
    if q.is_cuda and q.dtype == torch.float32:
        # Only the flash-attention kernel shares k and v between heads, and it lacks float32; the
        # fallback would keep all T x T scores. So repeat k and v.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Grouped-query self-attention; ``attention`` can be replaced from outside."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)
        self.attention = causal_attention

    def forward(self, x, cos, sin):
        # The number of heads follows from the projections: under tensor parallelism it is local.
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, T, K)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.attention(rotate(q, cos, sin), rotate(k, cos, sin), v)  # (B, H, T, K)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.RMSNorm):
    """Computes its statistics in float32, and returns the type of its input: under autocast torch
    2.13 would return float32 on GPUs. A weight of another type would leave the fused kernel."""

    def forward(self, x):
        weight = self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Linear):
    """The projection of hidden states x (B, T, D) to logits (B, T, V). Given targets (B, T), it
    returns their summed loss instead: see ``next_token_loss``.

    Above ``MAX_LOGITS`` logits the tokens are cut into 16 chunks. The loss is computed for one
    chunk at a time, and its logits again in the backward pass: the peak is about 0.8 bytes per
    logit, not 12. One call has all chunks: FSDP gathers the weight, and reduces its gradient, once.
    """

    def forward(self, x, targets=None):
        if targets is None:
            return super().forward(x)
        x, targets = x.flatten(0, 1), targets.flatten()
        if len(targets) * self.out_features <= MAX_LOGITS:
            return self.loss(x, targets)
        chunks = zip(x.chunk(16), targets.chunk(16))
        return sum(
            checkpoint(self.loss, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        )

    def loss(self, x, targets):
        return next_token_loss(F.linear(x, self.weight), targets)


class Transformer(nn.Module):
    """Tokens (B, T) in, logits (B, T, V) out; with targets (B, T), their summed loss out.

    ``layers`` is a ModuleDict: deleting some layers leaves the names of the others as they are.
    With ``nn.Identity`` in place of the embedding the model takes hidden states (B, T, D); with
    ``nn.Identity`` in place of final norm and head it returns hidden states, and does not use the
    targets. Pipeline stages need both.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleDict({
                str(i): Layer(config) for i in range(config.num_hidden_layers)
            }),
            "norm": RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        })
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens, targets=None, positions=None):
        """``positions`` (T,) or (B, T): the positions of the tokens in the whole sequence, if
        ``tokens`` is a shard of it."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.model.embed_tokens(tokens)  # (B, T, D)
        if torch.is_autocast_enabled(x.device.type):  # the residual stream, and what is sent of it
            x = x.to(torch.get_autocast_dtype(x.device.type))
        # The angles need float32 at least: bfloat16 cannot tell position 256 from 257.
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = rotary_table(
            positions, self.config.head_dim, self.config.rope_theta, dtype,
            self.config.rope_scaling,
        )
        for layer in self.model.layers.values():
            x = layer(x, cos, sin)
        x = self.model.norm(x)
        if targets is None or isinstance(self.lm_head, nn.Identity):
            return self.lm_head(x)
        return self.lm_head(x, targets=targets)


def next_token_loss(logits, targets):
    """The sum of the cross-entropies in nats, in float32 at least. Targets of -100 do not count.
    logits (B, T, V) or (B T, V), targets (B, T) or (B T,)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def wrap_layers(layers, compiled, checkpointed):
    """``compiled``: compile each layer by torch.compile. ``checkpointed``: keep only the input of
    each layer for the backward pass, which computes the layer again with the same random state
    (arXiv:1604.06174). Only ``layer.forward`` is replaced: parameters keep their names, and layers
    of the same shape share one compilation."""
    for layer in layers:
        if compiled:
            layer.forward = torch.compile(layer.forward)
        if checkpointed:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
