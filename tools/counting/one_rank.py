"""Runs a script as one rank of any cluster, in this process or in another one."""

import argparse
import atexit
import concurrent.futures.process
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import traceback

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException, DynamicOutputShapeException
)

from common.options import SettingError
from tools.command import fail, load
from tools.counting import pretend, stand_ins
from tools.huggingface.config import add_preset

PRELOADED = [  # what takes long to import; the first optimizer of a script imports torch._dynamo
    "tools.counting.stand_ins", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
NEEDED = ("main", "load_steps", "Run")


def count(script, options, world_size, rank, nproc_per_node, device=torch.device("cpu")):
    """Run ``main`` of a script as ``rank``, in this process. Returns what it counted, a dict.

    In a process call it for one rank of one world only: it replaces parts of torch, and DTensor's
    caches keep the groups of a world.

    Raises:
        SettingError: the script refuses its options, cannot be used, or reads a tensor's value.
    """
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % nproc_per_node),
        "LOCAL_WORLD_SIZE": str(min(world_size, nproc_per_node)), "CUDA_VISIBLE_DEVICES": "",
    }
    torch.set_num_threads(1)
    model, dtype = (value_of(name, options) for name in ("--model", "--dtype"))
    if dtype in (None, "auto"):
        options = [*options, "--dtype", "bfloat16"]  # as --dtype auto on GPUs
    if model:
        add_preset(model)
    sys.argv = [script, *options]
    module = load(script, NEEDED)
    counted = {"world_size": world_size, "rank": rank}

    def start(args):
        pretend.world(world_size, rank)
        return device

    replaced = stand_ins.stand_ins(counted, start, world_size, nproc_per_node)
    own = getattr(module, "WITHOUT_VALUES", {})
    for name in own.keys() - vars(module).keys():
        fail(f"{script}: WITHOUT_VALUES names {name}, which is not in the script")
    for name, stand_in in (replaced | own).items():
        if hasattr(module, name):
            setattr(module, name, stand_in)
    run_main(module, options, counted)
    return counted


def value_of(name, options):
    """The value of the option ``name`` in a list of words; None: it has none."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument(name, dest="value", nargs="?")
    return parser.parse_known_args(options)[0].value


def run_main(module, options, counted):
    try:
        module.main(options)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if "held" not in counted:  # after the counted step it does not matter
            others = tuple(f"{pathlib.Path(file).parent}/" for file in (torch.__file__, __file__))
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if not frame.filename.startswith(others)][-1]
            raise SettingError(
                f"{own.filename}:{own.lineno} reads the value of a tensor, and in a dry run no "
                f"tensor has values: {own.line}"
            ) from None


kept = threading.local()  # of each thread: processes by (world size, rank), the latest last
MOST_KEPT = 3
started = []  # of all threads


@atexit.register
def end_processes():
    for process in started:
        process.shutdown()


def count_apart(script, options, world_size, rank, *args, **more):
    """``count``, in another process, which is kept for the next one of this rank and world. It is
    forked off a server that has imported torch, and no more: where torch has CUDA packages, a fork
    of a process that has run a backward pass cannot run one itself. Raises SettingError also if
    that process is killed."""
    processes = vars(kept)
    process = processes.pop((world_size, rank), None)
    if process is None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = concurrent.futures.ProcessPoolExecutor(1, context, end_with_parent)
        started.append(process)
    counting = process.submit(count, script, options, world_size, rank, *args, **more)
    try:
        counted = counting.result()
    except concurrent.futures.process.BrokenProcessPool:
        fail(f"{script}: the process that counted was killed: it needs more memory")
    processes[world_size, rank] = process  # unless it has failed, at any place
    if len(processes) > MOST_KEPT:
        processes.pop(next(iter(processes))).shutdown()
    return counted


def end_with_parent():
    """End this process when the tool ends, however that is: a signal leaves nothing behind."""
    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tool hears Ctrl-C
    threading.Thread(target=wait, daemon=True).start()


def threads():
    """As many threads as cores, each to wait for a ``count_apart``."""
    return concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def most(counts):
    """Of several results of ``count``, the one of the rank with the highest peak."""
    return max(counts, key=lambda counted: counted["peak"]["in all"])
