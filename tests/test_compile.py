"""--compile: a layer stays one graph. That compiled runs are the same runs: test_same_run.py."""

import json

import pytest

from tests.sample import thorough
from tests.table import OPTIONS


@thorough
@pytest.mark.parametrize("script", ["ddp.py", "cp.py"])
def test_a_large_layer_is_one_graph(once, script):
    """DDP's own optimizer would cut it where a bucket of 25 MB is full."""
    found = []
    for sizes in ("--hidden-size 32 --intermediate-size 64",
                  "--hidden-size 1024 --intermediate-size 4096"):
        options = f"{OPTIONS} {sizes} --num-hidden-layers 1 --steps 2 --save-every 0 --compile"
        result = once(script, 2, options, inject="count_compiled('eager')")
        (line,) = [line for line in result.lines if line.startswith("calls ")]
        (first, second), _ = json.loads(line.removeprefix("calls "))
        found.append((first, second))
        assert second > 0
    assert found[0] == found[1]  # the calls in each step; the ring breaks the graph of any layer
