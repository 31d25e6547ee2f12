"""The kernels of common/ that CUDA computes otherwise than the CPU, beside a reference in float64:

    PYTHONPATH=. python tests/gpu/kernels.py cuda        or cpu

prints for each case a line with its name, and the distance of each result: the norm of the
difference over the norm of the reference. The reference gets the same, rounded, inputs.
"""

import itertools
import json
import sys

import torch
import torch.nn.functional as F

from common.attention import attend, attend_backward, merge, wide
from common.experts import grouped_product


def distance(found, expected):
    found, expected = found.double().cpu(), expected.double().cpu()
    return (found - expected).norm().item() / (expected.norm().item() or 1)  # of no rows it is 0


def random(*shape, device, dtype):
    """Numbers that are the same on every device."""
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def poison(device):
    """Fill the memory that the next tensors get with NaN: a kernel that reads what nobody has
    written shows it."""
    for size in (2**20, 2**22, 2**24):
        torch.full((size,), torch.nan, device=device)


def plain(q, k, v, causal, grad_out):
    """PyTorch's attention, and its gradients of q, k and v."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)


def log_sum_exp(q, k, causal):
    """Of the scores, in float64: (B, H, Q)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.logsumexp(-1)


def in_two_blocks(q, kv, grad_out):
    """Full attention as a ring of two ranks computes it: the blocks of keys one after the other,
    merged; then the contribution of each block to the gradients."""
    blocks = kv.chunk(2, dim=3)
    out, lse = (x.to(wide(q)) for x in attend(q, blocks[0], False))
    merge(out, lse, *attend(q, blocks[1], False))
    grads = [attend_backward(grad_out, q, block, out, lse, False) for block in blocks]
    grad_q = sum(part.to(wide(q)) for part, _ in grads)
    return out, lse, grad_q, torch.cat([grad_kv for _, grad_kv in grads], dim=3)


def attention(device, dtype, heads, kv_heads, T, head_size, causal):
    """attend and attend_backward, beside PyTorch's attention in float64."""
    size = {"device": device, "dtype": dtype}
    q, grad_out = (random(2, heads, T, head_size, **size) for _ in range(2))
    kv = random(2, 2, kv_heads, T, head_size, **size)
    poison(device)
    wide_q, wide_kv, wide_grad_out = (x.double().cpu() for x in (q, kv, grad_out))
    out, *grads = plain(wide_q, *wide_kv, causal, wide_grad_out)
    lse = log_sum_exp(wide_q, wide_kv[0], causal)
    expected = {"out": out, "lse": lse, "grad_q": grads[0], "grad_kv": torch.stack(grads[1:])}
    out, lse = attend(q, kv, causal)
    found = {"ours": (out, lse, *attend_backward(grad_out, q, kv, out, lse, causal))}
    if not causal:
        found["ours in two blocks"] = in_two_blocks(q, kv, grad_out)
    for whose, results in found.items():
        for (name, reference), result in zip(expected.items(), results, strict=True):
            yield f"{whose}: {name}", distance(result, reference)


def experts(device, counts, width, inner):
    """grouped_product in bfloat16, some of whose groups are empty, beside a loop over the experts
    in float64. ``counts``: the rows of each expert."""
    rows = random(sum(counts), width, device=device, dtype=torch.bfloat16).requires_grad_()
    weights = random(len(counts), inner, width, device=device, dtype=torch.bfloat16)
    weights.requires_grad_()
    poison(device)
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    out = grouped_product(rows, weights, ends, None)
    grad_out = random(*out.shape, device=device, dtype=torch.bfloat16)
    grad_rows, grad_weights = torch.autograd.grad(out, (rows, weights), grad_out)
    wide_rows, wide_weights = (x.detach().double().cpu().requires_grad_() for x in (rows, weights))
    expected = grouped_product(wide_rows, wide_weights, None, counts)
    expected_grads = torch.autograd.grad(
        expected, (wide_rows, wide_weights), grad_out.double().cpu()
    )
    yield "out", distance(out, expected)
    yield "grad_rows", distance(grad_rows, expected_grads[0])
    yield "grad_weights", distance(grad_weights, expected_grads[1])
    empty = [expert for expert, count in enumerate(counts) if not count]
    yield "largest gradient of empty experts", grad_weights[empty].abs().amax().item()


def main(device):
    torch.manual_seed(0)

    def report(name, results):
        print("kernel", json.dumps([name, dict(results)]), flush=True)

    # GPUs need rows of a multiple of 16 bytes: the others are padded.
    sizes = [("bfloat16", 64), ("bfloat16", 12), ("float32", 64), ("float32", 10)]
    for (dtype, head_size), causal, T in itertools.product(sizes, (True, False), (256, 80)):
        name = f"attention in {dtype}, head size {head_size}, {T} positions, causal {causal}"
        size = 8, 2, T, head_size
        report(name, attention(device, getattr(torch, dtype), *size, causal))
    for counts in ([162, 0, 257, 46, 0, 83], [0, 0, 96, 32], [64, 64, 0, 0], [0, 1, 0, 7],
                   [0, 0, 0, 0]):
        report(f"experts with {counts} rows", experts(device, counts, 256, 128))


if __name__ == "__main__":
    main(sys.argv[1])
