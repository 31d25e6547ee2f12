"""Text to token ids: writes the train.bin and val.bin that ``--data`` of the scripts reads.

    python -m tools.prepare corpus.jsonl books/*.txt --tokenizer tokenizer.json --out tokens

A document is a line of a file of JSON lines (.jsonl, .ndjson or .json), or 65,536 characters of
another file and the rest of their line. A hash of its text decides whether it goes to val.bin.
Memory does not grow with the files.
"""

import io
import itertools
import json
import os
import pathlib
import zlib

import numpy as np
from tqdm import tqdm

from common.files import open_regular, read_text, reading
from common.services.new_files import new_file, refuse_existing
from tools.support.command import make_parser, need, refuse, run


LINES = ".jsonl", ".ndjson", ".json"


def read_documents(path, bar, size=2**16):
    number, jsonl = 0, path.lower().endswith(LINES)
    with reading(path), open_regular(path) as bytes_of_file, io.TextIOWrapper(
        bytes_of_file, encoding="utf-8-sig", newline=""
    ) as file:
        pieces = file if jsonl else iter(lambda: file.read(size) + file.readline(size), "")
        try:
            for number, piece in enumerate(filter(str.strip, pieces), 1):
                bar.update(len(piece.encode()))
                text = json.loads(piece)["text"] if jsonl else piece
                if text.strip():
                    yield text, zlib.crc32(text.encode())
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            refuse(f"{path}, near document {number}: no UTF-8, or no text in JSON ({error!r})")


def main(argv=None):
    parser = make_parser("prepare", __doc__)
    parser.add_argument("files", nargs="+", help='text in UTF-8; .jsonl: lines of {"text": "..."}')
    parser.add_argument("--tokenizer", required=True, help="a Hugging Face tokenizer.json")
    parser.add_argument("--eod", default="<|endoftext|>", help="the token after each document")
    parser.add_argument("--val", type=float, default=0.01, help="share of val.bin (default: 0.01)")
    parser.add_argument("--out", required=True, help="the folder for train.bin and val.bin")
    args = parser.parse_args(argv)
    if not 0 <= args.val < 1:  # nan too
        refuse(f"--val {args.val}: this is a share of the documents: give 0 or more, less than 1")
    tokenizers = need("tokenizers")
    with reading(f"--tokenizer {args.tokenizer}"):
        tokenizer = tokenizers.Tokenizer.from_str(read_text(args.tokenizer, 2**30))
    end = tokenizer.token_to_id(args.eod)
    if end is None:
        refuse(f"--eod {args.eod}: the tokenizer has no such token; name one that ends a document")
    tokenizer.encode_special_tokens = True  # a text that spells out the token does not end there
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab_size = max(tokenizer.get_vocab().values()) + 1  # not their number: there may be gaps
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    try:
        os.makedirs(args.out, exist_ok=True)
    except OSError as error:
        refuse(f"--out {args.out} is no folder, and none can be made there ({error.strerror})")
    names = [pathlib.Path(args.out, name) for name in ("train.bin", "val.bin")]
    for name in names:
        refuse_existing(name)
    size = sum(map(os.path.getsize, args.files))
    with new_file(names[0], replace=False) as train, \
            new_file(names[1], replace=False) as val, \
            tqdm(total=size, unit="B", unit_scale=True) as bar:
        documents = (document for path in args.files for document in read_documents(path, bar))
        while batch := list(itertools.islice(documents, 64)):  # the cores share it
            encodings = tokenizer.encode_batch_fast([doc for doc, _ in batch],
                                                    add_special_tokens=False)
            for (_, place), encoding in zip(batch, encodings):
                file = val if place < args.val * 2**32 else train
                file.write(np.array([*encoding.ids, end], dtype))
        if not train.tell():
            refuse(f"--val {args.val}: all documents are in val.bin: give a smaller share"
                   if val.tell() else f"{', '.join(args.files)}: no text, so there are no tokens")
    for name in names:
        print(f"{name}: {os.path.getsize(name) // np.dtype(dtype).itemsize:,} tokens")
    print(f"give the scripts --data {names[0]} --token-dtype {dtype} --vocab-size {vocab_size}")


if __name__ == "__main__":
    run(main)
