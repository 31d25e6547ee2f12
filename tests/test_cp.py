"""cp.py: each attention is exact, and the ring never sees a whole sequence. Curves, bytes and the
number of collectives: test_same_run.py."""

import pytest

from tests.sample import sampled


@pytest.mark.parametrize("world", sampled([1, 2, 3, 4], [3]))
def test_all_agree_with_plain_attention(run, world):
    """Outputs and gradients, grouped heads, float64, float32 and bfloat16."""
    assert "all agree" in run("tests/attention.py agrees", world, pass_out=False).output


def test_gradients_are_reduced_during_the_backward_pass(run):
    assert "during the backward" in run("tests/attention.py reduces", 2, pass_out=False).output


def test_no_whole_sequence_in_the_ring(run):
    assert "no whole sequence" in run("tests/attention.py shapes", 4, pass_out=False).output
