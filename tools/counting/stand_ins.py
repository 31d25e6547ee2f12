"""What takes the place of a script's own names in a dry run: it has one rank, and no values.

Each stand-in has the name that the script imports, and says why the real one cannot run. Kernels
that keep less or more on a GPU than on a CPU have stand-ins too: see ``as_on_gpus``.
"""

import functools
import itertools
import sys
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

import ep
from common import experts, materialise, model, run
from common.options import SettingError
from cp import wide
from tools.counting import pretend, theory
from tools.counting.counter import OneStep, StepCounter


def stand_ins(counted, start, world_size, nproc_per_node):
    """A dict of all: a name in a script, and what takes its place.

    Args:
        counted: a dict, which ``Run`` fills with what it has counted in its only step.
        start: starts the process, as ``start_process_group(args)`` does.
    """
    replace_in_common()
    as_on_gpus()
    count = functools.partial(Run, counted, nproc_per_node)
    count.add_options = run.Run.add_options
    return {
        "start_process_group": start,
        "start_process": functools.partial(start_process, start, world_size),
        "init_device_mesh": pretend.outside(init_device_mesh),  # it reads the ranks' numbers
        "materialise": allocate, "wrap_layers": wrap_uncompiled,
        "check_stages": lambda *_: None,  # it gathers objects from other ranks
        "read_counts": experts.read_counts,
        "open_dataset": open_dataset, "open_held_out": lambda args: None,
        "load_steps": load_steps, "Run": count,
    }


@functools.cache
def replace_in_common():
    """Replace what modules use that the script imports. Nothing puts it back."""
    experts.read_counts = ep.read_counts = pretend.outside(equal_counts)
    for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
        setattr(PipelineStage, name, as_if_before(getattr(PipelineStage, name)))


@functools.cache
def as_on_gpus():
    """Replace what a GPU computes with another kernel than a CPU. Nothing puts it back."""
    F.rms_norm = FusedRMSNorm.apply
    model.add_product = add_product
    F.scaled_dot_product_attention = functools.partial(
        repeat_heads, F.scaled_dot_product_attention
    )


class FusedRMSNorm(torch.autograd.Function):
    """What RMSNorm allocates and keeps on a GPU: for the backward pass its fused kernel keeps the
    input, and one number a row in float32 at least. On a CPU torch composes RMSNorm of operations
    that keep more: in bfloat16 6 bytes for each number. The values are zeros."""

    @staticmethod
    def forward(ctx, x, _shape, weight=None, _eps=None):
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., :1], dtype=wide(x)))
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        grad_weight = None if weight is None else grad.sum(tuple(range(grad.ndim - 1)))
        return torch.zeros_like(x), None, grad_weight, None


def add_product(total, a, b):
    """``add_product`` of common/model.py. On a GPU the product of 16-bit numbers is added to a
    ``total`` in float32 as it is computed, which no CPU does: here of tensors of that type."""
    if a.dtype == total.dtype or isinstance(total, DTensor):
        total += a @ b
    else:
        a, b = (total.new_empty(()).expand(x.shape) for x in (a, b))  # they hold one number
        torch.addmm(total, a, b, out=total)


def repeat_heads(attention, q, k, v, *args, **options):
    """Attention, with keys and values repeated in float32: ``plain_attention`` of common/model.py
    does so on a GPU, where no fused kernel for float32 shares them between heads."""
    if q.dtype == torch.float32:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return attention(q, k, v, *args, **options)


def start_process(start, world_size, args):
    if world_size > 1:
        raise SettingError(f"{sys.argv[0]} is one process: its world size is 1")
    return start(args)


# Model


def draw_nothing(name, slices, *_):
    return torch.empty([rows.stop - rows.start for rows in slices])


def allocate(module, device, seed):
    """``materialise`` without drawing: only the sizes count."""
    with mock.patch.multiple(
        materialise, local_slices=pretend.outside(materialise.local_slices),
        draw_weight=draw_nothing,
    ):
        materialise.materialise(module, device, seed)


def wrap_uncompiled(layers, compiled, checkpointed, head=None):
    """``wrap_layers`` without compiling: what it counts stays the same."""
    model.wrap_layers(layers, False, checkpointed)


def as_if_before(prepare):
    """A stage of a pipeline allocates its buffers in the first step. Returns the method that does
    it such that it is not counted, as if an earlier step had called it."""

    def uncounted(*args, **kwargs):
        with pretend.seeing(lambda *_: None):
            return prepare(*args, **kwargs)

    return uncounted


def equal_counts(counts, rows):
    """``read_counts`` of experts: which tokens go where is in values. All get equally many."""
    numbers = counts[0].numel()
    borders = [i * rows // numbers for i in range(numbers + 1)]
    shared = torch.tensor([b - a for a, b in itertools.pairwise(borders)])
    return shared.view(counts.shape[1:]).expand(counts.shape).tolist()


# Data


class NoData:
    """A dataset of ``seq_len`` tokens and targets in each sample: no file is read."""

    def __init__(self, seq_len):
        self.seq_len = seq_len

    def __len__(self):
        return 10**12

    def __getitem__(self, index):
        return torch.zeros(2, self.seq_len, dtype=torch.int64).unbind()


def open_dataset(args):
    return NoData(args.seq_len)


def load_steps(dataset, sampler, device, workers=0):
    """One batch like those of ``dataset``, without values and without a process that reads."""
    rows = sampler.batch_size // (sampler.ranks * sampler.grad_accum)
    sample = pretend.outside(dataset.__getitem__)(0)
    like = pretend.outside(default_collate)([sample] * rows)

    def empty(x):
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    yield 0, [tree_map(empty, like) for _ in range(sampler.grad_accum)]


# The run


class Run:
    """Reads, writes and evaluates nothing. It puts what it counts in the step into the dict
    ``counted``."""

    def __init__(self, counted, nproc_per_node, args, models, optimizer, sampler, _dataset, device,
                 mesh=None, *, size=None, **_):
        self.counted, self.args, self.device = counted, args, device
        self.mesh, self.nproc_per_node = mesh, nproc_per_node
        self.models = models if isinstance(models, list) else [models]
        self.optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.history, self.loggers = [], []
        self.counting = OneStep(0, self.make_counter)
        counted["description"] = self.describe(size, sampler)
        if mesh is not None and "pp" in mesh.mesh_dim_names:
            counted.update(pipeline(args, mesh))
        self.allocate_states()

    def describe(self, size, sampler):
        """What is counted, in lines."""
        args = self.args
        _, model = run.start_lines(args, self.models, self.device, None, size)
        lines = [model, str(sampler)]
        if getattr(getattr(args, "config", None), "num_experts", 0):
            lines.append("assumed: all experts get equally many tokens")
        return lines

    def resume(self):
        return 0

    def allocate_states(self):
        """Those of the optimizers, so that the first step is as all others."""
        for each in self.optimizers:
            for group in each.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            each.step()
            each.zero_grad()

    def make_counter(self):
        return StepCounter(self.optimizers, self.models, self.mesh, self.device,
                           self.nproc_per_node, pretend.seeing)

    def steps(self, numbered):
        yield from self.counting.steps(numbered)
        self.note()

    def after_step(self, step, loss, grad_norm, **more):
        self.counting.stop()

    def note(self):
        counter, counted = self.counting.counter, self.counted
        formulas = theory.of(sys.argv[0], self.args, counted["world_size"], counted["rank"],
                             self.models)
        counted.update(
            counter.totals(), held=dict(counter.held), operations=counter.operations,
            theory={k: {"formula": f, "bytes": b} for k, (f, b) in formulas.items()},
        )


def pipeline(args, mesh):
    """Of a pipeline: the first rank of each stage, and the share of a step in which ranks wait."""
    ranks = mesh.mesh.movedim(mesh.mesh_dim_names.index("pp"), 0)
    n, v = len(ranks), getattr(args, "stages_per_rank", 1)  # hybrid_3d.py has 1F1B alone
    schedule = getattr(args, "schedule", "1f1b")
    return {"stages": ranks.reshape(n, -1)[:, 0].tolist(),
            "bubble": theory.bubble(schedule, n, v, args.microbatches)}
