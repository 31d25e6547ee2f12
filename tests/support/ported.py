"""Models of docs/copying.md that no script trains, optimizers, a metric. tests/test_porting.py
brings each of them to the scripts."""

import re
import runpy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.data import Dataset, default_collate  # noqa: F401

from common.model import Attention, Head, Layer, RMSNorm, Transformer, rotate
from common.model import next_token_loss  # noqa: F401
from tests.support.processes import ROOT

# A condition, such as a class or the time of a diffusion model


class ConditionedLayer(Layer):
    def __init__(self, config):
        super().__init__(config)
        self.shift = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, cos, sin):
        return super().forward(x + self.shift(self.condition), cos, sin)


class Conditioned(Transformer):
    """Every layer uses an embedding of the class of its sequence. Between the stages of a pipeline
    travels one tensor: the condition is its first token."""

    def __init__(self, config):
        super().__init__(config)
        self.model.classes = nn.Embedding(4, config.hidden_size)
        for name in self.model.layers:
            self.model.layers[name] = ConditionedLayer(config)

    def forward(self, x, classes=None, targets=None):
        if classes is None:  # a later stage
            condition, x = x[:, :1], x[:, 1:]  # (B, 1, D), (B, T, D)
        else:
            condition = self.model.classes(classes)[:, None]
        for layer in self.model.layers.values():
            layer.condition = condition
        x = super().forward(x, targets)
        if isinstance(self.lm_head, nn.Identity):  # not the last stage
            return torch.cat((condition, x), dim=1)  # (B, 1+T, D)
        return x


def train_only(model, names):
    """Only the parameters whose names fit this regular expression."""
    for name, p in model.named_parameters():
        p.requires_grad_(bool(re.search(names, name)))
    return model


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
    last. ``zeros``: each gets a gradient, of 0 if no sample has its task."""

    def __init__(self, config, zeros):
        super().__init__()
        self.zeros = zeros
        self.parts = nn.ModuleDict({
            str(i): Head(config.hidden_size, config.vocab_size) for i in range(4)
        })

    def forward(self, x, targets):
        tasks = targets[:, 0] % 3
        loss = sum(head(x[tasks == i], targets=targets[tasks == i])
                   for i, head in enumerate(self.parts.values()) if (tasks == i).any())
        return loss + 0 * sum(p.sum() for p in self.parameters()) if self.zeros else loss


def with_heads(model, zeros=False):
    model.lm_head = Heads(model.config, zeros)
    return model


# Norms of queries and keys, head by head, as in Qwen3


class NormedAttention(Attention):
    def __init__(self, config):
        super().__init__(config)
        self.q_norm, self.k_norm = (RMSNorm(config.head_dim, eps=0.1) for _ in "qk")

    def forward(self, x, cos, sin):
        q, k, v = (projection(x).unflatten(-1, (-1, self.head_dim))  # (B, T, heads, K)
                   for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
        out = self.attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def with_norms(model):
    for layer in model.model.layers.values():
        layer.self_attn = NormedAttention(model.config)
    return model


# A plain head: the loop computes the loss of its logits


def with_plain_head(model):
    model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size)
    return model


# A recurrence along the sequence


class Recurrent(Layer):
    """``mesh``: the ranks over which the sequence is split, in contiguous parts."""

    def __init__(self, config):
        super().__init__(config)
        self.into, self.mesh = nn.Linear(config.hidden_size, config.hidden_size), None

    def forward(self, x, cos, sin):
        return super().forward(x + self.scan(self.into(x)), cos, sin)

    def scan(self, x, decay=0.7):
        """h[t] = decay h[t-1] + x[t], (B, T, D)."""
        T = x.shape[1]
        place = torch.arange(T, dtype=x.dtype)
        since = place[:, None] - place
        h = torch.where(since >= 0, decay ** since, 0) @ x
        if self.mesh is None:
            return h
        ends = DTensor.from_local(h[None, :, -1], self.mesh, [Shard(0)], run_check=False)
        ends = ends.full_tensor(grad_placements=[Partial()])  # (ranks, B, D): the last states
        # Times 0, not left out: the backward pass of this gather is a collective of all ranks.
        later = self.mesh.get_local_rank() - 1 - torch.arange(len(ends), dtype=x.dtype)
        shares = torch.where(later >= 0, decay ** (T * later), 0)
        before = (shares[:, None, None] * ends).sum(0)
        return h + decay ** (place[:, None] + 1) * before[:, None]


def with_recurrence(model):
    for name in model.model.layers:
        model.model.layers[name] = Recurrent(model.config)
    return model


# A model of one's own, which becomes the stages of a pipeline


class Block(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Tanh(),
                         nn.Linear(4 * width, width))

    def forward(self, x):
        return x + super().forward(x)


class Own(nn.Module):
    """Tokens in, the summed loss out. A stage has nn.Identity for what it lacks, and passes on
    hidden states."""

    def __init__(self, config):
        super().__init__()
        self.config, width = config, config.hidden_size
        self.embed, self.places = nn.Embedding(config.vocab_size, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleDict({str(i): Block(width) for i in range(6)})
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, config.vocab_size)

    def forward(self, x, targets=None):
        if isinstance(self.embed, nn.Embedding):
            x = self.embed(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        if isinstance(self.head, nn.Identity):
            return x
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


# Samples that are dicts in dicts


class Nested(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        tokens, targets = self.dataset[index]
        return {"text": {"tokens": tokens}, "targets": targets}


class TakesText(Transformer):
    def forward(self, text, targets):
        return super().forward(text["tokens"], targets)


# A second term of the loss, over targets: the square of the logarithm of the softmax's divisor


def with_z_loss_of(loss):
    def loss_and_z(logits, targets):
        z, counts = logits.logsumexp(-1).square().flatten(), targets.flatten() != -100
        if isinstance(z, DTensor):  # TP: the logits are split
            counts = DTensor.from_local(counts, z.device_mesh, [Replicate()], run_check=False)
        return loss(logits, targets) + 0.01 * (z * counts).sum()

    return loss_and_z


def with_z_loss(model):
    model.lm_head.loss = with_z_loss_of(model.lm_head.loss)
    return model


# Over targets with weights, those of classes: all before a count half


def class_weights(logits):
    weights = torch.ones(logits.shape[-1], dtype=logits.dtype)
    weights[:ord("a")] = 0.5
    return weights


def with_class_weights(model):
    model.lm_head.loss = lambda logits, targets: F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), class_weights(logits), reduction="sum")
    return model


def sum_of_weights(batch, group=None):
    weights = class_weights(torch.empty(256, dtype=torch.float64))
    total = sum(weights[targets[targets != -100]].sum() for _, targets in batch)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


# And over sequences: each router adds up, over them, how unevenly their tokens go to the experts


def with_router_loss(model, T):
    for layer in model.model.layers.values():
        def keep(router, _, logits, k=layer.mlp.k):
            E = logits.shape[1]
            scores = logits.softmax(1).unflatten(0, (-1, T))  # (B, T, E)
            chosen = F.one_hot(scores.topk(k).indices, E).sum(2).to(scores.dtype)
            router.loss = E / k * (chosen.mean(1) * scores.mean(1)).sum()

        layer.mlp.router.register_forward_hook(keep)
    return model


def router_loss(model):
    return 0.1 * sum(layer.mlp.router.loss for layer in model.model.layers.values())


# LoRA


class WithAdapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Linear(base.in_features, 4, bias=False)
        self.B = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 9 * self.B(self.A(x))


def with_lora(model):
    model.requires_grad_(False)
    for layer in model.model.layers.values():
        layer.self_attn.o_proj = WithAdapter(layer.self_attn.o_proj)
        layer.mlp.up_proj = WithAdapter(layer.mlp.up_proj)
    return model


def with_adapters(model):
    """As fsdp_lora.py has them, of rank 4 and alpha 6: what they change is added to the weight. A
    ``bias`` begins with zeros, as B does."""
    model.requires_grad_(False)
    for name, linear in list(model.named_modules()):
        if "_proj" in name:
            linear.lora_A = nn.Linear(linear.in_features, 4, bias=False)
            linear.bias = nn.Parameter(torch.empty(linear.out_features, 4))
            linear.forward = lambda x, own=linear: F.linear(
                x, own.weight + 6 / 4 * own.bias @ own.lora_A.weight)
    return model


# Documents


class OfDocuments(Transformer):
    """Each of them by itself: with plain causal attention, and with positions from 0 on."""

    def forward(self, tokens, targets):
        loss = 0.0
        for row, own in zip(tokens, targets):
            ends = (row == ord("\n")).nonzero().flatten() + 1
            for document, its in zip(row.tensor_split(ends), own.tensor_split(ends)):
                if len(document):
                    loss += super().forward(document[None], its[None])
        return loss


# A model that returns a dict, and its loss outside


class ReturnsDict(Transformer):
    def forward(self, tokens, targets=None, positions=None):
        out = super().forward(tokens, positions=positions)
        return out if isinstance(self.lm_head, nn.Identity) else {"logits": out}


def returns_tensor(model):
    """For a pipeline, whose stages return tensors."""
    model.register_forward_hook(
        lambda model, _, out: out["logits"] if isinstance(out, dict) else out)


# Optimizers


class Scattered(torch.optim.Optimizer):
    """It keeps its state in many places: numbers in its groups, as schedule-free AdamW, Prodigy
    and apex do, one of which is there only after the first step, and one is changed in place; and
    of each parameter a number, a list, and a tensor in float32 or wider. Each changes what a step
    does."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "d": [1.0], "warm": False})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["d"][0] *= 0.7
            group["step"] = group.get("step", 0) + 1
            rate = group["lr"] * group["d"][0] / (1 + group["step"])
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    wide = torch.promote_types(p.dtype, torch.float32)
                    z = state.setdefault("z", p.to(wide, copy=True))
                    state["calls"] = state.get("calls", 0) + 1
                    past = state.setdefault("past", [])
                    past.append(float(len(past)))
                    share = (1 + group["warm"]) / group["step"] / (state["calls"] + sum(past))
                    z -= rate * share * p.grad
                    p.copy_(z)
            group["warm"] = True


# Noise


def normal_like(p, generator):
    """Normal numbers in the shape of ``p``, the same however it is split."""
    whole = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    if not hasattr(p, "placements"):
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements)


# A metric that is no mean: does the model expect a blank?


def pairs(logits, targets):
    """(N, 2): the score of a blank and whether there is one, of each target."""
    blank = ord(" ")
    return torch.stack((logits[..., blank].flatten(), (targets == blank).flatten()), dim=1)


def roc_auc_score(scores, labels):
    """The share of pairs of a right and a wrong one in which the right one has more."""
    right, wrong = scores[labels > 0], scores[labels == 0]
    return (right[:, None] > wrong).double().mean().item()


def muon_of_the_example(*arguments):
    """An optimizer of the class of examples/fsdp_muon.py."""
    return runpy.run_path(str(ROOT / "examples" / "fsdp_muon.py"))["Muon"](*arguments)
