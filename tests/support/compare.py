"""What a run has left, and how near two runs are."""

import functools

import torch
import torch.distributed.checkpoint as dcp

from common.checkpoint import open_checkpoint


@functools.lru_cache(9)
def read(checkpoint):
    """The tensors of a checkpoint, whole, by name: "model.lm_head.weight"."""
    reader, _ = open_checkpoint(checkpoint)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype)
               for name, entry in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def saved(run, step=3):
    """The tensors of a checkpoint of a run."""
    return read(run.out / f"step-{step:08d}")


def assert_bit_equal(tensors, others):
    assert tensors.keys() == others.keys() and len(others) > 60
    for name, tensor in others.items():
        assert torch.equal(tensors[name], tensor), name


def assert_near(tensors, others):
    """The same names, and to 1e-10 the same values."""
    assert tensors.keys() == others.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-10, msg=name)


def assert_same_run(found, expected, step=3):
    """All that is logged; weights and optimizer states after ``step``."""
    for name in set().union(*expected.history) - {"tokens_per_second"}:
        assert furthest(found.curve(name), expected.curve(name)) < 1e-10, name
    assert_near(saved(found, step), saved(expected, step))


def furthest(curve, other):
    """The largest difference between two curves: lists of lists of numbers."""
    assert len(curve) == len(other) > 0
    return max(abs(a - b) for row, reference in zip(curve, other) for a, b in zip(row, reference))
