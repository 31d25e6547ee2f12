"""Text to token ids: writes the train.bin and val.bin that ``--data`` of the scripts reads.

    python -m tools.prepare corpus.jsonl books/*.txt --tokenizer tokenizer.json --out tokens

A document is a line of a file of JSON lines (.jsonl, .ndjson or .json), or 65,536 characters of
another file and the rest of their line. A hash of its text decides whether it goes to val.bin.
Memory does not grow with the files. It needs one more package: ``pip install tokenizers``.
"""

import itertools
import json
import os
import pathlib
import zlib

import numpy as np
from tqdm import tqdm

from tools.support.command import make_parser, new_folder, refuse, run

LINES = ".jsonl", ".ndjson", ".json"


def read_documents(path, bar, size=2**16):
    """Yields the text of each document of a file."""
    number, jsonl = 0, path.lower().endswith(LINES)
    with open(path, encoding="utf-8-sig", newline="") as file:
        pieces = file if jsonl else iter(lambda: file.read(size) + file.readline(size), "")
        try:
            for number, piece in enumerate(filter(str.strip, pieces), 1):
                bar.update(len(piece.encode()))
                text = json.loads(piece)["text"] if jsonl else piece
                if text.strip():
                    yield text
        except (ValueError, TypeError, LookupError) as error:
            refuse(f"{path}, after document {number}: no UTF-8, or no text in JSON ({error!r})")


def load_tokenizer(path, eod):
    """The tokenizer, and the id of the token ``eod``."""
    from tokenizers import Tokenizer  # an optional package

    tokenizer = Tokenizer.from_str(pathlib.Path(path).read_text())
    end = tokenizer.token_to_id(eod)
    if end is None:
        refuse(f"--eod {eod}: the tokenizer has no such token; name one that ends a document")
    tokenizer.encode_special_tokens = True  # a text that spells out the token does not end there
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, end


def main(argv=None):
    parser = make_parser("prepare", __doc__)
    parser.add_argument("files", nargs="+", help='text in UTF-8; .jsonl: lines of {"text": "..."}')
    parser.add_argument("--tokenizer", required=True, help="a Hugging Face tokenizer.json")
    parser.add_argument("--eod", default="<|endoftext|>", help="the token after each document")
    parser.add_argument("--val", type=float, default=0.01, help="share of val.bin (default: 0.01)")
    parser.add_argument("--out", required=True, type=pathlib.Path,
                        help="the folder for train.bin and val.bin; it must not exist")
    args = parser.parse_args(argv)
    if not 0 <= args.val < 1:
        refuse(f"--val {args.val}: this is a share of the documents: give 0 or more, less than 1")
    tokenizer, end = load_tokenizer(args.tokenizer, args.eod)
    vocab_size = max(tokenizer.get_vocab().values()) + 1  # not their number: there may be gaps
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    size = sum(map(os.path.getsize, args.files))
    with new_folder(args.out) as half, tqdm(total=size, unit="B", unit_scale=True) as bar, \
            open(half / "train.bin", "wb") as train, open(half / "val.bin", "wb") as val:
        documents = itertools.chain.from_iterable(read_documents(path, bar) for path in args.files)
        while batch := list(itertools.islice(documents, 64)):  # the cores share it
            encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            for text, encoding in zip(batch, encodings):
                file = val if zlib.crc32(text.encode()) < args.val * 2**32 else train
                file.write(np.array([*encoding.ids, end], dtype))
        tokens = {file.name: file.tell() // np.dtype(dtype).itemsize for file in (train, val)}
        if not train.tell():
            refuse(f"--val {args.val}: all documents are in val.bin: give a smaller share"
                   if val.tell() else f"{', '.join(args.files)}: no text, so there are no tokens")
    for path, number in tokens.items():
        print(f"{args.out / pathlib.Path(path).name}: {number:,} tokens")
    print(f"give the scripts --data {args.out / 'train.bin'} --token-dtype {dtype} "
          f"--vocab-size {vocab_size}")


if __name__ == "__main__":
    run(main)
