"""cp.py: each attention is exact, and the ring never holds a whole sequence. Curves and bytes:
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
from tests.gpu.kernels import with_gradients
from tests.support import inject
from tests.support.on_ranks import on_ranks

TINY = ("--hidden-size 12 --num-attention-heads 2 --num-key-value-heads 1 --head-dim 2 "
        "--seq-len 16 --batch-size 4 --save-every 0")
BOUND = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@on_ranks(4)
def test_all_agree_with_plain_attention():
    """Outputs and gradients, over all ranks, over two beside two others, and over one; with grouped
    heads; and with numbers whose last stride in memory is not 1."""
    plain = F.scaled_dot_product_attention
    ulysses = functools.partial(cp.ulysses_attention, attention=plain)
    cases = itertools.product((4, 2, 1), (cp.ring_attention, cp.allgather_attention, ulysses),
                              (True, False), BOUND)
    for n, attention, causal, dtype in cases:
        zigzag = attention is not ulysses
        mesh = init_device_mesh("cpu", (4 // n, n), mesh_dim_names=("dp", "cp"))["cp"]
        # Ulysses: heads of keys that are shared by more ranks than there are
        heads, kv_heads = (2 * n, 2) if attention is ulysses else (3 * n, n)
        T, bound = 4 * n if zigzag else 3 * n, BOUND[dtype]
        torch.manual_seed(heads)
        whole = [torch.randn(2, h, T, 6, dtype=dtype) for h in (heads, kv_heads, kv_heads, heads)]
        positions = cp.shard_positions(T, n, zigzag)[mesh.get_local_rank()]
        mine = [x[:, :, positions].mT.contiguous().mT for x in whole]
        options = {"is_causal": causal, "scale": 0.7 if causal else None, "attn_mask": None,
                   "dropout_p": 0.0, "enable_gqa": True}
        # In float64, to measure the error of one of the two only
        *inputs, weight = (x.double() for x in whole)
        expected = with_gradients(functools.partial(plain, **options), *inputs, grad_out=weight)
        attention = functools.partial(attention, group=mesh.get_group(), **options)
        found = with_gradients(attention, *mine[:3], grad_out=mine[3])
        for x, y in zip(found, expected):
            assert x.dtype == dtype
            torch.testing.assert_close(x.double(), y[:, :, positions], rtol=bound, atol=bound)


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


class Watch(TorchDispatchMode):
    """The largest tensor that an operation returns, and the types in which numbers are added up."""

    def __init__(self):
        super().__init__()
        self.largest, self.sums = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *(leaf.numel() for leaf in leaves)])
        if function is torch.ops.aten.add_.Tensor or "reduce_scatter" in str(function):
            self.sums.add(leaves[0].dtype)
        return out


@on_ranks(4)
def test_what_the_ring_holds(mesh):
    """Neither whole sequences nor scores. No attention keeps more than the rank's own part for the
    backward pass, and sums are in float32."""
    B, H, KV, T, K, n = 1, 6, 2, 88, 10, mesh.size()
    send = dist.batch_isend_irecv

    def send_and_note(ops):
        done.append("send")
        return [mock.Mock(wait=functools.partial(wait_and_note, work)) for work in send(ops)]

    def wait_and_note(work):
        done.append("wait")
        work.wait()

    for attention in (cp.ring_attention, cp.allgather_attention):
        q, k, v = (torch.randn(B, heads, T // n, K, dtype=torch.bfloat16, requires_grad=True)
                   for heads in (H, KV, KV))
        kept, done = [], []
        keep = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor,
            lambda tensor: tensor)
        with (Watch() as watch, keep, mock.patch.object(dist, "batch_isend_irecv", send_and_note),
              mock.patch.multiple(cp, attend=cp.attend, attend_backward=cp.attend_backward)):
            for name in "attend", "attend_backward":
                inject.before(cp, name, lambda *_: done.append("compute"))
            attention(q, k, v, group=mesh.get_group(), is_causal=True).sum().backward()
        assert {(tensor.shape, tensor.dtype) for tensor in kept} == {
            ((B, H, T // n, K), torch.bfloat16), ((B, KV, T // n, K), torch.bfloat16),
            ((B, H, T // n), torch.float32),  # the log-sum-exp
        }
        assert watch.sums == {torch.float32}
        if attention is cp.ring_attention:
            # The next block travels while one is computed; the gradients of the blocks, too.
            assert " ".join(word for word, _ in itertools.groupby(done)) == (
                "send compute wait send compute wait send compute wait compute "
                "send compute wait send compute send wait send compute wait send wait compute wait "
                "send wait"), done
            assert watch.largest <= 2 * B * H * T // n * K  # of two queries
