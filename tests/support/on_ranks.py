"""Tests that take several ranks: ``@on_ranks(2)`` above a test, which each rank then runs.

All tests of a file for the same number of ranks run one after the other in the same processes,
before the first of them is reported. A test may take ``mesh``, a DeviceMesh of all ranks on the
CPU; ``rank``; and ``folder``, one of its own that the ranks share.
"""

import importlib
import inspect
import pathlib
import re
import sys

from tests.support import sample

ON_RANKS = {}  # by file, number of ranks, and whether they are thorough: the names of its tests
FOUND = {}  # the output of each such run


def on_ranks(world, thorough=False):
    """Run a test on so many ranks. ``thorough``: with --all only."""
    def decorate(body):
        key = body.__module__, world, thorough
        ON_RANKS.setdefault(key, []).append(body.__name__)

        def test(server, tmp_path_factory):
            if key not in FOUND:
                FOUND[key] = server.run("tests/support/on_ranks.py", world,
                                        [body.__module__, *ON_RANKS[key]], pass_out=False,
                                        folder=tmp_path_factory.mktemp("ranks"),
                                        expect_ok=False).output
            held = re.findall(r"(?m)^(\w+) holds on every rank$", FOUND[key])
            assert body.__name__ in held, FOUND[key]

        test.__doc__, test.body = body.__doc__, body
        return sample.thorough(test) if thorough else test

    return decorate


def main():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    module, *names = sys.argv[1:]
    for name in names:
        body = getattr(importlib.import_module(module), name).body
        values = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
                  "rank": dist.get_rank(), "folder": pathlib.Path(name)}
        body(**{key: values[key] for key in inspect.signature(body).parameters})
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{name} holds on every rank", flush=True)


if __name__ == "__main__":
    from common.launch import launch

    launch(main)
