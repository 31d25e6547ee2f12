"""examples/diloco.py: its reference is one process that runs the replicas in turn. And its
checkpoints."""

import shutil

import pytest
import torch

from tests.support.compare import assert_bit_equal, assert_same_run, saved
from tests.support.processes import edited
from tests.support.sample import thorough
from tests.test_porting import port

pytestmark = thorough
# Step 4 is between two meetings. They meet after the last step too.
OPTIONS = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 2 --num-attention-heads 4 "
           "--num-key-value-heads 2 --seq-len 24 --batch-size 16 --grad-accum 2 --dtype float64 "
           "--steps 8 --log-every 1 --warmup-steps 3 --lr 0.01 --seed 4 --save-every 4 "
           "--val-data {val} --val-every 4 --val-batches 1")
COMMAND = "examples/diloco.py --replicas 2 --inner-steps 3"


@pytest.fixture
def whole(once):
    """A run of two replicas, each on two ranks. It also resumes its checkpoint of step 4."""
    return once(COMMAND, 4, OPTIONS, inject="write_counts(); ignored(); resumed([], step=4)")


def test_one_process_runs_the_replicas_in_turn(once, whole, tmp_path):
    """The curve, the common weights and those of each replica, and the loss of each on its part of
    the held-out text. In the samples some targets are ignored, so that the replicas have different
    numbers of them."""
    script = edited(tmp_path / "copy", "single.py", *port("DiLoCo", "single.py"))
    one = once(script, 0, OPTIONS, inject="ignored()")
    assert_same_run(whole, one, 8)
    found = saved(whole, 4)
    assert not torch.equal(found["model.replica0.lm_head.weight"],
                           found["model.replica1.lm_head.weight"])


# Checkpoints


def test_a_run_resumes_between_two_meetings(whole):
    """Bit for bit the same weights in the same replicas. The bytes."""
    again = whole.again()
    assert_bit_equal(saved(again, 8), saved(whole, 8))
    assert again.curve() == whole.curve()[4:]
    assert again.curve("step", "val_loss")[1:] == whole.curve("step", "val_loss")[1:]  # step 8
    holds_and_sends(whole, "255232 127616 382932", 827696, ("all-reduce", 21, 127616))


def test_it_resumes_on_another_number_of_ranks(run, whole, corpus, held_out, tmp_path):
    shutil.copytree(whole.out, tmp_path / "again", ignore=lambda *_: ["step-00000008"])
    found = run(COMMAND, 2, f"{OPTIONS} --data {corpus}".format(val=held_out), out="again",
                inject="write_counts(); ignored()")
    assert "after step 4" in found.output
    assert_same_run(found, whole, 8)
    holds_and_sends(found, "510464 255232 765780", 0)


def holds_and_sends(result, held, sent, *meetings):
    """Bytes of parameters, of their gradients and of optimizer states, and what a rank sends, by
    formulas that commit 3e519c2 has: what fsdp.py sends within a replica, and the norm of 21
    tensors. The momentum is held from the start. The counted step ends in a meeting, if the run has
    one that late."""
    counts = result.counts()
    names = "parameters", "gradients", "optimizer states"
    assert " ".join(str(counts["held"][name]) for name in names) == held
    assert counts["sent"] == pytest.approx(sent, abs=1)
    between = [(part["collective"], part["calls"], part["bytes"])
               for part in counts["collectives"] if part["group"] == "replica"]
    assert between == [*meetings]
