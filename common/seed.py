"""The random state of a step, for dropout: a function of numbers, so that there is none to save."""

import hashlib

import torch


def seed_step(seed, step, *ranks):
    """Seed the generators of all devices of this process, as the first thing in a step.

    Args:
        seed: of the run.
        step: of the optimizer, so that a resumed run continues with the same numbers.
        ranks: the rank of this process along each axis that splits activations: data, context, and
            with sequence parallelism tensor. Ranks that compute the same activations must draw the
            same numbers, so the ranks along all other axes stay out.
    """
    digest = hashlib.sha256(repr((seed, step, *ranks)).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little"))
