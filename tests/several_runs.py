"""Runs a script several times in one launch:
SCRIPT OPTIONS... --each OPTIONS... --each OPTIONS..."""

import importlib
import itertools
import sys

from common.launch import launch


def main():
    script, *words = sys.argv[1:]
    module = importlib.import_module(script.removesuffix(".py"))
    options, *several = [
        list(group) for is_mark, group in itertools.groupby(words, lambda word: word == "--each")
        if not is_mark
    ]
    for more in several:
        module.main(options + more)


if __name__ == "__main__":
    launch(main)
