"""Runs the script that comes first among the arguments, with a loss that goes in chunks."""

import runpy
import sys

import common.model
from tests.processes import ROOT

common.model.MAX_LOGITS = 1000
sys.argv = [str(ROOT / sys.argv[1]), *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
