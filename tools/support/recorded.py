"""Runs a script, and lets parity record its steps: nothing in the script names parity."""

import argparse
import contextlib
import functools
import inspect
import sys
from unittest import mock

import torch

from parity import Parity

CLIPPING = "clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"  # of torch.nn.utils


def record(module, options, path, defaults=None, known_only=False, ignored=False):
    """Run ``main(options)`` of ``module``, and write a recording to ``path``.

    A step is recorded when the script first calls a function of torch that clips or measures
    gradients, or ``optimizer.step()``. Batches come from its ``load_steps``. Parameters have the
    names that they have in the models which it gives to ``materialise``, or else in its variable
    ``model``. The loss is its variable ``loss``: this rank's part of that of the batch.

    Args:
        module: it has ``main`` and ``load_steps``.
        defaults: of options, by their names in the parsed options. They replace the script's own.
        known_only: leave out those of ``options`` that the script does not have.
        ignored: let some targets in text not count, which tells apart what counts targets.
    """
    models, optimizers, parity, now = [], [], None, None  # now: the step and its batch, once

    def materialise(original, model, *args, **kwargs):
        models.append(model)
        return original(model, *args, **kwargs)

    def load_steps(original, *args, **kwargs):
        nonlocal parity, now
        for now in original(*args, **kwargs):
            if ignored and type(args[0]).__name__ == "TokenDataset":  # of this common/, or another
                for _, targets in now[1]:
                    targets[targets % 7 == 3] = -100
                    targets[targets[:, 0] % 3 == 1, ::2] = -100  # ranks have other numbers
            if parity is None:
                found = models or [variables_of(module).get("model")]
                parity = Parity(path, parameters(found, optimizers), optimizers, loss="sum")
            yield now

    def record_once():
        nonlocal now
        if now:
            (step, batch), now = now, None
            parity.record(step, variables_of(module).get("loss"), batch)

    def after_recording(original, *args, **kwargs):
        record_once()
        return original(*args, **kwargs)

    def make_optimizer(original, optimizer, *args, **kwargs):
        original(optimizer, *args, **kwargs)
        optimizers.append(optimizer)
        optimizer.register_step_pre_hook(lambda *_: record_once())  # before those of Parity

    def parse(original, parser, *args, **kwargs):
        parser.set_defaults(**defaults or {})
        known, unknown = original(parser, *args, **kwargs)
        return known, [] if known_only else unknown

    replaced = [(module, "load_steps", load_steps), (module, "materialise", materialise),
                (torch.optim.Optimizer, "__init__", make_optimizer),
                (argparse.ArgumentParser, "parse_known_args", parse),
                *((torch.nn.utils, name, after_recording) for name in CLIPPING)]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replaced:
            if original := getattr(owner, name, None):
                stack.enter_context(mock.patch.object(owner, name, around(original, replacement)))
        module.main(options)


def around(original, replacement):
    """A function, also of a class, that calls ``replacement`` with ``original`` first."""

    @functools.wraps(original)
    def called(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    return called


def variables_of(module):
    """The variables of the script's ``main``, which is running."""
    frame, code = sys._getframe(), inspect.unwrap(module.main).__code__
    while frame and frame.f_code is not code:
        frame = frame.f_back
    return frame.f_locals if frame else {}


def parameters(models, optimizers):
    """What Parity records: the model, or {name: parameter} of several stages, or of shards."""
    models = [model for model in models if isinstance(model, torch.nn.Module)]
    named = {name: p for model in models
             for name, p in model.named_parameters(remove_duplicate=False)}
    trained = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    if not named:
        return {f"parameter {i}": p for i, p in enumerate(trained)}
    known = {id(p) for p in named.values()}
    # Shards of zero.py are views of the parameters.
    of_place = {place(p): p for p in trained if id(p) not in known}
    shards = {name: of_place[place(p)] for name, p in named.items() if place(p) in of_place}
    if shards:
        return named | shards
    return models[0] if len(models) == 1 else named


def place(tensor):
    """Where the numbers of a tensor, or of this rank's part of it, lie in memory."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.untyped_storage().data_ptr()
