"""Runs the script that comes first among the arguments, and saves the gradients of its first step,
whole and before they are clipped, by parameter name to gradients.pt in the run folder."""

import pathlib
import runpy
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from common.checkpoint import Checkpoints
from tests.processes import ROOT

start_checkpoints, clip = Checkpoints.__init__, torch.nn.utils.clip_grad_norm_
named = {}


def keep_names(self, folder, run, tensors, optimizer, **options):
    named.update(tensors)
    start_checkpoints(self, folder, run, tensors, optimizer, **options)


def save_and_clip(*args, **kwargs):
    path = pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "gradients.pt")
    # Putting a gradient together takes all ranks.
    gradients = {name: whole(parameter.grad) for name, parameter in named.items()}
    if not path.exists() and (not dist.is_initialized() or dist.get_rank() == 0):
        torch.save(gradients, path)
    return clip(*args, **kwargs)


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


Checkpoints.__init__ = keep_names
torch.nn.utils.clip_grad_norm_ = save_and_clip
script = str(ROOT / sys.argv[1])
sys.argv = [script, *sys.argv[2:]]
runpy.run_path(script, run_name="__main__")
