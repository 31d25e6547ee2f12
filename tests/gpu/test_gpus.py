"""What test_cuda.py runs on GPUs, and what a machine without a GPU can check of it: its test of
kernels. Pretended GPUs: tests/gpu/test_pretend_cuda.py."""

import itertools
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import common.experts
import cp
import fsdp
import pp
from common.options import SettingError
from tests.gpu import kernels
from tests.support.sample import thorough

# A model that takes little time, and whose sizes can be split over 8 ranks
SMALL = ("--hidden-size 64 --intermediate-size 128 --num-hidden-layers 6 --num-attention-heads 8 "
         "--num-key-value-heads 8 --seq-len 64 --batch-size 64 --steps 20 --log-every 1 "
         "--warmup-steps 3 --save-every 0 --dtype float32")
EXPERTS = "--num-experts 8"
EACH_SCRIPT = """single.py
ddp.py
zero.py --stage 2
fsdp.py
tp.py
cp.py
pp.py --microbatches 8
hybrid_3d.py {grid}"""
# Commands, each with options that change what is trained: its reference gets them too. Of 14 layers
# each of 8 ranks has two stages.
MORE_CURVES = """zero.py --stage 1 |
tp.py --no-sequence-parallel |
cp.py --attention ulysses |
cp.py --attention allgather |
pp.py --microbatches 8 --schedule gpipe |
pp.py --microbatches 16 --schedule interleaved1f1b | --num-hidden-layers 14 --lr 5e-4
pp.py --microbatches 16 --schedule loopedbfs | --num-hidden-layers 14 --lr 5e-4
pp.py --microbatches 16 --schedule zerobubble | --num-hidden-layers 14 --lr 5e-4
pp.py --microbatches 16 --schedule zbv | --num-hidden-layers 14 --lr 5e-4
pp.py --microbatches 16 --schedule dualpipev | --num-hidden-layers 14 --lr 5e-4
ep.py | --num-experts 8
ep.py --ep {n} | --num-experts 8
hybrid_3d.py {grid} --ep {ep} | --num-experts 8"""
GRIDS = {1: "", 2: "--tp 2", 4: "--tp 2 --cp 2", 8: "--tp 2 --pp 2"}
# Of these a dry run counts something else: torch.compile, and which tokens go to which expert. The
# experts are as large as the Llama, with 8 of them in each layer.
UNCOUNTED_1B = ["fsdp.py --compile", "ep.py --num-experts 8 --expert-size 1024"]


def each_script(n):
    """A command of each script that trains the same model on n ranks."""
    return EACH_SCRIPT.format(grid=GRIDS[n]).splitlines()


def curves(n):
    """Commands that follow the curve of one process, each with the options that the one gets."""
    more = MORE_CURVES.format(grid=GRIDS[n], n=n, ep=min(n, 4)).splitlines()
    rows = (line.split(" |") for line in [*(f"{each} |" for each in each_script(n)), *more])
    return {command: options.strip() for command, options in rows}


def llama_1b(n):
    """Options of a Llama of 1.5 billion parameters, for n ranks. Most steps wait for nothing: only
    the first, the tenth and the last one are logged."""
    return (f"--model llama3-1b --seq-len 2048 --batch-size {8 * n} --dtype bfloat16 --steps 20 "
            "--lr 1e-4 --activation-checkpointing --save-every 0")


def test_directions_of_a_pipeline(monkeypatch):
    """Only NCCL has a communicator for each; torch 2.13 has no such option."""
    monkeypatch.setattr(pp.pipelining, "PipelineStage", lambda *_, **__: mock.Mock())
    monkeypatch.setattr(pp, "SCHEDULES", {"1f1b": lambda *_, **__: None})
    for name, backends, expected in (
        ("pipeline_per_direction_p2p", "cpu:gloo,cuda:nccl", True),
        ("pipeline_per_edge_p2p", "nccl", True), ("pipeline_per_edge_p2p", "gloo", False),
        ("other", "nccl", False),
    ):
        monkeypatch.setattr(pp, "config", types.SimpleNamespace(**{name: False}))
        monkeypatch.setattr(dist, "get_backend", lambda group: backends)
        hidden = [torch.empty(1)] * 3
        pp.make_schedule("1f1b", [torch.nn.Identity()], [0], 2, 2, *hidden, *[None] * 3)
        assert vars(pp.config) == {name: expected}


@pytest.mark.parametrize("undefined", [False, True])
def test_gradients_of_experts_without_rows_are_zero(monkeypatch, undefined):
    """First, last and between others; also where the kernel leaves them undefined. The kernel and
    the loop are equal."""
    grouped_mm, counts = F.grouped_mm, [0, 5, 0, 162, 7, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10 if undefined else 9, 0))
    assert common.experts.leaves_gradients_undefined(torch.device("cuda")) == undefined

    def leave_undefined(rows, weights, offs):
        empty = undefined & (torch.tensor(counts) == 0)
        weights.register_hook(lambda grad: grad.masked_fill(empty[:, None, None], torch.nan))
        return grouped_mm(rows, weights, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", leave_undefined)
    monkeypatch.setattr(common.experts, "leaves_gradients_undefined", lambda device: undefined)
    kernels.check_experts("cpu", counts)


def check_arguments(q, k, v, *more):
    """Refuse what the attention kernels of an A100 refuse, or take for granted."""
    for x in (q, k, v, *more):
        size = x.element_size()
        assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0, "query is not correctly aligned"
        assert not any(stride * size % 16 for stride in x.stride()[:-1]), "(strideM)"


forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class A100:
    """CUDA's kernels, computed by the CPU's."""

    def _scaled_dot_product_flash_attention(self, q, k, v, *, is_causal, scale):
        check_arguments(q, k, v)
        assert q.dtype == torch.bfloat16
        return *forward(q, k, v, is_causal=is_causal, scale=scale), None, None

    def _scaled_dot_product_flash_attention_backward(
        self, grad_out, q, k, v, out, lse, _, __, queries, keys, dropout, causal, *seed, scale
    ):
        check_arguments(q, k, v, grad_out, out)
        assert (queries, keys) == (q.shape[2], k.shape[2]) and lse.is_contiguous()
        return backward(grad_out, q, k, v, out, lse, dropout, causal, scale=scale)

    def _scaled_dot_product_efficient_attention(self, q, k, v, *options, scale):
        check_arguments(q, k, v)
        assert q.shape[1] == k.shape[1] and options[:3] == (None, True, 0.0)
        out, lse = forward(q, k, v, is_causal=options[3], scale=scale)
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse, None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, grad_out, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal, *, scale
    ):
        check_arguments(q, k, v, grad_out, out)
        _, H, T, K = out.shape
        assert out.stride(2) == H * K, "the kernel supposes (B, T, H, K)"
        assert lse.is_contiguous() and lse.shape[2] % 32 == 0 and bias is None
        assert wanted == (True, True, True, False)  # the gradients of q, k and v, not of a bias
        assert lse[..., T:].isposinf().all(), "rows that nobody has must count for nothing"
        lse = lse[..., :T]
        return *backward(grad_out, q, k, v, out, lse, dropout, causal, scale=scale), None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_kernels_of_gpus_are_given(monkeypatch, dtype):
    """Sizes of heads that are no multiples of 16 bytes too: the kernels get padded rows."""
    torch.manual_seed(0)
    monkeypatch.setattr(cp, "aten", A100())
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    for head_size, causal in itertools.product((64, 10), (True, False)):
        kernels.check_attention("cpu", dtype, 80, head_size, causal)
    q = torch.zeros(2, 4, 16, 12, dtype=torch.float64)
    with pytest.raises(SettingError, match="use float32, or the CPU"):
        cp.attend(q, q[None].expand(2, -1, -1, -1, -1), True)


@thorough
def test_kernels_of_the_cpu(server, tmp_path):
    """What test_cuda.py does with the kernels of a GPU."""
    server.run("tests/gpu/kernels.py cpu", 0, folder=tmp_path, pass_out=False)


def test_offload_is_refused_on_the_cpu_of_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingError, match="--cpu-offload"):
        fsdp.check(types.SimpleNamespace(replicate=1, cpu_offload=True, device="cpu"), 2)
