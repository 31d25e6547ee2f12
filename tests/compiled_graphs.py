"""single.py, and how many graphs it has compiled."""

from torch._dynamo.utils import counters

import single
from common.launch import launch


def main():
    single.main()
    print(counters["stats"]["unique_graphs"], "graphs")


launch(main)
