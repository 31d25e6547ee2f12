"""tp.py or cp.py (the first argument), but with a sampler that gives each rank rows of its own."""

import functools
import importlib
import sys

from common.launch import launch

script = importlib.import_module(sys.argv.pop(1).removesuffix(".py"))
sampler = script.BatchSampler


def share_out(*args, replication, **kwargs):
    return sampler(*args, **kwargs)


script.BatchSampler = functools.wraps(sampler)(share_out)
launch(script.main)
