"""Run a script and write down what its steps cost, without its start-up. tools/bench.py does so:

    torchrun --nproc_per_node=2 tools/support/timed.py 5 25 FOLDER ddp.py --steps 25

writes for each rank FOLDER/rank-N.json: the seconds and the CPU seconds of the process from the end
of the optimizer's step 5 to the end of its step 25, divided by 20.
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


def note_costs(first, last, path):
    """Write the cost of a step to ``path`` after step ``last``."""
    began, step_of = [], {}

    def note(optimizer, *_):
        step_of.setdefault(optimizer, itertools.count(1))  # a pipeline's rank may have several
        step = next(step_of[optimizer])
        if optimizer is next(iter(step_of)) and step in (first, last):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter(), time.process_time()
            began.append(now)
            if step == last:
                costs = [(b - a) / (last - first) for a, b in zip(began[0], now)]
                path.write_text(json.dumps(costs))

    register_optimizer_step_post_hook(note)


if __name__ == "__main__":
    first, last, folder, *sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    rank = os.environ.get("RANK", "0")
    note_costs(int(first), int(last), pathlib.Path(folder, f"rank-{rank}.json"))
    runpy.run_path(sys.argv[0], run_name="__main__")
