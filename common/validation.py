"""The loss on held-out data: the same number in every script and at every world size."""

import itertools

import torch
import torch.distributed as dist

from common.data import BatchSampler, load_batches
from common.errors import SettingError


class Validation:
    """Evaluates a model every ``every`` steps and after the last one, always on the same batches:
    the first ``batches`` of ``dataset`` in an order that no seed changes, shared out as ``sampler``
    shares out those of training. Without a ``dataset`` it is never ``due``."""

    def __init__(self, dataset, sampler, device, every, batches, workers=0):
        self.dataset, self.device, self.every, self.stop = dataset, device, every, sampler.stop
        if dataset:
            batches = min(batches, len(dataset) // sampler.batch_size)
            if not batches:
                raise SettingError(
                    f"--val-data has {dataset}, less than one batch of --batch-size "
                    f"{sampler.batch_size}: give more data, or a smaller --batch-size or --seq-len"
                )
            order = BatchSampler(
                len(dataset), sampler.batch_size, sampler.grad_accum, rank=sampler.rank,
                world_size=sampler.ranks, stop=batches,
            )
            # One loader for all evaluations: otherwise each would start its workers anew.
            again_and_again = itertools.chain.from_iterable(itertools.repeat(order))
            self.micro_batches = load_batches(dataset, again_and_again, device, workers)
            self.number = len(order)  # of micro-batches of this rank in an evaluation

    def due(self, step):
        """Whether to evaluate after ``step``, counted from 0."""
        return self.dataset and ((step + 1) % self.every == 0 or step + 1 == self.stop)

    @torch.no_grad()
    def loss(self, model, compute_loss=None):
        """The mean loss over all held-out targets, on all ranks. ``model`` runs in eval mode.

        ``compute_loss(inputs, targets)`` returns the summed loss of the part of a micro-batch that
        this rank computes, and the targets of that part; by default ``model(inputs, targets)`` and
        ``targets``. Every part must come from equally many ranks.
        """
        compute_loss = compute_loss or (lambda inputs, targets: (model(inputs, targets), targets))
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, number of targets
        for micro_batch in itertools.islice(self.micro_batches, self.number):
            loss, targets = compute_loss(*micro_batch)
            total += torch.stack((loss.double(), (targets != -100).sum().double()))
        for module, training in modes:
            module.training = training
        if dist.is_initialized():
            dist.all_reduce(total)
        return (total[0] / total[1].clamp(min=1)).item()
