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
        pieces = file
        if not jsonl:
            pieces = iter(lambda: file.read(size) + file.readline(size), "")
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
                    fail(f'{path}, line {number} is not {{"text": "..."}} in UTF-8 ({error!s:.60})'
                         f": write each line so, or leave such out by --skip-bad-lines")
                skipped.append(number)
                continue
            if text.strip():
                yield text, first
                first = jsonl


class Tokenizer:
    """A tokenizer.json, with the tokens that stand between documents: ``bos`` before each one, or
    none, and ``eod`` after it. Raises SettingError."""

    def __init__(self, path, bos, eod):
        from tokenizers import Tokenizer  # an optional package

        try:
            self.tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the package has no narrower class
            fail(f"--tokenizer {path} is no tokenizer.json ({error!s:.60}): transformers writes "
                 f"one by AutoTokenizer.from_pretrained(...).save_pretrained(...)")
        self.tokenizer.encode_special_tokens = True  # a text that spells a token does not end there
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.begin = [self.id_of("--bos", bos)] if bos else []
        self.end = [self.id_of("--eod", eod)]
        # Not the number of tokens: there may be gaps.
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self.dtype = "uint16" if self.vocab_size <= 2**16 else "uint32"

    def id_of(self, option, token):
        number = self.tokenizer.token_to_id(token)
        if number is None:
            fail(f"{option} {token}: the tokenizer has no such token")
        return number

    def encode(self, texts):
        """Yields (text, whether a document begins with it, its ids). The cores share the work."""
        while batch := list(itertools.islice(texts, 64)):
            encodings = self.tokenizer.encode_batch_fast([text for text, _ in batch],
                                                         add_special_tokens=False)
            for (text, first), encoding in zip(batch, encodings):
                yield text, first, encoding.ids

    def write(self, texts, train, val, share):
        """Write the ids of ``texts`` to two open files; ``share``: of the documents, to ``val``."""
        before = None  # the file that has a document without its end
        for text, first, ids in self.encode(texts):
            file = val if zlib.crc32(text.encode()) < share * 2**32 else train
            if first or file is not before:
                if before:
                    before.write(np.array(self.end, self.dtype))
                ids = self.begin + ids
            file.write(np.array(ids, self.dtype))
            before = file
        if before:
            before.write(np.array(self.end, self.dtype))


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
    tokenizer = Tokenizer(args.tokenizer, args.bos, args.eod)
    size, skipped = sum(map(os.path.getsize, args.files)), [] if args.skip_bad_lines else None
    with new_folder(args.out) as half, tqdm(total=size, unit="B", unit_scale=True) as bar, \
            open(half / "train.bin", "wb") as train, open(half / "val.bin", "wb") as val:
        texts = itertools.chain.from_iterable(read_texts(path, bar, skipped) for path in args.files)
        tokenizer.write(texts, train, val, args.val)
        width = np.dtype(tokenizer.dtype).itemsize
        in_train, in_val = train.tell() // width, val.tell() // width
        if not in_train and in_val:
            fail(f"--val {args.val}: all documents are in val.bin: give a smaller share")
        if not in_train:
            fail(f"{', '.join(args.files)}: no text, so there are no tokens")
    print(f"{args.out / 'train.bin'}: {in_train:,} tokens; val.bin: {in_val:,}")
    if args.val and not in_val:
        print(f"no document is in val.bin: raise --val {args.val}, or give no --val-data")
    if skipped:
        print(f"left out: {len(skipped):,} bad lines")
    if not args.bos and (own := tokenizer.tokenizer.encode("").tokens):
        print(f"no text has the {' '.join(own)} that the tokenizer itself adds: see --bos")
    print(f"give the scripts --data {args.out / 'train.bin'} --token-dtype {tokenizer.dtype} "
          f"--vocab-size {tokenizer.vocab_size}; an imported model has a vocabulary of its own")


if __name__ == "__main__":
    run(main)
