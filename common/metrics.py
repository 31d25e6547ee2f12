"""What a run tells: start lines, progress bar, metrics.jsonl, trace and summary."""

import json
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

from common import checkpoint
from common.counting import HELD, StepCounter
from common.errors import SettingError


class Metrics:
    """Reports a run that goes from step ``sampler.start`` to ``args.steps``; rank 0 speaks for all.

    One step, the third, is counted: what it holds and what it sends (see ``StepCounter``). By then DDP
    has arranged its buckets, and DTensor has learned how to share out each operation.

    Steps are counted from 0 while they run and reported as the number of steps done: the first
    line of metrics.jsonl has step 1. ``history`` is the list of the logged lines, on every rank.
    ``picture`` are more lines for the start: how ranks are arranged.
    """

    def __init__(self, args, device, model, sampler, optimizer, mesh=None, picture=()):
        self.args, self.device, self.start = args, device, sampler.start
        self.model, self.optimizer, self.mesh = model, optimizer, mesh
        self.counted_step = min(self.start + 2, args.steps - 1)
        self.counter, self.held = None, {}
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.tokens_per_step = args.batch_size * args.seq_len
        self.history = []
        self._print_start(device, sampler)
        for line in picture:
            self.say(line)
        self.profiler = self._profile() if args.profile else None
        if self.rank == 0:
            self.file = _open_log(args.out / "metrics.jsonl", self.start)
        self.bar = tqdm(
            initial=self.start, total=args.steps, unit=" steps", disable=self.rank != 0,
            dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else 5,
        )
        self.began = self.logged_at = time.perf_counter()
        self.logged_step = self.start
        self.warm = None  # (step, time) from which on steps are like all others

    def say(self, line):
        if self.rank == 0:
            print(line, flush=True)

    def due(self, step):
        """Whether ``step`` is logged: every ``--log-every`` steps, the first, the last, and before
        each checkpoint, so that none is saved of a run that diverged."""
        done = step + 1
        return (
            done % self.args.log_every == 0 or step == self.start or done == self.args.steps
            or checkpoint.due(self.args, step)
        )

    def log(self, step, loss, grad_norm, lr):
        """Write a line for ``step``. ``loss`` is the mean over the global batch, ``grad_norm`` the
        norm of all gradients before clipping.

        Raises:
            SettingError: the loss or the norm is not finite.
        """
        loss, grad_norm = float(loss), float(grad_norm)  # waits for the device
        now, done = time.perf_counter(), step + 1
        tokens_per_second = (done - self.logged_step) * self.tokens_per_step / (now - self.logged_at)
        self.logged_step, self.logged_at = done, now
        record = {
            "step": done, "loss": loss, "grad_norm": grad_norm, "lr": lr,
            "tokens": done * self.tokens_per_step, "tokens_per_second": tokens_per_second,
        }
        self.history.append(record)
        if self.rank == 0:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        self.bar.set_postfix_str(
            f"loss {loss:.3f}, grad norm {grad_norm:.2f}, {tokens_per_second:,.0f} tokens/s", False
        )
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise SettingError(
                f"at step {done} the loss is {loss} and the gradient norm {grad_norm}: training "
                f"diverged; lower --lr {self.args.lr} or lengthen --warmup-steps {self.args.warmup_steps}"
            )

    def begin_step(self, step):
        """Call it first in every step."""
        if step == self.counted_step:
            self.counter = StepCounter(self.optimizer, self.mesh)
            self.counter.__enter__()

    def after_backward(self, step):
        """Call it when the last gradient is there, before the optimizer's step."""
        if step == self.counted_step:
            self.counter.track_gradients(self.optimizer)
            self.held = dict(self.counter.now)

    def end_step(self, step):
        """Call it last in every step."""
        if step == self.counted_step:
            self.counter.__exit__(None, None, None)
        if step <= self.counted_step:  # compiles, allocates, or counts
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # it may be steps behind
            self.warm = step + 1, time.perf_counter()
        self.bar.update()
        if self.profiler:
            self.profiler.step()

    def close(self, **theory):
        """End the report with the summary, also written to summary.json. Returns the history.

        ``theory`` gives for ``parameters``, ``gradients``, ``optimizer_states`` and ``sent`` a formula
        and its value in bytes, to stand beside what was counted.
        """
        if self.profiler:
            self.profiler.stop()
        self.bar.close()
        (step, began), ended = self.warm, self.logged_at
        if step == self.args.steps:  # too few steps to leave those out
            step, began = self.start, self.began
        rate = (self.args.steps - step) * self.tokens_per_step / (ended - began)
        held, peak, counter = self.held, self.counter.peak, self.counter
        held["optimizer states"] = counter.now["optimizer states"]  # the first step has made them
        sent = round(sum(counter.sent.values()))
        if self.rank == 0:
            self.file.close()
            summary = {
                "loss": self.history[-1]["loss"], "tokens_per_second": rate,
                "held": held, "peak": peak, "sent": sent,
                "theory": {name: {"formula": f, "bytes": b} for name, (f, b) in theory.items()},
                "collectives": [
                    {"collective": label, "group": dim, "calls": counter.calls[label, dim], "bytes": size}
                    for (label, dim), size in counter.sent.items()
                ],
            }
            (self.args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        if self.profiler:
            self.say(f"traces of a few steps: {self.args.out}/trace-rank*.json")
        self.say(f"final loss {self.history[-1]['loss']:.4f} | {rate:,.0f} tokens/s | {self.args.out}")
        self.say(f"{'bytes on rank 0':18}{'after backward':>18}{'at the peak':>18}   theory")
        for name in HELD:
            formula, value = theory.get(name.replace(" ", "_"), (None, 0))
            self.say(f"{name:18}{held[name]:18,}{peak[name]:18,}" + (f"   {formula} = {value:,.0f}" if formula else ""))
        self.say(f"{'in all':18}{'':18}{peak['in all']:18,}")
        formula, value = theory.get("sent", (None, 0))
        self.say(f"{'sent in a step':18}{sent:18,}" + (f"{'':18}   {formula} = {value:,.0f}" if formula else ""))
        return self.history

    def _print_start(self, device, sampler):
        args, config, mesh = self.args, self.args.config, self.mesh
        name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
        where = f"{args.script}: {_count(self.world_size, 'process', 'processes')} on {name}"
        if mesh is not None:
            grid = " x ".join(f"{n} {size}" for n, size in zip(mesh.mesh_dim_names, mesh.shape))
            where += f" ({dist.get_backend()}), rank grid {grid}"
        self.say(where)
        self.say(
            f"model {args.model}: {sum(p.numel() for p in self.model.parameters()):,} parameters, "
            f"{_count(config.num_hidden_layers, 'layer')}, hidden size {config.hidden_size}, {args.dtype}"
        )
        micro_batch = args.batch_size // (sampler.ranks * args.grad_accum)
        self.say(
            f"batch {args.batch_size} = {_count(micro_batch, 'sequence')} "
            f"x {_count(args.grad_accum, 'accumulation step')} "
            f"x {_count(sampler.ranks, 'data-parallel rank')}, "
            f"{self.tokens_per_step:,} tokens of {args.data}"
        )
        if self.start:
            self.say(f"going on after step {self.start}, from {args.out}")

    def _profile(self):
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1),  # after the step that is counted
            on_trace_ready=lambda p: p.export_chrome_trace(
                str(self.args.out / f"trace-rank{self.rank}.json")
            ),
        )
        profiler.start()
        return profiler


def _count(number, noun, plural=None):
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _open_log(path, start):
    """Open metrics.jsonl to append, without the steps after ``start``: they are done again."""
    kept = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= start:
                    kept.append(line + "\n")
            except ValueError:  # cut short when the process was killed
                break
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
    return path.open("a")
