"""Runs the script that the first argument names, with a handler of atexit, as loggers have one, and
an object that tells when the interpreter is finalised."""

import atexit
import os
import runpy
import sys


class Last:
    def __del__(self, write=os.write):
        write(1, b"the interpreter is finalised\n")


sys.last = Last()  # deleted with the module sys, at the very end
atexit.register(print, "the handler has run")
runpy.run_path(sys.argv.pop(1), run_name="__main__")
