"""What a run keeps, shows and hears, all of it optional: checkpoints that any script writes and any
other reads, at any number of ranks; metrics.jsonl; the loss on held-out data; and a stop by a
signal that loses nothing. Without it a script trains to the same weights.

A run folder holds ``step-00000100/`` for each of the newest checkpoints: the shards that torch's
distributed checkpoint (DCP) wrote, each rank its own, and its index; ``run.json``, the step and the
settings; and ``SHA256SUMS``, the hash of every file. ``model.NAME`` is a tensor of the model,
``optimizer.NAME.exp_avg`` an optimizer state of it. A checkpoint is written under a temporary name,
and renamed when all of it is on disk: a folder named step-NNNNNNNN is complete, and finite.
"""

import copy
import datetime
import fcntl
import hashlib
import json
import math
import os
import pathlib
import pickle
import re
import shutil
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
# Nothing public names the member of DCP's index that Python 3.11.0 to 3.11.3 pickle by getattr.
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves  # torch has no public one
from tqdm import tqdm

from common.data import load_steps, open_dataset
from common.launch import hash_of_code, same_on_all_ranks
from common.options import SettingError, at_least, refuse

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP, in one process
FIXED, OPTIONS = "fixed", "options"  # in run.json: what a run must keep, and what may change
SHOWN = "loss", "val_loss", "grad_norm", "tokens_per_second", "samples_per_second"
# Dense matrix products in bfloat16, from NVIDIA's data sheets, in 10^12 operations per second.
PEAK_TFLOPS = {"B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835,
               "H100": 989, "H20": 148, "A100": 312, "A40": 150, "A10G": 70, "L40S": 362, "L4": 121}


class Run:
    """One run. All ranks call each method.

    Args:
        model: a module, or a list of them: the stages of a pipeline that this rank holds.
        optimizer: one, or a list of them.
        sampler: of the training data; its ``start`` becomes the number of steps done.
        tensors: what a checkpoint holds by name, the tensors themselves, whole or DTensors; None:
            the state dict of the model.
        loss_of: takes a held-out micro-batch, and returns the summed loss of the part of it that
            this rank computes, and the number of its targets; None: of ``model(*micro_batch)``.
        after_evaluation: called when the model has been evaluated.
        size: the number of parameters of the whole model, if this rank has a part of it.
        lines: what else to print at the start.

    ``history`` has the records of metrics.jsonl, on every rank; ``loggers`` are functions of a
    record, which rank 0 calls. Raises SettingError: the run folder cannot be written, is in use or
    holds another run; a checkpoint is damaged, or would lack what is trained.
    """

    @staticmethod
    def add_options(parser):
        add = parser.add_argument_group("run").add_argument
        add("--out", type=pathlib.Path, metavar="FOLDER", help="where to save; if it has a run, "
            "that run continues; machines must share it; None: save nothing")
        add("--from", type=pathlib.Path, metavar="CHECKPOINT", help="unless --out "
            "has a checkpoint, begin from this one, of any run, step and optimizer included")
        add("--async-save", action="store_true", help="write checkpoints while training goes on")
        for name, least, default, words in (
            ("save-every", 0, 100, "steps between checkpoints; the last step has one too; 0: none"),
            ("keep", 1, 2, "how many of the newest checkpoints to keep"),
            ("log-every", 1, 10, "steps between lines of metrics.jsonl"),
            ("val-every", 1, 100, "steps between evaluations; the last step has one too"),
            ("val-batches", 1, 10, "global batches in each evaluation, always the same"),
        ):
            add(f"--{name}", type=at_least(least), default=default, metavar="N", help=words)
        add("--val-data", metavar="PATH", help="held-out data, as --data; None: no evaluation")

    def __init__(self, args, model, optimizer, sampler, dataset, device, mesh=None, *,
                 tensors=None, loss_of=None, after_evaluation=lambda: None, size=None, lines=()):
        self.args, self.sampler, self.device = args, sampler, device
        self.source = vars(args)["from"]
        self.models = model if isinstance(model, list) else [model]
        self.optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.tensors = tensors if tensors is not None else {
            name: x for each in self.models for name, x in each.state_dict(keep_vars=True).items()
        }
        self.optimizer_of = {p: each for each in self.optimizers
                             for group in each.param_groups for p in group["params"]}
        refuse([(x.requires_grad and x not in self.optimizer_of,
                 f"{name} is trained, but by none of the optimizers")
                for name, x in self.tensors.items()])
        refuse([(self.optimizer_of.keys() - set(self.tensors.values()),
                 "an optimizer updates a tensor that is not among those to be saved")])
        self.loss_of, self.after_evaluation = loss_of, after_evaluation
        self.history, self.loggers, self.shown = [], [], {}  # the last: beside the bar
        self.norms = 0.0  # the sum of all gradient norms: finite if each of them is
        self.lock = self.saving = None  # rank 0: the open lock file; a save that is not complete
        self.asked, self.stopping = None, False  # when a signal came; whether the loop must end
        self.rank, self.ranks, self.group = 0, 1, None
        options = {f"--{name.replace('_', '-')}": str(x) for name, x in vars(args).items()}
        self.options = options | {"the code": hash_of_code()}
        self.fixed = {name: options.get(name) for name in ("--seed", "--batch-size", "--seq-len")}
        config = vars(args.config) if "config" in args else {}
        self.fixed |= {name: str(x) for name, x in config.items() if x} | fingerprint(dataset)
        self.fixed["optimizer"] = ", ".join(type(each).__name__ for each in self.optimizers)
        if dist.is_initialized():  # collectives on the CPU wait for no GPU; a thread has its own
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
            self.group, self.saving_group = (dist.new_group(
                backend="gloo", timeout=datetime.timedelta(seconds=args.timeout)) for _ in range(2))
            same_on_all_ranks(self.fixed, self.group)
        if args.val_data:
            self.prepare_validation()
        self.used = []  # numbers of FSDP's units, in the order of this step's forward passes
        units = [m for each in self.models for m in each.modules() if isinstance(m, FSDPModule)]
        states = [fully_shard.state(unit) for unit in units]  # modules of one unit share it
        for unit, i in zip(units, map(states.index, states)):
            unit.register_forward_pre_hook(lambda *_, i=i: self.used.append(i))
        self.stage, self.stages = 0, 1  # the stages of a pipeline have other units
        if mesh is not None and "pp" in mesh.mesh_dim_names:
            self.stage, self.stages = mesh.get_local_rank("pp"), mesh["pp"].size()
        self.units = args.batch_size * getattr(args, "seq_len", 1)  # in a step
        self.unit = "tokens" if "seq_len" in args else "samples"
        self.timed = 0, 0.0  # steps, and the seconds that they took, without the first line's
        if type(dataset).__str__ is object.__str__:  # a list would print all of its samples
            dataset = f"{len(dataset):,} samples"
        warning = [] if args.out else ["nothing is saved: there is no --out"]
        self.say(*self.start_lines(mesh, size), *lines, sampler, dataset, *warning)
        sampler.start = self.resume()

    def start_lines(self, mesh, size):
        """What runs where: processes and grid; the model."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        noun = "process" if self.ranks == 1 else "processes"
        place = f"{os.path.basename(sys.argv[0])}: {self.ranks:,} {noun} on {name}"
        if mesh is not None:
            grid = " x ".join(f"{dim} {n}" for dim, n in zip(mesh.mesh_dim_names, mesh.shape))
            place += f" ({dist.get_backend()}), rank grid {grid}"
        size = size or sum(p.numel() for each in self.models for p in each.parameters())
        model = getattr(self.args, "model", type(self.models[0]).__name__.removeprefix("FSDP"))
        return place, f"model {model}: {size:,} parameters, {str(self.args.compute_dtype)[6:]}"

    def say(self, *lines):
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def gather(self, value):
        """The values of all ranks."""
        values = [value] * self.ranks
        if self.group:
            dist.all_gather_object(values, value, self.group)
        return values

    def agreed(self, call, everywhere=False):
        """What ``call()`` returns on rank 0, on all ranks; ``everywhere``: all ranks call it. If it
        fails on one rank, all raise the same SettingError."""
        answer = problem = None
        if everywhere or self.rank == 0:
            try:
                answer = call()
            except SettingError as error:
                problem = str(error)
            except (OSError, dcp.CheckpointException) as error:
                problem = f"cannot read or write: {str(error).strip().splitlines()[-1]}"
        answers = self.gather((None if everywhere else answer, problem))
        refuse([(said, said) for _, said in answers])  # of the first rank that has one
        return answer if everywhere else answers[0][0]

    # The loop

    def steps(self, numbered):
        """Yields what ``numbered`` yields, pairs (step, batch), until a signal (SIGTERM, SIGUSR1 or
        Ctrl-C) asks to stop. What this changes in the process is put back at the end."""
        handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
        self.bar = tqdm(initial=self.sampler.start, total=self.args.steps, unit=" steps",
                        disable=self.rank != 0, dynamic_ncols=True,
                        mininterval=0.1 if sys.stderr.isatty() else 5)
        self.clock = self.sampler.start, time.perf_counter()  # of the last line
        try:
            for number in handlers:
                signal.signal(number, self.ask)
            for step, batch in numbered:
                yield step, batch
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

    def last_line(self):
        """How the run ended, and where it is saved."""
        args, saves = self.args, self.args.out and self.args.save_every
        last = {name: value for record in self.history for name, value in record.items()}
        if not self.history:
            return (f"nothing to train: {args.out or self.source} has done all of --steps "
                    f"{args.steps}: raise it, or for a new run take another --out")
        if self.stopping and self.done < args.steps:
            then = "saved: the same command continues from there" if saves else "nothing is saved"
            return f"stopped after step {self.done} of {args.steps}, {then}"
        last |= self.speed(*self.timed) if self.timed[0] else {}
        words = [f"final loss {last['loss']:.4f}"]
        words += [f"val loss {last['val_loss']:.4f}"] if "val_loss" in last else []
        words.append(f"{last[f'{self.unit}_per_second']:,.0f} {self.unit}/s")
        return " | ".join([*words, f"saved in {args.out}" if saves else "nothing is saved"])

    def ask(self, number, _):
        """Handler of the signals. A second one ends the process at once, but not within a second:
        launchers may deliver one twice."""
        if self.asked and time.monotonic() - self.asked > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = self.asked or time.monotonic()

    def after_step(self, step, loss, grad_norm, **more):
        """Call it at the end of every step (counted from 0). It logs, saves and evaluates, each if
        it is due; it saves too if a signal has asked any rank to stop.

        ``loss``: this rank's part of the mean loss of the global batch: all parts add up to it.
        ``grad_norm``: of the gradients of the whole model, before clipping. ``more``: further
        figures by name: functions, which all ranks call in a logged step. Raises SettingError, on
        all ranks: the loss or a norm is not finite, a save fails, ranks used other units of FSDP.
        """
        args, done = self.args, step + 1
        self.done, last = done, done == args.steps
        self.norms = self.norms + grad_norm  # stays on the device
        used = hash(tuple(self.used)) // 2
        self.used.clear()
        flags = torch.full((1 + self.stages, 2), -(2**62))
        flags[0] = torch.tensor([self.asked is not None,
                                 self.saving is not None and not self.saving[-1].done()])
        flags[1 + self.stage] = torch.tensor([used, -used])
        if self.group:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        (self.stopping, still_saving), *orders = flags.tolist()
        refuse([(most != -least, f"in step {done} ranks used other units of FSDP, or in another "
                 f"order: put parts that some ranks leave out into one unit, with reduce_unused")
                for most, least in orders])
        if self.saving and not still_saving:
            self.finish_save()
        saves = args.out and args.save_every and (
            done % args.save_every == 0 or last or self.stopping)
        evaluates = args.val_data and (done % args.val_every == 0 or last)
        if done % args.log_every == 0 or step == self.sampler.start or last or saves or evaluates:
            self.log(done, loss, grad_norm, more)
        if saves:
            self.save(done)
        if evaluates:
            self.write({"step": done, "val_loss": self.validation_loss()})
        if saves or evaluates:  # a line came before: what they take does not count as training
            self.clock = done, time.perf_counter()

    # Records

    def log(self, done, loss, grad_norm, more):
        before, since = self.clock
        loss = torch.as_tensor(loss, device=self.device).clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
        loss, grad_norm = float(loss), float(grad_norm)  # waits for the GPU
        self.clock = done, time.perf_counter()
        steps, seconds = done - before, self.clock[1] - since
        if self.history:
            self.timed = self.timed[0] + steps, self.timed[1] + seconds
        lr = self.optimizers[0].param_groups[0]["lr"]
        record = {"step": done, "loss": loss, "grad_norm": grad_norm, "lr": lr,
                  self.unit: done * self.units, **self.speed(steps, seconds)}
        if self.device.type == "cuda":  # bytes, of this rank
            record["peak_memory"] = torch.cuda.max_memory_allocated(self.device)
        self.write(record | {name: value() for name, value in more.items()})
        refuse([(done == self.sampler.start + 1 and loss == grad_norm == 0, "the first step has "
                 "neither loss nor gradient: is every target -100?"),
                (not math.isfinite(loss + grad_norm),
                 f"at step {done} the loss is {loss} and the gradient norm {grad_norm}, which is "
                 f"not finite: lower --lr ({lr:.3g} here) if it diverged, or look at the data")])

    def speed(self, steps, seconds):
        """Of all ranks, by the names that it has in a record."""
        rate, args = steps * self.units / seconds, self.args
        speed = {f"{self.unit}_per_second": rate}
        if self.device.type == "cuda" and "config" in args:
            peak = peak_tflops(torch.cuda.get_device_name(self.device)) * 1e12 * self.ranks
            if peak:
                speed["mfu"] = rate * flops_per_token(args.config, args.seq_len) / peak
        return speed

    def write(self, record):
        """Add a line to metrics.jsonl, show it beside the bar, and give it to the loggers."""
        self.history.append(record)
        if self.rank == 0:
            self.shown |= {name: f"{record[name]:,.4g}" for name in SHOWN if name in record}
            self.bar.set_postfix(self.shown, refresh=False)
            if self.args.out:
                self.check_lock()
                with open(self.args.out / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(record) + "\n")
            for log in self.loggers:
                log(record)

    # Validation: the first batches of a fixed permutation, shared out over ranks as in training

    def prepare_validation(self):
        args, self.held_out = self.args, open_dataset(self.args, self.args.val_data)
        self.order = copy.copy(self.sampler)
        self.order.size, self.order.seed, self.order.start = len(self.held_out), 0, 0
        self.order.stop = min(args.val_batches, len(self.held_out) // args.batch_size)
        refuse([(not self.order.stop, f"--val-data has {self.held_out}, less than one batch of "
                 f"--batch-size {args.batch_size}: give more data, or a smaller batch")])

    @torch.no_grad()
    def validation_loss(self):
        """The mean loss over all targets of the held-out batches, the same number on all ranks and
        at every world size. The model runs in eval mode."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, number of targets
        modes = [(module, module.training) for each in self.models for module in each.modules()]
        for each in self.models:
            each.eval()
        for _, batch in load_steps(self.held_out, self.order, self.device, self.args.workers):
            for micro_batch in batch:
                loss, count = self.loss_of(micro_batch) if self.loss_of else (
                    self.models[0](*micro_batch), (micro_batch[1] != -100).sum())
                total[0] += loss
                total[1] += count
        for module, training in modes:
            module.training = training
        self.after_evaluation()
        if dist.is_initialized():
            dist.all_reduce(total)
        refuse([(not total[1], "no held-out sample has a target: all are -100")])
        return (total[0] / total[1]).item()

    # Checkpoints

    def named(self):
        """What a checkpoint holds, by name: the tensors, and the states that optimizers keep."""
        named = {}
        for name, tensor in self.tensors.items():
            named[f"model.{name}"] = tensor.detach()
            states = self.optimizer_of[tensor].state if tensor in self.optimizer_of else {}
            for state, value in states.get(tensor, {}).items():
                named[f"optimizer.{name}.{state}"] = value
        return named

    def resume(self):
        """Lock the run folder, and load its newest checkpoint, or that of --from. Returns the
        number of steps done."""
        out, metrics = self.args.out, (self.args.out or pathlib.Path()) / "metrics.jsonl"

        def choose():  # rank 0 alone: a network file system may show others another
            if not out:
                return self.source
            words = f"--out {out} is a checkpoint: name its run folder, or give it to --from"
            refuse([((out / "run.json").exists(), words)])
            out.mkdir(parents=True, exist_ok=True)
            self.lock = open(out / "lock", "a")
            try:
                fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no data worker has it
            except BlockingIOError:
                raise SettingError(f"--out {out}: another process uses this folder: wait until it "
                                   f"ends, or choose another one") from None
            for half in out.glob("step-*.tmp"):
                shutil.rmtree(half)
            return (list_checkpoints(out) or [self.source])[-1]

        def drop_later_lines():  # of steps that are repeated, and one at which a run was killed
            kept = [line for line in metrics.read_text().splitlines(True)
                    if line.endswith("\n") and json.loads(line)["step"] <= done]
            write_file(metrics.with_suffix(".tmp"), "".join(kept)).rename(metrics)

        checkpoint = self.agreed(choose)
        done = self.load(checkpoint) if checkpoint else 0
        self.agreed(lambda: out and metrics.exists() and drop_later_lines())
        return done

    @torch.no_grad()
    def load(self, checkpoint):
        """Load a checkpoint in place, into the tensors and the states of their optimizers. Returns
        its step."""
        reader, saved = self.agreed(
            lambda: open_checkpoint(checkpoint, slice(self.rank, None, self.ranks)), True)
        new_run = "for a new run take another --out, without --from"
        refuse([(value != self.fixed.get(name), f"{name} is {value} in {checkpoint} and "
                 f"{self.fixed.get(name)} in this run: resume with the same; {new_run}")
                for name, value in saved[FIXED].items()  # for longer texts a new run may change it
                if name != "rope_theta" or checkpoint.parent == self.args.out])
        stored = reader.read_metadata().state_dict_metadata
        here = {f"model.{name}": x.shape for name, x in self.tensors.items()}
        # A rank of a pipeline has the tensors of its stages only.
        unknown = {name for name in stored if name.startswith("model.")}.difference(
            *self.gather(set(here)))
        refuse([(name not in stored or name in unknown or stored[name].size != here[name],
                 f"{checkpoint} is of another model: see {name}; {new_run}")
                for name in here.keys() | unknown])
        for key, entry in stored.items():  # an optimizer has no states before its first step
            name, _, state = key.removeprefix("optimizer.").rpartition(".")
            tensor = self.tensors.get(name)
            if key.startswith("optimizer.") and tensor in self.optimizer_of:
                self.optimizer_of[tensor].state[tensor][state] = (
                    torch.zeros_like(tensor) if entry.size == tensor.shape else
                    torch.zeros(entry.size, dtype=entry.properties.dtype, device=tensor.device))
        dcp.load(self.named(), storage_reader=reader, process_group=self.group)
        now = self.options | self.fixed
        changed = [f"{name} was {value}, is {now[name]}"
                   for name, value in (saved[OPTIONS] | saved[FIXED]).items()
                   if now.get(name, value) != value]
        self.say("; ".join([f"resuming {checkpoint} after step {saved['step']}", *changed]))
        return saved["step"]

    @torch.no_grad()
    def save(self, step):
        """Write the checkpoint after ``step`` steps; with --async-save begin to, from a copy."""
        self.finish_save()
        refuse([(not math.isfinite(float(self.norms)), f"step {step} is not saved, a gradient norm "
                 f"was not finite: lower --lr if training diverged, or look at the data")])
        half, named = self.args.out / f"step-{step:08d}.tmp", self.named()
        self.refuse_unlike(named)
        if self.args.async_save:  # torch fails to copy a DTensor of the CPU whose part is a view
            named = {name: x.clone() if x.is_cpu and x.storage_offset() else x
                     for name, x in named.items()}
        self.agreed(lambda: (self.check_lock(), half.mkdir()))
        # Copying ahead opens a context on the thread's device, which is GPU 0 in every rank.
        writer = HashingWriter(half, per_thread_copy_ahead=0)
        save = dcp.async_save if self.args.async_save else dcp.save
        future = self.agreed(lambda: save(
            named, storage_writer=writer, process_group=self.group and self.saving_group), True)
        self.saving = step, half, writer, future
        if not self.args.async_save:
            self.finish_save()

    def finish_save(self):
        """Wait for the save that is not complete, if there is one; give the checkpoint its hashes
        and its name, and remove the oldest beyond --keep."""
        if not self.saving:
            return
        (step, half, writer, future), self.saving = self.saving, None
        if self.args.async_save:
            self.agreed(future.result, True)
        hashes, out = self.gather(writer.sums), self.args.out

        def complete():
            sums = {name: digest for of_rank in hashes for name, digest in of_rank.items()}
            refuse([(not (half / name).exists(), f"--out {out} is not one folder for all machines: "
                     f"here it has no {name}") for name in sums])
            settings = {"step": step, FIXED: self.fixed, OPTIONS: self.options}
            write_file(half / "run.json", json.dumps(settings, indent=1))
            sums |= {name: hash_of(half / name) for name in (".metadata", "run.json")}
            lines = (f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
            write_file(half / "SHA256SUMS", "".join(lines))
            self.check_lock()
            half.rename(half.with_suffix(""))
            for old in list_checkpoints(out)[: -self.args.keep]:
                shutil.rmtree(old.rename(old.with_suffix(".tmp")))

        self.agreed(complete)

    def check_lock(self):
        """Rank 0, before it writes: the folder of that name must still be the one it has locked."""
        path = self.args.out / "lock"
        same = path.exists() and os.path.samestat(path.stat(), os.fstat(self.lock.fileno()))
        refuse([(not same, f"--out {path.parent} is not what this run has locked: was it moved?")])

    def refuse_unlike(self, named):
        """Refuse a plain tensor that has other values on another rank: a checkpoint holds one. But
        buffers may differ, as BatchNorm's do."""
        buffers = {buffer for each in self.models for buffer in each.buffers()}
        sums = {name: int(x.flatten().view(torch.uint8).sum(dtype=int)) for name, x in named.items()
                if not isinstance(x, DTensor) and self.tensors.get(name[6:]) not in buffers}
        first = {}
        for of_rank in self.gather(sums):
            refuse([(first.setdefault(name, value) != value,
                     f"{name} has other values on another rank, and a checkpoint holds one: make "
                     f"a part of each rank a DTensor, as torch.zeros_like(p) does")
                    for name, value in of_rank.items()])


def fingerprint(dataset):
    """What tells one dataset from another: its number of samples, and a hash of some of them."""
    digest, size = hashlib.sha256(), len(dataset)
    for index in range(0, size, -(-size // 64)):
        sample = dataset[index]
        if isinstance(sample, tuple) and getattr(sample[-1], "dtype", None) == torch.int64:
            other = sample[-1][(sample[-1] < 0) & (sample[-1] != -100)].tolist()
            refuse([(other, f"sample {index} has the target {other[:1]}: the mask is -100")])
        for value in tree_leaves(sample):
            if torch.is_tensor(value):  # NumPy has no bfloat16
                value = value.flatten().view(torch.uint8).numpy(force=True)
            digest.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode())
    return {"samples in --data": size, "hash of --data": digest.hexdigest()[:16]}


def list_checkpoints(folder):
    """The complete checkpoints of a run folder, oldest first."""
    return sorted(path for path in pathlib.Path(folder).glob("step-*")
                  if re.fullmatch("step-[0-9]{8,}", path.name))


def open_checkpoint(checkpoint, share=slice(None)):
    """Check the hashes of a checkpoint's index, of its run.json, and of ``share`` of the list of
    its other files. Returns its reader, and the content of run.json."""
    refuse([(not (checkpoint / "SHA256SUMS").exists(), f"{checkpoint} is no checkpoint, or this "
             f"machine does not see it: name one, such as runs/a/step-00000100")])
    lines = (checkpoint / "SHA256SUMS").read_text(errors="replace").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    own = {".metadata", "run.json"}
    for name in *own, *sorted(sums.keys() - own)[share]:
        refuse([(hash_of(checkpoint / name) != sums.get(name),
                 f"{checkpoint / name} is damaged: its SHA-256 is not the one in SHA256SUMS; start "
                 f"from an older checkpoint by --from, with another --out")])
    return SafeReader(checkpoint), json.loads((checkpoint / "run.json").read_text())


def hash_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path, text):
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return path


class HashingWriter(dcp.FileSystemWriter):
    """DCP's writer. ``sums``: the hash of each file that this rank has written, by its name."""

    def write_data(self, *args):
        written = super().write_data(*args)
        names = {result.storage_data.relative_path for result in written.wait()}
        self.sums = {name: hash_of(self.path / name) for name in names}
        return written


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, but its index, a pickle, may name only the classes that DCP writes for tensors:
    a file chooses no code that runs. DCP itself reads tensors with weights_only=True."""

    def read_metadata(self, *_, **__):
        with open(self.path / ".metadata", "rb") as file:
            return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    CLASSES = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
            "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"PosixPath"}, "pathlib._local": {"PosixPath"},
        "torch": {"Size"} | {key for key, value in vars(torch).items()
                             if isinstance(value, torch.dtype)},
    }

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11.0 to 3.11.3 pickle an Enum
            return self.member
        refuse([(name not in self.CLASSES.get(module, ()), f"the index of a checkpoint asks for "
                 f"{module}.{name}, which DCP never writes for tensors")])
        return super().find_class(module, name)

    def member(self, kind, name):
        """``getattr`` of one Enum and of nothing else."""
        refuse([(kind is not _MEM_FORMAT_ENCODING, f"the index asks for getattr of {kind!r:.60}")])
        return kind[name]


def flops_per_token(config, seq_len):
    """Floating-point operations per token of a forward and a backward pass, as PaLM counts them
    (arXiv:2204.02311, appendix B): 6 for each parameter of a matrix product that a token meets, and
    for attention 12 x layers x heads x head_dim x T, of which a causal mask leaves half."""
    width, mlp = config.num_attention_heads * config.head_dim, 3 * config.intermediate_size
    if getattr(config, "num_experts", 0):
        mlp = config.num_experts + 3 * config.experts_per_token * config.expert_size
    attention = 2 * width + 2 * config.num_key_value_heads * config.head_dim
    layers = config.num_hidden_layers * config.hidden_size * (attention + mlp)
    products = layers + config.hidden_size * config.vocab_size
    return 6 * products + 6 * config.num_hidden_layers * width * seq_len


def peak_tflops(name):
    return next((peak for known, peak in PEAK_TFLOPS.items()
                 if re.search(rf"\b{known}\b", name)), 0)  # an L40 is no L4
