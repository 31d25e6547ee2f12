"""Run a script and write down what its steps cost, without its start-up. tools/bench.py does so:

    torchrun --nproc_per_node=2 tools/timing/timed.py 5 25 FOLDER ddp.py --steps 25

writes for each rank FOLDER/rank-N.json: the seconds and the CPU seconds of the process from the end
of the optimizer's step 5 to the end of its step 25, divided by 20. If FOLDER is a file that ends in
.json, rank 0 writes a trace of these steps there, by torch.profiler.
"""

import itertools
import json
import os
import pathlib
import runpy
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def after_steps(first, last, begin, end):
    """Call ``begin`` after step ``first`` of the optimizer, and ``end`` after step ``last``."""
    step_of = {}

    def count(optimizer, *_):
        step_of.setdefault(optimizer, itertools.count(1))  # a pipeline's rank may have several
        step = next(step_of[optimizer])
        if optimizer is next(iter(step_of)) and step in (first, last):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            begin() if step == first else end()

    register_optimizer_step_post_hook(count)


def note_costs(first, last, path):
    """Write the cost of a step to ``path`` after step ``last``."""
    began = []

    def end():
        now = time.perf_counter(), time.process_time()
        path.write_text(json.dumps([(b - a) / (last - first) for a, b in zip(began, now)]))

    after_steps(first, last, lambda: began.extend((time.perf_counter(), time.process_time())), end)


def trace(first, last, path):
    """Write a Chrome trace of the steps after ``first`` to ``path``."""
    profiler = torch.profiler.profile()

    def end():
        profiler.stop()
        profiler.export_chrome_trace(str(path))

    after_steps(first, last, profiler.start, end)


if __name__ == "__main__":
    first, last, folder, *sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    rank, path = os.environ.get("RANK", "0"), pathlib.Path(folder)
    if path.suffix != ".json":
        note_costs(int(first), int(last), path / f"rank-{rank}.json")
    elif rank == "0":
        trace(int(first), int(last), path)
    runpy.run_path(sys.argv[0], run_name="__main__")
