"""Runs a script (the second argument) with a model or data of another kind (the first): dropout in
every layer; ignored targets; frozen, or tied, embedding and head; infinite gradients."""

import importlib
import sys

import torch
import torch.nn.functional as F

import common.data
import common.model
import common.optimizer
from common.launch import launch

kind, script = sys.argv.pop(1), sys.argv.pop(1)


def dropout():
    forward = common.model.Layer.forward
    common.model.Layer.forward = lambda self, *args: F.dropout(
        forward(self, *args), 0.1, self.training
    )


def ignored():
    """Every second sample has no target at all, the others lack some of the first."""
    read = common.data.TokenDataset.__getitem__

    def read_and_ignore(self, index):
        inputs, targets = read(self, index)
        targets = targets.clone()
        targets[: len(targets) if index % 2 else index % 29] = -100
        return inputs, targets

    common.data.TokenDataset.__getitem__ = read_and_ignore


def frozen():
    change_model(lambda model: model.model.embed_tokens.requires_grad_(False)
                 and model.model.layers["1"].mlp.requires_grad_(False))


def tied():
    change_model(lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight))


def infinite():
    """The gradients of the fourth step are infinite; afterwards tells whether weights changed."""
    skip, step_of = common.optimizer.skip_if_not_finite, torch.optim.AdamW.step

    def break_and_skip(optimizer, grad_norm, step):
        if step == 3:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(torch.inf)
            grad_norm = grad_norm * torch.inf
        skip(optimizer, grad_norm, step)
        optimizer.broken = step == 3

    def step_and_compare(self, *args):
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        step_of(self, *args)
        equal = all(torch.equal(whole(p.detach()), whole(b)) for p, b in zip(parameters, before))
        assert equal == self.broken and all(whole(p).isfinite().all() for p in parameters)
        if self.broken:
            print("weights are finite and unchanged", flush=True)

    common.optimizer.skip_if_not_finite = break_and_skip
    torch.optim.AdamW.step = step_and_compare


def whole(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def change_model(change):
    build = common.model.Transformer.__init__

    def build_and_change(self, config):
        build(self, config)
        change(self)

    common.model.Transformer.__init__ = build_and_change


globals()[kind]()
launch(importlib.import_module(script.removesuffix(".py").replace("/", ".")).main)
