"""Models of docs/copying.md that no script trains. tests/test_porting.py brings each of them
to the scripts."""

import torch
from torch import nn

from common.model import Head, Layer, Transformer, rotary_table

# A condition, such as a class or the time of a diffusion model


class ConditionedLayer(Layer):
    def __init__(self, config):
        super().__init__(config)
        self.shift = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, condition, cos, sin):
        return super().forward(x + self.shift(condition), cos, sin)


class Conditioned(Transformer):
    """Every layer uses an embedding of the class of its sequence. Between the stages of a pipeline
    travels one tensor: the condition is its first token."""

    def __init__(self, config):
        super().__init__(config)
        self.model.classes = nn.Embedding(4, config.hidden_size)
        for name in self.model.layers:
            self.model.layers[name] = ConditionedLayer(config)

    def forward(self, x, classes=None, targets=None):
        first = not isinstance(self.model.embed_tokens, nn.Identity)  # stage
        condition = self.model.classes(classes)[:, None] if first else x[:, :1]  # (B, 1, D)
        x = x if first else x[:, 1:]
        positions, x = torch.arange(x.shape[1]), self.model.embed_tokens(x)  # x: (B, T, D)
        cos, sin = rotary_table(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.model.layers.values():
            x = layer(x, condition, cos, sin)
        if isinstance(self.lm_head, nn.Identity):  # not the last stage
            return torch.cat((condition, x), dim=1)  # (B, 1+T, D)
        return self.lm_head(self.model.norm(x), targets=targets)


# Attention of one's own


def own_attention(q, k, v, is_causal, first_head=0, heads=4):
    """Causal, with a sliding window, a soft cap, and the slopes of ALiBi (arXiv:2108.12409), one
    for each of ``heads`` heads. q (B, H, T, K) has H of them, from ``first_head`` on."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    slopes = (2 ** (-8 * torch.arange(1, heads + 1) / heads))[first_head :][: q.shape[1]]
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = 5 * torch.tanh(scores / 5) - slopes[:, None, None] * distance
    scores = scores.masked_fill((distance < 0) | (distance > 7), -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def with_own_attention(model):
    for layer in model.model.layers.values():
        layer.self_attn.attention = own_attention
    return model


# Parts that some samples do not use


class Heads(nn.Module):
    """Heads of several tasks. The first target of a sample tells its task; no sample has the
    last."""

    def __init__(self, config):
        super().__init__()
        self.parts = nn.ModuleDict({
            str(i): Head(config.hidden_size, config.vocab_size, bias=False) for i in range(4)
        })

    def forward(self, x, targets):
        tasks = targets[:, 0] % 3
        return sum(head(x[tasks == i], targets=targets[tasks == i])
                   for i, head in enumerate(self.parts.values()) if (tasks == i).any())


def with_heads(model):
    model.lm_head = Heads(model.config)
    return model
