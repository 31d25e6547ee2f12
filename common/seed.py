"""The random state of a step, for dropout. The step number decides it, so nothing is saved."""

import hashlib

import torch


def seed_step(seed, step, *ranks):
    """Seed the generators of all devices of this process, as the first thing in a step.

    Args:
        seed: the seed of the run.
        step: the optimizer step, so that a resumed run draws the same random numbers.
        ranks: the rank of this process along each axis that splits activations: data, context, and
            with sequence parallelism tensor. Leave out the ranks along all other axes: ranks that
            compute the same activations must draw the same numbers.
    """
    digest = hashlib.sha256(repr((seed, step, *ranks)).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little"))
