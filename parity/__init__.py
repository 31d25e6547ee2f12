"""Is your trainer on N processes the run of one? Record both and compare them.

    parity = Parity("two.parity", model, optimizer)  # parallelised; before the first forward pass
    parity.record(step, loss, batch)    # every rank; gradients are reduced, and not yet clipped
    python -m parity one.parity two.parity              # --table prints every parameter

README.md has the verdicts. This folder needs torch alone.
"""

from .record import Parity

__all__ = ["Parity", "main"]


def main(argv=None):
    from .compare import main  # a trainer that records does not need it
    return main(argv)
