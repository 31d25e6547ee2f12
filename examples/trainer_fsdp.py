"""trainer.py with FSDP: ``shard`` is lifted from fsdp.py as it is, and so are the lines of its loop
that are marked ``# FSDP:``.

    torchrun --nproc_per_node=2 -m examples.trainer_fsdp
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
)

STEPS, BATCH, ACCUMULATE, T, D = 20, 8, 2, 32, 64


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList([
            nn.TransformerEncoderLayer(D, 4, 4 * D, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        ])
        self.head = nn.Linear(D, 256, bias=False)
        self.register_buffer("mask", torch.ones(T, T, dtype=torch.bool).triu(1))

    def forward(self, x):
        h = self.tokens(x) + self.positions.weight
        for block in self.blocks:
            h = block(h, self.mask, is_causal=True)
        return self.head(h)


def get_batch(data, step, micro_step):
    """The inputs and targets of a micro-batch, (BATCH, T) each."""
    generator = torch.Generator().manual_seed(1000 * step + micro_step)
    starts = torch.randint(len(data) - T - 1, (BATCH,), generator=generator)
    rows = data[starts[:, None] + torch.arange(T + 1)]
    return rows[:, :-1], rows[:, 1:]


def shard(model, groups, mesh, dtype=None, reshard_after_forward=True, cpu_offload=False):
    """Shard each of ``groups``, then what is left of ``model``, in place (FSDP2).

    Args:
        model: on the meta device or materialised; all ranks have the same.
        groups: modules of ``model`` whose parameters are gathered together, such as its layers.
        mesh: one dimension to shard over, or two: to replicate over the first and shard over the
            second (hybrid sharding).
        dtype: compute in this type, such as torch.bfloat16, and reduce gradients in float32; None:
            in the type of the parameters.
        reshard_after_forward: free gathered parameters between forward and backward.
        cpu_offload: keep the shards in host memory.
    """
    policy = MixedPrecisionPolicy()
    if dtype is not None:  # cast_forward_inputs would round the rotary angles
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for module in [*groups, model]:
        fully_shard(
            module, mesh=mesh, mp_policy=policy, offload_policy=offload,
            reshard_after_forward=reshard_after_forward,
        )


def main():
    data = torch.tensor(list(open(argparse.__file__, "rb").read()))
    torch.manual_seed(0)
    model = LanguageModel().double()
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    shard(model, model.blocks, init_device_mesh("cpu", (n,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        total = 0
        for micro_step in range(ACCUMULATE):
            x, y = (rows.chunk(n)[rank] for rows in get_batch(data, step, micro_step))
            # FSDP: gradients add up on each rank; the last backward pass averages them over ranks.
            model.set_requires_gradient_sync(micro_step == ACCUMULATE - 1)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / ACCUMULATE
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        # FSDP: the norm is a DTensor; full_tensor() combines the norms of the ranks' shards.
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {total:.12f} norm {norm:.12f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
