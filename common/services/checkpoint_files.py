"""A checkpoint on disk: which files it has, how they are written, and how they are read.

It is a folder. In it are the shards that ``torch.distributed.checkpoint`` (DCP) wrote, each rank
its own, in parallel, and DCP's index, .metadata; ``run.json``, the step and the settings of the
run; and ``SHA256SUMS``, the hash of every file (``sha256sum -c SHA256SUMS`` checks them).
``model.NAME`` is a tensor of the model, ``optimizer.NAME.exp_avg`` an optimizer state of that
tensor. How tensors were sharded when they were saved does not matter when they are loaded.

Reading runs no code that a file chose.
"""

import contextlib
import hashlib
import json
import pathlib
import pickle
import re
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING  # each index has one

from common.errors import SettingError
from common.files import SMALL, open_regular, read_text, reading
from common.services.new_files import new_file, remedy
from common.services.run_folder import CHECKPOINT

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP, in one process
FIXED, CHANGEABLE = "must stay the same", "may change"  # the settings of a run, keys of run.json
IMPORTED = 0  # the step of weights that no run has trained: see tools/huggingface/import_hf.py
INDEX, SETTINGS, SUMS = ".metadata", "run.json", "SHA256SUMS"
MOST_OF_INDEX = 2**31  # bytes; 200 MB were extrapolated for 70B on 512 ranks


class Damaged(SettingError):
    """A checkpoint that cannot be used."""


def list_checkpoints(folder):
    """The complete checkpoints of a run folder, oldest first."""
    paths = pathlib.Path(folder).glob("step-*")
    return sorted((path for path in paths if re.fullmatch(CHECKPOINT, path.name)), key=step_of)


def step_of(checkpoint):
    """The number of steps after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def older_checkpoint(checkpoint):
    """The newest checkpoint before ``checkpoint`` in its run folder, or None."""
    older = [path for path in list_checkpoints(checkpoint.parent)
             if step_of(path) < step_of(checkpoint)]
    return older[-1] if older else None


# Reading


def read(checkpoint, prefix="model."):
    """The tensors of a checkpoint whose names start with ``prefix``, whole, on the CPU, by the rest
    of their names: with the default, a ``state_dict`` of the model. One process is enough.

    Raises:
        Damaged: it is not a checkpoint, or damaged.
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
    sums, reader = read_sums(checkpoint), SafeReader(checkpoint)
    check_hash(checkpoint / INDEX, sums, MOST_OF_INDEX)
    check_hash(checkpoint / SETTINGS, sums, SMALL)
    with damaged(checkpoint), reading(checkpoint):
        saved = json.loads(read_text(checkpoint / SETTINGS))
        saved[FIXED].keys(), saved[CHANGEABLE].keys()
        if re.fullmatch(CHECKPOINT, checkpoint.name) and step_of(checkpoint) != saved["step"]:
            raise Damaged(f"{checkpoint} was saved after step {saved['step']}")
        index = reader.read_metadata()
        stored, sizes = index.state_dict_metadata, dict.fromkeys(sums.keys() - {INDEX, SETTINGS}, 0)
        for part in index.storage_data.values():
            end = part.offset + part.length
            sizes[part.relative_path] = max(sizes[part.relative_path], end)
    for name in sorted(sizes)[share]:
        check_hash(checkpoint / name, sums, sizes[name])
    return reader, stored, saved


@contextlib.contextmanager
def damaged(checkpoint):
    """Let whatever a file of a checkpoint makes the block raise be Damaged."""
    try:
        yield
    except SettingError as error:
        raise Damaged(str(error)) from None


def read_sums(checkpoint):
    """The hashes in SHA256SUMS, by the names of the files."""
    path = checkpoint / SUMS
    with damaged(checkpoint), reading(path):
        lines = re.findall(r"(?m)^([0-9a-f]{64})  ([^/\n]+)$", read_text(path))
    return {name: digest for digest, name in lines}


def check_hash(path, sums, most):
    """Raise Damaged unless a file of a checkpoint, of at most ``most`` bytes, is as it was
    written."""
    if path.name not in sums:
        raise Damaged(f"{path} cannot be checked: {SUMS} lacks it")
    with damaged(path), reading(path):
        digest = hash_of(path, most)
    if digest != sums[path.name]:
        raise Damaged(f"{path} is damaged: its SHA-256 is not the one in {SUMS}")


def hash_of(path, most=None):
    with open_regular(path, most) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, but its index, a pickle, may name only the classes that DCP writes for tensors.
    DCP itself reads tensors with weights_only=True."""

    index = None  # read once, however often something is loaded

    def read_metadata(self, *_, **__):
        if self.index is None:
            with open_regular(self.path / INDEX, MOST_OF_INDEX) as file:
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
            raise Damaged(f"{self.path} cannot be read {reason(error)}") from None
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
    """What an OSError or a CheckpointException says, and what to do then."""
    if isinstance(error, OSError):
        return f"({error.strerror or error}): {remedy(error)}"
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"(rank {rank}: {str(cause) or type(cause).__name__}): {remedy(cause)}"


# Writing


class HashingWriter(dcp.FileSystemWriter):
    """DCP's writer. ``sums``: the hash of each file that this rank has written, by its name."""

    def __init__(self, path, **options):
        # Copying ahead uses a CUDA stream, also for tensors on the CPU: in a thread, whose device
        # is GPU 0, every rank would open a context there.
        super().__init__(path, per_thread_copy_ahead=0, **options)
        # Without its parents: if the run folder has been moved, nothing is made in its place.
        self.fs.mkdir = lambda path: path.mkdir(exist_ok=True)

    def write_data(self, *args):
        try:
            written = super().write_data(*args)
        except RuntimeError as error:  # torch.save hides that a disk is full
            raise error.__context__ or error
        names = {result.storage_data.relative_path for result in written.wait()}
        self.sums = {name: hash_of(self.path / name) for name in names}
        return written


def complete(folder, sums, *, step, fixed, changeable):
    """Write run.json, and last SHA256SUMS: its own, and ``sums``, those of all ranks.

    Args:
        step: how many steps the run has done.
        fixed, changeable: the settings of the run.
    """
    with new_file(folder / SETTINGS, "w") as file:
        json.dump({"step": step, FIXED: fixed, CHANGEABLE: changeable}, file, indent=1)
    sums = sums | {name: hash_of(folder / name) for name in (INDEX, SETTINGS)}
    with new_file(folder / SUMS, "w") as file:
        file.writelines(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def remove_checkpoint(path):
    """Remove a checkpoint, or what a killed process has left of one: the files that SHA256SUMS
    lists or that a rank has begun, and the folder if nothing else is in it. Of a link, the link."""
    if path.is_symlink():
        return path.unlink()
    begun = re.compile(rf"__.*\.distcp|\{INDEX}(\.tmp)?|\.({SETTINGS}|{SUMS})\..*\.tmp|{SETTINGS}")
    listed = {}
    with contextlib.suppress(SettingError):
        listed = read_sums(path)
    with contextlib.suppress(OSError):  # what cannot be removed stays
        for file in path.iterdir():
            if file.name in listed or begun.fullmatch(file.name):
                file.unlink()
        (path / SUMS).unlink(missing_ok=True)  # last: it lists what is left
        path.rmdir()
