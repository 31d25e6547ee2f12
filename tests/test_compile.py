"""--compile stays on, and sends what eager layers send: in every script, in every step."""

import pytest

from tests.sample import sampled, thorough
from tests.test_same_run import BASE

RUNS = [("single.py", 0), ("ddp.py", 2), ("zero.py", 2), ("fsdp.py", 2), ("tp.py", 2),
        ("tp.py --no-sequence-parallel", 2), ("cp.py", 2), ("pp.py", 2), ("hybrid_3d.py --tp 2", 4)]
OPTIONS = BASE.replace("--steps 20", "--steps 6")


@thorough
@pytest.mark.parametrize("command", ["ddp.py", "cp.py"])
def test_a_large_layer_is_one_graph(run, corpus, command):
    """DDP's own optimizer would cut it where a bucket of 25 MB is full."""
    options = (
        f"{OPTIONS} --data {corpus} --steps 2 --hidden-size 1024 --intermediate-size 4096 "
        f"--num-hidden-layers 1 --compile"
    )
    found = []
    for large in (options, options.replace("1024", "32").replace("4096", "64")):
        result = run(f"tests/compiled_calls.py {command}", 2, large, out=str(len(found)))
        (line,) = [line for line in result.lines if line.startswith("calls")]
        found.append(line.partition(" graphs ")[0])
    assert found[0] == found[1]  # the calls in each step; the ring breaks the graph of any layer


@pytest.mark.parametrize("command, world", sampled(RUNS, [RUNS[4]]))
def test_compiled_layers_are_called_in_every_step(run, corpus, command, world):
    """Also in the third, which is counted: the counter once turned compilation off for good, and
    its hooks had layers compiled anew, with other collectives."""
    options = f"{OPTIONS} --data {corpus}"
    result = run(f"tests/compiled_calls.py {command}", world, f"{options} --compile")
    (line,) = [line for line in result.lines if line.startswith("calls")]
    calls, graphs = line.removeprefix("calls ").split(" graphs ")
    first, *rest = [int(number) for number in calls.strip("[]").split(",")]
    assert len(rest) == 5 and set(rest) == {rest[0]} and first >= rest[0] > 0, line
    assert int(graphs) <= 4, line  # one, and where a ring breaks a layer's graph, one for each part
    eager, compiled = run(command, world, options, out="eager").summary, result.summary
    assert compiled["sent"] == eager["sent"]
    assert compiled["peak"]["parameters"] == eager["peak"]["parameters"]
