"""Text files of any size into files of token ids; the command is tools/prepare.py."""

import codecs
import hashlib
import itertools
import json
import os
import pathlib
import tempfile

import numpy as np

from tools.command import need, refuse

PIECE = 2**18  # characters of a text; a document that has more is cut
LONGEST_LINE = 2**26  # bytes of a line of a .jsonl file
BATCH = 2**22  # characters; the tokenizer shares the documents of a batch among all cores
ENDS = "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"  # of GPT-2, Llama 3, Llama 2, Gemma


def load_tokenizer(path, eod):
    """A tokenizer, the size of its vocabulary, and the token that ends a document: ``eod``; for
    None, the one of ENDS that the tokenizer has. "" means no token."""
    tokenizers = need("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises no other class
        refuse(f"--tokenizer {path}: this is no tokenizer.json of Hugging Face ({error})")
    tokenizer.encode_special_tokens = True  # a text that contains </s> does not end there
    tokenizer.no_truncation()  # a tokenizer.json may ask for either
    tokenizer.no_padding()
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if eod is None:
        eod = next((name for name in ENDS if name in special), "")
    elif eod and tokenizer.token_to_id(eod) is None:
        refuse(f"--eod {eod}: the tokenizer has no such token; its special tokens are: "
               f"{', '.join(special[:20]) or 'none'}")
    # The largest id counts, not the number of tokens: some vocabularies have gaps.
    return tokenizer, max(tokenizer.get_vocab().values(), default=-1) + 1, eod


def find_files(path):
    """The file itself, or the files of a folder, sorted by path, without hidden ones."""
    found = [path]
    if path.is_dir():
        walk = os.walk(path, onerror=lambda error: refuse(f"{error}: change its permissions"))
        found = [pathlib.Path(folder, name) for folder, _, names in walk for name in names]
        found = sorted(file for file in found if "/." not in f"/{file.relative_to(path)}")
    for file in found:
        if not file.is_file():
            refuse(f"{file}: no such file or folder; give text files, .jsonl files or folders")
        if file.suffix == ".bin":  # perhaps an earlier output
            refuse(f"{file}: a .bin file holds token ids, not text; move it to another folder")
    return found


def read_documents(path, field, separator, bar):
    """Yields the documents of a file: ``field`` of each line of a .jsonl file, or the text between
    the lines that are equal to ``separator``. ``bar`` counts the bytes."""
    if path.suffix == ".jsonl":
        for number, line in _read_lines(path, LONGEST_LINE, bar):
            if line.strip():
                yield _parse(line, field, f"{path}, line {number}")
        return
    lines, size = [], 0
    for _, line in _read_lines(path, PIECE, bar):
        ends = line.rstrip("\r\n") == separator
        if ends or size + len(line) > PIECE:
            yield "".join(lines)
            lines, size = [], 0
        if not ends:
            lines.append(line)
            size += len(line)
    yield "".join(lines)


def _read_lines(path, limit, bar):
    """Yields (number, line). A line with more than ``limit`` bytes comes in several pieces."""
    decode, number = codecs.getincrementaldecoder("utf-8-sig")().decode, 1
    try:
        with open(path, "rb") as file:
            while line := file.readline(limit):
                bar.update(len(line))
                yield number, decode(line)
                number += line.endswith(b"\n")
            decode(b"", final=True)  # fails if the file ends within a character
    except UnicodeDecodeError as error:
        refuse(f"{path}, line {number}: this is not UTF-8 ({error.reason}); convert the file, for "
               "example with iconv")
    except OSError as error:
        refuse(f"{path} cannot be read ({error.strerror}): change its permissions, or leave it out")


def _parse(line, field, place):
    """The text in a line of a .jsonl file."""
    try:
        text = json.loads(line)[field]
        text.encode()  # fails if it is no string, or holds half of a surrogate pair
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        refuse(f"{place}: this must be a JSON object of at most {LONGEST_LINE >> 20} MiB with text "
               f"in the field {field!r} ({type(error).__name__}: {error}); correct the line, or "
               "name another field with --field")
    return text


def write_tokens(texts, tokenizer, eod, dtype, val, out):
    """Write train.bin and val.bin into the folder ``out``. Returns (documents, tokens) of both."""
    end = [tokenizer.token_to_id(eod)] if eod else []
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".prepare-", dir=out) as folder:
            paths = [pathlib.Path(folder, name) for name in ("train.bin", "val.bin")]
            with open(paths[0], "wb") as train, open(paths[1], "wb") as validation:
                counts = [0, 0], [0, 0]
                for text, ids in _encode(texts, tokenizer):
                    side = _is_validation(text, val)
                    (train, validation)[side].write(np.array(ids + end, dtype).tobytes())
                    counts[side][0] += 1
                    counts[side][1] += len(ids + end)
            if not counts[0][0]:
                refuse(f"of {counts[1][0]} documents none is left for train.bin: give more text, "
                       f"or a smaller --val than {val}")
            for path in paths:  # if this is killed in the middle, no train.bin is left
                (out / path.name).unlink(missing_ok=True)
            for path in reversed(paths[:1 + bool(counts[1][0])]):
                path.rename(out / path.name)
    except OSError as error:
        refuse(f"--out {out}: {error.filename or 'a file'} cannot be written ({error.strerror}); "
               "make room, or choose another folder")
    return counts


def _encode(texts, tokenizer):
    """Yields (text, ids) of each document that is not empty."""
    batch, size = [], 0
    for text in itertools.chain(texts, [None]):
        if text is not None:
            batch.append(text)
            size += len(text)
        if text is None or size >= BATCH:
            encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            yield from ((text, found.ids) for text, found in zip(batch, encoded) if found.ids)
            batch, size = [], 0


def _is_validation(text, val):
    """Whether a document goes to val.bin. A hash of its text decides: the order and the number of
    the files change nothing, and equal documents are all on one side."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < val * 2**64
