"""Runs a script, and lets parity record its steps: nothing in the script names parity."""

import argparse
import contextlib
import functools
import inspect
import sys
from unittest import mock

import torch
from torch.utils._pytree import tree_map  # torch has no public one

from parity import Parity

CLIPPING = "clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"  # of torch.nn.utils
# The groups of options that common/ adds to a parser, but for the arithmetic: check sets them.
COMMON = ("training", "model", "data", "run folder", "checkpoints", "validation", "logging")
FIXED = "device", "backend", "timeout", "deterministic", "help"


def record(module, options, path, defaults=None, known_only=False, ignored=False):
    """Run ``main(options)`` of ``module``, and write a recording to ``path``. Returns the options
    of the script's own that had their default, in words.

    A step is recorded when the script first calls a function of torch that clips or measures
    gradients, or ``optimizer.step()``; and again, if after this step it calls ``backward`` for
    another optimizer, as a GAN does. Batches come from its ``load_steps``. Parameters have the
    names that the script gives them in ``Checkpoints``. Without it they have those in the models
    that it gives to ``materialise``, or that are variables of ``main``. The loss is its variable
    ``loss``: this rank's part of that of the batch.

    Args:
        module: it has ``main`` and ``load_steps``.
        defaults: of options, by their names in the parsed options. They replace the script's own.
        known_only: leave out those of ``options`` that the script does not have.
        ignored: let some targets in text not count, which tells apart what counts targets.
    """
    models, optimizers, saved, untried = [], [], {}, []
    parity = step = batch = None
    records, stepped, fresh = 0, False, False  # of this step
    losses = []  # on which backward was called since the last record
    pipelined = running = False  # a pipeline calls backward; a backward pass runs

    def materialise(original, model, *args, **kwargs):
        models.append(model)
        return original(model, *args, **kwargs)

    def make_checkpoints(original, checkpoints, folder, settings, tensors, *args, **kwargs):
        saved.update(tensors)
        return original(checkpoints, folder, settings, tensors, *args, **kwargs)

    def make_optimizer(original, optimizer, *args, **kwargs):
        original(optimizer, *args, **kwargs)
        optimizers.append(optimizer)
        optimizer.register_step_pre_hook(before_step)  # before that of Parity

    def load_steps(original, *args, **kwargs):
        nonlocal parity, step, batch, records, stepped, fresh, losses
        for step, batch in original(*args, **kwargs):
            if ignored and type(args[0]).__name__ == "TokenDataset":  # of this common/, or another
                for _, targets in batch:
                    targets[targets % 7 == 3] = -100
                    targets[targets[:, 0] % 3 == 1, ::2] = -100  # ranks have other numbers
            if parity is None:
                roots = modules_of(variables_of(module), models, optimizers)
                named, others = tensors_of(roots, saved, variables_of(module), optimizers)
                parity = Parity(
                    path, named, optimizers, loss="sum", others=others,
                    modules=[(f"{prefix}{name}", part) for prefix, root in roots
                             for name, part in root.named_modules()])
            records, stepped, fresh, losses = 0, False, False, []
            yield step, batch

    def backward(original, tensors, *args, **kwargs):
        nonlocal running
        if running:  # a part of a model may compute again
            return original(tensors, *args, **kwargs)
        note_losses(tensors)
        running = True
        try:
            return original(tensors, *args, **kwargs)
        finally:
            running = False

    def grad(original, outputs, *args, **kwargs):
        if called_by_a_pipeline():  # its backward pass in two parts
            note_losses(outputs)
        return original(outputs, *args, **kwargs)

    def note_losses(tensors):
        nonlocal fresh, pipelined
        fresh, pipelined = stepped, called_by_a_pipeline()
        tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        losses.extend(x.detach() for x in tensors if torch.is_tensor(x) and x.numel() == 1)

    def before_step(*_):
        nonlocal stepped, fresh
        record_once()
        stepped, fresh = True, False

    def record_once():
        nonlocal records, losses, fresh
        if parity is None or records and not fresh:
            return
        parts = in_parts(variables_of(module).get("loss"), losses)
        cut = len(parts) if pipelined and isinstance(parts, list) else 1
        label = f"{step}, update {records + 1}" if records else step
        records, losses, fresh = records + 1, [], False
        parity.record(label, parts, cut_further(batch, cut))

    def after_recording(original, *args, **kwargs):
        record_once()
        return original(*args, **kwargs)

    def parse(original, parser, *args, **kwargs):
        parser.set_defaults(**defaults or {})
        known, unknown = original(parser, *args, **kwargs)
        untried.extend(not_tried(parser, known))
        return known, [] if known_only else unknown

    replaced = [(module, "load_steps", load_steps), (module, "materialise", materialise),
                (getattr(module, "Checkpoints", None), "__init__", make_checkpoints),
                (torch.optim.Optimizer, "__init__", make_optimizer),
                (torch.autograd, "backward", backward), (torch.autograd, "grad", grad),
                (argparse.ArgumentParser, "parse_known_args", parse),
                *((torch.nn.utils, name, after_recording) for name in CLIPPING)]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replaced:
            if owner and (original := getattr(owner, name, None)):
                stack.enter_context(mock.patch.object(owner, name, around(original, replacement)))
        module.main(options)
    return untried


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


def called_by_a_pipeline():
    """Whether torch's pipelining calls the function of torch.autograd that is replaced here."""
    frame = sys._getframe()
    while frame.f_globals.get("__name__") in (__name__, "torch.autograd", "torch._tensor"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith("torch.distributed.pipelining")


def not_tried(parser, known):
    """The options of a script's own, and of arithmetic, that have their default: "--stage", or with
    the values that they may have, "--attention ulysses or allgather"."""
    notes = []
    for group in parser._action_groups:  # nothing public tells who has added an option
        for action in group._group_actions if group.title not in COMMON else []:
            value = getattr(known, action.dest, None)
            if action.dest in FIXED or value != action.default:
                continue
            others = [str(x) for x in action.choices or [] if x not in (value, "auto")]
            names = [name for name in action.option_strings
                     if not isinstance(value, bool) or name.startswith("--no-") == value]
            notes += [" ".join([name, " or ".join(others)]).strip() for name in names[:1]]
    return notes


# The loss


def in_parts(loss, of_backward):
    """A rank's part of the loss of the batch, split over its micro-batches: in proportion to the
    losses on which ``backward`` was called, which may be larger, as by the number of ranks."""
    loss, *of_backward = (x.full_tensor() if hasattr(x, "full_tensor") else x
                          for x in (loss, *of_backward))
    total = sum(map(float, of_backward))
    if loss is None or len(of_backward) < 2 or not total or total - total:  # or not finite
        return loss
    return [loss * (float(x) / total) for x in of_backward]


def cut_further(batch, number):
    """The micro-batches of a step, in ``number`` parts, if each was cut into equally many: as a
    pipeline does."""
    each, rest = divmod(number, len(batch))
    if each < 2 or rest:
        return batch
    return [tree_map(lambda x: x.tensor_split(each)[i] if torch.is_tensor(x) else x, micro_batch)
            for micro_batch in batch for i in range(each)]


# Names


def modules_of(variables, models, optimizers):
    """[(prefix of its names, module)] of the modules that the optimizers train: ``models``, and
    what the variables of the script hold, alone or in a list or a dict. What is a part of another
    one is left out."""
    trained = places(optimizers)
    names_of = {model: "" for model in models if isinstance(model, torch.nn.Module)}
    for name, value in variables.items():
        held = value.values() if isinstance(value, dict) else value
        for x in held if isinstance(value, (dict, list, tuple)) else [value]:
            if isinstance(x, torch.nn.Module):
                names_of[x] = names_of.get(x) or name
    names_of = {module: name for module, name in names_of.items()
             if any(place(p) in trained for p in module.parameters())}
    parts = {part for module in names_of for part in module.modules() if part is not module}
    names_of = {module: name for module, name in names_of.items() if module not in parts}
    names = [name for module in names_of for name, _ in module.named_parameters()]
    alike = len({*names}) < len(names)  # as the layers of a generator and a discriminator
    return [(f"{name}." if alike else "", module) for module, name in names_of.items()]


def tensors_of(roots, saved, variables, optimizers):
    """({name: parameter}, {name: other tensor}) to record: what the script saves, and parameters of
    its modules that it does not save, such as the frozen ones of LoRA. Buffers are left out."""
    trained = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    own = {f"{prefix}{name}": p for prefix, root in roots
           for name, p in root.named_parameters(remove_duplicate=False)}
    known = {place(p) for p in [*own.values(), *trained]}
    buffers = {place(buffer) for x in [*(root for _, root in roots), *variables.values()]
               if isinstance(x, torch.nn.Module) for buffer in x.buffers()}
    named = {name: p for name, p in saved.items() if place(p) in known}
    others = {name: x for name, x in saved.items() if place(x) not in known | buffers}
    there = {place(p) for p in named.values()}
    # Shards of zero.py are views of the parameters.
    shards = {place(p): p for p in {*trained} - {*own.values()}}
    named |= {name: shards.get(place(p), p) for name, p in own.items() if place(p) not in there}
    there = {place(p) for p in named.values()}
    named |= {f"parameter {i}": p for i, p in enumerate(trained) if place(p) not in there}
    return named, others


def places(optimizers):
    return {place(p) for each in optimizers for group in each.param_groups for p in group["params"]}


def place(tensor):
    """Where the numbers of a tensor, or of this rank's part of it, lie in memory. What has no
    numbers lies nowhere: then the tensor itself."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage().data_ptr() or id(tensor)
