"""Checkpoints that any script writes and any other reads, at any number of ranks.

A run folder holds ``step-00000100/`` for each of the newest checkpoints; checkpoint_files.py beside
this file says what is in it. A checkpoint is written under a temporary name, and renamed when all
of it is written: a folder named step-NNNNNNNN is always complete, and finite.
"""

import collections
import concurrent.futures
import contextlib
import gc
import hashlib
import json
import math
import os
import pathlib
import re
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from common.errors import SettingError, printable
from common.launch import name_difference
from common.options import at_least, not_empty
from common.services.checkpoint_files import (
    CHANGEABLE, FIXED, IMPORTED, Damaged, HashingWriter, complete, list_checkpoints,
    older_checkpoint, open_checkpoint, reason, remove_checkpoint, step_of,
)
from common.services.new_files import remove_left_over
from common.services.run_folder import (
    ANOTHER, CHECKPOINT, add_out, claim_folder, new_id, read_run_id
)
from common.services.signals import catch_stop_signals, stop_requested

A_NEW_RUN = f"for a new run {ANOTHER}"


# One checkpoint, written and read. ``tensors`` are the trained tensors of this rank by name, whole
# or DTensors; ``optimizer_of`` has the optimizer of each of them that is trained.


def named_tensors(tensors, optimizer_of):
    """What a checkpoint holds, by name: each tensor, and each state that its optimizer keeps.

    Raises:
        SettingError: a state is not a tensor.
    """
    named = {}
    for name, tensor in tensors.items():
        named[f"model.{name}"] = tensor.detach()
        states = optimizer_of[tensor].state.get(tensor, {}) if tensor in optimizer_of else {}
        for state, value in states.items():
            if not isinstance(value, torch.Tensor):
                raise SettingError(
                    f"{state} of the optimizer is {value!r:.40}, and checkpoints hold tensors "
                    f"only: let the optimizer keep a tensor"
                )
            named[f"optimizer.{name}.{state}"] = value
    return named


def write_checkpoint(folder, named, *, step, fixed, changeable, group=None, plans=None):
    """Write ``named`` tensors into a folder, which all ranks of ``group`` see, after ``step`` steps
    of a run with these settings. Each rank writes its shards; of what several ranks hold, one of
    them writes each part. When all ranks have, rank 0 completes the folder.

    ``plans``: any object that stands for this group and these names: given again, DCP takes the
    plan that it has made. Raises OSError, or CheckpointException if any rank cannot write.
    """
    writer, planner = HashingWriter(folder), dcp.DefaultSavePlanner(enable_plan_caching=True)
    # DCP keeps plans by the name of the planner's class. Those of another group of ranks must not
    # be taken: two ranks would write one file.
    planner._cached_plans_key = plans or object()
    dcp.save(named, storage_writer=writer, planner=planner, process_group=group)
    hashes = gather(writer.sums, group)
    if _rank() == 0:
        complete(folder, dict(collections.ChainMap(*hashes)), step=step, fixed=fixed,
                 changeable=changeable)


@torch.no_grad()
def read_checkpoint(reader, stored, tensors, optimizer_of, group=None):
    """Read what ``open_checkpoint`` has found, ``stored``, into ``tensors`` and the states of their
    optimizers, in place. Each rank of ``group`` reads its parts, however they were sharded."""
    for key, entry in stored.items():  # an optimizer has no states before its first step
        name, _, state = key.removeprefix("optimizer.").rpartition(".")
        tensor = tensors.get(name)
        if key.startswith("optimizer.") and tensor in optimizer_of:
            optimizer_of[tensor].state[tensor][state] = (
                torch.zeros_like(tensor) if entry.size == tensor.shape else
                torch.zeros(entry.size, dtype=entry.properties.dtype, device=tensor.device)
            )
    named = named_tensors(tensors, optimizer_of)
    wanted = {name: tensor for name, tensor in named.items() if name in stored}
    dcp.load(wanted, storage_reader=reader, process_group=group)


def not_finite(tensors, optimizer_of):
    """The name of the first parameter or state with a number that is not finite, or None. A buffer,
    such as a mask, may hold -inf."""
    buffers = {f"model.{name}" for name, tensor in tensors.items() if _is_buffer(tensor)}
    for name, value in named_tensors(tensors, optimizer_of).items():
        value = value.to_local() if isinstance(value, DTensor) else value
        if name not in buffers and value.is_floating_point() and value.numel():
            # aminmax needs little memory, and returns NaN if there is one.
            if not torch.stack(value.aminmax()).isfinite().all():
                return name


# The checkpoints of a run: when to save, what to remove, what to refuse


class Checkpoints:
    """The checkpoints of one run. All ranks call each method.

    Args:
        folder: the run folder; with several machines, one that they share.
        settings: two dicts: the settings that must stay the same when the run is resumed, such as
            the seed, and those that may change, such as the learning rate. The settings of the
            optimizer may change too. Changes are printed.
        tensors: a state dict of the trained tensors themselves, not of copies, whole or DTensors,
            such as ``model.state_dict(keep_vars=True)``.
        optimizer: an optimizer, or a list of them. Their states are saved under the names of the
            tensors that they update.
        stop: number of steps in the whole run; the last step saves too.
        every: steps between checkpoints; 0: save none at all.
        keep: how many of the newest checkpoints to keep.
        in_background: write while training continues, from a copy in host memory.
    """

    def __init__(self, folder, settings, tensors, optimizer, *, stop, every=100, keep=2,
                 in_background=False):
        self.folder, self.tensors = pathlib.Path(folder), tensors
        self.stop, self.every, self.keep, self.in_background = stop, every, keep, in_background
        optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.optimizer_of = {
            parameter: optimizer for optimizer in optimizers
            for group in optimizer.param_groups for parameter in group["params"]
        }
        for name, tensor in tensors.items():
            if tensor.requires_grad and tensor not in self.optimizer_of:
                raise SettingError(f"{name} is trained, but by none of the optimizers to be saved")
        for parameter in self.optimizer_of.keys() - set(tensors.values()):
            raise SettingError(
                f"an optimizer updates a parameter of shape {tuple(parameter.shape)} that is not "
                f"among the tensors to be saved: add it to them"
            )
        fixed, changeable = settings
        fixed = fixed | {"the optimizer": ", ".join(type(each).__name__ for each in optimizers)}
        # Without those of parameter groups: a stage of a pipeline may have groups of its own.
        self.on_all_ranks = fixed | changeable
        changeable = changeable | _settings_of(optimizers)
        for name in ("amsgrad", "centered"):  # these decide which states an optimizer has
            if name in changeable:
                fixed[name] = changeable.pop(name)
        # As a JSON file returns them: tuples become lists, keys become strings.
        self.fixed, self.changeable = json.loads(json.dumps([fixed, changeable], default=str))
        self.saves = 0
        self.norms = 0.0  # the sum of all gradient norms: finite if each of them is
        self.had_finished = False  # before this process started
        self.claim = None  # of the run folder, by rank 0
        self.stopping = False  # whether the loop must end
        self.asked, self.vote = 0, None  # whether any rank was asked to stop, and its all-reduce
        self.saving = None  # the Future of a save in the background
        self.background = concurrent.futures.ThreadPoolExecutor(1)  # the loop does not wait for it
        self.plans = object()  # the key of this object's plans in DCP's cache
        self.staged = {}  # the copies in host memory, which the first save in the background makes
        # For collectives on the CPU, which wait for no GPU. The thread needs a group of its own.
        self.group = self.background_group = None
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo")
            self.background_group = dist.new_group(backend="gloo") if in_background else self.group
        self.run = gather(new_id(), self.group)[0]  # the id of the run, which its resumes keep

    @staticmethod
    def add_options(parser):
        """Add the options of the run folder to a parser of common/options.py."""
        add_out(parser)
        add = parser.add_argument_group("checkpoints").add_argument
        add("--save-every", type=at_least(0), default=100, metavar="N",
            help="steps between checkpoints; the last step saves one too; 0: save none")
        add("--keep", type=at_least(1), default=2, metavar="N",
            help="how many of the newest checkpoints to keep")
        add("--async-save", action="store_true", help="write checkpoints while training continues")
        add("--from", dest="source", type=not_empty, metavar="CHECKPOINT", help="start a new run "
            "from a checkpoint of any run, such as runs/a/step-00000100, step and optimizer "
            "included; --out must be empty, or hold the run that this has started")

    # Resuming

    def resume(self, source=None):
        """Lock the run folder, and load its newest checkpoint if it has one. Otherwise a run
        begins, or begins again: with ``source``, the path of another run's checkpoint, from there.
        Returns the number of steps done. From now on signals ask the run to stop.

        A run that has finished is loaded too: the loop then has no step, and ``finish`` says so.

        Raises:
            SettingError: the folder cannot be written or holds something else than a run, another
                process uses it, its run has finished more steps or began from another ``source``,
                ranks have different settings, or the checkpoint cannot be loaded.
        """
        refuse_differences(self.on_all_ranks, self.group)
        unwritable = f"--out {self.folder} cannot be written", "or choose another folder"
        chosen = None
        with raise_on_all_ranks(self.group, *unwritable):
            self.folder.mkdir(parents=True, exist_ok=True)
            if _rank() == 0:
                chosen = self.choose(source and os.path.abspath(source))
        # Rank 0 alone decides: a network file system may show another rank other checkpoints.
        checkpoint, self.run, text = gather(chosen, self.group)[0]
        shared = self.every or checkpoint  # otherwise the ranks need no shared folder
        if shared:
            self.check_that_it_is_shared(text)
        if checkpoint:
            self.load(checkpoint)
        with raise_on_all_ranks(self.group, *unwritable):
            if _rank() == 0:
                remove_left_over(self.folder, self.run)
                for path in self.folder.iterdir():
                    if re.fullmatch(rf"{CHECKPOINT}\.{self.run}\.(tmp|old)", path.name):
                        remove_checkpoint(path)
                self.claim.take()  # now that nothing can be refused any more
        if shared:
            self.check_that_it_is_shared(gather(self.claim and self.claim.text, self.group)[0])
        done = step_of(checkpoint) if checkpoint else 0
        self.had_finished = done == self.stop
        catch_stop_signals()
        return done

    def choose(self, source):
        """Rank 0: lock the folder. Returns the checkpoint to load or None, the id of the run, and
        the text of run-id."""
        if source and not re.fullmatch(CHECKPOINT, os.path.basename(source)):
            others = list_checkpoints(source)
            example = others[-1] if others else "runs/a/step-00000100"
            raise SettingError(f"--from {source} is no checkpoint: name one, such as {example}")
        self.claim = claim_folder(self.folder, source)
        checkpoints = list_checkpoints(self.folder)
        if not checkpoints and self.claim.source and not source:
            raise SettingError(
                f"--out {self.folder} has no checkpoint yet, and its run began from "
                f"{self.claim.source}: give the same --from, or {ANOTHER}"
            )
        checkpoint = checkpoints[-1] if checkpoints else source and pathlib.Path(source)
        return checkpoint, self.claim.run, read_run_id(self.folder)[1]

    def check_that_it_is_shared(self, text):
        """Raise SettingError unless each rank sees ``text`` in run-id, as rank 0 does."""
        # A network file system may be late by seconds.
        end = time.monotonic() + min(10, distributed_c10d.default_pg_timeout.total_seconds() / 2)
        with raise_on_all_ranks(self.group):
            while read_run_id(self.folder)[1] != text:
                if time.monotonic() > end:
                    raise SettingError(
                        f"--out {self.folder} is not one folder for all machines: rank {_rank()} "
                        f"does not see what rank 0 has written to run-id: choose a shared folder"
                    )
                time.sleep(0.1)

    def load(self, checkpoint):
        """Load a checkpoint in place: into the tensors and the states of their optimizers."""
        advice = f"there is no older checkpoint: {A_NEW_RUN}"
        if step_of(checkpoint) == IMPORTED:
            advice = "import the weights again, into another folder"
        if older := older_checkpoint(checkpoint):
            advice = f"start from the older one: --from {older} and another --out"
        unreadable = self.group, f"{checkpoint} cannot be read", advice
        with raise_on_all_ranks(*unreadable):
            ranks = dist.get_world_size(self.group) if self.group else 1
            reader, stored, saved = open_checkpoint(checkpoint, slice(_rank(), None, ranks))
        names = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
        # A rank of a pipeline has the tensors of its stages only.
        unknown = set.intersection(*gather(names - self.tensors.keys(), self.group))
        with raise_on_all_ranks(self.group):
            self.compare(checkpoint, stored, saved[FIXED], unknown)
        with raise_on_all_ranks(*unreadable):
            read_checkpoint(reader, stored, self.tensors, self.optimizer_of, self.group)
        changed = [
            f"{name} was {saved[CHANGEABLE][name]}, is {value}"
            for name, value in self.changeable.items()
            if saved[CHANGEABLE].get(name, value) != value
        ]
        if (step_of(checkpoint) == IMPORTED or checkpoint.parent != self.folder) and _rank() == 0:
            print(printable(f"starting from {checkpoint}"), flush=True)
        if changed and _rank() == 0:
            print(printable(f"changed since {checkpoint}: {'; '.join(changed)}"), flush=True)

    def compare(self, checkpoint, stored, saved, unknown):
        """Refuse a checkpoint that does not fit this run: its settings that must stay the same are
        ``saved``, it has the tensors ``stored``, and those that no rank knows are ``unknown``."""
        names, same = saved | self.fixed, f"resume with the same, or {A_NEW_RUN}"
        if step_of(checkpoint) == IMPORTED:  # it has the settings of a model only
            names, same = saved, f"give --model {checkpoint.parent}, or another --out"
        if step_of(checkpoint) >= self.stop + (checkpoint.parent == self.folder):
            raise SettingError(
                f"{checkpoint} has finished step {step_of(checkpoint)}, and --steps is "
                f"{self.stop}: raise --steps to train on, or {A_NEW_RUN}"
            )
        for name in names:  # either may have settings that the other lacks
            value = self.fixed.get(name)
            if saved.get(name) != value:
                raise SettingError(
                    f"{name} is {saved.get(name)} in {checkpoint} and {value} in this run: {same}"
                )
        for name, tensor in self.tensors.items():
            entry = stored.get(f"model.{name}")
            there = tuple(entry.size) if entry else "none"
            if there != tuple(tensor.shape):
                raise SettingError(
                    f"{checkpoint} is of another model: {name} has shape {tuple(tensor.shape)} "
                    f"here and {there} there"
                )
        if unknown:
            raise SettingError(
                f"{checkpoint} is of another model: no rank of this run has "
                f"{', '.join(sorted(unknown))}"
            )

    # Saving

    def after_step(self, step, grad_norm):
        """Call it at the end of every step (counted from 0), with the norm of all gradients. It
        saves after every ``every`` steps, after the last step, and when a signal has asked any rank
        to stop. Then ``stopping`` is True on all ranks, and the loop must end."""
        self.norms = self.norms + grad_norm  # stays on the device: only a save waits for it
        if self.vote:
            self.vote.wait()
        self.stopping = bool(self.asked)
        if self.saving and self.saving.done():
            self.wait()
        if self.every and (self.stopping or (step + 1) % self.every == 0 or step + 1 == self.stop):
            self.save(step + 1)
        self.asked = torch.tensor(int(stop_requested()))
        if self.group:  # the next step reads the answer, so that no step waits for it
            self.vote = dist.all_reduce(
                self.asked, dist.ReduceOp.MAX, group=self.group, async_op=True
            )

    @torch.no_grad()
    def save(self, step):
        """Write the checkpoint after ``step`` steps, and remove the oldest beyond ``keep``. Call
        ``resume`` first.

        Raises:
            SettingError: it cannot be written; or a gradient norm, a parameter or an optimizer
                state is not finite. The checkpoints before it are intact.
        """
        self.wait()
        if not self.saves:
            buffers = {f"model.{name}" for name in _buffers_of_modules(self.tensors)}
            named = named_tensors(self.tensors, self.optimizer_of)
            refuse_unlike(named, buffers, self.group)
        self.saves += 1
        _share_buffers(self.tensors, self.group)
        with raise_on_all_ranks(self.group):
            name = not_finite(self.tensors, self.optimizer_of)
            if not math.isfinite(self.norms):
                name = "a gradient norm"
            if name:
                raise SettingError(
                    f"step {step} is not saved, since {name} is not finite: lower --lr if training "
                    f"diverged, or look at the data; the checkpoints before it are intact"
                )
        if self.in_background:
            for name, tensor in named_tensors(self.tensors, self.optimizer_of).items():
                if name not in self.staged:
                    self.staged[name] = torch.empty_like(
                        tensor, device="cpu", pin_memory=tensor.is_cuda
                    )
                self.staged[name].copy_(tensor)
            self.saving = self.background.submit(self.write, self.staged, step)
        else:
            self.write(named_tensors(self.tensors, self.optimizer_of), step)

    def write(self, named, step):
        """Write the checkpoint under a temporary name, and rename it when it is complete."""
        failed = (f"the checkpoint of step {step} could not be written to {self.folder}",
                  "then start again: the ones before it are intact")
        temporary = self.temporary(self.path(step), "tmp")
        try:
            with raise_on_all_ranks(self.background_group, *failed):
                if _rank() == 0:
                    self.claim.check()
                    temporary.mkdir()
            with raise_on_all_ranks(self.background_group, *failed):
                write_checkpoint(
                    temporary, named, step=step, fixed=self.fixed, changeable=self.changeable,
                    group=self.background_group, plans=self.plans,
                )
                if _rank() == 0:
                    self.claim.check()
                    temporary.rename(self.path(step))
        except SettingError:
            if _rank() == 0:
                remove_checkpoint(temporary)  # it fills a disk that is full
            raise
        if _rank() == 0:
            self.remove_oldest()

    def remove_oldest(self):
        """Remove the oldest checkpoints beyond ``keep``, but no imported weights. One that cannot
        be removed stays."""
        trained = [path for path in list_checkpoints(self.folder) if step_of(path) != IMPORTED]
        for old in trained[: -self.keep]:
            try:  # Rename first: if the removal is killed, the rest must not look complete.
                renamed = old.rename(self.temporary(old, "old"))
                self.background.submit(remove_checkpoint, renamed)
            except OSError as error:
                print(printable(f"{old} could not be removed ({error.strerror}), and stays"),
                      flush=True)

    def wait(self):
        """Wait for a save in the background, if there is one; raise what went wrong."""
        if self.saving:
            saving, self.saving = self.saving, None
            saving.result()

    def finish(self):
        """Wait for what runs in the background; call it at the end of a run."""
        self.wait()
        if self.vote:
            self.vote.wait()
        self.background.shutdown()
        if self.had_finished and _rank() == 0:  # a job that was started again, perhaps
            print(printable(f"{self.folder} holds a run that has finished step {self.stop}, its "
                            f"last: raise --steps to train on, or {A_NEW_RUN}"), flush=True)

    def path(self, step):
        return self.folder / f"step-{step:08d}"

    def temporary(self, checkpoint, kind):
        """The name of a checkpoint of this run that is being written, or removed."""
        return checkpoint.with_name(f"{checkpoint.name}.{self.run}.{kind}")


# Ranks


@contextlib.contextmanager
def raise_on_all_ranks(group, failed="", advice=""):
    """If the block fails on one rank of ``group``, all of its ranks raise the same SettingError.
    Without a group: this rank only."""
    problem = None
    try:
        yield
    except Damaged as error:
        problem = f"{error}; {advice}"
    except SettingError as error:
        problem = str(error)
    except (OSError, dcp.CheckpointException) as error:  # the latter on all ranks if one fails
        problem = f"{failed} {reason(error)}; {advice}"
    if problem := next(filter(None, gather(problem, group)), None):
        raise SettingError(problem)


def gather(value, group):
    """The values of all ranks of ``group``."""
    values = [value]
    if group:
        values = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
    return values


def refuse_differences(settings, group):
    """Raise SettingError on all ranks of ``group`` unless all have the same ``settings``, a dict.
    They gather hashes, and the settings only if these differ."""
    settings = {name: str(value) for name, value in settings.items()}
    digest = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()
    if len(set(gather(digest, group))) > 1:
        first, *others = gather(settings, group)
        for rank, other in enumerate(others, 1):
            if difference := name_difference(first, other, rank):
                raise SettingError(difference)


def _share_buffers(tensors, group):
    """Give each buffer the values of the first rank that holds it. BatchNorm's differ between
    ranks, and DCP would save copies of different ranks."""
    if group is None:
        return
    buffers = [name for name, tensor in tensors.items() if _is_buffer(tensor)]
    shared = {}
    for rank, names in enumerate(gather(buffers, group)):
        if new := [name for name in names if name not in shared]:
            values = [[tensors[name].cpu() for name in new] if rank == _rank() else None]
            dist.broadcast_object_list(values, rank, group)
            shared |= zip(new, values[0])
    for name in buffers:
        tensors[name].copy_(shared[name])


def refuse_unlike(tensors, buffers, group):
    """Raise SettingError on all ranks of ``group`` if a plain tensor has other values on another
    rank: only those of one rank would be saved. It names the tensor. ``buffers``: names of those
    that may differ, as BatchNorm's: see ``_share_buffers``."""
    if group is None:
        return
    plain = {name: x for name, x in tensors.items()
             if not isinstance(x, DTensor) and name not in buffers}
    sums = {name: (tuple(x.shape), _sum_of_bits(x)) for name, x in plain.items()}
    digest = hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()
    if len(set(gather(digest, group))) == 1:
        return
    first = {}  # by name: the first rank that has it, and its values
    for rank, of_rank in enumerate(gather(sums, group)):  # one of a pipeline has its stages only
        for name, values in of_rank.items():
            before, expected = first.setdefault(name, (rank, values))
            if values != expected:
                raise SettingError(
                    f"{name} has other values on rank {rank} than on rank {before}, and a "
                    f"checkpoint holds one: if each rank keeps a part of it, make it a DTensor, as "
                    f"torch.zeros_like(parameter) does; otherwise let the ranks agree"
                )


def _buffers_of_modules(tensors):
    """The names of those of ``tensors`` that are buffers of modules. Nothing in a tensor tells it
    from an average of weights: so this asks all modules that exist."""
    modules = [x for x in gc.get_objects() if issubclass(type(x), torch.nn.Module)]
    buffers = {id(buffer) for module in modules for buffer in module.buffers(recurse=False)}
    return {name for name, tensor in tensors.items() if id(tensor) in buffers}


def _sum_of_bits(tensor):
    """Of two tensors with other values it differs, but for chance. On a GPU it costs one pass."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(whole).sum(dtype=torch.int64).item()


def _settings_of(optimizers):
    """The settings of all parameter groups but their learning rates, such as the momentum: a list
    with a value for each group, or the value if all groups have the same."""
    groups = [group for each in optimizers for group in each.param_groups]
    settings = {}
    for name in {name: None for group in groups for name in group}:
        if name not in ("params", "param_names", "lr", "initial_lr"):
            values = [group.get(name) for group in groups]
            settings[name] = values[0] if values.count(values[0]) == len(values) else values
    return settings


def _is_buffer(tensor):
    return not isinstance(tensor, (torch.nn.Parameter, DTensor))


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0
