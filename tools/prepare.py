"""Text to token ids: writes the train.bin and val.bin that ``--data`` of the scripts reads.

    bash run.sh prepare corpus.jsonl books/*.txt --tokenizer tokenizer.json --out tokens

A document is a line of a file of JSON lines (.jsonl, .ndjson or .json), or another file. A hash of
its text decides whether it goes to val.bin. It needs one more package: ``pip install tokenizers``.
"""

import itertools
import json
import pathlib
import zlib

import numpy as np
from tqdm import tqdm

from tools.command import fail, make_parser, new_folder, run

LINES = ".jsonl", ".ndjson", ".json"


def read_texts(path):
    """Yields the text of each document in a file. Raises SettingError: one cannot be read."""
    has_lines = path.lower().endswith(LINES)
    with open(path, "rb") as file:
        for number, line in enumerate(file if has_lines else [file.read()], 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"] if has_lines else line.decode("utf-8-sig")
                text.encode()  # JSON may have half a character
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                form = '{"text": "..."} in UTF-8' if has_lines else "UTF-8"
                fail(f"{path}, line {number} is not {form} ({error!s:.60}): write it so")
            if text.strip():
                yield text


def load_tokenizer(path):
    from tokenizers import Tokenizer  # an optional package

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package has no narrower class
        fail(f"--tokenizer {path} is no tokenizer.json ({error!s:.60}): transformers writes one by "
             f"AutoTokenizer.from_pretrained(...).save_pretrained(...)")
    tokenizer.encode_special_tokens = True  # a text that spells a token does not end there
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
    parser.add_argument("--val", type=float, default=0.01, help="share of val.bin (default: 0.01)")
    parser.add_argument("--out", required=True, type=pathlib.Path,
                        help="the folder for train.bin and val.bin; it must not exist")
    args = parser.parse_args(argv)
    tokenizer = load_tokenizer(args.tokenizer)
    begin = [id_of(tokenizer, "--bos", args.bos)] if args.bos else []
    end = id_of(tokenizer, "--eod", args.eod)
    vocab_size = max(tokenizer.get_vocab().values()) + 1  # there may be gaps
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    texts = itertools.chain.from_iterable(map(read_texts, tqdm(args.files, unit=" files")))
    in_train = in_val = 0  # tokens
    with new_folder(args.out) as half:
        with open(half / "train.bin", "wb") as train, open(half / "val.bin", "wb") as val:
            while batch := list(itertools.islice(texts, 64)):  # the cores share its work
                encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                for text, encoding in zip(batch, encodings):
                    ids = np.array([*begin, *encoding.ids, end], dtype)
                    if zlib.crc32(text.encode()) < args.val * 2**32:
                        val.write(ids)
                        in_val += len(ids)
                    else:
                        train.write(ids)
                        in_train += len(ids)
        if not in_train:
            fail(f"no document is in train.bin, {in_val:,} tokens in val.bin: see --val {args.val}")
    path = args.out / "train.bin"
    print(f"{path}: {in_train:,} tokens; val.bin: {in_val:,}\n"
          f"give the scripts --data {path} --token-dtype {dtype} --vocab-size {vocab_size}; an "
          f"imported model has a vocabulary of its own")


if __name__ == "__main__":
    run(main)
