"""What a script can do without, and trains to the same weights: a run's bar and lines,
metrics.jsonl, the loss on held-out data, checkpoints, and a stop by a signal that loses nothing.

A run folder, --out, holds the newest checkpoints; metrics.jsonl, one JSON object a line; and a
lock: two runs never write into one folder. No checkpoint follows a step whose loss or gradient norm
was not finite.
"""

import copy
import datetime
import fcntl
import functools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from common.checkpoint import (
    NEW_RUN, complete, list_checkpoints, load, named_states, open_checkpoint, refuse_unlike,
    start_save, texts, write_file
)
from common.data import STOPS, fingerprint, load_steps
from common.launch import agreed, gather, options_of, same_on_all_ranks
from common.options import SettingError, at_least, opening
from common.step import evaluating

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP, in one process
SHOWN = {"loss", "val_loss", "grad_norm", "tokens_per_second", "samples_per_second"}


class Run:
    """One run. All ranks call each method.

    Args:
        model: a module, or a list of them: the stages of a pipeline that this rank holds.
        optimizer: one, or a list of them.
        sampler: of the training data.
        held_out: the data of --val-data, or your own; None: no evaluation.
        tensors: what a checkpoint holds by name, the tensors themselves, whole or DTensors; None:
            the state dict of the model.
        loss_of: takes a held-out micro-batch, and returns the summed loss of the part of it that
            this rank computes, and the number of its targets; None: of ``model(*micro_batch)``.
        after_evaluation: called when the model has been evaluated.
        size: the number of parameters of the whole model, if this rank has a part of it.
        usage: of a model that FSDP shards; what ranks have used of it is compared.

    ``history`` has the records of metrics.jsonl, on every rank; ``loggers`` are functions of a
    record, which rank 0 calls. Raises SettingError: a checkpoint would lack what is trained; ranks
    have other data or another model; there is too little held-out data.
    """

    @staticmethod
    def add_options(parser):
        add = parser.add_argument_group("run").add_argument
        add("--out", type=pathlib.Path, metavar="FOLDER", help="where to save; if it has a run, "
            "that run continues; machines must share it; None: save nothing")
        add("--from", type=pathlib.Path, metavar="CHECKPOINT", help="unless --out "
            "has a checkpoint, begin from this one, step and optimizer included: of a run with the "
            "same data, batches and seed, or imported")
        add("--async-save", action="store_true", help="write checkpoints while training goes on")
        for name, least, default, words in (
            ("--save-every", 0, 100, "steps between checkpoints; the last step has one; 0: none"),
            ("--keep", 1, 2, "newest checkpoints to keep; while it saves there is one more"),
            ("--log-every", 1, 10, "steps between lines of metrics.jsonl"),
            ("--val-every", 1, 100, "steps between evaluations; the last step has one too"),
            ("--val-batches", 1, 10, "global batches in each evaluation, always the same"),
        ):
            add(name, type=at_least(least), default=default, metavar="N", help=words)
        add("--val-data", metavar="PATH", help="held-out data, as --data; None: no evaluation")

    def __init__(self, args, model, optimizer, sampler, dataset, device, mesh=None, *,
                 held_out=None, tensors=None, loss_of=None, after_evaluation=None, size=None,
                 usage=None):
        self.args, self.sampler, self.device = args, sampler, device
        self.models = model if isinstance(model, list) else [model]
        self.optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.tensors = tensors or {name: x for each in self.models
                                   for name, x in each.state_dict(keep_vars=True).items()}
        self.optimizer_of = optimizers_by_tensor(self.optimizers, self.tensors)
        self.loss_of, self.after_evaluation, self.usage = loss_of, after_evaluation, usage
        self.history, self.loggers, self.shown = [], [], {}  # the last figure of each name
        self.norms = 0.0  # the sum of all gradient norms: finite if each of them is
        self.lock = self.saving = None  # rank 0: the open lock file; a save that is not complete
        self.asked, self.stopping = None, False  # when a signal came; whether the loop must end
        self.fixed, self.options = settings_of(args, dataset, self.optimizers)
        self.held_out, self.order = held_out, held_out_order(args, sampler, held_out)
        of_held_out = {} if held_out is None else fingerprint(
            held_out, "--val-data", args.workers)
        self.options.update(of_held_out)  # a resumed run may have another
        self.rank, self.ranks, self.group, self.saving_group = 0, 1, None, None
        if dist.is_initialized():
            self.connect(datetime.timedelta(seconds=args.timeout))
            same_on_all_ranks(self.fixed | of_held_out, self.group)
        self.agreed = functools.partial(agreed, group=self.group, folder=args.out)
        self.watch_first_step()
        self.per_step = args.batch_size * getattr(args, "seq_len", 1)  # tokens, or samples
        self.unit = "tokens" if "seq_len" in args else "samples"
        self.say(*start_lines(args, self.models, device, mesh, size), sampler,
                 f"{len(dataset):,} samples")
        if not args.out:
            self.say("nothing is saved: there is no --out")

    def connect(self, timeout):
        """Make groups of its own: collectives on the CPU wait for no GPU, and those of a thread for
        no others. Refuse what replicas or shards cannot do."""
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.saving_group = dist.new_group(backend="gloo", timeout=timeout)
        for module in nn.ModuleList(self.models).modules():
            if self.ranks > 1 and getattr(module, "max_norm", None):
                raise SettingError(
                    "nn.Embedding(max_norm=) changes its weights in the forward pass, on each rank "
                    "for other tokens: leave it out, and scale its rows after optimizer.step()")

    def say(self, *lines):
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    # The loop

    def steps(self, numbered):
        """Yields what ``numbered`` yields, pairs (step, batch), until a signal (SIGTERM, SIGUSR1 or
        Ctrl-C) asks to stop. What this changes in the process is put back at the end."""
        self.bar = tqdm(initial=self.sampler.start, total=self.args.steps, unit=" steps",
                        disable=self.rank != 0, dynamic_ncols=True,
                        mininterval=0.1 if sys.stderr.isatty() else 5)
        self.clock = self.sampler.start, time.perf_counter()  # of the last line
        handlers = {number: signal.signal(number, self.on_signal) for number in STOPS}
        try:
            for pair in numbered:
                yield pair
                self.bar.update()
                if self.stopping:
                    break
            self.finish_save()
        finally:
            self.bar.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if self.lock:
                self.lock.close()
        self.say(self.last_line())

    def on_signal(self, number, _):
        """A second signal ends the process at once, but not within a second: launchers may deliver
        one twice."""
        if self.asked and time.monotonic() - self.asked > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = self.asked or time.monotonic()

    def after_step(self, step, loss, grad_norm, **more):
        """Call it at the end of every step (counted from 0). It logs, saves and evaluates, each if
        it is due; it saves too if a signal has asked any rank to stop.

        ``loss``: this rank's part of the mean loss of the global batch: all parts add up to it.
        ``grad_norm``: of the gradients of the whole model, before clipping. ``more``: further
        figures by name: functions, which all ranks call in a logged step; if ``skipped`` is not 0,
        a first step may have neither loss nor gradient. Raises SettingError, on all ranks: the loss
        is a DTensor, or it or a norm is not finite, a save fails, ranks used other units of FSDP.
        """
        args, done = self.args, step + 1
        self.done, last = done, done == args.steps
        self.norms = self.norms + grad_norm  # stays on the device
        unsaved = self.saving is not None and not self.saving[-1].done()
        used = self.usage.flags() if self.usage else []
        flags = torch.tensor([self.asked is not None, unsaved, *used])
        if self.group:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        self.stopping, unsaved, *used = flags.tolist()
        if self.usage:
            self.usage.check(done, used)
        if self.saving and not unsaved:
            self.finish_save()
        if args.out and step == self.sampler.start:
            self.named_states()  # refuses now what cannot be saved
        saves = args.out and args.save_every and (
            done % args.save_every == 0 or last or self.stopping)
        evaluates = self.order and (done % args.val_every == 0 or last)
        if done % args.log_every == 0 or step == self.sampler.start or last or saves or evaluates:
            self.log(done, loss, grad_norm, more)
        if saves:
            self.save(done)
        if evaluates:
            self.write({"step": done, "val_loss": self.validation_loss()})
        if saves or evaluates:  # a line came before: what they take does not count as training
            self.clock = done, time.perf_counter()

    def watch_first_step(self):
        own = {p for each in self.models for p in each.parameters()}
        for each in self.optimizers:  # of the model's parameters; not a wrapper of an optimizer
            if isinstance(each, torch.optim.Optimizer) and not own.isdisjoint(
                    p for group in each.param_groups for p in group["params"]):
                each.register_step_pre_hook(self.look_at_gradients)

    def look_at_gradients(self, optimizer, *_):
        """Before the first step of an optimizer: does the loss reach what it trains?"""
        if self.history:
            return
        now = dict(self.tensors)
        for each in self.models:  # not the shards: gathered ones may have the gradients
            now.update(each.named_parameters())
        trained = [name for name, x in self.tensors.items()
                   if x.requires_grad and self.optimizer_of[x][0] is optimizer]
        without = [name for name in trained if now[name].grad is None]
        if without:
            words = f"no gradient in the first step: {', '.join(without):.300}"
            if without == trained:
                raise SettingError(f"{words}; does the loss depend on them?")
            self.say(words)

    # Records

    def log(self, done, loss, grad_norm, more):
        before, since = self.clock
        if isinstance(loss, DTensor):
            raise SettingError(
                "the loss is a DTensor, and after_step takes a rank's part of it: give it "
                "loss.full_tensor() / the number of ranks that have the same loss")
        loss = torch.as_tensor(loss, device=self.device).clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
        loss, grad_norm = float(loss), float(grad_norm)  # waits for the GPU
        self.clock = done, time.perf_counter()
        rate = (done - before) * self.per_step / (self.clock[1] - since)
        lr = float(self.optimizers[0].param_groups[0]["lr"])  # compiled ones have a tensor
        record = {"step": done, "loss": loss, "grad_norm": grad_norm, "lr": lr,
                  self.unit: done * self.per_step, f"{self.unit}_per_second": rate}
        if self.device.type == "cuda":  # bytes, of this rank
            record["peak_memory"] = torch.cuda.max_memory_allocated(self.device)
        for name, value in more.items():
            record[name] = float(value())
        self.write(record)
        skipped = record.get("skipped")
        if done == self.sampler.start + 1 and loss == grad_norm == 0 and not skipped:
            raise SettingError(
                "the first step has neither loss nor gradient: is every target -100?")
        if not math.isfinite(loss + float(self.norms)):
            raise SettingError(
                f"at step {done} the loss is {loss} and the gradient norm {grad_norm}: one of "
                f"them, or a norm since the last line, is not finite: lower --lr ({lr:.3g} here) "
                f"if it diverged, or look at the data; to skip such a step give after_step finite "
                f"numbers")

    def write(self, record):
        """Add a line to metrics.jsonl, show it beside the bar, and give it to the loggers."""
        self.history.append(record)
        if self.rank != 0:
            return
        for name, value in record.items():
            if name in SHOWN:
                self.shown[name] = f"{value:,.0f}" if value > 999 else f"{value:.4g}"
        self.bar.set_postfix(self.shown, refresh=False)
        if self.args.out:
            with opening(f"--out {self.args.out}"):
                with open(self.args.out / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(record) + "\n")
        for log in self.loggers:
            log(record)

    def last_line(self):
        """How the run ended, and where it is saved."""
        args, saves = self.args, self.args.out and self.args.save_every
        if not self.history:
            return (f"nothing to train: {args.out or vars(args)['from']} has done all of --steps "
                    f"{args.steps}: raise it, or for a new run take another --out")
        if self.stopping and self.done < args.steps:
            then = "saved: the same command continues from there" if saves else "nothing is saved"
            return f"stopped after step {self.done} of {args.steps}, {then}"
        words = [f"{name} {figure}" for name, figure in self.shown.items()]
        words.append(f"saved in {args.out}" if saves else "nothing is saved")
        return f"final {' | '.join(words)}"

    @torch.no_grad()
    def validation_loss(self):
        """The mean loss over all targets of the held-out batches, the same number on all ranks and
        at every world size. The model runs in eval mode."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, number of targets
        with evaluating(*self.models):
            for _, batch in load_steps(self.held_out, self.order, self.device, self.args.workers):
                for micro_batch in batch:
                    if self.loss_of:
                        loss, count = self.loss_of(micro_batch)
                    else:
                        loss = self.models[0](*micro_batch)
                        count = (micro_batch[1] != -100).sum()
                    total[0] += loss
                    total[1] += count
        if self.after_evaluation:
            self.after_evaluation()
        if dist.is_initialized():
            dist.all_reduce(total)
        if not total[1]:
            raise SettingError("no held-out sample has a target: all are -100")
        return (total[0] / total[1]).item()

    # The run folder

    def resume(self):
        """Lock the run folder, and load its newest checkpoint, or that of --from. Returns the
        number of steps done. Raises SettingError: the folder cannot be written, is in use, or holds
        another run; a checkpoint is damaged."""
        checkpoint = self.agreed(self.choose_checkpoint)
        done = self.load(checkpoint) if checkpoint else 0
        if self.args.out:
            self.agreed(lambda: self.drop_lines_after(done))
        return done

    def choose_checkpoint(self):
        """Rank 0 alone chooses: a network file system may show others another one."""
        out, source = self.args.out, vars(self.args)["from"]
        if not out:
            return source
        if (out / "run.json").exists():
            raise SettingError(
                f"--out {out} is a checkpoint: name its run folder, or give it to --from")
        out.mkdir(parents=True, exist_ok=True)
        self.lock = open(out / "lock", "a")
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no data worker has it
        except BlockingIOError:
            raise SettingError(f"--out {out}: another process uses this folder: wait until it "
                               f"ends, or choose another one") from None
        for half in out.glob("step-*.tmp"):
            shutil.rmtree(half)
        return (list_checkpoints(out) or [source])[-1]

    def load(self, checkpoint):
        """Load a checkpoint, of which each rank checks a share of the files. Returns its step."""
        share = slice(self.rank, None, self.ranks)
        reader, saved = self.agreed(lambda: open_checkpoint(checkpoint, share), everywhere=True)
        for name, value in saved["fixed"].items():
            # A model that --from names may go on to longer texts.
            may_change = name == "rope_theta" and checkpoint.parent != self.args.out
            if not may_change and value != self.fixed.get(name):
                raise SettingError(
                    f"{name} is {value} in {checkpoint} and {self.fixed.get(name)} in this run: "
                    f"resume with the same; {NEW_RUN}")
        load(reader, self.tensors, self.optimizer_of, self.group)
        words = [f"resuming {checkpoint} after step {saved['step']}"]
        now = self.options | self.fixed
        for name, value in (saved["options"] | saved["fixed"]).items():
            if now.get(name, value) != value:
                words.append(f"{name} was {value}, is {now[name]}")
        self.say("; ".join(words))
        return saved["step"]

    def drop_lines_after(self, done):
        """Drop from metrics.jsonl the lines of steps that this run repeats, and a last one that was
        not written whole. Other lines, such as a note, stay."""
        metrics, new = self.args.out / "metrics.jsonl", self.args.out / "metrics.tmp"
        metrics.touch()

        def kept(line):
            return line[0] if int(line[1]) <= done else ""

        whole, end, _ = metrics.read_text(errors="replace").rpartition("\n")
        write_file(new, re.sub(r'(?m)^\{"step": (\d+).*\n', kept, whole + end))
        new.rename(metrics)

    @torch.no_grad()
    def save(self, step):
        """Write the checkpoint after ``step`` steps; with --async-save begin to, from a copy."""
        self.finish_save()
        half = self.args.out / f"step-{step:08d}.tmp"
        named = self.named_states()
        self.agreed(half.mkdir)
        writer, future = self.agreed(lambda: start_save(
            half, named, self.saving_group, self.args.async_save), everywhere=True)
        self.saving = step, half, writer, future
        if not future:
            self.finish_save()

    def named_states(self):
        """What a checkpoint holds, by name. Raises SettingError if it cannot."""
        named = named_states(self.tensors, self.optimizer_of)
        refuse_unlike(named, self.group)
        return named

    def finish_save(self):
        """Wait for the save that is not complete, if there is one; complete it, and remove the
        oldest checkpoints beyond --keep."""
        if not self.saving:
            return
        (step, half, writer, future), self.saving = self.saving, None
        if future:
            self.agreed(future.result, everywhere=True)
        sums = gather(writer.sums, self.group)

        def complete_and_rotate():
            complete(half, sums, {"step": step, "fixed": self.fixed, "options": self.options})
            half.rename(half.with_suffix(""))
            for old in list_checkpoints(self.args.out)[: -self.args.keep]:
                shutil.rmtree(old.rename(old.with_suffix(".tmp")))

        self.agreed(complete_and_rotate)


def optimizers_by_tensor(optimizers, tensors):
    """The optimizer of each trained tensor, its parameter group, and what the group holds now, as
    text. Raises SettingError if a checkpoint of ``tensors``, by name, would lack what is trained.
    """
    optimizer_of = {}
    for each in optimizers:
        for group in each.param_groups:
            optimizer_of.update(dict.fromkeys(group["params"], (each, group, texts(group))))
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise SettingError(f"{name} of the model is no tensor, and cannot be saved: give Run "
                               f"tensors= without it")
        if tensor.requires_grad and tensor not in optimizer_of:
            raise SettingError(f"{name} is trained, but by none of the optimizers")
    if optimizer_of.keys() - set(tensors.values()):
        raise SettingError("an optimizer updates a tensor that is not among those to be saved")
    return optimizer_of


def settings_of(args, dataset, optimizers):
    """Two dicts of settings by name: those that a run must keep, and those that it may change."""
    options = options_of(args)
    fixed = {name: options.get(name) for name in ("--seed", "--batch-size", "--seq-len")}
    if "config" in args:
        fixed.update((name, str(x)) for name, x in vars(args.config).items()
                     if x or name == "rope_scaling")
    for no_option in "--config", "--betas", "--max-norm", "--param-dtype", "--bfloat16":
        options.pop(no_option, None)  # they follow from others
    fixed.update(fingerprint(dataset, "--data", args.workers))
    fixed["optimizer"] = ", ".join(type(each).__name__ for each in optimizers)
    return fixed, options


def held_out_order(args, sampler, held_out):
    """The sampler of each evaluation: the first batches of a fixed permutation, shared out over
    ranks as in training. None without held-out data."""
    if held_out is None:
        if args.val_data:
            raise SettingError("--val-data: this script gives Run no held-out data: open it there, "
                               "as held_out=, or leave --val-data out")
        return None
    order = copy.copy(sampler)
    order.size, order.seed, order.start = len(held_out), 0, 0
    order.stop = min(args.val_batches, len(held_out) // args.batch_size)
    if not order.stop:
        raise SettingError(
            f"the held-out data (--val-data) has {len(held_out)} samples, less than one batch of "
            f"--batch-size {args.batch_size}: give more data, or a smaller batch")
    return order


def start_lines(args, models, device, mesh, size):
    """What runs where: processes and grid; the model."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    place = f"{os.path.basename(sys.argv[0])} on {kind}"
    if mesh is not None:
        grid = " x ".join(f"{dim} {n}" for dim, n in zip(mesh.mesh_dim_names, mesh.shape))
        place += f" ({dist.get_backend()}), rank grid {grid}"
    size = size or sum(p.numel() for each in models for p in each.parameters())
    model = getattr(args, "model", type(models[0]).__name__.removeprefix("FSDP"))
    return place, f"model {model}: {size:,} parameters, {str(args.compute_dtype)[6:]}"
