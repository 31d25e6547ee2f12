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

import pytest

from tests.support.sample import thorough

ON_RANKS = {}  # by file and number of ranks: the names of its tests
FOUND = {}  # the output of each such run


def on_ranks(*worlds, sample=None):
    """Run a test on each of these numbers of ranks; without --all on those of ``sample`` only."""
    def decorate(body):
        @pytest.mark.parametrize("world", [
            pytest.param(n, marks=() if n in (sample or worlds) else thorough) for n in worlds])
        def test(server, tmp_path_factory, world):
            key = body.__module__, world
            if key not in FOUND:
                names = ON_RANKS[key]
                FOUND[key] = server.run("tests/support/on_ranks.py", world, [*key[:1], *names],
                                        folder=tmp_path_factory.mktemp("ranks"), pass_out=False,
                                        expect_ok=False).output
            held = re.findall(r"(?m)^(\w+) holds on every rank$", FOUND[key])
            assert body.__name__ in held, FOUND[key]

        test.__doc__, test.body = body.__doc__, body
        for world in worlds:
            ON_RANKS.setdefault((body.__module__, world), []).append(body.__name__)
        return test

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
