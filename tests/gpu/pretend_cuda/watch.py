"""Dry runs with every tensor on ``cuda:0``, on a machine without a GPU and a torch without CUDA:

    python tests/gpu/pretend_cuda/watch.py guard.so < rows.json

``guard.so`` is guard.cpp, compiled. A row is [command, world size, rank]; for each row a line of
JSON comes back, with what happened in the steps:

- ``attention``: the attention kernels that were called;
- ``copies``: where a tensor was copied between the GPU and the CPU, which waits for the GPU;
- ``on_cpu``: where a tensor on the CPU of more than one element was used.

It fails where the value of a tensor is read (``.item()``).
"""

import ctypes
import sys

ctypes.CDLL(sys.argv[1])  # before torch

import contextlib
import json
import multiprocessing
import pathlib
import traceback
import types

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))
from common import run
from tools.counting import one_rank
from tools.counting import pretend, stand_ins

aten = torch.ops.aten
GPU = torch.device("cuda", 0)


class Stream:
    """A stream or an event on which everything is done at once."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):  # wait_stream, record and so on
        return lambda *_, **__: self


def replace_cuda():
    """Let torch.cuda say that there is an H100, which does nothing."""
    for name, value in {
        "current_stream": Stream(), "stream": contextlib.nullcontext(), "synchronize": None,
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_name": "NVIDIA H100", "get_device_capability": (9, 0),
        "is_bf16_supported": True, "max_memory_allocated": 0, "reset_peak_memory_stats": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        "manual_seed_all": None,
    }.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.Stream = torch.cuda.Event = torch.Event = Stream
    torch.Tensor.is_pinned = lambda *_: True
    stand_ins.as_on_gpus = lambda: None  # tensors are on a GPU: its kernels are called
    F.scaled_dot_product_attention = attention


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **_):
    """Chooses the kernel as CUDA does on an H100 with cuDNN above 9.15: a torch without CUDA would
    take the one that keeps all scores, which CUDA takes in float64 only."""
    assert q.device == k.device == v.device == GPU and q.dtype != torch.float64
    if q.dtype == torch.bfloat16 and attn_mask is None:
        assert q.shape[-1] % 8 == 0
        return aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, torch.is_grad_enabled(), dropout_p, is_causal
        )[0]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal
    )[0]


def where():
    """The innermost line of the repository that does not only watch or count."""
    watchers = "watch.py", "pretend.py", "counter.py"
    for frame in reversed(traceback.extract_stack()):
        path = pathlib.Path(frame.filename)
        if path.name not in watchers and "torch" not in path.parts:
            return f"{path.name}: {frame.line}"


def watch_steps(command, world_size, rank):
    """A dry run on the GPU, watched from its first step on."""
    seen = {"attention": set(), "copies": set(), "on_cpu": set()}
    dispatch, load_steps = pretend.Pretend.__torch_dispatch__, stand_ins.load_steps

    def watch(mode, function, kinds, args=(), kwargs=None):
        out = dispatch(mode, function, kinds, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if not any(is_traceable_wrapper_subclass(x) for x in tensors):
            name = function._overloadpacket.__name__
            if "attention" in name:
                seen["attention"].add(name)
            if len({x.device.type for x in tensors}) > 1 and name in ("_to_copy", "copy_"):
                seen["copies"].add(f"{name} {where()}")
            if any(x.device.type == "cpu" and x.numel() > 1 for x in tensors):
                seen["on_cpu"].add(f"{name} {where()}")
        return out

    def load_and_watch(*args):
        pretend.Pretend.__torch_dispatch__ = watch
        return load_steps(*args)

    def after_step(counting, *args, **more):
        """What the real one does in a step that is neither logged nor saved."""
        options = types.SimpleNamespace(
            steps=0, out=None, save_every=0, val_data=None, log_every=10**9)
        quiet = types.SimpleNamespace(
            args=options, norms=0.0, asked=None, saving=None, group=None, usage=None, order=None,
            sampler=types.SimpleNamespace(start=-1))
        pretend.outside(run.Run.after_step)(quiet, *args, **more)
        count(counting, *args, **more)

    stand_ins.load_steps = load_and_watch
    count, stand_ins.Run.after_step = stand_ins.Run.after_step, after_step
    script, *options = command.split()
    one_rank.count(script, options, world_size, rank, 8, GPU)
    return json.dumps({name: sorted(found) for name, found in seen.items()})


if __name__ == "__main__":
    replace_cuda()
    # Each row in a process of its own, but torch is imported once
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(*pool.starmap(watch_steps, json.load(sys.stdin), 1), sep="\n")
