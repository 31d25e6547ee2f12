"""Runs the script that comes first among the arguments; every rank writes what it counted to
rank0.json, rank1.json and so on, in the run folder."""

import importlib
import json
import sys

from common.launch import launch
from common.metrics import Metrics

sys.argv.pop(0)
close = Metrics.close


def write_and_close(metrics, **theory):
    counter = metrics.counter
    held = metrics.held | {"optimizer states": counter.now["optimizer states"]}
    collectives = [[kind, dim, counter.calls[kind, dim], size]
                   for (kind, dim), size in counter.sent.items()]
    (metrics.folder / f"rank{metrics.rank}.json").write_text(json.dumps(
        {"held": held, "peak": counter.peak, "collectives": sorted(collectives)}
    ))
    return close(metrics, **theory)


Metrics.close = write_and_close
launch(importlib.import_module(sys.argv[0].removesuffix(".py").replace("/", ".")).main)
