"""Text to token ids: writes the train.bin and val.bin that ``--data`` of the scripts reads.

    python -m tools.prepare corpus.jsonl books/ --tokenizer tokenizer.json --out tokens

Each line of a .jsonl file is a document, and each other file, unless --separator cuts it. Memory is
bounded: a .jsonl line has at most 64 MiB, and other documents of more than 262,144 characters are
cut at line ends into several. If a text spells out a special token such as </s>, these are ordinary
characters and not that token. A hash of its text decides whether a document goes to val.bin. If
this command is killed, it leaves only a hidden folder .prepare-* in the output folder.
"""

import os
import pathlib

from tqdm import tqdm

from common.errors import printable
from tools.command import make_parser, refuse, run
from tools.text import find_files, load_tokenizer, read_documents, write_tokens


def main(argv=None):
    parser = make_parser("prepare", __doc__)
    parser.add_argument("paths", nargs="+", type=pathlib.Path, metavar="PATH",
                        help="a text file in UTF-8, a .jsonl file, or a folder of such files")
    parser.add_argument("--tokenizer", required=True, metavar="FILE",
                        help="a tokenizer.json of Hugging Face")
    parser.add_argument("--out", required=True, type=pathlib.Path, metavar="FOLDER",
                        help="the folder for train.bin and val.bin; older ones are replaced")
    parser.add_argument("--val", type=float, default=0.01, metavar="X",
                        help="share of the documents that go to val.bin (default: 0.01)")
    parser.add_argument("--eod", metavar="TOKEN", help="the token after each document; '': none "
                        "(default: <|endoftext|>, <|end_of_text|>, </s> or <eos>, if it exists)")
    parser.add_argument("--field", default="text", metavar="NAME",
                        help="field of a .jsonl line that holds the text (default: text)")
    parser.add_argument("--separator", metavar="LINE", help="in files that are not .jsonl, the "
                        "line between two documents, such as '<|endoftext|>'; '': an empty line")
    args = parser.parse_args(argv)
    if not 0 <= args.val < 1:
        refuse(f"--val {args.val} is not allowed: give a share from 0 to less than 1, such as 0.01")
    tokenizer, vocab_size, eod = load_tokenizer(args.tokenizer, args.eod)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    files = [file for path in args.paths for file in find_files(path)]
    with tqdm(total=sum(map(os.path.getsize, files)), unit="B", unit_scale=True) as bar:
        texts = (text for file in files
                 for text in read_documents(file, args.field, args.separator, bar))
        counts = write_tokens(texts, tokenizer, eod, dtype, args.val, args.out)
    for name, (documents, tokens) in zip(("train.bin", "val.bin"), counts):
        print(printable(f"{args.out / name}: {tokens:,} tokens in {documents:,} documents"
                        if documents else f"no document was drawn for {name}: see --val"))
    print(printable(f"the token after each document: {eod}" if eod else "no token ends a document"))
    print(printable(f"give the scripts --data {args.out / 'train.bin'} --token-dtype {dtype} "
                    f"--vocab-size {vocab_size}"))


if __name__ == "__main__":
    run(main)
