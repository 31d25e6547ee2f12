"""Tokens to train on: .bin files of token ids, or text, of which each byte is a token. Your own
dataset takes its place: anything that has ``len(dataset)`` and ``dataset[index]``."""

import os
import pathlib
import sysconfig

import numpy as np
import torch
from torch.utils.data import Dataset

from common.data import counted
from common.errors import SettingError, refuse
from common.files import open_regular, reading
from common.options import at_least

STANDARD_LIBRARY = "stdlib"
ADVICE = ": remove it from the data, or see to its rights"
# How files begin that have no raw ids, in spite of their name: (what they are, what to do).
WITHOUT_HEADER = "cut it off: tail -c +1025 FILE > NEW"
CONVERTED = "load them, and write numpy.array(ids, '{0}').tofile(NEW)"
HEADERS = {
    (20240520).to_bytes(4, "little"): (
        "has a header of llm.c (256 int32, the first 20240520) before its ids in uint16",
        WITHOUT_HEADER),
    (20240801).to_bytes(4, "little"): (
        "has a header of llm.c (256 int32, the first 20240801) before its ids in uint32",
        WITHOUT_HEADER),
    b"\x93NUMPY": ("is a file of NumPy (.npy)", CONVERTED),
    b"PK\3\4": ("is a zip file, which torch.save and numpy.savez write", CONVERTED),
    b"PAR1": ("is a Parquet file", CONVERTED), b"ARROW1": ("is an Arrow file", CONVERTED),
    b"\x1f\x8b\x08": ("is compressed by gzip", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("is compressed by zstd", "unpack it"),
    b"MMIDIDX": ("is the index of a dataset of Megatron-LM", "give the .bin file beside it"),
}
# Not part of the library proper, or not installed everywhere.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


class TokenDataset(Dataset):
    """Sample i has the T inputs [i*T, (i+1)*T) of the data, and as targets the same shifted by one.

    Args:
        data: a ``.bin`` file of raw token ids (the nanoGPT convention, no header), or a folder of
            such files. Any other file or folder is read as text, one token per byte. ``stdlib`` is
            the source text of Python's standard library. The files of a folder are concatenated in
            the order of their paths.
        seq_len: T, the number of tokens in a sample.
        token_dtype: the type of the ids in a ``.bin`` file, "uint16" or "uint32"; "auto": uint16 if
            ``vocab_size`` allows it.
        vocab_size: refuse token ids that are not below this.
        option: the name of ``data`` in error messages.

    A sample is two int64 tensors (T,), read from the files when it is asked for. Links are
    followed; a folder that several lead to is read once. Files and folders whose names start with
    a dot are skipped.

    Raises:
        SettingError: ``data`` does not exist, cannot be read, mixes .bin files with text, has half
            a token, a header, ids of another type or bytes that are no text, or is too short for
            one sample; when a sample is read: a token is not in the vocabulary, or a file is
            missing or has changed.
    """

    def __init__(self, data, seq_len, token_dtype="auto", vocab_size=None, option="--data"):
        self.data, self.seq_len, self.vocab_size = data, seq_len, vocab_size
        self.files, self.folders = _find_files(data, option)
        self.stamps = []
        binary = [path.suffix.lower() == ".bin" for path in self.files]
        fitting = "uint16" if (vocab_size or 0) <= 2**16 else "uint32"
        token_dtype = fitting if token_dtype == "auto" else token_dtype
        self.dtype = np.dtype(token_dtype if any(binary) else np.uint8)
        for path, is_binary in zip(self.files, binary):
            with reading(path, ADVICE), open_regular(path) as file:
                self.stamps.append(_stamp(file))
                head = file.read(2**15 if is_binary else 2**13)
            if not is_binary and b"\0" in head:  # as grep and git tell text
                raise SettingError(
                    f"{path} is no text: it has bytes that are 0; write token ids as raw "
                    f"numbers into a file whose name ends in .bin, or remove it from the data"
                )
            if is_binary and (problem := _no_ids(head, token_dtype, fitting, vocab_size)):
                raise SettingError(f"{path} {problem}")
        sizes = np.array([size for _, size, _ in self.stamps], np.int64)
        # file i holds the tokens [bounds[i], bounds[i+1])
        self.bounds = np.concatenate([[0], np.cumsum(sizes // self.dtype.itemsize)])
        self.tokens = int(self.bounds[-1])
        refuse([
            (any(binary) and not all(binary),
             f"{option} {data} mixes .bin files (token ids) with others (text): keep one kind"),
            *[(size % self.dtype.itemsize,
               f"{path} has {size} bytes: not a whole number of {self.dtype} tokens; see "
               f"--token-dtype") for path, size in zip(self.files, sizes)],
            (len(self) < 1,
             f"{option} {data} holds {self.tokens} tokens: one sample of --seq-len {seq_len} takes "
             f"{seq_len + 1}; give more data or a smaller --seq-len"),
        ])

    def __str__(self):
        return f"{counted(len(self), 'sample')} of {counted(self.seq_len, 'token')} in {self.data}"

    def __len__(self):
        return max(0, self.tokens - 1) // self.seq_len

    def __getitem__(self, index):
        first = index * self.seq_len
        tokens = torch.from_numpy(self.read(first, first + self.seq_len + 1).astype(np.int64))
        if self.vocab_size is not None and (largest := tokens.max().item()) >= self.vocab_size:
            # Said here in words; on a GPU the embedding would fail in an assertion of its kernel.
            raise SettingError(
                f"{self.data} holds token {largest}, beyond a vocabulary of {self.vocab_size}: "
                f"raise --vocab-size to that of the tokenizer; if it has no more, these are no ids "
                f"in {self.dtype}: see --token-dtype"
            )
        return tokens[:-1], tokens[1:]

    def read(self, first, last):
        """The tokens [first, last) of all files."""
        bounds, pieces = self.bounds, []
        for i in range(np.searchsorted(bounds, first, "right") - 1, np.searchsorted(bounds, last)):
            start, stop = max(first, bounds[i]) - bounds[i], min(last, bounds[i + 1]) - bounds[i]
            path, offset = self.files[i], start * self.dtype.itemsize
            with reading(path, ": put it back, or see to its rights"), open_regular(path) as file:
                stamp = _stamp(file)
                pieces.append(np.fromfile(file, self.dtype, stop - start, offset=offset))
            if stamp != self.stamps[i]:
                raise SettingError(
                    f"{path} has changed since the run began: put the file back, or take another "
                    f"--out for a new run"
                )
        return np.concatenate(pieces)


def _no_ids(head, dtype, fitting, vocab_size):
    """Say why a file that begins with ``head`` has no raw ids in ``dtype``, or "". ``fitting``: the
    type that the vocabulary needs."""
    for begin, (what, advice) in HEADERS.items():
        if head.startswith(begin):
            return f"{what}: a .bin file must hold raw ids alone: {advice.format(fitting)}"
    words = np.frombuffer(head[: len(head) // 8 * 8], np.uint16).reshape(-1, 4)  # lowest first
    if len(words) < 4 or (words[:, 0] > 0).mean() < 0.25:  # padding says nothing
        return ""
    numbers = words.view(np.uint32)
    if np.isin(numbers[:, 1], (0, 2**32 - 1)).all():  # the sign
        return (f"seems to have ids in int64: every second number of 32 bits is 0: write them in "
                f"{fitting}: numpy.fromfile(FILE, 'int64').astype('{fitting}').tofile(NEW)")
    low, high = words.reshape(-1, 2).T
    high = np.where(high < 2**16 - 1, high, 0)
    # Some vocabularies have more than 2^16 ids, none 2^20.
    if not high.any() or high.max() < 16 and low.max() >= 2**12:
        likely, why = "uint32", "every second number of 16 bits is 0, or nearly so"
    else:
        beyond = vocab_size and words.max() < vocab_size <= numbers.max()
        likely, why = "uint16" if beyond else dtype, "numbers of 32 bits are beyond the vocabulary"
    if likely == dtype:
        return ""
    return f"seems to have ids in {likely}, and not in {dtype}: {why}: give --token-dtype {likely}"


def add_text_options(parser):
    """Add the options of the data to a parser of common/options.py."""
    add = parser.add_argument_group("data").add_argument
    add("--data", default=STANDARD_LIBRARY, metavar="PATH", help="a .bin file of token ids, a "
        "text file, or a folder of either; text is read as bytes; "
        f"'{STANDARD_LIBRARY}': the source text of Python's standard library")
    add("--token-dtype", choices=("auto", "uint16", "uint32"), default="auto", help="type of "
        "the ids in .bin files; auto: uint16 if the vocabulary fits, otherwise uint32")
    add("--seq-len", type=at_least(1), default=128, metavar="T", help="tokens in a sequence")


def open_dataset(args, option="--data"):
    """The TokenDataset that ``option`` names; None if it names none."""
    data = getattr(args, option.removeprefix("--").replace("-", "_"))
    if data is None:
        return None
    dataset = TokenDataset(data, args.seq_len, args.token_dtype, args.config.vocab_size, option)
    if out := getattr(args, "out", None):
        out = pathlib.Path(os.path.realpath(out))  # resolve() fails if links form a loop
        if any(_place(path) in dataset.folders for path in (out, *out.parents) if path.exists()):
            raise SettingError(
                f"--out {args.out} is inside {option} {data}: its files would be read as data; "
                f"choose a folder outside of it"
            )
    return dataset


def _find_files(data, option):
    """The files of ``data``, in the order of their paths, and the places of its folders. A folder
    to which two links lead counts once. One that cannot be read is an error."""
    standard = data == STANDARD_LIBRARY
    path = pathlib.Path(sysconfig.get_path("stdlib") if standard else data)
    if data == "" or not os.path.exists(path):
        raise SettingError(
            f"{option} {data or repr(data)}: no such file or folder (give one, or "
            f"'{STANDARD_LIBRARY}' for the source of Python's standard library)"
        )
    if not path.is_dir():
        return [path], set()
    skipped, files, seen = SKIPPED_FOLDERS if standard else set(), [], set()

    def cannot_be_read(error):  # os.walk would leave the folder out
        with reading(error.filename, ADVICE):
            raise error

    for folder, below, names in os.walk(path, onerror=cannot_be_read, followlinks=True):
        with reading(folder, ADVICE):
            place = _place(folder)
        if place in seen:
            below.clear()
            continue
        seen.add(place)
        below[:] = [name for name in sorted(below)
                    if not name.startswith(".") and name not in skipped]
        files += [pathlib.Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.suffix == ".py" or not standard), seen


def _place(folder):
    """What a folder is by all of its names, links among them."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _stamp(file):
    """What changes if another file takes the place of a file."""
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns
