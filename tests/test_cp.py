"""cp.py: each attention is exact, and the ring never sees a whole sequence. Curves, bytes and the
number of collectives: test_same_run.py."""

import pytest

from tests.sample import sampled
from tests.test_same_run import furthest


@pytest.mark.parametrize("world", sampled([1, 2, 3, 4], [3]))
def test_all_agree_with_plain_attention(run, world):
    """Outputs and gradients, grouped heads, float64, float32 and bfloat16."""
    assert "all agree" in run("tests/attention.py agrees", world, pass_out=False).output


def test_gradients_are_reduced_during_the_backward_pass(run):
    assert "during the backward" in run("tests/attention.py reduces", 2, pass_out=False).output


def test_no_whole_sequence_in_the_ring(run):
    assert "no whole sequence" in run("tests/attention.py shapes", 4, pass_out=False).output


@pytest.mark.parametrize("world", [2, 3])
def test_strides(run, world):
    assert "no layout" in run("tests/attention.py strides", world, pass_out=False).output


@pytest.mark.parametrize("attention", sampled(["ring", "allgather", "ulysses"], ["allgather"]))
def test_two_numbers_in_a_head(run, corpus, attention):
    """The rotation concatenates halves of one number: the last stride is not 1."""
    options = (f"--data {corpus} --hidden-size 12 --num-attention-heads 2 --num-key-value-heads 2 "
               "--head-dim 2 --seq-len 16 --batch-size 4 --steps 2 --dtype float64 --save-every 0")
    found = run(f"cp.py --attention {attention}", 2, options).curve()
    assert furthest(found, run("single.py", 0, options).curve()) < 1e-10
