"""examples/diloco.py: its reference is one process that runs the replicas in turn. And its
checkpoints."""

import re
import shutil

import pytest

from tests.support.compare import assert_bit_equal, assert_near, furthest, saved
from tests.support.sample import thorough

pytestmark = thorough
MODEL = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 2 --num-attention-heads 4 "
         "--num-key-value-heads 2 --seq-len 24 --batch-size 16 --dtype float64")
# Steps 4 and 8 are between two meetings.
WHOLE = (f"{MODEL} --steps 8 --log-every 1 --warmup-steps 3 --lr 0.01 --seed 4 --save-every 4 "
         "--grad-accum 2 --val-data {val} --val-every 4 --val-batches 1")
COMMAND = "examples/diloco.py --replicas 2 --inner-steps 3"
# As a plain loop over the replicas gave them in commit f660e7d: losses and norms, the loss of
# held-out data, and the norms of the common weights, of those of each replica, and of the momentum
CURVE = """5.537416198 1.868872553 5.475593931 1.795356057 5.178762350 2.127830942
    4.950050055 2.681744467 4.584918984 2.761926231 4.812353339 32.40944751
    3.913301144 1.861698497 3.969465012 21.56861653"""
NORMS = {r"model\.(?!replica)": 14.3933992, r"model\.replica0": 14.5033868,
         r"model\.replica1": 14.5020983, "optimizer.*momentum_buffer": 3.35442161}


@pytest.fixture
def whole(once):
    """A run of two replicas, each on two ranks. It also resumes its checkpoint of step 4."""
    return once(COMMAND, 4, WHOLE, inject="write_counts(); ignored(); resumed([], step=4)")


def test_one_process_runs_the_replicas_in_turn(whole):
    """In the samples some targets are ignored, so that the replicas have different numbers of
    them."""
    # Initial weights round otherwise on some CPUs, and training amplifies it.
    assert sum(whole.curve(), []) == pytest.approx([*map(float, CURVE.split())], rel=1e-5)
    assert whole.curve("step", "val_loss")[-1] == pytest.approx([8, 3.75234895])
    for names, norm in NORMS.items():
        squares = [x.square().sum() for name, x in saved(whole, 8).items() if re.match(names, name)]
        assert sum(squares).item() == pytest.approx(norm**2), names


# Checkpoints


def test_a_run_resumes_between_two_meetings(whole):
    """Bit for bit the same weights in the same replicas. The bytes."""
    again = whole.again()
    assert_bit_equal(saved(again, 8), saved(whole, 8))
    assert again.curve() == whole.curve()[4:]
    assert again.curve("step", "val_loss")[1:] == whole.curve("step", "val_loss")[1:]  # step 8
    # The counted step ends in a meeting.
    assert holds_and_sends(whole) == [255232, 127616, 382932, 827696]
    assert between_replicas(whole) == [("all-reduce", 21, 127616)]


def test_it_resumes_on_another_number_of_ranks(run, whole, corpus, held_out, tmp_path):
    shutil.copytree(whole.out, tmp_path / "again", ignore=lambda *_: ["step-00000008"])
    found = run(COMMAND, 2, f"{WHOLE} --data {corpus}".format(val=held_out), out="again",
                inject="write_counts(); ignored()")
    assert "after step 4" in found.output
    assert furthest(found.curve(), whole.curve()) < 1e-10
    assert_near(saved(found, 8), saved(whole, 8))
    assert holds_and_sends(found) == [510464, 255232, 765780, 0]
    assert between_replicas(found) == []


def holds_and_sends(result):
    """Bytes, by the formulas of this file in commit f660e7d."""
    counts = result.counts()
    kinds = "parameters", "gradients", "optimizer states"
    return [*(counts["held"][kind] for kind in kinds), round(counts["sent"])]


def between_replicas(result):
    return [(part["collective"], part["calls"], part["bytes"])
            for part in result.counts()["collectives"] if part["group"] == "replica"]
