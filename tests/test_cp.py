"""cp.py: each attention is exact, and the ring never sees a whole sequence. Curves and bytes:
test_same_run.py."""

import functools
import itertools
import math
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cp
from tests.support import inject
from tests.support.on_ranks import on_ranks

TINY = ("--hidden-size 12 --num-attention-heads 2 --num-key-value-heads 1 --head-dim 2 "
        "--seq-len 16 --batch-size 4 --save-every 0")
BOUND = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@on_ranks(4)
def test_all_agree_with_plain_attention(mesh, rank):
    """Outputs and gradients, grouped heads, float64, float32 and bfloat16; the layout of q, k, v
    and of the output's gradient in memory is any of the 24, one after the other."""
    group, n = mesh.get_group(), mesh.size()
    B, K = 2, 6
    plain = F.scaled_dot_product_attention
    ulysses = functools.partial(cp.ulysses_attention, attention=plain)
    orders = itertools.cycle(itertools.permutations(range(4)))
    cases = [  # an attention, whether the positions are zig-zag, and whether it is causal
        *[(attention, *case) for attention in (cp.ring_attention, cp.allgather_attention)
          for case in ((True, True), (True, False), (False, False))],
        (ulysses, False, True), (ulysses, False, False),
    ]
    for attention, zigzag, is_causal in cases:
        # Heads of keys that are shared by more ranks than there are. 3n is no multiple of 2n.
        shared, T = ((2 * n, 2), 3 * n) if attention is ulysses else ((3, 1), 4 * n)
        for (heads, kv_heads), dtype in itertools.product([(2 * n, 2 * n), (3 * n, n), shared],
                                                          BOUND):
            torch.manual_seed(heads)
            whole = [torch.randn(B, h, T, K, dtype=dtype)
                     for h in (heads, kv_heads, kv_heads, heads)]
            positions = cp.shard_positions(T, n, zigzag)[rank]
            order = next(orders)
            back = [order.index(axis) for axis in range(4)]
            mine = [x[:, :, positions].permute(order).contiguous().permute(back) for x in whole]
            options = {"is_causal": is_causal, "scale": 0.7 if kv_heads == n else None,
                       "attn_mask": None, "dropout_p": 0.0, "enable_gqa": True}
            # In float64, to measure the error of one of the two only
            expected = results(functools.partial(plain, **options), *(x.double() for x in whole))
            got = results(functools.partial(attention, group=group, **options), *mine)
            for x, y in zip(got, expected):
                assert x.dtype == dtype
                torch.testing.assert_close(x.double(), y[:, :, positions],
                                           rtol=BOUND[dtype], atol=BOUND[dtype])


@on_ranks(4)
def test_a_ring_beside_others():
    """Of two ranks, and of one, with the gradients of plain attention."""
    for n in 2, 1:
        mesh = init_device_mesh("cpu", (4 // n, n), mesh_dim_names=("dp", "cp"))["cp"]
        torch.manual_seed(0)
        whole = torch.randn(4, 2, 2, 4 * n, 6, dtype=torch.float64)
        positions = cp.shard_positions(4 * n, n)[mesh.get_local_rank()]
        ring = functools.partial(cp.ring_attention, group=mesh.get_group(), is_causal=True)
        plain = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        for x, y in zip(results(ring, *whole[..., positions, :]), results(plain, *whole)):
            torch.testing.assert_close(x, y[:, :, positions])


def test_large_scores_are_merged():
    """In float32, also of blocks in bfloat16: exp(200) is no number of either."""
    out, lse = torch.ones(1, 1, 2), torch.full((1, 1), 200.0)
    cp.merge(out, lse, torch.full_like(out, 2).bfloat16(), lse - math.log(2))
    torch.testing.assert_close(out, torch.full_like(out, 4 / 3))


def test_two_ranks_share_a_head(once):
    """Of keys and values, under Ulysses. Its two numbers: the rotation concatenates halves of one,
    and the last stride is not 1."""
    options = f"{TINY} --steps 3 --attention ulysses --dtype bfloat16"
    counts = once("cp.py", 2, options, inject="write_counts()").counts()
    assert counts["sent"] == counts["theory"]["sent"] > 0


def results(attention, q, k, v, weight):
    """The output, and the gradients of q, k and v, of a weighted sum of it."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs)
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


class Shapes(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.add_.Tensor:
            self.sums.add(out.dtype)
        elif "reduce_scatter" in str(function):
            self.sums.add(out[0].dtype)
        self.seen.update(tuple(leaf.shape) for leaf in tree_leaves(out)
                         if isinstance(leaf, torch.Tensor))
        return out


@on_ranks(4)
def test_no_whole_sequence_in_the_ring(mesh):
    """Nor scores. No attention keeps more than the rank's own part for the backward pass, and sums
    are in float32."""
    # No product of the others is T, or T/n^2: whatever has such a size comes from the sequence.
    B, H, KV, T, K, n = 1, 6, 2, 88, 10, mesh.size()
    for attention in (cp.ring_attention, cp.allgather_attention):
        q, k, v = (torch.randn(B, heads, T // n, K, dtype=torch.bfloat16, requires_grad=True)
                   for heads in (H, KV, KV))
        mode, kept = Shapes(), []
        mode.seen, mode.sums = set(), set()
        begun = []  # how many exchanges have begun, before each block is computed
        with (mode, torch.autograd.graph.saved_tensors_hooks(
                  lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor),
              mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as sends,
              mock.patch.multiple(cp, attend=cp.attend, attend_backward=cp.attend_backward)):
            for name in "attend", "attend_backward":
                inject.before(cp, name, lambda *_: begun.append(sends.call_count))
            attention(q, k, v, group=mesh.get_group(), is_causal=True).sum().backward()
        assert {(tuple(tensor.shape), tensor.dtype) for tensor in kept} == {
            ((B, H, T // n, K), torch.bfloat16), ((B, KV, T // n, K), torch.bfloat16),
            ((B, H, T // n), torch.float32),  # the log-sum-exp
        }
        assert mode.sums == {torch.float32}
        if attention is cp.ring_attention:
            # A block at a time, and one ahead; the gradients of the blocks travel, too.
            assert begun == [1, 2, 3, 3, 4, 5, 7, 8]
            for shape in mode.seen:
                assert all(size < T for size in shape), f"{shape} has a whole sequence"
                most = 2 * B * H * T // n * K  # elements of two queries
                assert torch.Size(shape).numel() <= most, f"{shape} has scores"
        else:  # the same eyes see whole sequences where there are some
            assert (n, 2, B, KV, T // n, K) in mode.seen
