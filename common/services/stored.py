"""A checkpoint on disk: which files it has, how they are written, and how they are read.

It is a folder. In it are the shards that ``torch.distributed.checkpoint`` (DCP) wrote, each rank
its own, in parallel, and DCP's index, .metadata; ``run.json``, the settings of the run; and beside
each FILE its hash, FILE.sha256 (``sha256sum -c *.sha256 .*.sha256`` checks them). ``model.NAME`` is
a tensor of the model, ``optimizer.NAME.exp_avg`` an optimizer state of that tensor. How tensors
were sharded when they were saved does not matter when they are loaded.

Reading runs no code that a file chose.
"""

import hashlib
import json
import os
import pathlib
import pickle
import re
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from common.errors import SettingError

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP, in one process
ANEW = "start anew with --no-resume or another --out"
FIXED, CHANGEABLE = "must stay the same", "may change"  # the settings of a run, keys of run.json
IMPORTED = 0  # the step of weights that no run has trained: see tools/import_hf.py


def list_checkpoints(folder):
    """The complete checkpoints of a run folder, oldest first."""
    paths = pathlib.Path(folder).glob("step-*")
    return sorted((path for path in paths if re.fullmatch(r"step-\d{8,}", path.name)), key=step_of)


def step_of(checkpoint):
    """The number of steps after which a checkpoint was saved."""
    return int(checkpoint.stem.removeprefix("step-"))


def read(checkpoint, prefix="model."):
    """The tensors of a checkpoint whose names start with ``prefix``, whole, on the CPU, by the rest
    of their names: with the default, a ``state_dict`` of the model. One process is enough.

    Raises:
        SettingError: it is not a checkpoint, damaged, or not to be trusted.
    """
    reader, stored, _ = open_checkpoint(pathlib.Path(checkpoint))
    tensors = reader.read_tensors(*(name for name in stored if name.startswith(prefix)))
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def open_checkpoint(checkpoint, share=slice(None)):
    """Check the hashes of a checkpoint's index, its run.json and, of the list of all other files,
    ``share``. Returns its reader, the metadata of each stored tensor, and the content of run.json.

    Raises:
        SettingError: see ``read``.
    """
    first = {".metadata", "run.json"}
    hashed = first | {path.name.removesuffix(".sha256") for path in checkpoint.glob("*.sha256")}
    for name in sorted(first) + sorted(hashed - first)[share]:
        check_hash(checkpoint / name)
    try:
        saved = json.loads((checkpoint / "run.json").read_text())
        saved[FIXED].keys(), saved[CHANGEABLE].keys()
        reader = SafeReader(checkpoint)
        index = reader.read_metadata()
        stored = index.state_dict_metadata
        for part in index.storage_data.values():
            if part.relative_path not in hashed:
                raise ValueError(f"its index names the file {part.relative_path!r}")
        for name, entry in stored.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{name} is not a tensor")
        if len(stored) != saved["tensors"]:
            raise ValueError(f"its index has {len(stored)} tensors of {saved['tensors']}")
    except Exception as error:  # whatever a file that somebody else has made may cause
        raise SettingError(
            f"{checkpoint} is not a checkpoint of these scripts ({type(error).__name__}: {error}); "
            f"{instead_of(checkpoint)}"
        ) from None
    return reader, stored, saved


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
            raise SettingError(
                f"{self.path} cannot be read ({reason(error)}): {instead_of(self.path)}"
            ) from None
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
        if name not in self.CLASSES.get(module, ()):
            raise pickle.UnpicklingError(
                f"its index asks for {module}.{name}, which DCP never writes for tensors"
            )
        return super().find_class(module, name)


def instead_of(checkpoint):
    """What to do when a checkpoint is broken."""
    for older in reversed(list_checkpoints(checkpoint.parent)):
        if older.name < checkpoint.name:
            return f"use the older {older}: --resume-from {step_of(older)}"
    return f"there is no older checkpoint: {ANEW}"


def reason(error):
    """What an OSError or a CheckpointException says."""
    if isinstance(error, OSError):
        return error.strerror or error
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {cause}"


# Writing


class HashingWriter(dcp.FileSystemWriter):
    """DCP's writer, which also writes the hash of what this rank writes."""

    def write_data(self, *args):
        try:
            written = super().write_data(*args)
        except RuntimeError as error:  # torch.save hides that a disk is full
            raise error.__context__ or error
        for name in {result.storage_data.relative_path for result in written.wait()}:
            write_hash(self.path / name)
        return written


def write_hash(path):
    """Write the hash of a file beside it."""
    _write(path.with_name(f"{path.name}.sha256"), _hash_line(path))


def check_hash(path):
    """Raise SettingError unless a file of a checkpoint is as it was written."""
    written = path.with_name(f"{path.name}.sha256")
    if not (path.is_file() and written.is_file()):  # reading a FIFO or a device might never end
        problem = f"cannot be checked: it or {written.name} is missing, or no regular file"
    elif written.read_bytes() != _hash_line(path).encode():
        problem = f"is damaged: its SHA-256 is not the one in {written.name}"
    else:
        return
    raise SettingError(f"{path} {problem}; {instead_of(path.parent)}")


def _hash_line(path):
    with open(path, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n"


def _write(path, text):
    """Write a file, and flush it to disk, as DCP does."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_settings(folder, fixed, changeable, tensors):
    """Write run.json, and the hashes of it and of DCP's index: the last files of a checkpoint.
    ``tensors``: how many it has."""
    settings = {FIXED: fixed, CHANGEABLE: changeable, "tensors": tensors}
    _write(folder / "run.json", json.dumps(settings, indent=1))
    for name in (".metadata", "run.json"):
        write_hash(folder / name)
