"""Runs the script that the first argument names, and looks at what rotates queries and keys: angles
in float32, not rounded to the bfloat16 of the queries and keys."""

import importlib
import sys

import torch

from common import model
from common.launch import launch

types = set()
rotate = model.rotate


def look(x, cos, sin):
    types.add((x.dtype, cos.dtype, sin.dtype))
    assert (cos.double() ** 2 + sin.double() ** 2 - 1).abs().max() < 1e-6  # bfloat16: 4e-3
    return rotate(x, cos, sin)


def main():
    importlib.import_module(script.removesuffix(".py")).main()
    assert types == {(torch.bfloat16, torch.float32, torch.float32)}, types


model.rotate = look
script = sys.argv.pop(1)
launch(main)
