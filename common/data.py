"""Rank-aware data: every world size reads the same samples in the same order.

The order of the samples is a pure function of (seed, epoch), computed index by index: a keyed
permutation instead of a shuffled list, so that 10^12 samples cost no start-up time and no memory.
Step s consumes the samples [s*B, (s+1)*B) of that order, where B is the global batch size, and each
data-parallel rank takes its share of them. So the step number is the only state of the data.

``BatchSampler`` and ``load_batches`` serve any map-style dataset: anything that has
``len(dataset)`` and ``dataset[index]``.
"""

import os
import sys
import tempfile

import numpy as np
import torch
from torch.utils._pytree import tree_map  # torch has no public one
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from common.errors import SettingError

LONG = 300  # seconds: below --timeout, so that the error names the worker and no collective


def permute(indices, size, key):
    """Where each of ``indices`` goes in the permutation of range(``size``) that ``key`` selects.

    ``indices`` is an array of any shape, ``key`` a sequence of integers >= 0. A Feistel network
    permutes range(2^bits), the smallest that contains range(``size``). An index that lands outside
    of range(``size``) is permuted again until it lands inside, which keeps it a permutation (cycle
    walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    bits = (size - 1).bit_length()
    low = np.uint64(bits // 2)  # one half has low bits, the other bits - low
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(8, np.uint64)

    def scramble(x):
        left, right = x >> low, x & low_mask
        for even, odd in round_keys.reshape(4, 2):
            left = left ^ (_mix(right ^ even) & high_mask)
            right = right ^ (_mix(left ^ odd) & low_mask)
        return (left << low) | right

    out = scramble(np.atleast_1d(np.asarray(indices, np.uint64)))
    while (outside := out >= size).any():
        out[outside] = scramble(out[outside])
    return out.astype(np.int64).reshape(np.shape(indices))


def _mix(x):
    """Let every bit of x change every bit of the result (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class BatchSampler(Sampler):
    """Yields the sample indices of one micro-batch after another, for this rank.

    Args:
        size: number of samples in the dataset.
        batch_size: B, samples in the *global* batch, over all ranks and accumulation steps.
        grad_accum: number of micro-batches into which each rank cuts its share of a global batch.
        seed: seed of the order.
        start, stop: optimizer steps, ``start`` included, ``stop`` not (None: endless).
        rank, world_size: the rank of this process, and the number of processes.
        replication: number of consecutive ranks that get the same samples (tensor, context and
            pipeline ranks).
        mesh: instead of the three above, the data-parallel dimensions of a ``DeviceMesh``; of
            several dimensions, ranks are counted in row-major order.

    Data-parallel rank r of n takes the samples [r*B/n, (r+1)*B/n) of the global batch, so the
    shares of all ranks, concatenated in the order of the ranks, are the batch in order. If an epoch
    ends inside a batch, the batch continues with the next epoch: no sample is padded, repeated or
    dropped.

    Raises:
        SettingError: ``batch_size`` is no multiple of data-parallel ranks x ``grad_accum``, or
            ``replication`` does not divide ``world_size``.
    """

    def __init__(self, size, batch_size, grad_accum=1, *, seed=0, start=0, stop=None,
                 rank=0, world_size=1, replication=1, mesh=None):
        if mesh is not None:
            rank = int(np.ravel_multi_index(mesh.get_coordinate(), mesh.shape))
            world_size, replication = mesh.size(), 1
        if world_size % replication:
            raise SettingError(
                f"a replication of {replication} does not divide the world size {world_size}"
            )
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.grad_accum, self.start, self.stop = grad_accum, start, stop
        self.rank, self.ranks = rank // replication, world_size // replication
        parts = self.ranks * grad_accum
        if batch_size % parts:
            below, above = batch_size // parts * parts, -(-batch_size // parts) * parts
            raise SettingError(
                f"--batch-size {batch_size} cannot be shared evenly by {self.ranks} data-parallel "
                f"ranks x {grad_accum} accumulation steps: use a multiple of {parts}, such as "
                f"{f'{below} or {above}' if below else above}"
            )

    def __str__(self):
        samples = self.batch_size // (self.ranks * self.grad_accum)
        return (
            f"batch {self.batch_size} = {counted(samples, 'sample')} "
            f"x {counted(self.grad_accum, 'accumulation step')} "
            f"x {counted(self.ranks, 'data-parallel rank')}"
        )

    def __len__(self):
        """The number of micro-batches from ``start`` to ``stop``; an endless sampler has none."""
        if self.stop is None:
            raise TypeError("a sampler without `stop` is endless")
        return max(0, self.stop - self.start) * self.grad_accum

    def __iter__(self):
        share = self.batch_size // self.ranks
        step = self.start
        while self.stop is None or step < self.stop:
            first = step * self.batch_size + self.rank * share
            for rows in np.split(self.samples(first, first + share), self.grad_accum):
                yield rows.tolist()
            step += 1

    def samples(self, first, last):
        """The sample indices at the places [first, last) of the endless order, an int64 array."""
        epochs, places = np.divmod(np.arange(first, last), self.size)
        return np.concatenate([
            permute(places[epochs == epoch], self.size, (self.seed, int(epoch)))
            for epoch in np.unique(epochs)
        ])


def load_batches(dataset, sampler, device, workers=0):
    """Yields the micro-batches of this rank on ``device``: samples of ``dataset``, collated into
    any structure of tensors, such as a tuple or a dict. ``workers`` processes read ahead; 0: this
    process reads. A worker that gives nothing for ``LONG`` seconds ends the run."""
    if workers and len(folder := tempfile.gettempdir()) > 70:
        raise SettingError(
            f"TMPDIR is {folder}: too long for the Unix sockets of --workers; name a folder of at "
            f"most 70 characters"
        )
    loader = DataLoader(
        _Batches(dataset), sampler=sampler, batch_size=None,  # the sampler yields whole batches
        num_workers=workers, pin_memory=device.type == "cuda", worker_init_fn=_leave_group,
        timeout=LONG if workers else 0,
        generator=torch.Generator(),  # otherwise it would advance the random state of training
    )
    for batch in loader:
        if isinstance(batch, SettingError):
            raise batch
        yield tree_map(
            lambda x: x.to(device, non_blocking=True) if hasattr(x, "to") else x, batch
        )


class _Batches(Dataset):
    """The micro-batches of ``dataset``, by lists of indices; or the SettingError that reading one
    has raised, or that samples do not make a batch: if a worker raised it, its words would be lost
    in a traceback."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, indices):
        try:
            samples = [self.dataset[index] for index in indices]
        except SettingError as error:
            return error
        try:
            return default_collate(samples)
        except Exception as error:  # of shapes, types, names, or of numbers that are no tensors
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            return SettingError(
                f"samples {', '.join(map(str, indices[:8]))} of the dataset do not make a batch "
                f"({reason:.200}): tensors of the same name must have one shape and type in all "
                f"samples; pad sequences in __getitem__, and their targets with -100"
            )


def _leave_group(worker):
    """A signal that asks a run to stop, such as Ctrl-C, may reach all processes of its group:
    workers still have a step to serve. They end with their parent, which they watch."""
    os.setpgid(0, 0)
    # The thread that hands tensors over has no words when its parent ends in between.
    sys.excepthook = lambda *_: None


def load_steps(dataset, sampler, device, workers=0):
    """Yields (step, batch) for each step that is left: the list of this rank's micro-batches."""
    micro_batches = load_batches(dataset, sampler, device, workers)
    for step in range(sampler.start, sampler.stop):
        yield step, [next(micro_batches) for _ in range(sampler.grad_accum)]


def counted(number, noun):
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
