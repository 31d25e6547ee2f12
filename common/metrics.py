"""What a run reports: start lines, progress bar, metrics.jsonl, trace and summary."""

import contextlib
import itertools
import json
import math
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

from common.counting import HELD, StepCounter
from common.errors import SettingError, printable

# Dense matrix products in bfloat16, from NVIDIA's data sheets, in 10^12 operations per second.
PEAK_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "H20": 148, "A100": 312, "A800": 312, "A40": 150, "A10G": 70, "L40S": 362, "L4": 121,
    "RTX 4090": 165, "RTX 3090": 71,
}


class Metrics:
    """Reports the steps ``start`` to ``stop`` of a run; rank 0 prints and writes.

    One step is counted (see ``StepCounter``): the third after the start or the resume, or the last
    one if there are fewer. In earlier steps the optimizer allocates its states, torch.compile
    compiles, and DTensor caches how each operation is sharded.

    Steps are counted from 0 while they run and reported as the number of steps done: the first
    line of metrics.jsonl has step 1. ``history`` is the list of the logged lines, on every rank;
    those of ``log_validation`` have ``val_loss`` in place of ``loss``.

    Args:
        folder: the run folder, for metrics.jsonl, summary.json and traces.
        optimizer: its parameters, their gradients and its states are counted.
        modules: the model and its layers, on which the counted step sets hooks.
        description: lines to print at the start, strings or objects that print as one line.
        start, stop: the first step of this run, and the number of steps in the whole run.
        tokens_per_step: tokens in the global batch, or what ``unit`` names.
        device: the torch.device of this process.
        mesh: the DeviceMesh of the run, or None.
        log_every: steps between the lines of metrics.jsonl.
        profile: write a trace of a few steps, from every rank.
        unit: what ``tokens_per_step`` counts.
        flops_per_token: of forward and backward pass; with it, and a known peak, MFU is reported:
            the share of the device's peak that the model's operations take.
        peak_tflops: the peak of one device; None: that of the GPU, by its name.
        loggers: objects with ``log``, called with each line of metrics.jsonl, those of before a
            resume too, and ``finish``; see common/loggers.py.
    """

    def __init__(self, folder, optimizer, modules, description, *, start, stop, tokens_per_step,
                 device, mesh=None, log_every=10, profile=False, unit="tokens",
                 flops_per_token=0, peak_tflops=None, loggers=()):
        self.folder, self.optimizer, self.modules = pathlib.Path(folder), optimizer, modules
        self.start, self.stop, self.tokens_per_step = start, stop, tokens_per_step
        self.device, self.mesh, self.log_every, self.unit = device, mesh, log_every, unit
        self.loggers = loggers
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        peak = (peak_tflops or _peak_tflops(device)) * 1e12 * world_size
        self.mfu_per_rate = flops_per_token / peak if peak else 0
        self.counted_step = min(start + 2, stop - 1)
        self.counter, self.held, self.allocated = None, {}, None
        self.history, self.done, self.loss, self.val_loss = [], start, None, None
        self.say(self._place())
        for line in description:
            self.say(line)
        if start:
            self.say(f"resuming after step {start} of {folder}")
        self.profiler = self._profile() if profile else None
        if self.rank == 0:
            with _in_words(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                self.file, earlier = _open_log(self.folder / "metrics.jsonl", start)
            for line, logger in itertools.product(earlier, loggers):
                logger.log(json.loads(line))
        self.bar = tqdm(
            initial=start, total=stop, unit=" steps", disable=self.rank != 0, dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else 5,
        )
        self.began = self.logged_at = time.perf_counter()
        self.logged_step = start
        self.others = ""  # what the bar shows beside the losses
        self.warm = None  # (step, time) at the end of warm-up: tokens/s are measured from there

    def say(self, line):
        if self.rank == 0:
            print(printable(str(line)), flush=True)

    def due(self, step):
        """Whether ``step`` is logged: every ``log_every`` steps, the first and the last."""
        return (step + 1) % self.log_every == 0 or step in (self.start, self.stop - 1)

    def log(self, step, loss, grad_norm, lr):
        """Write a line for ``step``. ``loss`` is the mean over the global batch, ``grad_norm`` the
        norm of all gradients before clipping.

        Raises:
            SettingError: the loss or the norm is not finite, or was not since the last call.
        """
        self.loss = loss = float(loss)  # waits for the device
        grad_norm = float(grad_norm)
        now, done = time.perf_counter(), step + 1
        tokens = (done - self.logged_step) * self.tokens_per_step
        tokens_per_second = tokens / (now - self.logged_at)
        self.logged_step, self.logged_at = done, now
        record = {
            "step": done, "loss": loss, "grad_norm": grad_norm, "lr": lr,
            self.unit: done * self.tokens_per_step,
            f"{self.unit}_per_second": tokens_per_second,
        }
        mfu = ""
        if self.mfu_per_rate:
            record["mfu"] = tokens_per_second * self.mfu_per_rate
            mfu = f", MFU {record['mfu']:.1%}"
        self.others = f"grad norm {grad_norm:.2f}, {tokens_per_second:,.0f} {self.unit}/s{mfu}"
        self._write(record)
        skipped = int(getattr(self.optimizer, "first_skipped", -1)) + 1
        if skipped or not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise SettingError(
                f"at step {skipped or done} the gradients were not finite (at step {done} the loss "
                f"is {loss}, the gradient norm {grad_norm}): training diverged; lower --lr "
                f"({lr:.3g} in step {done}) or lengthen --warmup-steps"
            )

    def log_validation(self, step, val_loss):
        """Write a line for an evaluation after ``step``: ``val_loss`` is the mean loss on held-out
        data."""
        self.val_loss = val_loss
        self._write({"step": step + 1, "val_loss": val_loss})

    def _write(self, record):
        """Add a line to metrics.jsonl, give it to the loggers, and show it beside the bar."""
        self.history.append(record)
        if self.rank == 0:
            with _in_words(self.folder):
                self.file.write(json.dumps(record) + "\n")
                self.file.flush()
            for logger in self.loggers:
                logger.log(record)
        values = {"loss": self.loss, "val loss": self.val_loss}
        shown = [f"{name} {value:.3f}" for name, value in values.items() if value is not None]
        self.bar.set_postfix_str(", ".join([*shown, self.others]), False)

    @contextlib.contextmanager
    def pause(self):
        """``with metrics.pause():`` around what is no training, such as validation. Its time does
        not count in tokens per second."""
        self._wait_for_device()
        began = time.perf_counter()
        yield
        self._wait_for_device()
        paused = time.perf_counter() - began
        self.began, self.logged_at = self.began + paused, self.logged_at + paused
        if self.warm:
            self.warm = self.warm[0], self.warm[1] + paused

    def _wait_for_device(self):
        """Wait for what is queued on the GPU, which may be steps behind."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def begin_step(self, step):
        """Call it first in every step."""
        if step == self.counted_step:
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            self.counter = StepCounter(self.optimizer, self.modules, self.mesh)
            self.counter.__enter__()

    def after_backward(self, step):
        """Call it when the last gradient has arrived, before the optimizer's step."""
        if step == self.counted_step:
            if self.device.type == "cpu":
                time.sleep(0.05)  # a thread of gloo may not have let go yet of what it has sent
            self.counter.track_gradients(self.optimizer)
            self.held = dict(self.counter.now)

    def end_step(self, step):
        """Call it last in every step."""
        if step == self.counted_step:
            self.counter.__exit__(None, None, None)
            if self.device.type == "cuda":
                self.allocated = torch.cuda.max_memory_allocated(self.device)
        if step <= self.counted_step:  # such a step compiles, allocates, or counts
            self._wait_for_device()
            self.warm = step + 1, time.perf_counter()
        self.done = step + 1
        self.bar.update()
        if self.profiler:
            self.profiler.step()

    def close(self, **theory):
        """End the report with the summary, also written to summary.json, or, if the run was stopped
        early, with one line. Returns the history.

        ``theory`` gives, for ``parameters``, ``gradients``, ``optimizer_states`` and ``sent``, a
        formula and its value in bytes, to stand beside what was counted.
        """
        if self.profiler:
            self.profiler.stop()
        self.bar.close()
        for logger in self.loggers:
            logger.finish()
        if self.done < self.stop:
            self.say(self._stopped())
            return self.history
        (step, began), ended = self.warm, self.logged_at
        if step == self.stop:  # no step is left after warm-up: time all steps
            step, began = self.start, self.began
        rate = (self.stop - step) * self.tokens_per_step / (ended - began)
        held, peak, counter = self.held, self.counter.peak, self.counter
        held["optimizer states"] = counter.now["optimizer states"]  # the first step allocates them
        sent = round(sum(counter.sent.values()))
        mfu = f" | MFU {rate * self.mfu_per_rate:.1%}" if self.mfu_per_rate else ""
        collectives = [
            {"collective": kind, "group": dim, "calls": counter.calls[kind, dim], "bytes": size}
            for (kind, dim), size in counter.sent.items()
        ]
        if self.rank == 0:
            self.file.close()
            summary = {
                "loss": self.loss, "val_loss": self.val_loss,
                f"{self.unit}_per_second": rate,
                "mfu": rate * self.mfu_per_rate or None,
                "held": held, "peak": peak, "allocated": self.allocated, "sent": sent,
                "theory": {name: {"formula": f, "bytes": b} for name, (f, b) in theory.items()},
                "collectives": collectives,
            }
            with _in_words(self.folder):
                (self.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        if self.profiler:
            self.say(f"traces of a few steps: {self.folder}/trace-rank*.json")
        val_loss = "" if self.val_loss is None else f" | val loss {self.val_loss:.4f}"
        self.say(
            f"final loss {self.loss:.4f}{val_loss} | {rate:,.0f} {self.unit}/s{mfu} | {self.folder}"
        )
        for line in bytes_table(0, held, peak, sent, theory, self.allocated):
            self.say(line)
        return self.history

    def _stopped(self):
        saved = (self.folder / f"step-{self.done:08d}").exists()
        return (
            f"stopped after step {self.done} of {self.stop}, "
            + ("saved: the same command goes on from there" if saved else "and nothing is saved")
        )

    def _place(self):
        """The line that says what runs where."""
        size = dist.get_world_size() if dist.is_initialized() else 1
        cpu = self.device.type == "cpu"
        name = "cpu" if cpu else torch.cuda.get_device_name(self.device)
        script = os.path.basename(sys.argv[0])
        line = f"{script}: {size:,} process{'' if size == 1 else 'es'} on {name}"
        if self.mesh is None:
            return line
        dims = zip(self.mesh.mesh_dim_names, self.mesh.shape)
        grid = " x ".join(f"{dim} {ranks}" for dim, ranks in dims)
        return f"{line} ({dist.get_backend()}), rank grid {grid}"

    def _profile(self):
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=activities,
            acc_events=True,  # otherwise it warns that there is one cycle
            # After the counted step, which takes its time.
            schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(
                str(self.folder / f"trace-rank{self.rank}.json")
            ),
        )
        profiler.start()
        return profiler


def bytes_table(rank, held, peak, sent, theory, allocated=None):
    """The lines of the summary: bytes that ``rank`` held, by kind, and sent. ``allocated``: what
    torch allocated at the peak. For the others see ``StepCounter`` and ``Metrics.close``."""
    formulas = {name: f"   {f} = {b:,.0f}" for name, (f, b) in theory.items()}
    yield f"{f'bytes on rank {rank}':18}{'after backward':>18}{'at the peak':>18}   theory"
    for name in HELD:
        formula = formulas.get(name.replace(" ", "_"), "")
        yield f"{name:18}{held.get(name, 0):18,}{peak.get(name, 0):18,}{formula}"
    yield f"{'in all':18}{'':18}{peak['in all']:18,}"
    if allocated:  # on a GPU, with the workspaces of kernels, which are no tensors
        yield f"{'torch allocated':18}{'':18}{allocated:18,}"
    yield f"{'sent in a step':18}{sent:18,}{'':18}{formulas.get('sent', '')}"


def _peak_tflops(device):
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), 0)


@contextlib.contextmanager
def _in_words(folder):
    try:
        yield
    except OSError as error:
        raise SettingError(
            f"--out {folder}: {error.filename or 'metrics.jsonl'} cannot be written "
            f"({error.strerror}); the checkpoints are intact: make room, or choose another folder"
        ) from None


def _open_log(path, start):
    """Open metrics.jsonl to append, without the lines after step ``start``: those are repeated.
    Returns the file and its lines."""
    kept = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= start:
                    kept.append(line + "\n")
            # The process was killed while it wrote this line.
            except (ValueError, TypeError, KeyError):
                break
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
    return path.open("a"), kept
