"""Runs the script beside it, or in the repo, that the first argument names. Then saves what the
optimizer of each rank has updated, in its order, to weights-rank.pt in the current folder."""

import importlib
import os
import sys

import torch

from common.launch import launch

optimizers = []
start = torch.optim.AdamW.__init__


def remember(self, *args, **kwargs):
    start(self, *args, **kwargs)
    optimizers.append(self)


def main():
    importlib.import_module(script.removesuffix(".py")).main()
    (optimizer,) = optimizers
    weights = [getattr(p, "_local_tensor", p) for g in optimizer.param_groups for p in g["params"]]
    torch.save([w.detach().clone() for w in weights], f"weights-{os.environ.get('RANK', 0)}.pt")


torch.optim.AdamW.__init__ = remember
script = sys.argv.pop(1)
launch(main)
