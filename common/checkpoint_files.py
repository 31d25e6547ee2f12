"""The files of a checkpoint, which are not trusted: their hashes, and DCP's index.

Beside each FILE lies FILE.sha256, as ``sha256sum`` writes it (``sha256sum -c *.sha256
.*.sha256`` reads it). The index, ``.metadata``, is a pickle. The unpickler that reads the index
admits only the classes that DCP writes. What the index says about files and sizes is compared with
the files before anything is allocated.
"""

import errno
import hashlib
import math
import os
import pathlib
import pickle
import stat

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata

# The errors that reading a broken file may raise.
BROKEN = (
    OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError,
    MemoryError, EOFError, pickle.UnpicklingError,
)


def open_regular(path):
    """Open a file to read bytes.

    Raises:
        OSError: it cannot be read, or is a FIFO or a device, where reading might never end.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return file


def write_text(path, text):
    """Write a file, and flush it to disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_hashes(folder, names):
    """Write NAME.sha256 for each of the files ``names`` of a folder."""
    for name in names:
        write_text(folder / f"{name}.sha256", _line(folder, name))


def hashed_files(folder):
    """The names of the files that have a hash, and of those that every checkpoint has."""
    hashed = {path.name.removesuffix(".sha256") for path in folder.glob("*.sha256")}
    return sorted(hashed | {".metadata", "run.json"})


def find_damage(folder, names):
    """Says what is wrong with the first damaged file of ``names``: a sentence, or None if all files
    are as they were written."""
    for name in names:
        try:
            with open_regular(folder / f"{name}.sha256") as file:
                written = file.read(1000).decode()
            if written != _line(folder, name):
                return f"{folder / name} is damaged: its SHA-256 is not the one in {name}.sha256"
        except (OSError, ValueError) as error:
            return f"{folder / name} cannot be checked: {error}"


def _line(folder, name):
    with open_regular(folder / name) as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, but the index may name only classes that DCP writes, hold only tensors, and
    point only into files of the checkpoint's own folder. DCP itself reads tensors with
    ``weights_only=True``.

    Raises, when the index is read:
        ValueError, or another of ``BROKEN``: the index contradicts itself or the files.
    """

    index = None  # read and checked once, however often something is loaded

    def read_metadata(self, *args, **kwargs):
        self.index = self.index or self._read_index()
        return self.index

    def _read_index(self):
        folder = pathlib.Path(self.path)
        with open_regular(folder / ".metadata") as file:
            metadata = _MetadataUnpickler(file).load()
        _check_files(metadata.storage_data, folder)
        for name, entry in metadata.state_dict_metadata.items():
            _check_tensor(name, entry, metadata.storage_data)
        return metadata


def _check_files(storage, folder):
    """Check that each stored part lies within a regular file of ``folder`` that has a hash."""
    names, sizes = hashed_files(folder), {}
    for part in storage.values():
        name = part.relative_path
        if name not in names:
            raise ValueError(f"its index names the file {name!r}, which is not there with its hash")
        if name not in sizes:
            with open_regular(folder / name) as file:
                sizes[name] = os.fstat(file.fileno()).st_size
        if not 0 <= part.offset <= part.offset + part.length <= sizes[name]:
            raise ValueError(f"its index goes beyond the end of {name}")


def _check_tensor(name, entry, storage):
    """Check that the stored parts of a tensor make it up, and that each has the right size."""
    if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
        raise ValueError(f"it is not to be trusted: {name} is not a tensor")
    parts = {}
    for chunk in entry.chunks:
        ends = [first + length for first, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        if (min([0, *chunk.offsets, *chunk.sizes]) < 0 or len(ends) != len(entry.size)
                or any(end > most for end, most in zip(ends, entry.size))):
            raise ValueError(f"a part of {name} in its index lies outside of the tensor")
        if numbers := math.prod(chunk.sizes):
            part = storage[dcp_metadata.MetadataIndex(name, chunk.offsets)]
            if numbers * entry.properties.dtype.itemsize > part.length:
                raise ValueError(f"a part of {name} in its index is larger than its file says")
            parts[chunk.offsets] = numbers
    if sum(parts.values()) != math.prod(entry.size):
        raise ValueError(f"parts of {name} are missing in its index")


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
