"""What tests inject into scripts from outside: the names that they replace, in one place.

``run("fsdp.py", 2, options, inject="ignored(); loss_in_chunks()")`` runs the code before the
script, in each rank.
"""

import functools
import json
import multiprocessing  # noqa: F401
import os
import pathlib
import resource  # noqa: F401
import shutil
import signal
import sys
import time  # noqa: F401
import weakref

import torch

import common.data
import common.experts
import common.launch
import common.materialise
import common.model
import common.run
import common.step
from common.data import TokenDataset
from common.run import Run

rank = int(os.environ.get("RANK", 0))


def before(owner, name, do):
    """Call ``do`` with the arguments of ``owner.name`` before each of its calls."""
    call = getattr(owner, name)

    def do_and_call(*args, **kwargs):
        do(*args, **kwargs)
        return call(*args, **kwargs)

    setattr(owner, name, do_and_call)


def changed(owner, name, change):
    """Calls of ``owner.name`` return ``change`` of their result and of their arguments."""
    call = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(call(*args, **kwargs), *args, **kwargs))


def after(owner, name, do):
    """Call ``do`` with the result of ``owner.name``, and its arguments, after each of its calls."""
    def do_and_keep(result, *args, **kwargs):
        do(result, *args, **kwargs)
        return result

    changed(owner, name, do_and_keep)


# Other models and data

def ignored():
    """Every second sample has no target at all, the others lack some of the first."""
    def ignore(sample, dataset, index):
        inputs, targets = sample[0], sample[1].clone()
        targets[: len(targets) if index % 2 else index % 29] = -100
        return inputs, targets

    changed(TokenDataset, "__getitem__", ignore)


def in_mode():
    """Layers are in training mode where they train, and no others, but in the pass in which DDP
    arranges its buckets. Autocast keeps no weights."""
    trained = weakref.WeakSet()

    def look(layer, *_):
        if layer.training:
            trained.add(layer)
        common.options.refuse([
            (layer.training and not torch.is_grad_enabled(), "evaluated as in training"),
            (layer in trained and torch.is_grad_enabled() and not layer.training,
             "trained as if evaluated"),
            (torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled(),
             "weights stay"),
        ])

    before(common.model.Layer, "forward", look)


def tied():
    """Embedding and head."""
    after(common.model.Transformer, "__init__", lambda _, model, config: (
        setattr(model.lm_head, "weight", model.model.embed_tokens.weight)
    ))


def own_parameter():
    """One that no plan and no stage knows."""
    after(common.model.Transformer, "__init__", lambda _, model, config: (
        model.model.register_parameter("gate", torch.nn.Parameter(torch.empty(3)))
    ))


def loss_in_chunks():
    """Also of few logits."""
    common.model.MAX_LOGITS = 15_000


def unrounded_muon():
    """torch's Muon converts to bfloat16: on 2.13 by ``bfloat16``, on 2.15 by ``to``. Not here."""
    to = torch.Tensor.to
    torch.Tensor.bfloat16 = lambda tensor: tensor.clone()
    torch.Tensor.to = lambda tensor, *args, **kwargs: (
        tensor.clone() if kwargs.get("dtype") == torch.bfloat16 else to(tensor, *args, **kwargs))


# Faults

def at(number, do, *arguments, on=None):
    """Before step ``number``, counted from 1, call ``do(*arguments)``; on the rank ``on``, or on
    all."""
    def do_before(steps, *_, **__):
        for step, batch in steps:
            if step + 1 == number and on in (None, rank):
                do(*arguments)
            yield step, batch

    changed(common.data, "load_steps", do_before)


def gradients_times(factor, number):
    """Multiply the gradients of the layers in step ``number``; the loss stays."""
    now = [1.0]
    after(common.model.Layer, "forward", lambda hidden, *_: (
        hidden.requires_grad and hidden.register_hook(lambda gradient: gradient * now[0])
    ))
    at(number, now.__setitem__, 0, factor)
    at(number + 1, now.__setitem__, 0, 1.0)


def signal_self(name):
    os.kill(os.getpid(), getattr(signal, name))


# What a run did

def count_compiled(backend):
    """At the end, print how many calls of compiled code each training step had."""
    calls = [0]
    compile_graph = torch._dynamo.lookup_backend(backend)

    def compile_and_count(graph, example_inputs):
        compiled = compile_graph(graph, example_inputs)

        def run(*inputs):
            calls[-1] += 1
            return compiled(*inputs)

        return run

    compile_layer = torch.compile
    common.model.torch.compile = functools.partial(compile_layer, backend=compile_and_count)
    before(Run, "after_step", lambda *_, **__: calls.append(0))  # the count of the next step
    after(Run, "validation_loss", lambda *_: calls.__setitem__(-1, 0))
    after(Run, "last_line", lambda *_: rank or print("calls", json.dumps(calls[:-1]), flush=True))


def write_counts():
    """Count what one step holds and sends, and write it to rankN.json in the run folder, for each
    rank: the third step after the start or the resume, or the last one if there are fewer. In
    earlier steps the optimizer allocates its states, torch.compile compiles, and DTensor caches how
    each operation is sharded."""
    from tools.counting import theory
    from tools.counting.counter import OneStep, StepCounter

    class CountedRun(Run):
        def __init__(self, args, model, optimizer, sampler, dataset, device, mesh=None, **more):
            super().__init__(args, model, optimizer, sampler, dataset, device, mesh, **more)
            self.mesh = mesh

        def steps(self, numbered):
            number = min(self.sampler.start + 2, self.args.steps - 1)
            self.counting = OneStep(number, lambda: StepCounter(
                self.optimizers, self.models, self.mesh, self.device))
            return self.counting.steps(super().steps(numbered))

        def after_step(self, step, *args, **more):
            self.counting.stop()
            if step == self.counting.number:
                self.write_counts()
            super().after_step(step, *args, **more)

        def write_counts(self):
            counter = self.counting.counter
            formulas = {} if "ep" in self.args else theory.of(
                sys.argv[0], self.args, self.ranks, rank, self.models)
            (self.args.out / f"rank{rank}.json").write_text(json.dumps({
                "held": counter.held, **counter.totals(),
                "theory": {name: size for name, (_, size) in formulas.items()}}))

    common.run.Run = CountedRun


def resumed(folders, train=True, step=2):
    """Resume what each of the run folders ``folders`` has saved after ``step``, one after the other
    in the same processes, in again-0, again-1 and so on below --out. With ``train`` the script
    first does what its command says, and resumes its own run too, as again-0."""
    launch = common.launch.launch

    def main_and_again(main):
        out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
        if train:
            main()
        for number, folder in enumerate([str(out)] * train + folders):
            again, name = out / f"again-{number}", f"step-{step:08}"
            if rank == 0:
                shutil.copytree(pathlib.Path(folder, name), again / name, copy_function=os.link)
            save = [] if folder == str(out) else ["--save-every", "0"]
            main([*sys.argv[1:], "--out", str(again), "--val-every", "2", *save])

    common.launch.launch = lambda main: launch(lambda: main_and_again(main))
