"""Text to token ids: writes the train.bin and val.bin that ``--data`` of the scripts reads.

    bash run.sh prepare corpus.jsonl books/*.txt --tokenizer tokenizer.json --out tokens

A document is a line of a file of JSON lines (.jsonl, .ndjson or .json), or another file. A hash of
its text decides whether it goes to val.bin; a file of text is cut for it into blocks of 65,536
characters and the rest of their line. Memory does not grow with the files. It needs one more
package: ``pip install tokenizers``.
"""

import itertools
import json
import os
import pathlib
import zlib

import numpy as np
from tqdm import tqdm

from tools.command import fail, make_parser, new_folder, run

LINES = ".jsonl", ".ndjson", ".json"


def read_texts(path, bar, skipped, size=2**16):
    """Yields (text, whether a document begins with it) for each line of JSON lines, or each block
    of another file. With a list ``skipped`` it adds the bad lines to it, and goes on; None: it
    refuses them."""
    jsonl, first = path.lower().endswith(LINES), True
    if path.lower().endswith((".gz", ".bz2", ".xz", ".zst")):
        fail(f"{path} is compressed: unpack it first")
    # A byte that is no UTF-8 becomes a lone surrogate, which cannot be encoded again.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        pieces = file if jsonl else iter(lambda: file.read(size) + file.readline(size), "")
        for number, piece in enumerate(pieces, 1):
            bar.update(len(piece.encode(errors="surrogateescape")))
            if not piece.strip():
                continue
            try:
                text = json.loads(piece)["text"] if jsonl else piece
                text.encode()
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                if not jsonl:
                    fail(f"{path}, block {number}: no UTF-8: convert the file, such as by iconv")
                if skipped is None:
                    fail(f'{path}, line {number} is not {{"text": "..."}} in UTF-8 ({error!s:.60}'
                           f"): write each line so, or leave such out by --skip-bad-lines")
                skipped.append(number)
                continue
            if text.strip():
                yield text, first
                first = jsonl


def id_of(tokenizer, option, token):
    number = tokenizer.token_to_id(token)
    if number is None:
        fail(f"{option} {token}: the tokenizer has no such token")
    return number


def main(argv=None):
    parser = make_parser("prepare", __doc__)
    parser.add_argument("files", nargs="+", help='text in UTF-8; .jsonl: lines of {"text": "..."}')
    parser.add_argument("--tokenizer", required=True, help="a Hugging Face tokenizer.json")
    parser.add_argument("--eod", default="<|endoftext|>", help="the token after each document")
    parser.add_argument("--bos", help="a token before each document (default: none)")
    parser.add_argument("--skip-bad-lines", action="store_true", help="leave out lines of JSON "
                        "lines that have no text, or no UTF-8, and say how many")
    parser.add_argument("--val", type=float, default=0.01, help="share of val.bin (default: 0.01)")
    parser.add_argument("--out", required=True, type=pathlib.Path,
                        help="the folder for train.bin and val.bin; it must not exist")
    args = parser.parse_args(argv)
    if not 0 <= args.val < 1:
        fail(f"--val {args.val}: this is a share of the documents: give 0 or more, less than 1")
    from tokenizers import Tokenizer  # an optional package

    try:
        tokenizer = Tokenizer.from_file(args.tokenizer)
    except Exception as error:  # the package has no narrower class
        fail(f"--tokenizer {args.tokenizer} is no tokenizer.json ({error!s:.60}): transformers "
               f"writes one by AutoTokenizer.from_pretrained(...).save_pretrained(...)")
    tokenizer.encode_special_tokens = True  # a text that spells out a token does not end there
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = [id_of(tokenizer, "--eod", args.eod)]
    begin = [id_of(tokenizer, "--bos", args.bos)] if args.bos else []
    vocab_size = max(tokenizer.get_vocab().values()) + 1  # not their number: there may be gaps
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    size, skipped = sum(map(os.path.getsize, args.files)), [] if args.skip_bad_lines else None
    with new_folder(args.out) as half, tqdm(total=size, unit="B", unit_scale=True) as bar, \
            open(half / "train.bin", "wb") as train, open(half / "val.bin", "wb") as val:
        texts = itertools.chain.from_iterable(read_texts(path, bar, skipped) for path in args.files)
        before = None  # the file that has a document without its end
        while batch := list(itertools.islice(texts, 64)):  # the cores share it
            encodings = tokenizer.encode_batch_fast([text for text, _ in batch],
                                                    add_special_tokens=False)
            for (text, first), encoding in zip(batch, encodings):
                file = val if zlib.crc32(text.encode()) < args.val * 2**32 else train
                ids = encoding.ids
                if first or file is not before:
                    if before:
                        before.write(np.array(end, dtype))
                    ids = begin + ids
                file.write(np.array(ids, dtype))
                before = file
        if before:
            before.write(np.array(end, dtype))
        tokens = {file.name: file.tell() // np.dtype(dtype).itemsize for file in (train, val)}
        if not train.tell():
            fail(f"--val {args.val}: all documents are in val.bin: give a smaller share"
                   if val.tell() else f"{', '.join(args.files)}: no text, so there are no tokens")
    for path, number in tokens.items():
        print(f"{args.out / pathlib.Path(path).name}: {number:,} tokens")
    if args.val and not tokens[str(half / "val.bin")]:
        print(f"no document is in val.bin: raise --val {args.val}, or give no --val-data")
    if skipped:
        print(f"left out: {len(skipped):,} bad lines")
    if not args.bos and (own := tokenizer.encode("").tokens):
        print(f"no text has the {' '.join(own)} that the tokenizer itself adds: see --bos")
    print(f"give the scripts --data {args.out / 'train.bin'} --token-dtype {dtype} "
          f"--vocab-size {vocab_size}; an imported model has a vocabulary of its own")


if __name__ == "__main__":
    run(main)
