"""Training loops as PyTorch's tutorials write them, on random tokens. tools/bench.py compares the
scripts with them.

    python -m tools.support.tutorial single
    torchrun --nproc_per_node=2 -m tools.support.tutorial ddp       or fsdp or tp

- ddp: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
- fsdp: https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html, FSDP2
- tp: https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html, with sequence and loss
  parallelism

All have the model of common/model.py, AdamW with its defaults, and clip the norm of the gradients.
Of the scripts' options they take the few that change what a step computes.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from common.experts import MixtureConfig, mixtures, use_experts
from common.model import PRESETS, Transformer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", choices=("single", "ddp", "fsdp", "tp"))
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--num-experts", type=int, default=0)
    parser.add_argument("--expert-size", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--compile", action="store_true")
    args, _ = parser.parse_known_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    n = int(os.environ.get("WORLD_SIZE", 1)) if args.strategy != "single" else 1
    if args.strategy != "single":
        dist.init_process_group("nccl" if on_gpu else "gloo")
    bfloat16 = args.dtype == "bfloat16"
    autocast = torch.autocast(
        "cuda" if on_gpu else "cpu", torch.bfloat16, enabled=bfloat16 and args.strategy != "fsdp"
    )
    torch.manual_seed(0)  # the ranks of tp must have the same weights
    model = build(args).to(device)
    if args.compile and args.strategy == "fsdp":
        for layer in model.model.layers.values():
            layer.compile()
    elif args.compile:
        model.compile()
    if args.strategy == "ddp":
        model = DistributedDataParallel(model)
    elif args.strategy == "fsdp":
        shard(model, MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else None)
    elif args.strategy == "tp":
        split(model, init_device_mesh("cuda" if on_gpu else "cpu", (n,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    vocabulary = PRESETS[args.model].vocab_size
    rows = args.batch_size if args.strategy == "tp" else args.batch_size // n
    losses = []
    for _ in range(args.steps):
        tokens = torch.randint(0, vocabulary, (rows, args.seq_len + 1), device=device)
        with loss_parallel() if args.strategy == "tp" else contextlib.nullcontext():
            with autocast:
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if on_gpu:
        torch.cuda.synchronize()
    print("losses", [float(loss) for loss in losses], flush=True)
    if n > 1:
        dist.barrier()
    os._exit(0)  # without the tear-down of gloo's threads, which may abort


def build(args):
    """The model, with weights of the usual size."""
    experts = {"num_experts": args.num_experts, "expert_size": args.expert_size}
    model = use_experts(Transformer(MixtureConfig(**vars(PRESETS[args.model]) | experts)))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    for mixture in mixtures(model):
        mixture.bias.zero_()
    return model


def shard(model, policy):
    """FSDP2: each layer, and the rest."""
    options = {"mp_policy": policy} if policy else {}
    for layer in model.model.layers.values():
        fully_shard(layer, **options)
    fully_shard(model, **options)


def split(model, mesh):
    """Tensor and sequence parallelism."""
    parallelize_module(model, mesh, {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    })
    for layer in model.model.layers.values():
        parallelize_module(layer, mesh, {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_layouts=(Shard(1), None, None),
                desired_input_layouts=(Replicate(), None, None),
            ),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        })


main()
