"""--compile stays on, and sends what eager layers send: in every script, in every step."""

import pytest

from tests.sample import sampled
from tests.test_same_run import BASE

RUNS = [("single.py", 0), ("ddp.py", 2), ("zero.py", 2), ("fsdp.py", 2), ("tp.py", 2),
        ("tp.py --no-sequence-parallel", 2), ("cp.py", 2), ("pp.py", 2), ("hybrid_3d.py --tp 2", 4)]
OPTIONS = BASE.replace("--steps 20", "--steps 6")


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
