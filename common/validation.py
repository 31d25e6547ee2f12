"""The loss on held-out data: the same number in every script and at every world size."""

import itertools

import torch
import torch.distributed as dist

from common.data import BatchSampler, load_batches
from common.errors import SettingError


class Validation:
    """Evaluates a model every ``every`` steps, and after the last step of the run.

    Each evaluation reads the same batches: the first ``batches`` of a fixed permutation of
    ``dataset``, which no seed changes, or fewer if the data has fewer. They are shared out over
    ranks and cut into micro-batches as in training, so an evaluation takes less memory than a step.

    Args:
        dataset: the held-out data: len(dataset) samples of (inputs, targets); None: ``due`` is
            never true.
        sampler: the BatchSampler of the training data.
        device: the torch.device of this process.
        every, batches: steps between evaluations, and global batches in each.
        workers: processes that read ahead; see ``load_batches``.

    Raises:
        SettingError: the data is less than one global batch.
    """

    def __init__(self, dataset, sampler, device, every=100, batches=10, workers=0):
        self.dataset, self.device, self.every, self.stop = dataset, device, every, sampler.stop
        if dataset is None:
            return
        batches = min(batches, len(dataset) // sampler.batch_size)
        if not batches:
            raise SettingError(
                f"--val-data has {dataset}, less than one batch of --batch-size "
                f"{sampler.batch_size}: give more data, or a smaller --batch-size or --seq-len"
            )
        dataset[0]  # now, not at the first evaluation, for its errors
        order = BatchSampler(
            len(dataset), sampler.batch_size, sampler.grad_accum, stop=batches,
            rank=sampler.rank, world_size=sampler.ranks,
        )
        # One loader for all evaluations: otherwise each would start its workers anew.
        again_and_again = itertools.chain.from_iterable(itertools.repeat(order))
        self.micro_batches = load_batches(dataset, again_and_again, device, workers)
        self.number = len(order)  # of micro-batches of this rank in an evaluation

    def due(self, step):
        """Whether to evaluate after ``step``, counted from 0. True on all ranks or on none."""
        return self.dataset is not None and (
            (step + 1) % self.every == 0 or step + 1 == self.stop
        )

    @torch.no_grad()
    def loss(self, model, compute_loss=None):
        """The mean loss over all targets of the held-out batches; targets of -100 do not count. All
        ranks call it and get the same number. ``model`` runs in eval mode: without dropout, and
        BatchNorm keeps its statistics. Afterwards its modules have their modes back.

        ``compute_loss(inputs, targets)`` returns the summed loss of the part of a micro-batch that
        this rank computes, and the targets of that part; the default is ``model(inputs, targets)``
        and ``targets``. Every part must come from equally many ranks. A rank that has no loss
        returns 0 and no targets.
        """
        compute_loss = compute_loss or (lambda inputs, targets: (model(inputs, targets), targets))
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, number of targets
        for inputs, targets in itertools.islice(self.micro_batches, self.number):
            loss, targets = compute_loss(inputs, targets)
            total += torch.stack((loss.double(), (targets != -100).sum().double()))
        for module, training in modes:
            module.training = training
        if dist.is_initialized():
            dist.all_reduce(total)
        return (total[0] / total[1].clamp(min=1)).item()
