"""Equal bits after a resume of DistributedDataParallel (DDP)."""

import torch
from torch.utils._pytree import tree_leaves  # torch has no public one

from common.errors import SettingError


def arrange_buckets(replica, sampler, *sample):
    """Run one forward and backward pass of ``replica`` on zeros, and drop the gradients. Buffers
    and the random state are afterwards as they were before.

    DDP rebuilds its buckets after its first backward pass, in the order in which gradients arrived.
    Done here, all steps have the same buckets. Otherwise the first step after a resume would add
    gradients in another order than the same step of an uninterrupted run. On GPUs equal bits need
    --deterministic too.

    Args:
        replica: the model in DistributedDataParallel.
        sampler: the BatchSampler, which knows how many samples a micro-batch of a rank has.
        sample: of one sample, the tensors that the model takes.

    Raises:
        SettingError: a parameter got no gradient. DDP would wait for it.
    """
    before = [buffer.clone() for buffer in replica.buffers()]
    device = next(replica.parameters()).device
    number = sampler.batch_size // (sampler.ranks * sampler.grad_accum)
    zeros = [x.new_zeros(number, *x.shape, device=device) for x in sample]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        outputs = tree_leaves(replica(*zeros))
        sum(x.sum() for x in outputs if x.requires_grad).backward()
    unused = [name for name, p in replica.module.named_parameters()
              if p.requires_grad and p.grad is None]
    if unused and not replica.find_unused_parameters:
        raise SettingError(
            f"{unused[0]} got no gradient, as {len(unused)} parameters in all: DDP would wait for "
            f"it; if some samples do not use all parameters, give DistributedDataParallel "
            f"find_unused_parameters=True; otherwise freeze those by requires_grad_(False)"
        )
    replica.zero_grad()
    with torch.no_grad():
        for buffer, value in zip(replica.buffers(), before):
            buffer.copy_(value)
