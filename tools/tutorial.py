"""The training loop of PyTorch's tutorials, on random tokens; tools/bench.py compares with it.

It is one process, or DistributedDataParallel if torchrun has started several. Of the scripts'
options it takes the few that change what a step computes.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from common.model import PRESETS, Transformer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--compile", action="store_true")
    args, _ = parser.parse_known_args()

    n, on_gpu = int(os.environ.get("WORLD_SIZE", 1)), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    model = Transformer(PRESETS[args.model]).to(device)
    if args.compile:
        model.compile()
    if n > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    vocabulary = PRESETS[args.model].vocab_size

    for _ in range(args.steps):
        tokens = torch.randint(0, vocabulary, (args.batch_size // n, args.seq_len + 1)).to(device)
        with torch.autocast("cuda" if on_gpu else "cpu", torch.bfloat16,
                            enabled=args.dtype == "bfloat16"):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if on_gpu:
        torch.cuda.synchronize()
    if n > 1:
        dist.barrier()
    os._exit(0)  # without the tear-down of gloo's threads, which may abort


main()
