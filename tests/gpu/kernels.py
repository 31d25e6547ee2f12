"""The kernels that CUDA computes otherwise than the CPU, beside a reference in float64:

    PYTHONPATH=. python tests/gpu/kernels.py cuda        or cpu

prints each case before it checks it. The reference gets the same, rounded, inputs.
"""

import itertools
import sys

import torch

from common.experts import grouped_product
from common.model import LossInChunks, next_token_loss, plain_attention
from cp import attend, attend_backward, merge, wide

EXACT = 1e-4  # float32
ROUNDED = 0.015  # bfloat16: 0.2 % to 0.5 % of a result on the CPU; a wrong kernel has 10 % and more


def check(names, found, expected, within):
    """The norm of each difference is at most ``within`` times the norm of the reference."""
    for name, one, other in zip(names, found, expected, strict=True):
        one, other = one.double().cpu(), other.double().cpu()
        distance = (one - other).norm() / (other.norm() or 1)  # of no rows it is 0
        assert distance <= within, (name, distance)


def random(*shape, device, dtype):
    """Numbers that are the same on every device."""
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def poison(device):
    """Fill the memory that the next tensors get with NaN: a kernel that reads what nobody has
    written shows it."""
    for size in (2**20, 2**22, 2**24):
        torch.full((size,), torch.nan, device=device)


def with_gradients(function, *inputs, grad_out=None):
    """The output, and the gradients of the inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    return out, *torch.autograd.grad(out, inputs, grad_out)


def plain(q, kv, grad_out, causal):
    """On newer GPUs this is cuDNN's attention: what all scripts but cp.py use."""
    return with_gradients(lambda q, kv: plain_attention(q, *kv, is_causal=causal), q, kv,
                          grad_out=grad_out)


def in_two_blocks(q, kv, grad_out):
    """Full attention as a ring of two ranks computes it: the blocks of keys one after the other,
    merged; then the contribution of each block to the gradients."""
    blocks = kv.chunk(2, dim=3)
    out, lse = (x.to(wide(q)) for x in attend(q, blocks[0], False))
    merge(out, lse, *attend(q, blocks[1], False))
    grads = [attend_backward(grad_out, q, block, out, lse, False) for block in blocks]
    grad_q = sum(part.to(wide(q)) for part, _ in grads)
    return out, grad_q, torch.cat([grad_kv for _, grad_kv in grads], dim=3)


def check_attention(device, dtype, T, head_size, causal):
    """attend and attend_backward. 8 query heads share 2 heads of keys. With ``causal`` half the
    queries have a scale of their own, which makes the same scores."""
    size = {"device": device, "dtype": dtype}
    q, grad_out = (random(2, 8, T, head_size, **size) for _ in range(2))
    kv = random(2, 2, 2, T, head_size, **size)
    by = 1 + causal
    x, scale = q / by, by / head_size**0.5
    poison(device)
    out, lse = attend(x, kv, causal, scale)
    grad_x, grad_kv = attend_backward(grad_out, x, kv, out, lse, causal, scale)
    found = {"ours": (out, grad_x / by, grad_kv), "plain": plain(q, kv, grad_out, causal)}
    if not causal:
        found["ours in two blocks"] = in_two_blocks(q, kv, grad_out)
    expected = plain(*(x.double().cpu() for x in (q, kv, grad_out)), causal)
    within = EXACT if dtype == torch.float32 else ROUNDED
    for whose, results in found.items():
        check([f"{whose}: {name}" for name in ("out", "grad_q", "grad_kv")], results, expected,
              within)


def check_experts(device, counts):
    """grouped_product in bfloat16, some of whose groups are empty, beside a loop over the experts
    in float64. ``counts``: the rows of each expert."""
    size = {"device": device, "dtype": torch.bfloat16}
    rows, weights = random(sum(counts), 256, **size), random(len(counts), 128, 256, **size)
    grad_out = random(sum(counts), 128, **size)
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    poison(device)
    found = with_gradients(lambda *x: grouped_product(*x, ends, counts), rows, weights,
                           grad_out=grad_out)
    expected = with_gradients(
        lambda *x: grouped_product(*x, None, counts), rows.double().cpu(), weights.double().cpu(),
        grad_out=grad_out.double().cpu())
    check(("out", "grad_rows", "grad_weights"), found, expected, ROUNDED)
    empty = [expert for expert, count in enumerate(counts) if not count]
    assert not found[2][empty].any(), "gradients of experts without rows"


def check_loss_in_chunks(device, chunk):
    """The loss, and the gradients of hidden states and of a float32 weight, of which autocast makes
    bfloat16. The products of the chunks add up in float32, on a GPU within the matrix product."""
    x = random(4096, 64, device=device, dtype=torch.bfloat16)
    weight = random(512, 64, device=device, dtype=torch.bfloat16).float() / 8
    targets = torch.arange(4096, device=device) % 512
    poison(device)

    def loss_over(targets):
        return lambda x, weight: LossInChunks.apply(
            x, weight, targets, chunk, next_token_loss) / 4096

    found = with_gradients(loss_over(targets), x, weight)
    assert found[2].dtype == torch.float32
    expected = with_gradients(loss_over(targets.cpu()), x.double().cpu(), weight.double().cpu())
    check(("loss", "grad_x", "grad_weight"), found, expected, ROUNDED)


def main(device):
    torch.manual_seed(0)
    # GPUs need rows of a multiple of 16 bytes: the others are padded.
    sizes = [("bfloat16", 64), ("bfloat16", 12), ("float32", 64), ("float32", 10)]
    for (dtype, head_size), causal, T in itertools.product(sizes, (True, False), (256, 80)):
        print(f"attention in {dtype}, head size {head_size}, {T} positions, causal {causal}")
        check_attention(device, getattr(torch, dtype), T, head_size, causal)
    for counts in ([162, 0, 257, 46, 0, 83], [0, 0, 96, 32], [64, 64, 0, 0], [0, 1, 0, 7],
                   [0, 0, 0, 0]):
        print(f"experts with {counts} rows")
        check_experts(device, counts)
    for chunk in (4096, 64):
        print(f"loss in chunks of {chunk} tokens")
        check_loss_in_chunks(device, chunk)


if __name__ == "__main__":
    main(sys.argv[1])
