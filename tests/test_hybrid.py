"""hybrid_3d.py: each rank has its place in the grid. Its curves and bytes: test_same_run.py."""

import json
import re

from common.data import BatchSampler
from common.tokens import TokenDataset
from tests.support.edits import edited
from tests.support.processes import ROOT
from tests.support.sample import thorough
from tests.support.table import OPTIONS, Row
from tests.test_same_run import assert_near, furthest, read


@thorough
def test_all_four_on_16_ranks(once, corpus):
    """The grid from the environment, with hybrid sharding; and the lines that show it. Each rank
    reads the rows and holds the positions that the mesh says."""
    grid = {"DP_SIZE": "2", "CP_SIZE": "2", "TP_SIZE": "2", "PP_SIZE": "2"}
    options = f"{OPTIONS} --dtype float64 --steps 2 --num-hidden-layers 3 --save-every 0"
    result = once("hybrid_3d.py", 16, f"{options} --replicate 2", env=grid,
                  inject="ignored(); note_place()")
    assert "rank grid pp 2 x dp_replicate 2 x dp_shard 1 x cp 2 x tp 2" in result.output
    assert [line for line in result.lines if line.startswith("pp ")] == [
        "pp 0 dp 0 | cp 0: 0 1   cp 1: 2 3 | layers 0-1",
        "pp 0 dp 1 | cp 0: 4 5   cp 1: 6 7 | layers 0-1",
        "pp 1 dp 0 | cp 0: 8 9   cp 1: 10 11 | layers 2-2",
        "pp 1 dp 1 | cp 0: 12 13   cp 1: 14 15 | layers 2-2",
    ]
    assert "warn" not in result.output.lower() and "W1" not in result.output
    dataset = TokenDataset(corpus, 24)
    (rows,) = BatchSampler(len(dataset), 24, stop=1)
    batch = [dataset[i][0].tolist() for i in rows]
    early, middle, late = list(range(6)), list(range(6, 18)), list(range(18, 24))
    for rank in range(8):  # of the first stage, which gets tokens
        found = json.loads((result.out / f"rank-{rank}.json").read_text())
        dp, cp = rank // 4, rank // 2 % 2  # tp innermost, then cp, then dp
        positions = middle if cp else early + late
        assert found["inputs"] == batch[dp * 12 :][:12] and found["positions"] == positions
        micro_batch = found["inputs"][: len(found["given"])]
        assert found["given"] == [[row[p] for p in positions] for row in micro_batch] != []

    expected = once("single.py", 0, options, inject="ignored()")
    assert furthest(result.curve(), expected.curve()) < 1e-10
    assert furthest(result.curve("val_loss"), expected.curve("val_loss")) < 1e-10


def test_without_the_lines_that_the_docs_delete(once, shared):
    """Those of context parallelism: what is left trains and saves what single.py does."""
    page = (ROOT / "docs" / "strategies.md").read_text()
    (block,) = re.findall(r"(?s)```diff\n(.*?)```", page)
    edits = [["".join(re.findall(rf"(?m)^\{sign}(.*\n)", part)) for sign in "-+"]
             for part in re.split(r"(?m)^\n", block)]
    script = edited(shared / "without-cp", "hybrid_3d.py", *edits)
    found = once(script, 4, f"--tp 2 --pp 2 {OPTIONS} --dtype float64", inject="ignored()")
    expected = Row("single.py", 0).run(once)
    for names in ("loss", "grad_norm"), ("step", "val_loss"):
        assert furthest(found.curve(*names), expected.curve(*names)) < 1e-10
    assert_near(read(found.out), read(expected.out))
