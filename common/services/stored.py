"""A checkpoint on disk: which files it has, how they are written, and how they are read.

It is a folder. In it are the shards that ``torch.distributed.checkpoint`` (DCP) wrote, each rank
its own, in parallel, and DCP's index, .metadata; ``run.json``, the run, the step and the settings;
and ``SHA256SUMS``, the hash of every file (``sha256sum -c SHA256SUMS`` checks them). ``model.NAME``
is a tensor of the model, ``optimizer.NAME.exp_avg`` an optimizer state of that tensor. How tensors
were sharded when they were saved does not matter when they are loaded.

Reading runs no code that a file chose.
"""

import contextlib
import hashlib
import json
import math
import os
import pathlib
import pickle
import re
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING  # each index has one
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from common.errors import SettingError

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP, in one process
FIXED, CHANGEABLE = "must stay the same", "may change"  # the settings of a run, keys of run.json
IMPORTED = 0  # the step of weights that no run has trained: see tools/import_hf.py
NAME, SUMS = r"step-\d{8,}", "SHA256SUMS"


class Damaged(SettingError):
    """A checkpoint that cannot be used."""


def list_checkpoints(folder):
    """The complete checkpoints of a run folder, oldest first."""
    paths = pathlib.Path(folder).glob("step-*")
    return sorted((path for path in paths if re.fullmatch(NAME, path.name)), key=step_of)


def step_of(checkpoint):
    """The number of steps after which a checkpoint was saved."""
    return int(checkpoint.stem.removeprefix("step-"))


def older_checkpoint(checkpoint):
    """The newest checkpoint before ``checkpoint`` in its run folder, or None."""
    older = [path for path in list_checkpoints(checkpoint.parent) if path.name < checkpoint.name]
    return older[-1] if older else None


def run_of(checkpoint):
    """The id of the run that has saved a checkpoint; None if it does not say."""
    path = checkpoint / "run.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        if path.is_file():  # reading a FIFO or a device might never end
            return json.loads(path.read_text())["run"]
    return None


def read(checkpoint, prefix="model."):
    """The tensors of a checkpoint whose names start with ``prefix``, whole, on the CPU, by the rest
    of their names: with the default, a ``state_dict`` of the model. One process is enough.

    Raises:
        Damaged: it is not a checkpoint, damaged, or not to be trusted.
    """
    reader, stored, _ = open_checkpoint(pathlib.Path(checkpoint))
    tensors = reader.read_tensors(*(name for name in stored if name.startswith(prefix)))
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def open_checkpoint(checkpoint, share=slice(None)):
    """Check the hashes of a checkpoint's index, its run.json and, of the list of all other files,
    ``share``. Returns its reader, the metadata of each stored tensor, and the content of run.json.

    Raises:
        Damaged: see ``read``.
    """
    first, sums = (".metadata", "run.json"), read_sums(checkpoint)
    for name in (*first, *sorted(sums.keys() - set(first))[share]):
        check_hash(checkpoint / name, sums)
    try:
        saved = json.loads((checkpoint / "run.json").read_text())
        saved[FIXED].keys(), saved[CHANGEABLE].keys()
        if re.fullmatch(NAME, checkpoint.name) and step_of(checkpoint) != saved["step"]:
            raise ValueError(f"it was saved after step {saved['step']}")
        reader = SafeReader(checkpoint)
        index = reader.read_metadata()
        stored = index.state_dict_metadata
        for part in index.storage_data.values():
            if part.relative_path not in sums:
                raise ValueError(f"its index names {part.relative_path!r}, which {SUMS} lacks")
        for name, entry in stored.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{name} is not a tensor")
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise ValueError(f"it lacks a part of {name}")
        if len(stored) != saved["tensors"]:
            raise ValueError(f"its index has {len(stored)} tensors of {saved['tensors']}")
    except Exception as error:  # whatever a file that somebody else has made may cause
        raise Damaged(
            f"{checkpoint} is not a checkpoint of these scripts ({type(error).__name__}: {error})"
        ) from None
    return reader, stored, saved


def read_sums(checkpoint):
    """The hashes in SHA256SUMS, by the names of the files."""
    path = checkpoint / SUMS
    if (checkpoint / ".metadata.sha256").exists():
        raise Damaged(f"{checkpoint} is of an earlier format, with a .sha256 beside each file")
    if not path.is_file():  # reading a FIFO or a device might never end
        raise Damaged(f"{path} is missing, or no regular file: nothing can be checked")
    found = re.findall(r"(?m)^([0-9a-f]{64})  ([^/\n]+)$", path.read_text(errors="replace"))
    return {name: digest for digest, name in found}


def check_hash(path, sums):
    """Raise Damaged unless a file of a checkpoint is as it was written."""
    if path.name not in sums:
        raise Damaged(f"{path} cannot be checked: {SUMS} lacks it")
    if not path.is_file():
        raise Damaged(f"{path} is missing, or no regular file")
    if hash_of(path) != sums[path.name]:
        raise Damaged(f"{path} is damaged: its SHA-256 is not the one in {SUMS}")


def hash_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, but its index, a pickle, may name only the classes that DCP writes for tensors.
    DCP itself reads tensors with weights_only=True."""

    index = None  # read once, however often something is loaded

    def read_metadata(self, *_, **__):
        if self.index is None:
            with open(self.path / ".metadata", "rb") as file:
                self.index = _Unpickler(file).load()
        return self.index

    def read_tensors(self, *names):
        """Tensors by their names, whole, on the CPU. It waits for no other rank."""
        stored = self.read_metadata().state_dict_metadata
        tensors = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
                   for name in names}
        try:
            dcp.load(tensors, storage_reader=self, no_dist=True)
        except (OSError, dcp.CheckpointException) as error:
            raise Damaged(f"{self.path} cannot be read ({reason(error)})") from None
        return tensors

    def read_tensor(self, name):
        return self.read_tensors(name)[name]


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
        if (module, name) == ("builtins", "getattr"):
            return _memory_format  # so Python 3.11.0 to 3.11.3 pickle a member of an Enum
        if name not in self.CLASSES.get(module, ()):
            raise pickle.UnpicklingError(
                f"its index asks for {module}.{name}, which DCP never writes for tensors"
            )
        return super().find_class(module, name)


def _memory_format(kind, name):
    """``getattr`` for the members of one Enum and nothing else."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"its index asks for getattr of {kind!r:.60}")
    return kind[name]


def reason(error):
    """What an OSError or a CheckpointException says."""
    if isinstance(error, OSError):
        return error.strerror or error
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {str(cause) or type(cause).__name__}"


# Writing


class HashingWriter(dcp.FileSystemWriter):
    """DCP's writer. ``sums``: the hash of each file that this rank has written, by its name."""

    def __init__(self, path, **options):
        # Copying ahead uses a CUDA stream, also for tensors on the CPU: in a thread, whose device
        # is GPU 0, every rank would open a context there.
        super().__init__(path, per_thread_copy_ahead=0, **options)

    def write_data(self, *args):
        try:
            written = super().write_data(*args)
        except RuntimeError as error:  # torch.save hides that a disk is full
            raise error.__context__ or error
        names = {result.storage_data.relative_path for result in written.wait()}
        self.sums = {name: hash_of(self.path / name) for name in names}
        return written


def complete(folder, sums, *, run, step, tensors, fixed, changeable):
    """Write run.json, and last SHA256SUMS: its own, and ``sums``, those of all ranks.

    Args:
        run: the id of the run.
        step: how many steps it has done.
        tensors: how many tensors DCP's index has.
        fixed, changeable: the settings of the run.
    """
    settings = {"run": run, "step": step, "tensors": tensors, FIXED: fixed, CHANGEABLE: changeable}
    _write(folder / "run.json", json.dumps(settings, indent=1))
    sums = sums | {name: hash_of(folder / name) for name in (".metadata", "run.json")}
    _write(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def _write(path, text):
    """Write a file, and flush it to disk, as DCP does."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
