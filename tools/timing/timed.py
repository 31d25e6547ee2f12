"""Run a script and write down what its steps cost, without its start-up. tools/bench.py does so:

    torchrun --nproc_per_node=2 tools/timing/timed.py 5 25 FOLDER ddp.py --steps 25

writes for each rank FOLDER/rank-N.json: the seconds and the CPU seconds of the process from the end
of the optimizer's step 5 to the end of its step 25, divided by 20. If FOLDER is a file that ends in
.json, rank 0 writes a trace of these steps there, by torch.profiler.
"""

import contextlib
import itertools
import json
import os
import pathlib
import runpy
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def between_steps(first, last, context):
    """Enter ``context`` after step ``first`` of the optimizer, and leave it after step ``last``."""
    step_of = {}

    def count(optimizer, *_):
        step_of.setdefault(optimizer, itertools.count(1))  # a pipeline's rank may have several
        step = next(step_of[optimizer])
        if optimizer is next(iter(step_of)) and step in (first, last):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            context.__enter__() if step == first else context.__exit__(None, None, None)

    register_optimizer_step_post_hook(count)


@contextlib.contextmanager
def costs(steps, path):
    """Write the cost of one of ``steps`` to ``path``."""
    seconds, cpu_seconds = time.perf_counter(), time.process_time()
    yield
    cost = time.perf_counter() - seconds, time.process_time() - cpu_seconds
    path.write_text(json.dumps([each / steps for each in cost]))


@contextlib.contextmanager
def trace(path):
    """Write a Chrome trace to ``path``."""
    with torch.profiler.profile() as profiler:
        yield
    profiler.export_chrome_trace(str(path))


if __name__ == "__main__":
    first, last, folder, *sys.argv = sys.argv[1:]
    first, last, path = int(first), int(last), pathlib.Path(folder)
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    rank = os.environ.get("RANK", "0")
    if path.suffix != ".json":
        between_steps(first, last, costs(last - first, path / f"rank-{rank}.json"))
    elif rank == "0":
        between_steps(first, last, trace(path))
    runpy.run_path(sys.argv[0], run_name="__main__")
