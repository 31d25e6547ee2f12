"""hybrid_3d.py: every grid follows single.py, sends what it says, and each rank has its place."""

import itertools
import json

import pytest

from tests.sample import sampled, thorough
from tests.test_same_run import BASE, furthest

# Sizes for tp 2, cp 2, pp 2 and a batch for dp 2 x 2 micro-batches
OPTIONS = f"{BASE} --dtype float64 --num-hidden-layers 3"
SHORT = OPTIONS.replace("--steps 20", "--steps 8")  # on 8 and 16 ranks, which two cores share
PAIRS, TRIPLES = (
    [{name: 2 for name in names}
     for names in itertools.combinations(("dp", "cp", "tp", "pp"), length)] for length in (2, 3)
)


def flags(grid):
    return " ".join(f"--{name} {size}" for name, size in grid.items())


def world_of(grid):
    world = 1
    for size in grid.values():
        world *= size
    return world


def check(result, curve, steps=20):
    assert furthest(result.curve(), curve, steps) < 1e-10
    summary = result.summary
    # Beyond theory: the loss, and for clipping 30 tensors' norms over each dimension of a mesh.
    assert 0 <= summary["sent"] - summary["theory"]["sent"]["bytes"] < 3 * (2 * 30 * 8 / 2) + 40
    assert summary["held"]["parameters"] == pytest.approx(summary["theory"]["parameters"]["bytes"],
                                                          rel=0.01)
    assert summary["held"]["gradients"] == pytest.approx(summary["theory"]["gradients"]["bytes"],
                                                         rel=0.01)


SAMPLE = [{"tp": 2, "pp": 2}]  # without --all


@pytest.mark.parametrize("grid", sampled(PAIRS, SAMPLE), ids="-".join)
def test_equals_single(run, single, corpus, grid):
    check(run("hybrid_3d.py", world_of(grid), f"{OPTIONS} --data {corpus} {flags(grid)}"),
          single(OPTIONS))


@thorough
@pytest.mark.parametrize("grid", TRIPLES, ids="-".join)
def test_three_axes_equal_single(run, single, corpus, grid):
    check(run("hybrid_3d.py", world_of(grid), f"{SHORT} --data {corpus} {flags(grid)}"),
          single(SHORT), steps=8)


FURTHER = [
    (4, "--cp 2 --replicate 2"), (4, "--dp 2 --cp 2 --replicate 2 --grad-accum 2"),
    (4, "--tp 2 --pp 2 --no-sequence-parallel --microbatches 3 --grad-accum 2"),
    (1, "--grad-accum 3"),
]


@pytest.mark.parametrize("world, options", sampled(FURTHER, FURTHER[1:2]))
def test_options(run, single, corpus, world, options):
    check(run("hybrid_3d.py", world, f"{OPTIONS} --data {corpus} {options}"), single(OPTIONS))


@thorough
def test_all_four_on_16_ranks(run, single, corpus):
    """The grid from the environment, with hybrid sharding."""
    grid = {"DP_SIZE": "2", "CP_SIZE": "2", "TP_SIZE": "2", "PP_SIZE": "2"}
    options = SHORT.replace("--num-hidden-layers 3", "")
    result = run("hybrid_3d.py", 16, f"{options} --data {corpus} --replicate 2", env=grid)
    assert "rank grid pp 2 x dp_replicate 2 x dp_shard 1 x cp 2 x tp 2" in result.output
    check(result, single(options), steps=8)


def test_every_rank_has_its_place(run, corpus):
    """The rows read and the positions held are those that the mesh says, on every rank."""
    options = f"{OPTIONS} --data {corpus} --steps 1 --dp 2 --cp 2 --tp 2"
    result = run("tests/where_it_reads.py", 8, options)
    place = {}
    for rank in range(8):
        place[rank] = json.loads((result.out / f"rank-{rank}.json").read_text())
    batch = place[0]["inputs"] + place[4]["inputs"]  # dp 0 and dp 1: the global batch, in order
    assert place[0]["batch"] == batch and len(batch) == 24
    T = 32
    early, late = list(range(T // 4)), list(range(3 * T // 4, T))
    middle = list(range(T // 4, 3 * T // 4))
    for rank, found in place.items():
        dp, cp = rank // 4, rank // 2 % 2  # tp innermost, then cp, then dp
        assert found["inputs"] == batch[dp * 12 : dp * 12 + 12]
        assert found["positions"] == (middle if cp else early + late)
        assert found["given"] == [[row[p] for p in found["positions"]] for row in found["inputs"]]


def test_without_a_pipeline_it_is_zero_3(run, corpus):
    """The peaks of fsdp.py: under PipelineStage parameters and gradients would stay whole."""
    peaks = {}
    for script in ("fsdp.py", "hybrid_3d.py"):
        options = f"{BASE} --steps 3 --num-hidden-layers 4 --data {corpus} --grad-accum 2"
        peaks[script] = run(script, 2, options, out=script).summary["peak"]
    for kind in ("parameters", "gradients"):
        assert peaks["hybrid_3d.py"][kind] == pytest.approx(peaks["fsdp.py"][kind], rel=0.02), peaks


@thorough
def test_traffic_with_bfloat16(run, corpus):
    """Each part of the theory, where matrices are half as wide as the parameters."""
    for i, (world, options) in enumerate((
        (4, "--tp 2 --grad-accum 2"), (4, "--cp 2 --microbatches 2"), (4, "--tp 2 --pp 2"),
    )):
        options = f"{OPTIONS} --dtype bfloat16 --steps 3 --data {corpus} {options}"
        summary = run("hybrid_3d.py", world, options, out=f"out-{i}").summary
        more = summary["sent"] - summary["theory"]["sent"]["bytes"]
        assert 0 <= more < 3 * (2 * 30 * 4 / 2) + 40, options


@thorough
def test_the_picture(run, corpus):
    result = run("hybrid_3d.py", 8, f"{OPTIONS} --data {corpus} --steps 1 --tp 2 --cp 2 --pp 2")
    lines = [line for line in result.lines if line.startswith("pp ")]
    assert lines == ["pp 0 dp 0 | cp 0: 0 1   cp 1: 2 3 | layers 0-1",
                     "pp 1 dp 0 | cp 0: 4 5   cp 1: 6 7 | layers 2-2"]
    assert "warn" not in result.output.lower() and "W1" not in result.output


@pytest.mark.parametrize("world, options, message", [
    (4, "--dp 2 --tp 2 --cp 3", "World size (4) must equal dp (2) x tp (2) x cp (3) x pp (1) = 12"),
    (3, "--tp 2", "World size (3) must equal dp (1) x tp (2) x cp (1) x pp (1) = 2"),
    (4, "--tp 8", "World size (4) must equal dp (1) x tp (8) x cp (1) x pp (1) = 8"),
    (2, "--dp 0", "--dp: 0 is not allowed"),
    (4, "--tp 4 --num-key-value-heads 2",
     "--num-key-value-heads 2 cannot be cut into 4 equal parts (--tp)"),
    (4, "--cp 4 --seq-len 36", "--seq-len 36 cannot be cut into 8 equal parts (2 x --cp)"),
    (8, "--cp 2 --tp 4 --seq-len 20",
     "over --cp 2 is 10 positions, which cannot be cut into --tp 4 equal parts"),
    (2, "--pp 2 --microbatches 1",
     "--microbatches 1 leaves stages without work: use at least --pp 2"),
    (2, "--pp 2 --microbatches 3", "--batch-size 16 cannot be cut into 3 equal parts"),
    (2, "--pp 2 --num-hidden-layers 1", "--pp 2 stages are more than the 1 layers"),
    (4, "--replicate 3", "--replicate 3 does not divide dp (4)"),
    (4, "--cp 4 --replicate 2 --seq-len 32", "--replicate 2 does not divide dp (1)"),
])
def test_bad_grids(run, world, options, message):
    (line,) = run("hybrid_3d.py", world, options, expect_ok=False).lines
    assert message in line
