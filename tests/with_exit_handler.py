"""Runs the script that the first argument names, and tells when the interpreter is taken down."""

import atexit
import runpy
import sys

atexit.register(print, "the interpreter is taken down")
runpy.run_path(sys.argv.pop(1), run_name="__main__")
