"""Run a script as one rank of any cluster: in one process, without GPUs, data or other ranks.

    python -m tools.dry_run 1024 fsdp.py --model llama3-70b --seq-len 8192 --dtype bfloat16
    python -m tools.dry_run --device-memory 80 --nproc-per-node 8 64 hybrid_3d.py --tp 8 --pp 4

The options below stand before the world size; the script's own options stand after the script.

The script itself runs, for a step that is counted as in a real run. Names that the script has
imported are replaced: the process group is torch's fake one, whose collectives send nothing, and
tensors are fake, with shapes but no memory. Nothing is read from --data or written to --out. A copy
of a script with a model of your own runs too, if it still takes start_process_group and load_steps
from common/, and Checkpoints and Report from common/services/.

What is counted is what torch on a CPU would hold and send. A GPU adds its context, workspaces of
kernels and fragmentation. --compile, which makes activations smaller, is ignored here. The loss
and all other values are unknown: code that reads a value cannot run. In a mixture of experts each
expert is assumed to get equally many tokens: in a real run the data decides.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import importlib.util
import itertools
import json
import multiprocessing
import operator
import os
import pathlib
import sys
import traceback
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException, DynamicOutputShapeException
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate
from torch.utils.flop_counter import flop_registry
from tqdm import tqdm

import ep
import pp
from common import experts, materialise
from common import options as common_options
from common.errors import SettingError, printable
from common.model import wrap_layers
from common.options import at_least
from common.services import checkpoint, counting, report, validation
from common.services.counting import StepCounter, bytes_table, group_of
from tools import pretend
from tools.command import check_json, make_parser, refuse, run, write_json

PRELOADED = [  # what takes long to import; the first optimizer of a script imports torch._dynamo
    "pp", "common.services.checkpoint", "common.services.report", "common.services.validation",
    "tools.pretend", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
]
NEEDED = ("main", "load_steps", "Checkpoints", "Report")


class OperationCounter(StepCounter):
    """Also counts ``operations``, the floating-point operations of matrix products, convolutions
    and attention, and ``crossing``, the part of ``sent`` that goes to another machine.

    ``parts`` are those of the step. Each ends when the first gradient of a backward pass arrives,
    the last one when the optimizer's step begins. Of each, ``peak`` has the most bytes that were
    alive at once, by kind, and ``begin`` and ``end`` what was alive at its begin and its end.

    Half of a causal attention is counted: its kernels skip the rest. In the backward pass they
    compute the scores again. A collective is a ring over the ranks in their order, with
    ``nproc_per_node`` ranks on each machine. Some edges of the ring lead to another machine: their
    share of the edges is the share of the bytes in ``crossing``.
    """

    def __init__(self, nproc_per_node, *args):
        super().__init__(*args)
        self.nproc_per_node = nproc_per_node
        self.operations, self.crossing, self.parts = 0, collections.Counter(), []
        self.first = None  # the parameter whose gradient arrives first
        self.begin = self.now.copy()

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = super().__torch_dispatch__(function, kinds, args, kwargs)
        if out is not NotImplemented:
            self.operations += operations(function._overloadpacket, args, kwargs or {}, out)
        return out

    def __exit__(self, *error):
        super().__exit__(*error)
        self.end_part(self.held)
        self.peak = functools.reduce(operator.or_, (part["peak"] for part in self.parts))

    def watch_gradient(self, parameter):
        super().watch_gradient(parameter)
        self.first = self.first or id(parameter)
        if id(parameter) == self.first:
            self.end_part(self.now.copy())

    def end_part(self, end):
        self.parts.append({"peak": self.peak, "begin": self.begin, "end": end})
        self.peak, self.begin = end.copy(), end

    def collective(self, name, args, out):
        before = self.sent.copy()
        super().collective(name, args, out)
        for key, size in (self.sent - before).items():
            self.crossing[key] += size * crossing_share(name, args, self.nproc_per_node)


def operations(packet, args, kwargs, out):
    """The floating-point operations of one call, by torch's formulas. torch has none for attention
    on the CPU: its products of Q queries and S keys are counted, 2 forward, 5 backward."""
    name = packet.__name__
    if name == "_grouped_mm":  # of experts, forward or backward
        return 2 * args[0].numel() * args[1].shape[-1]
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        products = 5 if name.endswith("backward") else 2
        q, k = args[1:3] if products == 5 else args[:2]  # (B, H, Q, K), (B, KV, S, K)
        causal = kwargs.get("is_causal", any(arg is True for arg in args))
        return products * 2 * q.numel() * k.shape[2] // (2 if causal else 1)
    formula = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=out) if formula else 0


def crossing_share(name, args, nproc_per_node):
    """The share of what a collective sends that goes to another machine."""
    group = group_of(args)
    if name == "send":
        receiver = next(arg for arg in args if isinstance(arg, int))
        machines = _machines(group, nproc_per_node)
        return float(machines[receiver] != machines[group.rank()])
    return _crossing(group, nproc_per_node, name.startswith(("alltoall", "all_to_all")))


@functools.cache
def _machines(group, nproc_per_node):
    return [rank // nproc_per_node for rank in dist.get_process_group_ranks(group)]


@functools.cache
def _crossing(group, nproc_per_node, to_all):
    machines = _machines(group, nproc_per_node)
    if to_all:  # of all pairs of ranks
        n = len(machines)
        here = sum(m * (m - 1) for m in collections.Counter(machines).values())
        return 1 - here / max(1, n * (n - 1))
    edges = zip(machines, machines[1:] + machines[:1])
    return sum(a != b for a, b in edges) / len(machines)


def count(script, options, world_size, rank, nproc_per_node, device=torch.device("cpu")):
    """Run ``main`` of a script as ``rank``, in this process. Returns what it counted, a dict: see
    ``stand_ins``.

    Call it once in a process: it replaces parts of torch.

    Raises:
        SettingError: the script refuses its options, cannot be used, or reads a tensor's value.
    """
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % nproc_per_node),
        "LOCAL_WORLD_SIZE": str(min(world_size, nproc_per_node)), "CUDA_VISIBLE_DEVICES": "",
    }
    torch.set_num_threads(1)
    sys.argv = [script, *options]
    common_options.default_dtype = lambda device: "bfloat16"  # as on GPUs
    module = load(script)
    counted = {}
    # States are allocated before the first step. But in it DDP rebuilds its buckets.
    steps = 2 if hasattr(module, "DistributedDataParallel") else 1
    with contextlib.ExitStack() as stack:
        def start(args):
            stack.enter_context(pretend.world(world_size, rank))
            return device

        for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
            uncounted = as_if_before(getattr(PipelineStage, name))
            stack.enter_context(mock.patch.object(PipelineStage, name, uncounted))
        replaced = stand_ins(counted, steps, start, world_size, rank, nproc_per_node)
        for name, stand_in in replaced.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)
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


def load(script):
    """Import a script by its path.

    Raises:
        SettingError: it cannot be imported, or lacks a name of ``NEEDED``.
    """
    path = pathlib.Path(script)
    if not path.exists():
        path = pathlib.Path(__file__).parent.parent / script  # from another folder
    if path.suffix != ".py" or not path.is_file():
        raise SettingError(f"{script} is no script: give the path of a .py file, such as fsdp.py")
    sys.path[:0] = [str(path.parent.resolve()), str(pathlib.Path(__file__).parent.parent)]
    spec = importlib.util.spec_from_file_location("dry_" + path.stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SettingError(
            f"{script} cannot be imported: {type(error).__name__}: {error}"
        ) from None
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        raise SettingError(
            f"{script} has no {', '.join(missing)}: a dry run needs a script like fsdp.py, whose "
            f"main(argv) takes these from common/ and common/services/"
        )
    return module


def stand_ins(counted, steps, start, world_size, rank, nproc_per_node):
    """Replacements for names that a script has imported, a dict. ``Report`` counts the last of
    ``steps`` and fills ``counted``."""

    def start_one(args):
        if world_size > 1:
            raise SettingError(f"{sys.argv[0]} is one process: its world size is 1")
        return start(args)

    class Data:
        def __init__(self, seq_len):
            self.seq_len = seq_len

        def __str__(self):
            return "no data"

        def __len__(self):
            return 10**12

        def __getitem__(self, index):
            return torch.zeros(2, self.seq_len, dtype=torch.int64).unbind()

    def open_dataset(args, option="--data"):
        return Data(args.seq_len) if option == "--data" else None

    def load_steps(dataset, sampler, device, workers=0):
        rows = sampler.batch_size // (sampler.ranks * sampler.grad_accum)
        sample = pretend.outside(dataset.__getitem__)(0)
        like = pretend.outside(default_collate)([sample] * rows)
        for step in range(steps):
            yield step, [
                tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device), like)
                for _ in range(sampler.grad_accum)
            ]

    def share_out(counts, rows):
        numbers = counts[0].numel()
        borders = [i * rows // numbers for i in range(numbers + 1)]
        shared = torch.tensor([b - a for a, b in itertools.pairwise(borders)])
        return shared.view(counts.shape[1:]).expand(counts.shape).tolist()

    def allocate(model, device, seed):
        with mock.patch.multiple(
            materialise, local_slices=pretend.outside(materialise.local_slices),
            draw_weight=lambda name, slices, *_: torch.empty([s.stop - s.start for s in slices]),
        ):
            materialise.materialise(model, device, seed)

    class Checkpoints:
        add_options = checkpoint.Checkpoints.add_options

        def __init__(self, folder, settings, tensors, optimizer, **_):
            self.optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]

        def resume(self, *, newest=True, step=None):
            """Allocate the optimizers' states, so that the first step is as all others."""
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
                optimizer.zero_grad()
            return 0

        stopping = False

        def after_step(self, step, grad_norm):
            pass

        def finish(self):
            pass

    class Validation:  # in no step that is counted
        add_options = validation.Validation.add_options

        def __init__(self, *_, **__):
            pass

        def due(self, step):
            return False

    report.StepCounter = functools.partial(OperationCounter, nproc_per_node)
    experts.read_counts = ep.read_counts = pretend.outside(share_out)

    class DryReport(report.Report):
        def __init__(self, *args, **kwargs):
            counted.update(world_size=world_size, rank=rank, description=[])
            super().__init__(*args, **kwargs)
            counted["description"] = counted["description"][1:5]  # without the device
            counted["chosen"] = (" in bfloat16: --dtype auto counts as on GPUs"
                                 if self.args.dtype == "auto" else "")
            if getattr(getattr(self.args, "config", None), "num_experts", 0):
                self.say("assumed: all experts get equally many tokens")
            if self.mesh is not None:
                counted["grid"] = dict(zip(self.mesh.mesh_dim_names, self.mesh.shape))
                if "pp" in counted["grid"]:  # the first rank of each stage
                    ranks = self.mesh.mesh.movedim(self.mesh.mesh_dim_names.index("pp"), 0)
                    counted["stages"] = ranks.reshape(len(ranks), -1)[:, 0].tolist()
                    schedule = getattr(self.args, "schedule", "1f1b")
                    v = getattr(self.args, "stages_per_rank", 1) or (
                        1 if schedule in pp.ONE_STAGE else 2)
                    M = self.args.microbatches or len(ranks)
                    counted["bubble"], _ = pp.bubble(schedule, len(ranks), v, M)

        def say(self, line):
            counted["description"].append(str(line))

        def steps(self, numbered):
            for step, batch in numbered:
                self.counted = step + -steps % self.every  # the last one ends in a meeting
                if step == steps - 1:
                    self.start_counting()
                yield self.counted, batch

        def log(self, step, loss, grad_norm, **more):
            self.stop_counting()

        def close(self, theory=None):
            counter = self.counter
            if counter.failed:
                raise counter.failed
            counted.update(
                held=dict(counter.held), peak=dict(counter.peak),
                sent=round(sum(counter.sent.values())),
                between_machines=round(sum(counter.crossing.values())),
                operations=counter.operations, parts=counter.parts,
                collectives=[
                    part | {"between_machines": counter.crossing[part["collective"], part["group"]]}
                    for part in counter.collectives()
                ],
                theory={k: {"formula": f, "bytes": b} for k, (f, b) in (theory or {}).items()},
            )
            return []

    return {
        "start_process": start_one, "start_process_group": start,
        "open_dataset": open_dataset, "load_steps": load_steps, "materialise": allocate,
        "wrap_layers": wrap_uncompiled,
        "run_settings": lambda *_: ({}, {}), "Checkpoints": Checkpoints, "Report": DryReport,
        "check_stages": lambda *_: None,  # it gathers objects
        "set_timeout": lambda *_: None,
        "read_counts": experts.read_counts,
        # examples/fsdp_lora.py: no weights of a base
        "load_weights": lambda *_, **__: None, "first_rows": lambda _: [],
        "fingerprint": lambda *_: {},
        "read_seen": lambda seen: [True] * len(seen),  # examples/cp_documents.py: one document
        "Validation": Validation, "init_device_mesh": pretend.outside(init_device_mesh),
    }


def wrap_uncompiled(layers, compiled, checkpointed):
    """``wrap_layers`` without compiling: what it counts stays the same. It refuses what a real run
    refuses."""
    wrap_layers([], compiled, checkpointed)
    wrap_layers(layers, False, checkpointed)


def as_if_before(prepare):
    """A stage of a pipeline allocates its buffers in the first step. Returns the method that does
    it such that it is not counted, as if an earlier step had called it."""

    def uncounted(*args, **kwargs):
        with mock.patch.object(OperationCounter, "operation", lambda *_: None):
            return prepare(*args, **kwargs)

    return uncounted


def count_apart(*job, **options):
    """``count``, in a process of its own: DTensor's caches keep the groups of an earlier world. The
    process is forked off a server that has imported torch, and no more: where torch has CUDA
    packages, a fork of a process that has run a backward pass cannot run one itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with concurrent.futures.ProcessPoolExecutor(1, context) as process:
        return process.submit(count, *job, **options).result()


def threads():
    """As many threads as cores, each to wait for a ``count_apart``."""
    return concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def most(found):
    """Of several results of ``count``, the one of the rank with the highest peak."""
    return max(found, key=lambda counted: counted["peak"]["in all"])


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
    job = args.script, args.options, args.world_size
    if args.rank is not None:
        counted = count(*job, args.rank, args.nproc_per_node)
    else:
        as_rank = functools.partial(count_apart, *job, nproc_per_node=args.nproc_per_node)
        first = as_rank(0)
        others = first.get("stages", [0])[1:]
        with threads() as pool:
            found = pool.map(as_rank, others)
            counted = most([first, *tqdm(found, "other stages", len(others), leave=False,
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
