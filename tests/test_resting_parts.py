"""The functions of the scripts in a trainer that is not ours, tests/support/lifted.py, beside one
process: losses, norms and parameters are equal, also if a part of the model rests. If not, the step
is refused, as the table in docs/strategies.md says."""

import functools

import pytest
import torch

import pp
from common.options import SettingError
from tests.support.lifted import (
    Mixture, Parts, Sequences, context, ddp, expert, fully_sharded, hybrid_in_one_stage,
    hybrid_in_stages, pipeline, plain, tensor, train, zero
)
from tests.support.on_ranks import on_ranks
from tests.support.processes import ROOT

# What the samples of the micro-batches of each step use: see ``train`` and ``Choice`` of lifted.py
NOBODY = ("cc cc", "cc cc")  # leaves out a part
SOME_MICRO_BATCHES = ("aa bb", "bb aa", "aa bb")
SOME_RANKS = ("ab bb", "bb ba", "aa ab")
TAKEN = ("AB bb", "bb BA", "cc AB")  # all parts are computed, and each rank's loss takes one
MORE = ("ac bb", "c- ca", "-b")  # other numbers of parts, or none
NO_RANK = ("aa bb", "bb bb", "AA", "bb", "--")
COLUMNS = [SOME_MICRO_BATCHES], [SOME_RANKS, TAKEN, MORE], [NO_RANK]

EQUAL, CANNOT_BE = "equal", "cannot be"
TORCH = "refused in the same step, in torch's words"
DROPPED = "equal with `drop_unused`, otherwise refused in the same step"
UNITS = "refused at the end of the step, if it ends: see below"
OTHER_UNITS = "ranks used other units of FSDP"
# What is refused: in the words, what is refused in the last of these steps
REFUSED = {
    TORCH: ("find_unused_parameters=True", [("ab",), ("cc", "aa"), ("cc cc", "cc ab")]),
    DROPPED: ("in step {} a rank left out parameters: call usage.drop_unused",
              [("aa",), ("cc", "bb bb"), ("cc", "AA")]),
    UNITS: (f"in step {{}} {OTHER_UNITS}", [("ab",), ("cc", "ba")]),
}


def variants(function, make=Parts, **options):
    """[(function with one of the values of the option, model)]"""
    ((name, values),) = options.items()
    return [(functools.partial(function, **{name: value}), make) for value in values]


FIND = functools.partial(ddp, find_unused_parameters=True)
TOGETHER = functools.partial(fully_sharded, together=True)
GATHERED_ONCE = functools.partial(zero, together=True)
PARTS_AND_EXPERTS = functools.partial(Mixture, rests=True)
# The table in docs/strategies.md: its cells; what computes them on 2 ranks by default; what else;
# what on 4 ranks.
TABLE = {
    "`ddp.py`, `cp.py`": (
        [TORCH, TORCH, TORCH], [(ddp, Parts)], [(context, Sequences)], [(ddp, Parts)]),
    "`ddp.py`, `cp.py` with `find_unused_parameters=True`": (
        [EQUAL, EQUAL, EQUAL], [(FIND, Parts)], [], [(FIND, Parts)]),
    "`zero.py`, `fsdp.py`, `ep.py`, `hybrid_3d.py`, each part a unit": (
        [EQUAL, UNITS, DROPPED],
        variants(fully_sharded, replicas=[1]) + variants(zero, stage=[2]),
        variants(functools.partial(fully_sharded, reshard=False), replicas=[2, 1])
        + variants(fully_sharded, replicas=[2]) + variants(zero, stage=[1]),
        variants(fully_sharded, replicas=[1, 2, 4])
        + [(hybrid_in_one_stage, Parts)]),
    "the parts in a module that is a unit": (
        [EQUAL, DROPPED, DROPPED],
        variants(TOGETHER, replicas=[1, 2]) + variants(GATHERED_ONCE, stage=[1]),
        variants(functools.partial(TOGETHER, reshard=False), replicas=[1, 2])
        + variants(GATHERED_ONCE, stage=[2])
        + variants(functools.partial(expert, together=True), PARTS_AND_EXPERTS, ep_ranks=[1, 2]),
        variants(TOGETHER, replicas=[1, 2, 4]) + [(hybrid_in_stages, Parts)]),
    "experts of `ep.py` that get no token": (
        [EQUAL, EQUAL, EQUAL],
        variants(expert, Mixture, ep_ranks=[2]), variants(expert, Mixture, ep_ranks=[1]),
        variants(functools.partial(expert, replicas=2), Mixture, ep_ranks=[2, 1])),
    "`tp.py`, `pp.py`": (
        [EQUAL, CANNOT_BE, EQUAL], [(tensor, Parts)] + variants(pipeline, name=["zbv"]),
        variants(pipeline, name=pp.SCHEDULES), []),
}


@functools.cache
def expected(steps, make):
    return train(make, plain, steps)


def compare(column):
    for name, row in TABLE.items():
        for strategy, make in row[column]:
            cells = [EQUAL, *row[0]]
            for cell, all_steps in zip(cells, ([NOBODY], *COLUMNS)):
                for steps in all_steps if cell in (EQUAL, DROPPED) else []:
                    print(name, strategy, cell, steps)
                    history, parameters = train(make, strategy, steps, cell == DROPPED)
                    right, whole = expected(steps, make)
                    torch.testing.assert_close(history, right, rtol=0, atol=1e-12)
                    for key, value in parameters.items():
                        torch.testing.assert_close(value, whole[key], rtol=0, atol=1e-12)
            for cell, (words, all_steps) in REFUSED.items():
                for steps in all_steps if cell in cells else []:
                    print(name, strategy, cell, steps)
                    with pytest.raises((SettingError, RuntimeError), match=words.format(len(steps))):
                        train(make, strategy, steps)


@on_ranks(2)
def test_a_sample_of_the_table():
    compare(1)


@on_ranks(2, thorough=True)
def test_the_rest_of_the_table():
    compare(2)


@on_ranks(4, thorough=True)
def test_on_four_ranks():
    compare(3)
    # Stages have other units; ranks of one stage have not.
    with pytest.raises(SettingError, match=f"in step 2 {OTHER_UNITS}"):
        train(Parts, functools.partial(hybrid_in_stages, together=False), ("cc", "abba"))


def test_the_table():
    page = (ROOT / "docs" / "strategies.md").read_text()
    for name, (cells, *_) in TABLE.items():
        assert f"| {' | '.join([name, *cells])} |" in page
