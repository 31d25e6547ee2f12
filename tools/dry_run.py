"""Run a script as one rank of any cluster: in one process, without GPUs, data or other ranks.

    python -m tools.dry_run 1024 fsdp.py --model llama3-70b --seq-len 8192 --dtype bfloat16
    python -m tools.dry_run --device-memory 80 --nproc-per-node 8 64 hybrid_3d.py --tp 8 --pp 4

The options below stand before the world size; the script's own options stand after the script.

The script itself runs, for a step that is counted as in a real run. Names that the script has
imported are replaced: the process group is torch's fake one, whose collectives send nothing, and
tensors are fake, with shapes but no memory. Nothing is read from --data or written to --out. A copy
of a script with a model of your own runs too, if it still takes start_process_group and load_steps
from common/, and Checkpoints and Report from common/services/. If a function of the script reads
values or files, the script names another function that a dry run calls instead: see WITHOUT_VALUES
in examples/cp_documents.py.

It counts what torch would hold and send. Where kernels of a GPU keep other tensors for the backward
pass than those of a CPU, it counts the GPU's. A GPU adds its context, workspaces of kernels and
fragmentation. In float64, for which it has no fused attention, it also keeps the scores. With
--cpu-offload only what is on the GPU counts, and not what is in host memory. --compile, which makes
activations smaller, is ignored here. The loss and all other values are unknown: code that reads a
value cannot run. In a mixture of experts each expert is assumed to get equally many tokens: in a
real run the data decides.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import importlib
import multiprocessing
import os
import pathlib
import pkgutil
import sys
import threading
import traceback

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException, DynamicOutputShapeException
)
from tqdm import tqdm

from common import options as common_options
from common.errors import SettingError, printable
from common.options import at_least
from common.services import counting
from common.services.counting import bytes_table
from tools.support import pretend, stand_ins
from tools.support.command import (
    ROOT, check_json, find, forget_modules, load, make_parser, package_of, refuse, run, write_json
)

PRELOADED = [  # what takes long to import; the first optimizer of a script imports torch._dynamo
    "tools.support.stand_ins", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
NEEDED = ("main", "load_steps", "Checkpoints", "Report")


def count(script, options, world_size, rank, nproc_per_node, device=torch.device("cpu"),
          progress=False):
    """Run ``main`` of a script as ``rank``, in this process. Returns what it counted, a dict. With
    ``progress`` it shows a progress bar if it takes long.

    Call it once in a process: it replaces parts of torch.

    Raises:
        SettingError: the script refuses its options, cannot be used, or reads a tensor's value.
    """
    count_it = count_with_these
    if (package := package_of(script) or "common") != "common":
        count_it = tools_with(package, script).count_with_these
    try:
        return count_it(script, options, world_size, rank, nproc_per_node, device, progress)
    except ValueError as error:
        if type(error).__name__ == "SettingError":  # maybe that of a copy
            raise SettingError(str(error)) from None
        raise


def tools_with(package, script):
    """This module, imported again with ``package``, the copy of common/ beside a script, in place
    of common/: the names that it replaces are then those that the script imports."""
    sys.path.insert(0, str(find(script).resolve().parent))
    copy = {"common": importlib.import_module(package)}
    for module in pkgutil.walk_packages(copy["common"].__path__, f"{package}."):
        name = f"common{module.name.removeprefix(package)}"
        copy[name] = importlib.import_module(module.name)
    del sys.path[0]
    forget_modules()
    sys.modules.update(copy)
    tools = importlib.import_module("tools.dry_run")
    for name in copy:  # the script may have another common/
        del sys.modules[name]
    return tools


def count_with_these(script, options, world_size, rank, nproc_per_node, device, progress):
    """``count`` with the common/ that this module has imported."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % nproc_per_node),
        "LOCAL_WORLD_SIZE": str(min(world_size, nproc_per_node)), "CUDA_VISIBLE_DEVICES": "",
    }
    torch.set_num_threads(1)
    sys.argv = [script, *options]
    common_options.default_dtype = lambda device: "bfloat16"  # as on GPUs
    module = load(script, NEEDED)
    counted = {"world_size": world_size, "rank": rank}
    # States are allocated before the first step. But in it DDP rebuilds its buckets.
    steps = 2 if hasattr(module, "DistributedDataParallel") else 1
    with contextlib.ExitStack() as stack:
        def start(args):
            stack.enter_context(pretend.world(world_size, rank))
            return device

        replaced = stand_ins.stand_ins(
            counted, steps, start, world_size, nproc_per_node, progress
        )
        own = getattr(module, "WITHOUT_VALUES", {})
        for name in own.keys() - vars(module).keys():
            refuse(f"{script}: WITHOUT_VALUES names {name}, which is not in the script")
        for name, stand_in in (replaced | own).items():
            if hasattr(module, name):
                setattr(module, name, stand_in)
        if hasattr(module, "check"):
            module.check = stand_ins.as_if_on_gpu(module.check)
        run_main(module, options, counted)
    return counted


def run_main(module, options, counted):
    try:
        module.main(options)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if "held" not in counted:  # after the counted step it does not matter
            others = [f"{pathlib.Path(file).parent}/" for file in (torch.__file__, __file__)]
            others = *others, counting.__file__
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if not frame.filename.startswith(others)][-1]
            raise SettingError(
                f"{own.filename}:{own.lineno} reads the value of a tensor, and in a dry run no "
                f"tensor has values: {own.line}"
            ) from None


def count_apart(*job, **options):
    """``count``, in a process of its own: DTensor's caches keep the groups of an earlier world. The
    process is forked off a server that has imported torch, and no more: where torch has CUDA
    packages, a fork of a process that has run a backward pass cannot run one itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with concurrent.futures.ProcessPoolExecutor(1, context, end_with_parent) as process:
        return process.submit(count, *job, **options).result()


def end_with_parent():
    """End this process when the tool ends, however that is: a signal leaves nothing behind."""
    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def threads():
    """As many threads as cores, each to wait for a ``count_apart``."""
    return concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def most(counts):
    """Of several results of ``count``, the one of the rank with the highest peak."""
    return max(counts, key=lambda counted: counted["peak"]["in all"])


def lines_of(counted, device_memory):
    """The lines to print."""
    yield from counted["description"]
    yield from bytes_table(
        counted["rank"], counted["held"], counted["peak"], counted["sent"],
        {k: (t["formula"], t["bytes"]) for k, t in counted["theory"].items()},
    )
    yield f"{'between machines':18}{counted['between_machines']:18,}"
    for part in sorted(counted["collectives"], key=lambda part: -part["bytes"]):
        yield (
            f"{part['calls']:>10,} x {part['collective']} over {part['group']}: "
            f"{part['bytes']:,.0f} bytes, {part['between_machines']:,.0f} between machines"
        )
    yield f"floating-point operations of rank {counted['rank']}: {counted['operations']:.4g}"
    if "bubble" in counted:
        yield f"bubble: at least {counted['bubble']:.1%} of a step"
    if device_memory:
        left = device_memory - counted["peak"]["in all"] / 1e9
        yield (f"fits into {device_memory:g} GB, {left:,.2f} GB are left" if left >= 0 else
               f"does not fit into {device_memory:g} GB, {-left:,.2f} GB too much")


def main(argv=None):
    parser = make_parser("dry_run", __doc__)
    parser.usage = "%(prog)s [options] WORLD_SIZE SCRIPT [options of the script]"
    parser.add_argument("world_size", type=at_least(1, most=2**20), metavar="WORLD_SIZE",
                        help="number of ranks")
    parser.add_argument("script", metavar="SCRIPT", help="path of a script, such as fsdp.py")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the script")
    parser.add_argument("--rank", type=at_least(0), metavar="R",
                        help="the rank to run as (default: 0; in a pipeline, the first rank of the "
                        "stage that holds most)")
    parser.add_argument("--nproc-per-node", type=at_least(1), default=8, metavar="N",
                        help="ranks per machine (default: 8)")
    parser.add_argument("--device-memory", type=at_least(0, float, above=True), metavar="GB",
                        help="memory of one device, in GB of 10^9 bytes, to compare with")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE",
                        help="write the counts to FILE, under the names of a run's summary.json")
    args = parser.parse_args(argv)
    if args.json:
        check_json(args.json, "dry_run")
    if args.rank is not None and args.rank >= args.world_size:
        refuse(f"--rank {args.rank}: the ranks of {args.world_size} are 0 to {args.world_size - 1}")
    own = find(args.script).resolve().parent / "common"
    if (own / "launch.py").exists() and not own.samefile(ROOT / "common"):
        refuse(f"{args.script} has a common/ of its own, and this dry_run would count with another "
               f"one: copy tools/ to {own.parent} too, and run that one")
    job = args.script, args.options, args.world_size
    if args.rank is not None:
        counted = count(*job, args.rank, args.nproc_per_node, progress=True)
    else:
        as_rank = functools.partial(count_apart, *job, nproc_per_node=args.nproc_per_node)
        first = as_rank(0, progress=True)
        others = first.get("stages", [0])[1:]
        with threads() as pool:
            counts = pool.map(as_rank, others)
            counted = most([first, *tqdm(counts, "other stages", len(others), leave=False,
                                         disable=not others)])
    counted.pop("stages", None)
    chosen = counted.pop("chosen")
    print(f"{args.script} as rank {counted['rank']:,} of {args.world_size:,}, a dry run{chosen}")
    for line in lines_of(counted, args.device_memory):
        print(printable(line))
    if args.json:
        write_json(args.json, "dry_run", counted)


if __name__ == "__main__":
    status = 0
    try:
        run(main)
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    sys.stdout.flush()
    os._exit(status or 0)  # at an ordinary exit a package of torch's lists what it leaks: 40 lines
