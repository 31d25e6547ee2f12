"""Equal bits after a resume of DistributedDataParallel (DDP)."""

import collections.abc
import inspect

import torch
from torch.utils._pytree import tree_leaves, tree_map  # torch has no public ones
from torch.utils.data import default_collate

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
        sample: what the loop gives ``replica``, of one sample: such as ``dataset[0]``, or several
            of its parts. A tuple becomes arguments, a dict becomes keywords if the model has them.
            They may be nested.

    Raises:
        SettingError: a parameter got no gradient, for which DDP would wait; or the model does not
            take such a sample.
    """
    before = [buffer.clone() for buffer in replica.buffers()]
    device = next(replica.parameters()).device
    number = sampler.batch_size // (sampler.ranks * sampler.grad_accum)
    batch = default_collate([sample[0] if len(sample) == 1 else sample] * number)  # as load_steps
    zeros = tree_map(
        lambda x: torch.zeros_like(x, device=device) if torch.is_tensor(x) else x, batch
    )
    args, named = arguments_of(replica.module, zeros)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        outputs = tree_leaves(replica(*args, **named))
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


def arguments_of(model, batch):
    """(arguments, keywords) by which ``model`` takes a micro-batch: a tuple or a list as several
    arguments, a dict by its keywords if it has them, and anything else as one.

    Raises:
        SettingError: it takes neither.
    """
    ways = [((batch,), {})]
    if isinstance(batch, collections.abc.Mapping):
        ways.insert(0, ((), dict(batch)))
    elif isinstance(batch, (list, tuple)):
        ways = [(tuple(batch), {})]
    for args, named in ways:
        try:
            inspect.signature(model.forward).bind(*args, **named)
            return args, named
        except TypeError:
            continue
    raise SettingError(
        f"the model takes {inspect.signature(model.forward)}, and a sample is a "
        f"{type(batch).__name__}{f' of {list(batch)}' if len(ways) > 1 else ''}: give "
        f"arrange_buckets what the loop gives replica, such as dataset[0]['x'], dataset[0]['y']"
    )
