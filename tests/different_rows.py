"""tp.py or cp.py (the first argument), but with a sampler that gives each rank rows of its own."""

import functools
import importlib
import sys

import torch.distributed as dist

from common.launch import launch

script = importlib.import_module(sys.argv.pop(1).removesuffix(".py"))
sampler = script.BatchSampler


def share_out(*args, mesh, **kwargs):
    return sampler(*args, rank=dist.get_rank(), world_size=dist.get_world_size(), **kwargs)


script.BatchSampler = functools.wraps(sampler)(share_out)
launch(script.main)
