"""ddp.py, where only rank 1 finds a GPU."""

import os

import torch

import common.launch
import ddp

common.launch.pick_device = lambda device, share: torch.device(
    "cuda" if os.environ["RANK"] == "1" else "cpu"
)
common.launch.launch(ddp.main)
