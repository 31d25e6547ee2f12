"""Checkpoints that any script writes and any other reads, at any number of ranks.

A run folder holds ``step-00000100/`` for each of the newest checkpoints. In it are the shards that
``torch.distributed.checkpoint`` (DCP) wrote (each rank writes its own, in parallel), the SHA-256 of
each file, and ``run.json``: the settings of the run. ``model.NAME`` is a tensor of the model,
``optimizer.NAME.exp_avg`` an optimizer state of that tensor. How tensors were sharded when they
were saved does not matter when they are loaded.

A checkpoint is written under a temporary name and renamed when all of it is on disk: a folder named
step-NNNNNNNN is always complete, and finite. Loading runs no code that a file chose (see
``checkpoint_files.py``).
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
import socket
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from common.checkpoint_files import (
    BROKEN, SafeReader, find_damage, hashed_files, open_regular, write_hashes, write_text
)
from common.errors import SettingError, printable
from common.replicas import NOT_HELD, first_difference, sum_of_bits
from common.signals import asked, listen

MUST, MAY, COUNTS = "must stay the same", "may change", "the index has"  # the keys of run.json


class Checkpoints:
    """The checkpoints of one run. All ranks call each method.

    Args:
        folder: the run folder; with several machines, one that they share.
        run: a dict of the settings that must stay the same when the run is resumed, such as the
            seed and the batch size.
        may_change: a dict of the settings that may change when the run is resumed, such as the
            learning rate. Changes are printed.
        tensors: a state dict of the trained tensors themselves, not of copies, whole or DTensors,
            such as ``model.state_dict(keep_vars=True)``.
        optimizer: its states are saved under the names of the tensors that it updates.
        stop: number of steps in the whole run; the last step saves too.
        every: steps between checkpoints; 0: save none at all.
        keep: how many of the newest checkpoints to keep.
        resume: True: resume from the newest checkpoint, if there is one. A number: resume from the
            checkpoint of that step. False: start afresh. Checkpoints that are newer than the one
            that the run resumes from move into ``previous-N``.
        in_background: write while training continues. It takes host memory for a copy of what this
            rank writes.
        check_replicas: steps between checks that the replicas on all ranks are equal; 0: no checks.
    """

    def __init__(self, folder, run, tensors, optimizer, *, stop, may_change=None, every=100, keep=2,
                 resume=True, in_background=False, check_replicas=0):
        self.folder, self.run = pathlib.Path(folder), _as_read(
            run | {"the optimizer": type(optimizer).__name__}
        )
        self.may_change = _as_read(may_change or {})
        self.tensors, self.optimizer = tensors, optimizer
        self.stop, self.every, self.keep, self.from_step = stop, every, keep, resume
        self.in_background, self.check_replicas = in_background, check_replicas
        # The running all-reduce that asks whether any rank got a signal, and the last answer
        self.asking, self.stopping = None, False
        self.saving = None  # (future, temporary path, final path) of a save in the background
        self.aside = concurrent.futures.ThreadPoolExecutor(1)  # for what the loop does not wait for
        self.removing = None
        self.staged = {}
        self.stager = BlockingAsyncStager(cache_staged_state_dict=True)
        # For collectives on the CPU, which wait for no GPU. The thread needs a group of its own.
        self.group = self.group_aside = None
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo")
            self.group_aside = dist.new_group(backend="gloo") if in_background else self.group
        self.written, self.buffers, self.replicas = _share_out(tensors, self.group)

    def resume(self):
        """Lock and prepare the run folder, and load a complete checkpoint if there is one. Returns
        the number of steps done: 0 for a new run. See ``load``. From now on signals ask the run to
        stop (see ``signals.py``).

        Raises:
            SettingError: the folder cannot be written, another run uses it, its run has finished,
                or ranks have different settings.
        """
        problem, done = None, 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
            if _rank() == 0:
                self.lock = _lock(self.folder)
                done = self._tidy()
        except SettingError as error:
            problem = str(error)
        except OSError as error:
            problem = (
                f"--out {self.folder} cannot be written ({error.strerror}): choose another folder"
            )
        _raise_together(problem, self.group)
        done = self._agree_on(done)
        if done >= self.stop:
            raise SettingError(
                f"{self.folder} holds a run that has finished step {done}, and --steps is "
                f"{self.stop}: raise --steps to train on, or start anew with --no-resume or "
                f"another --out"
            )
        if done:
            load(
                self._path(done), self.run, self.tensors, self.optimizer,
                may_change=self.may_change, group=self.group,
            )
            if _rank() == 0:
                newer = [path for path in list_checkpoints(self.folder) if step_of(path) > done]
                _move_aside(self.folder, newer)
        listen()
        return done

    def _tidy(self):
        """Rank 0: remove what earlier runs left behind. Returns the step to resume from."""
        for cut_short in [*self.folder.glob("step-*.tmp"), *self.folder.glob("step-*.old")]:
            _remove(cut_short)
        steps = [step_of(path) for path in list_checkpoints(self.folder)]
        done = max(steps, default=0) if self.from_step is True else int(self.from_step)
        if done and done not in steps:
            raise SettingError(
                f"--resume-from {done}: {self.folder} has no such checkpoint; it has "
                f"{', '.join(map(str, steps)) or 'none'}"
            )
        if not done:
            kinds = "step-*", "*.json", "*.jsonl", "events.out.*"  # the last: TensorBoard's
            earlier = [self.folder.glob(kind) for kind in kinds]
            _move_aside(self.folder, [path for paths in earlier for path in paths])
        return done

    def _path(self, step):
        return self.folder / f"step-{step:08d}"

    def _agree_on(self, done):
        """Compare the settings of all ranks. Returns the step from which rank 0 resumes, once this
        rank sees its checkpoint too: a network file system may show it later on other machines."""
        first = {"step": done} | self.run
        if dist.is_initialized():
            first = json.loads(_broadcast_text(json.dumps(first), self.group))
        done = first.pop("step")
        problem, patience = None, time.monotonic() + 60
        for key in first | self.run:
            if (here := self.run.get(key)) != first.get(key):
                problem = problem or (
                    f"{key} is {first.get(key)} on rank 0 and {here} on rank {_rank()}: start all "
                    f"ranks with the same"
                )
        while done and not problem and not self._path(done).exists():
            if time.monotonic() > patience:
                problem = (
                    f"rank 0 sees {self._path(done)} and rank {_rank()} does not: --out must be "
                    f"one folder for all machines"
                )
            time.sleep(0.1)
        _raise_together(problem, self.group)
        return done

    def due(self, step):
        """Whether a save follows ``step`` (counted from 0): after every ``every`` steps, after the
        last step, and when a signal has asked any rank to stop."""
        if self.asking:
            flag, work = self.asking
            if work:
                work.wait()
            self.asking, self.stopping = None, bool(flag)
        return self.every > 0 and (
            self.stopping or (step + 1) % self.every == 0 or step + 1 == self.stop
        )

    def after_step(self, step):
        """Save if a checkpoint is due; call it at the end of every step. Returns True if a signal
        has asked the run to stop: then the loop must end."""
        if self.saving and self.saving[0].done():
            self.publish_saved()
        if self.check_replicas and (step + 1) % self.check_replicas == 0:
            self.compare_replicas(step + 1)
        if self.due(step):
            self.save(step + 1)
        if not self.stopping:
            # The next step reads the answer, so that no step waits for it.
            flag, work = torch.tensor(int(asked() is not None)), None
            if dist.is_initialized():
                work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group, async_op=True)
            self.asking = flag, work
        return self.stopping

    def compare_replicas(self, step):
        """Check that replicas are equal on all ranks: parameters, buffers and optimizer states. Not
        running statistics (BatchNorm's), which differ between ranks until a save.

        Raises:
            SettingError: ranks hold different values.
        """
        held = {}  # by place: a sum, on the device
        for place, (name, part) in enumerate(self.replicas):
            tensor = self.tensors.get(name)
            if tensor is not None and _part(tensor) == part and ".running_" not in f".{name}":
                states = self.optimizer.state.get(tensor, {})
                held[2 * place] = sum_of_bits([_local(tensor)])
                held[2 * place + 1] = sum_of_bits([_local(states[key]) for key in sorted(states)])
        sums = torch.full([2 * len(self.replicas)], NOT_HELD)
        if held:
            device = held[min(held)].device
            sums[list(held)] = torch.stack([total.to(device) for total in held.values()]).cpu()
        if found := dist.is_initialized() and first_difference(sums, self.group):
            place, ranks = found
            kind, name = ("", "the optimizer's states of ")[place % 2], self.replicas[place // 2][0]
            ranks = " but not with ".join(f"rank {', '.join(map(str, equal))}" for equal in ranks)
            raise SettingError(
                f"after step {step} {kind}{name} should be equal and is not: {ranks}; the memory "
                f"or the network of a rank is at fault: start again from the last checkpoint"
            )

    def save(self, step):
        """Write the checkpoint after ``step`` steps, and remove the oldest beyond ``keep``.

        Raises:
            SettingError: it cannot be written, or a parameter or an optimizer state is not finite;
                the checkpoints before it are intact.
        """
        self.publish_saved()
        # One rank writes each buffer: first all ranks take the values of the first rank that holds
        # the buffer.
        for name, (source, group) in self.buffers.items():
            dist.broadcast(self.tensors[name], source, group)
        own = {name: self.tensors[name] for name in self.written}
        problem = None
        if name := _first_not_finite(own, self.optimizer):
            problem = (
                f"step {step} is not saved, since {name} is not finite: training diverged; lower "
                f"--lr; the checkpoints before it are intact"
            )
        _raise_together(problem, self.group)
        final = self._path(step)
        temporary = final.with_suffix(".tmp")
        with _in_words(step, temporary, self.group):
            if _rank() == 0:
                temporary.mkdir()
        if not temporary.exists():
            raise SettingError(
                f"--out {self.folder} is not one folder for all machines: choose a shared one"
            )
        tensors = _with_states(own, self.optimizer)
        if self.in_background:
            tensors = self.stage(tensors)
            self.saving = self.aside.submit(self.write, tensors, temporary, step), temporary, final
        else:
            self.write(tensors, temporary, step)
            with _in_words(step, temporary, self.group):
                self.publish(temporary, final)

    def write(self, tensors, folder, step):
        """Write a state dict into ``folder``: each rank writes its ``tensors``."""
        group = self.group_aside
        with _in_words(step, folder, group), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns that a single process saves alone
            index = dcp.save(
                tensors, storage_writer=dcp.FileSystemWriter(folder), process_group=group,
                planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
            )
            names = [path.name for path in folder.glob(f"__{_rank()}_*.distcp")]
            if _rank() == 0:
                settings = {MUST: self.run, MAY: self.may_change, COUNTS: _counts(index)}
                write_text(folder / "run.json", json.dumps(settings, indent=1))
                names += [".metadata", "run.json"]
            write_hashes(folder, names)

    def stage(self, tensors):
        """Copy ``tensors`` to host memory, which the first save allocates, pinned if they are on a
        GPU. Returns the copies."""
        if any(tensor.is_cuda for tensor in tensors.values()):
            return self.stager.stage(tensors)
        for name, tensor in tensors.items():
            if name not in self.staged:
                self.staged[name] = tensor.clone()
            self.staged[name].copy_(tensor)
        return self.staged

    def publish_saved(self):
        """Wait for a save in the background, and publish it."""
        if self.saving:
            (future, temporary, final), self.saving = self.saving, None
            future.result()
            with _in_words(step_of(final), temporary, None):
                self.publish(temporary, final)

    def finish(self):
        """Wait for what runs in the background; call it at the end of a run."""
        self.publish_saved()
        if self.asking and self.asking[1]:
            self.asking[1].wait()
        if self.removing:
            self.removing.result()

    def publish(self, temporary, final):
        """Rank 0 renames a checkpoint that all ranks have written. A thread removes older ones."""
        if _rank() == 0:
            _flush_to_disk(temporary)
            temporary.rename(final)
            _flush_to_disk(self.folder)
            for old in list_checkpoints(self.folder)[: -self.keep]:
                # Rename first: if the removal is killed, the rest must not look complete.
                renamed = old.rename(old.with_suffix(".old"))
                self.removing = self.aside.submit(_remove, renamed)


def list_checkpoints(folder):
    """The complete checkpoints of a run folder, oldest first."""
    paths = pathlib.Path(folder).glob("step-*")
    return sorted((path for path in paths if re.fullmatch(r"step-\d+", path.name)), key=step_of)


def step_of(checkpoint):
    """The number of steps after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


@torch.no_grad()
def load(checkpoint, run, tensors, optimizer, may_change=None, group=None):
    """Load a checkpoint in place: into ``tensors`` and the states of ``optimizer``, whatever their
    sharding. For the arguments see ``Checkpoints``; ``group`` is one for tensors on the CPU.

    Raises:
        SettingError: it is of another run or model, damaged, or not to be trusted.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    damage = find_damage(checkpoint, hashed_files(checkpoint)[_rank() :: ranks])
    _raise_together(damage and f"{damage}; {_instead(checkpoint)}", group)
    reader, stored, saved = _open(checkpoint)
    for key, value in _as_read(run).items():
        if (before := saved[MUST].get(key)) != value:
            raise SettingError(
                f"{key} is {before} in {checkpoint} and {value} in this run: resume with the same, "
                f"or start anew with --no-resume or another --out"
            )
    for name, tensor in tensors.items():
        entry = stored.get(f"model.{name}")
        if entry is None or entry.size != tensor.shape:
            raise SettingError(
                f"{checkpoint} is of another model: {name} has shape {tuple(tensor.shape)} here "
                f"and {tuple(entry.size) if entry else 'none'} there"
            )
    if unknown := _names_that_no_rank_has(stored, tensors):
        raise SettingError(
            f"{checkpoint} is of another model: no rank of this run has {', '.join(unknown)}"
        )
    _make_states(stored, tensors, optimizer)
    _load(_with_states(tensors, optimizer), reader, group)
    changes = [
        f"{key} was {saved[MAY].get(key)}, is {value}"
        for key, value in _as_read(may_change or {}).items() if saved[MAY].get(key) != value
    ]
    if changes and _rank() == 0:
        print(printable(f"changed since {checkpoint}: {'; '.join(changes)}"), flush=True)


def read(checkpoint, prefix="model."):
    """The tensors of a checkpoint whose names start with ``prefix``, whole, on the CPU, by the rest
    of their names: with the default, a ``state_dict`` of the model. One process is enough.

    Raises:
        SettingError: it is not a checkpoint, or not to be trusted.
    """
    shapes, read_one, _ = open_tensors(checkpoint, prefix)
    return {name: read_one(name) for name in shapes}


def open_tensors(checkpoint, prefix="model.", around=iter):
    """The tensors of a checkpoint whose names start with ``prefix``, to be read one at a time.

    ``around`` wraps the list of files while their hashes are checked, to show a progress bar.
    Returns three things: a dict from the rest of each name to the shape and the torch.dtype; a
    function of such a name, which reads that tensor, whole, on the CPU; and the settings of the run
    that must stay the same, a dict.

    Raises:
        SettingError: it is not a checkpoint, damaged, or not to be trusted.
    """
    checkpoint = pathlib.Path(checkpoint)
    for name in around(hashed_files(checkpoint)):
        if damage := find_damage(checkpoint, [name]):
            raise SettingError(f"{damage}; {_instead(checkpoint)}")
    reader, stored, saved = _open(checkpoint)
    shapes = {
        name.removeprefix(prefix): (tuple(entry.size), entry.properties.dtype)
        for name, entry in stored.items() if name.startswith(prefix)
    }

    def read_one(name):
        shape, dtype = shapes[name]
        tensors = {prefix + name: torch.empty(shape, dtype=dtype)}
        _load(tensors, reader, alone=True)  # even if there is a process group
        return tensors[prefix + name]

    return shapes, read_one, saved[MUST]


def _open(checkpoint):
    """Returns DCP's reader, the metadata of each stored tensor, and the content of run.json."""
    try:
        with open_regular(checkpoint / "run.json") as file:
            saved = json.load(file)
        if not all(isinstance(saved[key], dict) for key in (MUST, MAY, COUNTS)):
            raise ValueError("run.json holds no settings")
        reader = SafeReader(checkpoint)
        index = reader.read_metadata()
        if saved[COUNTS] != _counts(index):
            raise ValueError(f"its index has {_counts(index)}, and run.json {saved[COUNTS]}")
    except BROKEN as error:
        raise SettingError(
            f"{checkpoint} is not a checkpoint of these scripts ({type(error).__name__}: {error}); "
            f"{_instead(checkpoint)}"
        ) from None
    return reader, index.state_dict_metadata, saved


def _counts(index):
    """The numbers of tensors and parts in an index; run.json has them too, to notice a loss."""
    entries = index.state_dict_metadata.values()
    return {"tensors": len(entries), "parts": sum(len(entry.chunks) for entry in entries)}


def _instead(checkpoint):
    """What to do when a checkpoint is broken."""
    older = [
        path for path in list_checkpoints(checkpoint.parent) if step_of(path) < step_of(checkpoint)
    ] if re.fullmatch(r"step-\d+", checkpoint.name) else []
    if not older:
        return "there is no older checkpoint: start anew with --no-resume or another --out"
    return f"use the older {older[-1]}: --resume-from {step_of(older[-1])}"


def _load(tensors, reader, group=None, alone=False):
    try:
        with warnings.catch_warnings():  # DCP warns that a single process loads alone
            warnings.simplefilter("ignore")
            dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=alone)
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise SettingError(
            f"{reader.path} cannot be read (rank {rank}: {cause}); "
            f"{_instead(pathlib.Path(reader.path))}"
        ) from None


@contextlib.contextmanager
def _in_words(step, temporary, group):
    """Around a part of a save: turn a failure into a SettingError on all ranks of ``group``, and
    remove what has been written."""
    problem = None
    try:
        yield
    except dcp.CheckpointException as error:  # all ranks raise it if one fails
        rank, (cause, _) = next(iter(error.failures.items()))
        problem = f"rank {rank}: {cause}"
    except OSError as error:
        problem = f"rank {_rank()}: {error}"
    if problem:
        problem = (
            f"the checkpoint of step {step} could not be written to {temporary.parent} "
            f"({problem}); the ones before it are intact: make room and start again"
        )
    try:
        _raise_together(problem, group)
    except SettingError:
        if _rank() == 0:
            _remove(temporary)
        raise


def _with_states(tensors, optimizer):
    """All tensors of a checkpoint, by their names in it."""
    named = {}
    for name, tensor in tensors.items():
        named[f"model.{name}"] = tensor.detach()
        for key, value in optimizer.state.get(tensor, {}).items():
            named[f"optimizer.{name}.{key}"] = value
    return named


def _share_out(tensors, group):
    """Decide which rank writes what. One of the ranks that hold equal parts writes them, and all
    ranks write about as much. Returns the names of the tensors whose part this rank writes; for
    each buffer that this rank and others hold, the first such rank and the group of these ranks;
    and what several ranks hold, as pairs of a name and a part.
    """
    own = [
        (name, _part(tensor), _local(tensor).nbytes, _is_buffer(tensor))
        for name, tensor in tensors.items()
    ]
    of_all = [own]
    if dist.is_initialized():
        of_all = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, own, group=group)
    holders = {}
    for rank, parts in enumerate(of_all):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    written, load = set(), [0] * len(of_all)
    buffers, groups = {}, {}
    for (name, _, size, is_buffer), ranks in sorted(holders.items(), key=lambda item: -item[0][2]):
        writer = min(ranks, key=load.__getitem__)
        load[writer] += size
        if writer == _rank():
            written.add(name)
        if is_buffer and len(ranks) > 1:
            ranks = tuple(ranks)
            if ranks not in groups:
                groups[ranks] = dist.new_group(ranks)  # all ranks call it, in the same order
            if _rank() in ranks:
                buffers[name] = ranks[0], groups[ranks]
    replicas = [part[:2] for part, ranks in holders.items() if len(ranks) > 1]
    return [name for name in tensors if name in written], buffers, replicas


def _first_not_finite(tensors, optimizer):
    """The name of the first parameter that is not finite, or whose optimizer states are not."""
    for name, tensor in tensors.items():
        if not _is_buffer(tensor):  # a buffer, such as a mask, may hold -inf
            for value in (tensor, *optimizer.state.get(tensor, {}).values()):
                value = _local(value)
                if value.is_floating_point() and value.numel():
                    # aminmax needs little memory, and returns NaN if there is one.
                    if not torch.stack(value.aminmax()).isfinite().all():
                        return name


def _raise_together(problem, group):
    """Raise a SettingError on all ranks of ``group`` if one of them has a ``problem``. Without a
    group: on this rank only."""
    problems = [problem]
    if group is not None:
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    if problem := next(filter(None, problems), None):
        raise SettingError(problem)


def _broadcast_text(text, group):
    """The text of rank 0, sent to all ranks without pickle."""
    content = torch.tensor(list(text.encode()), dtype=torch.uint8)
    size = torch.tensor(len(content))
    dist.broadcast(size, 0, group)
    if _rank():
        content = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(content, 0, group)
    return bytes(content.tolist()).decode()


def _part(tensor):
    """Which part of a tensor this rank holds: its place along the dimensions of the mesh that split
    the tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements)
    return tuple(place for place, placement in places if not placement.is_replicate())


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_buffer(tensor):
    return not isinstance(tensor, (torch.nn.Parameter, DTensor))


def _names_that_no_rank_has(stored, tensors):
    """The names of stored tensors of the model into which no rank loads."""
    names = sorted(name for name in stored if name.startswith("model."))
    found = [name.removeprefix("model.") in tensors for name in names]
    found = torch.tensor(found, dtype=torch.uint8)
    if dist.is_initialized():  # a pipeline rank has the tensors of its stages only
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return [name.removeprefix("model.") for name, has in zip(names, found.tolist()) if not has]


def _make_states(stored, tensors, optimizer):
    """Allocate the stored optimizer states: an optimizer has none before its first step."""
    for key, entry in stored.items():
        if key.startswith("optimizer."):
            name, state = key.removeprefix("optimizer.").rsplit(".", 1)
            if name in tensors:
                tensor = tensors[name]
                optimizer.state[tensor][state] = (
                    torch.zeros_like(tensor) if entry.size == tensor.shape
                    else torch.zeros(
                        entry.size, dtype=entry.properties.dtype, device=tensor.device
                    )
                )


def _lock(folder):
    """Lock the run folder until this process ends, however it ends. Returns the open file, which
    must stay open. The lock is a record lock: children do not inherit it, and NFS has it too.

    Raises:
        SettingError: another process has it.
    """
    file = open(folder / "lock", "a+")
    patience = time.monotonic() + 5  # for the run before, if it is just ending
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                print(f"{folder} cannot be locked ({error.strerror}): make sure that no other run "
                      f"uses it", file=sys.stderr)
                return file
            if time.monotonic() > patience:
                file.seek(0)
                raise SettingError(
                    f"--out {folder} is in use by {file.read(200).strip()}: wait until that run "
                    f"has ended, or choose another folder"
                ) from None
            time.sleep(0.1)
            continue
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        return file


def _remove(path):
    """Remove a checkpoint; what cannot be removed stays."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _move_aside(folder, paths):
    """Move files of an earlier run into the first free ``previous-N`` of the folder."""
    if paths:
        number = 1
        while (folder / f"previous-{number}").exists():
            number += 1
        (folder / f"previous-{number}").mkdir()
        for path in paths:
            path.rename(folder / f"previous-{number}" / path.name)


def _flush_to_disk(folder):
    """Make the names in a folder survive a power cut (DCP flushes the files themselves)."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


def _as_read(settings):
    """The settings as a JSON file returns them: tuples become lists, keys become strings."""
    return json.loads(json.dumps(settings, default=str))
