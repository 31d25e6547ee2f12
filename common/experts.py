"""A mixture of experts in place of the MLP of a layer, as in Mixtral (arXiv:2401.04088): a router
chooses K of E small MLPs, the experts, for each token. No token is dropped, however many choose the
same expert.

In the shapes below t is the number of tokens of this rank, K ``experts_per_token``, E
``num_experts``, D ``hidden_size``, I ``expert_size``. A row is a token on its way to one of its
experts; there are tK rows. Sums have a fixed order, without atomic additions: a run can be
repeated bit for bit, on GPUs too.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor


class Experts(nn.Module):
    """E SwiGLU MLPs. Their weights are stacked: dimension 0 is the experts."""

    def __init__(self, config):
        super().__init__()
        E, D, I = config.num_experts, config.hidden_size, config.expert_size  # noqa: E741
        self.gate_proj = nn.Parameter(torch.empty(E, I, D))
        self.up_proj = nn.Parameter(torch.empty(E, I, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, I))

    def forward(self, rows, counts, sizes=None):
        """Rows (R, D), sorted by expert -> (R, D). ``counts`` (E,): how many rows each expert has;
        ``sizes``: the same as a list, if the caller has read them. If the weights are DTensors, E
        is the number of experts on this rank."""
        gate, up, down = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.gate_proj, self.up_proj, self.down_proj)
        )
        if torch.is_autocast_enabled(rows.device.type):  # it does not know grouped products
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, gate, up, down = (x.to(dtype) for x in (rows, gate, up, down))
        ends = None
        # The kernel needs strides that are multiples of 16 bytes.
        if rows.dtype == torch.bfloat16 and gate.shape[1] % 8 == gate.shape[2] % 8 == 0:
            ends = counts.cumsum(0, dtype=torch.int32)
        elif sizes is None:
            (sizes,) = read_counts(counts[None], len(rows))

        def product(rows, weights):  # (R, in), (E, out, in) -> (R, out)
            return grouped_product(rows, weights, ends, sizes)

        return product(F.silu(product(rows, gate)) * product(rows, up), down)


def grouped_product(rows, weights, ends, sizes):
    """The product of each of ``rows`` (R, in), sorted by expert, with the weight of its expert:
    ``weights`` (E, out, in) -> (R, out). The rows of an expert end at ``ends`` (E,), and one kernel
    computes all products; or they are as many as the list ``sizes`` says, and a loop does."""
    if ends is not None:
        return F.grouped_mm(rows, weights.mT, offs=ends)
    return torch.cat([F.linear(x, weight) for x, weight in zip(rows.split(sizes), weights)])


def read_counts(counts, rows):
    """The list of lists ``counts.tolist()``, for which the CPU waits for the device. The numbers in
    each ``counts[i]`` add up to ``rows``: a dry run, which has no tokens, shares these out."""
    return counts.tolist()


class MixtureOfExperts(nn.Module):
    """Takes the place of the MLP. Each token goes to the K experts with the highest score + bias.
    The K outputs are weighted by the scores alone, which are made to add up to 1.

    ``dispatch(rows, counts, experts)`` brings rows (tK, D), sorted by expert, to the experts, and
    their outputs back. It can be replaced from outside; ep.py sends rows to other ranks.
    """

    def __init__(self, config):
        super().__init__()
        self.E, self.K = config.num_experts, config.experts_per_token
        self.router = nn.Linear(config.hidden_size, self.E, bias=False)
        self.experts = Experts(config)
        self.dispatch = all_experts_are_here
        self.register_buffer("bias", torch.empty(self.E))  # see balance_experts
        # Tokens that training has sent to each expert since balance_experts was called. It is no
        # buffer, because DDP broadcasts buffers.
        self.counts = 0

    @torch.compiler.disable  # how many rows an expert has depends on the data
    def forward(self, x):
        shape, x = x.shape, x.flatten(0, -2)  # (t, D)
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = self.router(x).to(wide).softmax(1)  # (t, E)
        chosen = (scores.detach() + self.bias).topk(self.K).indices  # (t, K)
        weights = scores.gather(1, chosen)  # (t, K); its gradient adds to each place only once
        weights = weights / weights.sum(1, keepdim=True)
        expert, order = chosen.flatten().sort(stable=True)  # (tK,), of each row
        # bincount would wait for the device.
        counts = (expert[:, None] == torch.arange(self.E, device=x.device)).sum(0)  # (E,)
        if self.training:
            self.counts = self.counts + counts
        rows = x[:, None].expand(-1, self.K, -1).flatten(0, 1)  # (tK, D), by token
        rows = Permute.apply(rows, order)  # by expert
        rows = self.dispatch(rows, counts, self.experts)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=x.device)
        out = Permute.apply(rows, inverse).unflatten(0, (-1, self.K))  # (t, K, D), by token
        return (out * weights[..., None].to(out.dtype)).sum(1).view(shape)


def all_experts_are_here(rows, counts, experts):
    return experts(rows, counts)


class Permute(torch.autograd.Function):
    """``rows[order]``. In the backward pass each gradient moves to its place. PyTorch's own would
    add it there, atomically, since it does not know that ``order`` has each row once."""

    @staticmethod
    def forward(ctx, rows, order):
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx, grad_rows):
        (order,) = ctx.saved_tensors
        grad = torch.empty_like(grad_rows)
        grad[order] = grad_rows
        return grad, None


def mixtures(model):
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


@torch.no_grad()
def balance_experts(model, rate, group=None):
    """Call it after the optimizer's step. In each layer it raises the bias of experts that got
    fewer tokens in this step than the mean, and lowers that of experts that got more, by ``rate``.
    So the experts stay busy without a loss that would change gradients (DeepSeek-V3,
    arXiv:2408.15664). It does nothing to a model without experts.

    The tokens are those of the whole global batch, in whole numbers: the biases are exactly the
    same for every number of ranks and micro-batches. ``group``: the ranks that have different
    tokens. Activation checkpointing counts all tokens twice, which changes no comparison.
    """
    layers = mixtures(model)
    if not layers:
        return
    counts = torch.stack([layer.counts for layer in layers])  # (layers, E)
    if group is not None:
        dist.all_reduce(counts, group=group)
    total = counts.sum(1, keepdim=True)  # E times the mean
    signs = (total - counts.shape[1] * counts).sign()
    for layer, sign, share in zip(layers, signs, counts.amax(1, keepdim=True) / total):
        layer.bias += rate * sign.to(layer.bias.dtype)
        layer.busiest, layer.counts = share, 0


def busiest_share(models, device):
    """The largest share of a layer's rows that one expert got in the last step, in all layers.
    ``models``: what this rank holds of the model, which may have no layer. All ranks call it."""
    shares = [layer.busiest for model in models for layer in mixtures(model)]
    share = torch.cat([torch.zeros(1, device=device), *shares]).max()
    if dist.is_initialized():
        dist.all_reduce(share, dist.ReduceOp.MAX)
    return share.item()
