"""Promise 6: the peaks of the runs in the table. What a run holds and sends is compared with the
theory in test_same_run.py."""

import pytest
import torch

from common.model import ModelConfig, Transformer
from common.services import theory
from tests.support.sample import sampled, thorough
from tests.support.table import EXACT, SAMPLE

MODULE = Transformer(ModelConfig(256, 32, 48, 5, 8, 4)).double()  # of the table
P, LAYER, EMBEDDING = (theory.bytes_of(module) for module in (
    MODULE, MODULE.model.layers["0"], MODULE.model.embed_tokens
))
LAST = EMBEDDING + theory.bytes_of(MODULE.model.norm)  # the largest unit, with the head
WHOLE = "single.py", "ddp.py"
PEAKS = [row for row in EXACT
         if row.script in (*WHOLE, "zero.py", "fsdp.py") and row.world in (0, 2, 4)]


@pytest.mark.parametrize("row", sampled(PEAKS, [row for row in PEAKS if row in SAMPLE]),
                         ids=lambda row: row.name)
def test_peaks(once, row):
    found, n, a = row.run(once).summary["peak"], row.world or 1, row.option("--grad-accum")
    parameters, gradients = found["parameters"], found["gradients"]
    if row.script in WHOLE:
        assert parameters == P
        # DDP's bucket, and the last gradient on its way into it. A gradient that is added to one of
        # an earlier micro-batch is freed at once.
        assert gradients == P + (EMBEDDING if row.script == "ddp.py" and a == 1 else 0)
    elif row.script == "zero.py":
        # On top are two buckets in flight; a thread of gloo may still hold the one before.
        assert P + LAYER <= parameters <= P + 3 * LAST
        if "--stage 1" in row.command and a > 1:  # between micro-batches stage 1 has all gradients
            assert gradients >= P
        else:
            assert P / n < gradients <= P / n + 2 * LAST < P
    else:
        shards = n // row.option("--replicate")
        reshard = "--no-reshard" not in row.command
        gathered = (LAST if reshard else P) + LAST  # two units, one ahead of its use, or all
        if a > 1 and torch.__version__ < "2.15":  # frees a unit later in the second micro-batch
            gathered += LAYER
        least = P / shards + (2 * LAYER if reshard else P)
        assert least <= parameters <= 1.01 * (P / shards + gathered)
        assert P / shards < gradients <= P / shards + 3 * LAST


@thorough
@pytest.mark.parametrize("command, most", [("tp.py", 0.33), ("cp.py", 0.27)])
def test_activations_fall_with_the_number_of_ranks(run, corpus, command, most):
    options = f"--batch-size 2 --seq-len 512 --steps 3 --save-every 0 --data {corpus}"
    one, four = (
        run(command, world, options, out=f"out-{world}").summary["peak"]["activations"]
        for world in (1, 4)
    )
    assert 0 < four < most * one
