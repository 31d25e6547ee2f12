"""Runs the script that the first argument names. Prints the most bytes that the allocator of rank 0
held in the counted step."""

import importlib
import sys

import torch
import torch.distributed as dist

from common.launch import launch
from common.metrics import Metrics

begin_step, end_step, most = Metrics.begin_step, Metrics.end_step, []


def begin(self, step):
    torch.cuda.reset_peak_memory_stats()
    begin_step(self, step)


def end(self, step):
    if step == self.counted_step:
        most.append(torch.cuda.max_memory_allocated())
    end_step(self, step)


def main():
    script = importlib.import_module(sys.argv.pop(1).removesuffix(".py"))
    Metrics.begin_step, Metrics.end_step = begin, end
    script.main()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("allocated", *most, flush=True)


launch(main)
