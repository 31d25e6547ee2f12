"""Runs the script that comes first among the arguments, after the code in the variable INJECT."""

import importlib
import os
import sys

from common.launch import launch

sys.argv.pop(0)
rank = int(os.environ.get("RANK", 0))
exec(os.environ["INJECT"])
launch(importlib.import_module(sys.argv[0].removesuffix(".py")).main)
