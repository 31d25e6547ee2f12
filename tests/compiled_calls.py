"""Runs the script that comes first among the arguments, and counts in each step how many calls of
compiled layers ran compiled code. Prints the counts, and how often a layer was compiled."""

import importlib
import sys

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import common.model
from common.launch import launch
from common.metrics import Metrics

calls, steps, optimized = [0], [], torch.compile


def count_calls(graph, example_inputs):
    """A backend of torch.compile that runs the graph as it is."""
    def run(*inputs):
        calls[0] += 1
        return graph(*inputs)

    return run


end_step = Metrics.end_step


def note(self, step):
    steps.append(calls[0])
    calls[0] = 0
    end_step(self, step)


def main():
    script = importlib.import_module(sys.argv.pop(1).removesuffix(".py"))
    common.model.torch.compile = lambda forward: optimized(forward, backend=count_calls)
    Metrics.end_step = note
    script.main()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("calls", steps, "graphs", counters["stats"]["unique_graphs"], flush=True)


launch(main)
