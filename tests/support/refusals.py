"""Runs a tool of tools/ with each of several command lines, a JSON list; prints how each ends."""

import importlib
import json
import sys

from tools.support.command import run

if __name__ == "__main__":  # a process that counts imports this file too
    tool = importlib.import_module(f"tools.{sys.argv[1]}")
    for words in json.loads(sys.argv[2]):
        try:
            run(tool.main, words)
            print("it ended well")
        except SystemExit as end:
            print(end.code)
