"""Is your trainer on N processes the run of one? Record both and compare them.

    parity = Parity("two.parity", model, optimizer)  # parallelised; before the first forward pass
    parity.record(step, loss, batch)    # every rank; gradients are reduced, and not yet clipped
    python -m tools.parity one.parity two.parity        # --table prints every parameter

Record some five steps of any two layouts: one process and n ranks, DDP and TP, yesterday's commit
and today's. Both start from the same weights, read the same samples and have no dropout. Let the
number of ranks differ from the number of micro-batches, so that a factor names one of them. Where
several optimizers step in turn, as in a GAN, record before each. The comparison prints:

    EQUAL               what was compared, and what was not. Exit status 0
    DIFFERENT           the first difference and its likely cause. Exit status 1
    NOTHING PROVEN      16 bits: only factors, missing gradients and samples agree. Exit status 1
    NOTHING TO COMPARE  nothing learns, as when all gradients are 0; or training amplifies rounding
                        so much that it hides all else. Exit status 1

Run it in float32 or float64. Gradients must not be nothing but rounding, as at an optimum; if a
ReLU or a router may flip by rounding, only float64 proves it. Parity does not compare buffers, and
no fault shows that does not act, such as clipping that is never active. record.py needs torch
alone, compare.py and checks.py too.
"""

from .record import Parity

__all__ = ["Parity", "main"]


def main(argv=None):
    from .compare import main  # a trainer that records does not need it
    return main(argv)
