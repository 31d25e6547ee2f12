"""Checkpoints that any script writes and any other reads, at any number of ranks.

A run folder holds ``step-00000100/`` for each of the newest checkpoints. In it are the shards that
``torch.distributed.checkpoint`` (DCP) wrote, every rank its own in parallel, and ``run.json``: the
settings that must stay the same when the run is resumed. ``model.NAME`` is a tensor of the model,
``optimizer.NAME.exp_avg`` a state that the optimizer keeps for it. How tensors were sharded when
they were saved does not matter when they are loaded.

A checkpoint is written under a temporary name and renamed when all of it is on disk: a folder named
step-NNNNNNNN is always complete. Loading runs no code that a file chose (see ``_SafeReader``).
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import pickle
import re
import shutil
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from common.errors import SettingError

# What reading a broken file raises.
BROKEN = OSError, ValueError, TypeError, AttributeError, EOFError, pickle.UnpicklingError


class Checkpoints:
    """The checkpoints of one run. All ranks call each method.

    Args:
        folder: the run folder; with several machines, one that they share.
        run: a dict of the settings that must stay the same when the run is resumed, such as the
            seed and the batch size.
        tensors: a state dict of the very tensors that are trained, whole or DTensors, such as
            ``model.state_dict(keep_vars=True)``.
        optimizer: its states are saved under the names of the tensors that it updates.
        stop: number of steps in the whole run; the last step saves too.
        every: steps between checkpoints; 0: save none at all.
        keep: how many of the newest checkpoints to keep.
        resume: resume from the newest checkpoint. Without one, or with False, move the files of an
            earlier run into ``previous-N`` and start afresh.
        in_background: write while training continues. It takes memory on the host for what this
            rank writes.
    """

    def __init__(self, folder, run, tensors, optimizer, *, stop, every=100, keep=2, resume=True,
                 in_background=False):
        run = run | {"the optimizer": type(optimizer).__name__}
        # As it comes back from the file: tuples are lists, keys are strings.
        self.folder, self.run = pathlib.Path(folder), json.loads(json.dumps(run, default=str))
        self.tensors, self.optimizer = tensors, optimizer
        self.stop, self.every, self.keep, self.from_newest = stop, every, keep, resume
        self.in_background = in_background
        self.saving = None  # (future, temporary path, final path) of a save in the background
        self.aside = concurrent.futures.ThreadPoolExecutor(1)  # for what the loop need not wait for
        self.removing = None
        self.staged = {}
        self.stager = BlockingAsyncStager(cache_staged_state_dict=True)
        # Saving in the background runs collectives in a thread: they need a group of their own.
        self.group = None
        if in_background and dist.is_initialized():
            self.group = dist.new_group(backend="gloo")
        self.written, self.buffers = _share_out(tensors)

    def resume(self):
        """Prepare the run folder, and load its newest complete checkpoint if there is one. Returns
        the number of steps done: 0 for a new run. See ``load``.

        Raises:
            SettingError: the folder cannot be written, or its run has finished.
        """
        folder = self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            if _rank() == 0:
                for cut_short in [*folder.glob("step-*.tmp"), *folder.glob("step-*.old")]:
                    shutil.rmtree(cut_short)
                if not self.from_newest or not list_checkpoints(folder):
                    _move_aside(folder)
        except OSError as error:
            raise SettingError(
                f"--out {folder} cannot be written ({error.strerror}): choose another folder"
            ) from None
        _barrier()
        done = self._newest()
        if not done:
            return 0
        if done >= self.stop:
            raise SettingError(
                f"{folder} holds a run that has finished step {done}, and --steps is {self.stop}: "
                f"raise --steps to train on, or start anew with --no-resume or another --out"
            )
        load(self._path(done), self.run, self.tensors, self.optimizer)
        return done

    def _path(self, step):
        return self.folder / f"step-{step:08d}"

    def _newest(self):
        """The step of the newest checkpoint, 0 if there is none. Rank 0 decides: on a network file
        system another machine may not see yet what one machine sees."""
        steps = [step_of(path) for path in list_checkpoints(self.folder)]
        newest = torch.tensor(max(steps, default=0))
        if dist.is_initialized():
            dist.broadcast(newest, 0)
        newest, patience = int(newest), time.monotonic() + 60
        while newest and not self._path(newest).exists():
            if time.monotonic() > patience:
                raise SettingError(
                    f"rank 0 sees {self._path(newest)} and rank {_rank()} does not: --out must be "
                    f"one folder for all machines"
                )
            time.sleep(0.1)
        return newest

    def due(self, step):
        """Whether ``step`` (from 0) is followed by a save: every ``every`` steps, and the last."""
        return self.every > 0 and ((step + 1) % self.every == 0 or step + 1 == self.stop)

    def after_step(self, step):
        """Save if a checkpoint is due; call it at the end of every step."""
        if self.saving and self.saving[0].done():
            self.publish_saved()
        if self.due(step):
            self.save(step + 1)

    def save(self, step):
        """Write the checkpoint after ``step`` steps, and remove the oldest beyond ``keep``.

        Raises:
            SettingError: it cannot be written; the checkpoints before it are intact.
        """
        self.publish_saved()
        # DCP takes equal tensors from different ranks: first make buffers equal, to those of the
        # first rank that holds a copy.
        for name, (source, group) in self.buffers.items():
            dist.broadcast(self.tensors[name], source, group)
        final = self._path(step)
        temporary = final.with_suffix(".tmp")
        if _rank() == 0:
            temporary.mkdir()
            (temporary / "run.json").write_text(json.dumps(self.run, indent=1))
        _barrier()
        if not temporary.exists():
            raise SettingError(
                f"--out {self.folder} is not one folder for all machines: choose a shared one"
            )
        own = {name: self.tensors[name] for name in self.written}
        tensors = _with_states(own, self.optimizer)
        with _in_words(step, self.folder):
            if self.in_background:
                tensors = self.stage(tensors)
                self.saving = self.aside.submit(self.write, tensors, temporary), temporary, final
            else:
                self.write(tensors, temporary)
                self.publish(temporary, final)
        _barrier()

    def write(self, tensors, folder):
        """Write a state dict into ``folder``: each rank what it holds in ``tensors``."""
        with warnings.catch_warnings():  # DCP warns that a single process saves alone
            warnings.simplefilter("ignore")
            dcp.save(
                tensors, storage_writer=dcp.FileSystemWriter(folder), process_group=self.group,
                planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
            )

    def stage(self, tensors):
        """Copies of ``tensors`` on the host, in memory that is allocated at the first save, and
        pinned if they are on a GPU."""
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
            with _in_words(step_of(final), self.folder):
                future.result()
            self.publish(temporary, final)

    def finish(self):
        """Wait for what runs in the background; call it at the end of a run."""
        self.publish_saved()
        if self.removing:
            self.removing.result()

    def publish(self, temporary, final):
        """Rank 0 renames a checkpoint that all ranks have written, and removes older ones aside."""
        if _rank() == 0:
            _flush_to_disk(temporary)
            temporary.rename(final)
            _flush_to_disk(self.folder)
            for old in list_checkpoints(self.folder)[: -self.keep]:
                # Rename first: if the removal is killed, the rest must not look complete.
                renamed = old.rename(old.with_suffix(".old"))
                self.removing = self.aside.submit(shutil.rmtree, renamed, ignore_errors=True)


def list_checkpoints(folder):
    """The complete checkpoints of a run folder, oldest first."""
    paths = pathlib.Path(folder).glob("step-*")
    return sorted((path for path in paths if re.fullmatch(r"step-\d+", path.name)), key=step_of)


def step_of(checkpoint):
    """The number of steps after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


@torch.no_grad()
def load(checkpoint, run, tensors, optimizer):
    """Load a checkpoint in place: into ``tensors`` and the states of ``optimizer``, whatever their
    sharding. For the arguments see ``Checkpoints``.

    Raises:
        SettingError: it is of another run or model, or not to be trusted.
    """
    reader, stored, saved = _open(checkpoint)
    for key, value in run.items():
        if saved.get(key) != value:
            raise SettingError(
                f"{key} is {saved.get(key)} in {checkpoint} and {value} in this run: resume with "
                f"the same, or start anew with --no-resume or another --out"
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
    _load(_with_states(tensors, optimizer), reader)


def read(checkpoint, prefix="model."):
    """The tensors of a checkpoint whose names start with ``prefix``, whole, on the CPU, by the rest
    of their names: with the default, a ``state_dict`` of the model. One process is enough.

    Raises:
        SettingError: it is not a checkpoint, or not to be trusted.
    """
    reader, stored, _ = _open(pathlib.Path(checkpoint))
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items() if name.startswith(prefix)
    }
    _load(tensors, reader)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _open(checkpoint):
    """Returns DCP's reader, the metadata of each stored tensor, and the content of run.json."""
    try:
        saved = json.loads((checkpoint / "run.json").read_text())
        reader = _SafeReader(checkpoint)
        stored = reader.read_metadata().state_dict_metadata
    except BROKEN as error:
        raise SettingError(f"{checkpoint} is not a checkpoint of these scripts: {error}") from None
    for name, entry in stored.items():
        if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
            raise SettingError(f"{checkpoint} is not to be trusted: {name} is not a tensor")
    return reader, stored, saved


def _load(tensors, reader):
    with warnings.catch_warnings():  # DCP warns that a single process loads alone
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=reader)


@contextlib.contextmanager
def _in_words(step, out):
    """Around a save: turn a failure into a SettingError."""
    try:
        yield
    except dcp.CheckpointException as error:  # raised on all ranks, though one failed
        rank, (cause, _) = next(iter(error.failures.items()))
        raise SettingError(
            f"the checkpoint of step {step} could not be written to {out} (rank {rank}: {cause}); "
            f"the ones before it are intact: make room and start again"
        ) from None


def _with_states(tensors, optimizer):
    """Everything that a checkpoint holds, by its name there."""
    named = {}
    for name, tensor in tensors.items():
        named[f"model.{name}"] = tensor.detach()
        for key, value in optimizer.state.get(tensor, {}).items():
            named[f"optimizer.{name}.{key}"] = value
    return named


def _share_out(tensors):
    """Who writes what. Returns the names of the tensors whose part on this rank this rank writes:
    of the ranks that hold equal parts one does, and all write about as much. And for each buffer of
    this rank of which others hold copies, the first such rank and their group.
    """
    own = [
        (name, _part(tensor), _local(tensor).nbytes, _is_buffer(tensor))
        for name, tensor in tensors.items()
    ]
    of_all = [own]
    if dist.is_initialized():
        of_all = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, own)
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
    return [name for name in tensors if name in written], buffers


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


class _SafeReader(dcp.FileSystemReader):
    """DCP's reader, but its index, a pickle, may name only the classes that DCP writes.

    DCP itself reads tensors with ``weights_only=True``. Other values, which it would unpickle, are
    refused by ``_open``.
    """

    def read_metadata(self, *args, **kwargs):
        with (pathlib.Path(self.path) / ".metadata").open("rb") as file:
            return _MetadataUnpickler(file).load()


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        written_by_dcp = (
            (module == "torch.distributed.checkpoint.metadata" and name in _METADATA_CLASSES)
            or (module, name) in _OTHER_CLASSES
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        )
        if not written_by_dcp:
            raise pickle.UnpicklingError(
                f"its index asks for {module}.{name}, which DCP never writes"
            )
        return super().find_class(module, name)


_METADATA_CLASSES = {
    "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
    "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
}
_OTHER_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def _move_aside(out):
    """Move the files of an earlier run into the first free ``previous-N`` of the folder."""
    earlier = [*out.glob("step-*"), *out.glob("*.json"), *out.glob("*.jsonl")]
    if earlier:
        number = 1
        while (out / f"previous-{number}").exists():
            number += 1
        (out / f"previous-{number}").mkdir()
        for path in earlier:
            path.rename(out / f"previous-{number}" / path.name)


def _flush_to_disk(folder):
    """Make the names in a folder survive a power cut (DCP flushes the files themselves)."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier():
    if dist.is_initialized():
        dist.barrier()
