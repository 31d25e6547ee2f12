"""Compares two recordings, step by step. ``find`` measures once what is off in a step; then the
checks of checks.py look at it, causes before their effects, and the first one that has an answer
names what is wrong. How far sound runs are apart stands in ``tolerances``."""

import argparse
import dataclasses
import json
import math
import os
from dataclasses import dataclass

import torch

from . import __doc__ as manual
from . import checks, record

# Limits, relative. What is said to be measured are many sound runs and many faults.
PARTED = 0.3  # rounding that has parted the runs so far hides every fault of gradients
SHORT = 0.1  # a gradient that is shorter than this share of the usual one is as inexact as it
FLOAT32_INSIDE = 2**-16  # measured: rotary angles in float32 1e-6; a wrong eps of a norm 5e-5
STEPS_APART = 8  # roundings of a weight between two steps of sound runs


@dataclass
class Tensors:
    """What one run has recorded of its weights or gradients in one step; a row is a parameter."""

    length: torch.Tensor  # (N,) Euclidean length
    sketch: torch.Tensor  # (N, K) projections: two sketches are as far apart as the tensors
    spread: torch.Tensor  # (N,) how far apart the copies are that several ranks hold
    noise: torch.Tensor  # (N,) share of numbers that are only rounding beside the others
    mean: torch.Tensor  # (N, K) sketch of the mean of unlike copies
    total: torch.Tensor  # (N, K) sketch of the sum of unlike copies

    @property
    def finite(self):
        return self.length.isfinite()


@dataclass
class Run:
    """What one run has recorded in one step."""

    line: dict  # as it stands in the file
    ranks: list  # a dict of each rank
    targets: list  # how many targets each batch has that ranks have read
    counted: list  # the ranks whose losses make that of the batch; see ``ranks_that_count``
    loss: float  # of the global batch; None if it is not recorded
    weights: Tensors
    gradients: Tensors

    @property
    def finite(self):
        return bool((self.weights.finite & self.gradients.finite).all())

    @property
    def replicas(self):
        """How many ranks read the same samples."""
        return len(self.ranks) / max(len({str(rank["samples"]) for rank in self.ranks}), 1)


@dataclass
class Tolerance:
    """How far sound runs are apart in their first step, relative; see ``tolerances``."""

    type: str  # of both runs: the coarsest one
    rounding: float  # of one number of the type of the weights
    eps: float  # of the type that modules compute in
    sums: float  # of gradients, from rounding alone
    gradients: float  # of gradients, also if rounding flips a ReLU or a router
    loss: float
    accumulate: float  # of one addition of the type that sums use
    float32: float  # what ``sums`` is in float32

    @property
    def in_16_bits(self):
        return self.eps > 2**-12


@dataclass
class History:
    """What the checks of a step need to know of the steps before it."""

    slack: float = 0.0  # how far rounding of earlier steps has parted the runs, relative
    largest: float = 0.0  # the largest difference of gradients up to now, relative
    compared: int = 0  # steps
    first: tuple = ()  # the weights of both runs in the first step that was compared
    before: Tensors = None  # the gradients of the reference in the step before
    longest: torch.Tensor = 0.0  # (N,) the longest gradient of the reference up to now
    scale: torch.Tensor = 0.0  # (N,) the length of the first gradient that is not 0
    noise: torch.Tensor = 0.0  # (N,) the root of the share of it that is only rounding


@dataclass
class Step:
    """One step of both runs, and what ``find`` has found in it."""

    names: list  # of the N parameters
    reference: Run
    run: Run
    history: History
    tolerance: Tolerance
    given: tuple = ([], [])  # of both runs: what gradients were scaled by before the optimizer

    # Gradients: how far apart the runs are, and what is allowed
    floor: torch.Tensor = None  # (N,) short gradients are as inexact as one of this length
    loose: torch.Tensor = None  # (N,) what earlier steps allow
    allowed: torch.Tensor = None  # (N,) what rounding allows in all
    share: torch.Tensor = None  # (N,) the difference, relative
    off: torch.Tensor = None  # (N,) bool: gradients differ
    unclear: torch.Tensor = None  # (N,) bool: too short to prove anything

    # Weights: how far they have moved since the first step
    moved: tuple = ()  # (N,) of both runs
    gap: torch.Tensor = None  # (N,) the length of the difference of the two ways
    resolved: torch.Tensor = None  # (N,) how far a weight must move to prove anything
    strayed: torch.Tensor = None  # (N,) bool: weights have moved differently

    loss_known: bool = False  # both runs have recorded it
    loss_right: bool = False
    loss_ratio: float = math.nan  # of the run's to that of the reference
    inside: bool = False  # in float64: as far apart as float32 in between makes the runs

    @property
    def everywhere(self):
        """All gradients are off, but for those that are too short to prove anything."""
        return bool((self.off | self.unclear).all())


# Finding


def tolerances(one, two):
    """How far two sound runs are apart, from the types that they compute in and their sizes."""
    ranks = one[0]["ranks"] + two[0]["ranks"]
    coarsest = checks.coarsest(ranks, "modules compute", "the loss is", "weights are kept")
    eps = torch.finfo(getattr(torch, coarsest)).eps
    weights = torch.finfo(getattr(torch, checks.coarsest(ranks, "weights are kept"))).eps
    accumulate = min(eps, 2**-23)  # matrix products of 16 bits are summed in float32
    parameters = len(one[0]["values"])
    targets = max(sum(targets_of_batches(steps[0])) for steps in (one, two)) or 2**16
    numbers = max(sum(rank["numbers"] for rank in steps[0]["ranks"]) for steps in (one, two))
    sums = rounding_of_sums(eps, accumulate, parameters, numbers)
    return Tolerance(
        type=coarsest, rounding=weights, eps=eps, sums=sums, accumulate=accumulate,
        # In 16 bits a ReLU or a router flips here and there: measured, up to 0.2 of a gradient.
        gradients=max(sums, 0.3 if eps > 2**-12 else checks.PROJECTED),
        # The losses of few targets round as those of one. 16: measured, for sums in any order.
        loss=2 * eps * max(parameters / targets, 1.0) ** 0.5 + 16 * accumulate,
        float32=rounding_of_sums(2**-23, 2**-23, parameters, numbers))


def rounding_of_sums(eps, accumulate, parameters, numbers):
    # Roundings of products are a random walk through the layers. Sums over the batch are one, too;
    # its length has an end, as measured: longer sums are made of blocks.
    # 6: measured, of the bias of a convolution, whose gradient is one sum over all images.
    return eps * parameters**0.5 + 6 * accumulate * min(numbers or 2**16, 2**16) ** 0.5


def targets_of_batches(line):
    """How many targets each batch has that ranks have read; ranks may read the same."""
    return list({str(rank["samples"]): sum(rank["targets"])
                 for rank in line["ranks"] if rank["targets"]}.values())


def ranks_that_count(lines):
    """The ranks whose losses make that of the batch. Of ranks that read the same samples and have
    the same loss in all steps, as under tensor parallelism, one counts."""
    found = {}
    for rank, first in enumerate(lines[0]["ranks"]):
        losses = [sum(line["ranks"][rank]["losses"]) for line in lines]
        own = found.setdefault(str(first["samples"]) if first["samples"] else rank, {})
        copies = any(all(math.isclose(a, b, rel_tol=checks.COPIES) for a, b in zip(losses, others))
                     for others in own.values())
        if first["losses"] and not copies:
            own[rank] = losses
    return sorted(rank for own in found.values() for rank in own)


def names_to_compare(one, two):
    """The names of parameters in both runs; of a tied tensor the first, unless the tie is lost."""
    def repeated(lines):
        seen, names = set(), set()
        for name, gradient in lines[0]["gradients"].items():
            key = json.dumps([[line[kind].get(name, {}).get("sums") for line in lines]
                              for kind in ("values", "gradients")])
            if gradient["sums"][1] and key in seen:
                names.add(name)
            seen.add(key)
        return names

    tied, also = repeated(one), repeated(two)
    lost = {name for name in tied - also if name in two[0]["values"]}
    own = [name for name in one[0]["values"] if name not in tied or name in lost]
    return own + [name for name in two[0]["values"] if name not in {*one[0]["values"]} | also]


def run_of(line, names, counted=()):
    """A recorded line as tensors. What has no gradient has a gradient of 0."""
    def tensors(kind):
        width = len(next(iter(line["values"].values()))["sums"])
        rows = torch.tensor([line[kind][name]["sums"] if name in line[kind] else [0.0] * width
                             for name in names], dtype=torch.float64)
        K = (width - 3) // 3
        return Tensors(spread=rows[:, 0], length=rows[:, 1].sqrt(), noise=rows[:, 2],
                       sketch=rows[:, 3 : 3 + K], mean=rows[:, -2 * K : -K], total=rows[:, -K:])

    counted = [line["ranks"][rank] for rank in counted]
    loss = None
    if counted:
        loss = sum(sum(rank["losses"]) for rank in counted)
        loss /= len(counted) if line["loss"] == "mean" else 1
    return Run(line, line["ranks"], targets_of_batches(line), counted, loss, tensors("values"),
               tensors("gradients"))


def find(names, runs, after, history, tolerance, float32_inside):
    """Measure once what is off in one step of both runs, for all checks that look at it.

    ``after``: the lines of both runs of the next step, or None.
    """
    it = Step(names, *runs, history, tolerance)
    if after:
        it.given = tuple([x for rank in line["ranks"] for x in rank["factors"]] for line in after)
    find_in_gradients(it)
    find_in_loss(it)
    largest = it.share.max().item()
    it.inside = (tolerance.accumulate < checks.PROJECTED and not history.compared
                 and largest <= min(tolerance.float32, FLOAT32_INSIDE)
                 and bool(it.off.any() or it.loss_known and not it.loss_right))
    if it.inside and float32_inside:
        # 8: how much larger than in the first step differences may become.
        gradients = max(tolerance.gradients, min(tolerance.float32, 8 * largest))
        it.tolerance = dataclasses.replace(
            tolerance, type="float64 with float32 inside", sums=gradients, gradients=gradients,
            loss=(2 + 16) * 2**-23, accumulate=2**-23)
        find_in_gradients(it)
        find_in_loss(it)
    find_in_weights(it)
    return it


def find_in_gradients(it):
    x, history = it.reference.gradients, it.history
    apart = checks.distance(x, it.run.gradients)
    it.floor = SHORT * x.length.norm() / len(it.names) ** 0.5 + history.longest
    it.loose = history.slack * (history.longest + x.length)  # weights differ by rounding already
    it.allowed = it.tolerance.gradients * (x.length + it.floor) + it.loose
    it.share = apart / (x.length + it.floor).clamp(min=1e-300)
    it.off = apart > it.allowed
    it.unclear = ~it.off & (x.length <= 2 * it.allowed)


def find_in_loss(it):
    x, w, slack = it.reference.gradients, it.reference.weights, it.history.slack
    want, have = it.reference.loss, it.run.loss
    it.loss_known = None not in (want, have) and (math.isfinite(want) or math.isfinite(have))
    if it.loss_known:
        way = (w.sketch - (it.history.first or (w,))[0].sketch).norm(dim=1)
        # What rounding of the weights, and the way that they have moved apart, do to the loss
        room = it.tolerance.accumulate * x.length.norm() * w.length.norm() + slack * (
            (x.length + it.history.longest) @ way)
        it.loss_right = bool(abs(have - want) <= it.tolerance.loss * abs(want) + room)
        it.loss_ratio = have / (want or math.nan)


def find_in_weights(it):
    history, tolerance = it.history, it.tolerance
    now = it.reference.weights, it.run.weights
    first = history.first or now
    ways = [weights.sketch - then.sketch for weights, then in zip(now, first)]
    it.moved = tuple(way.norm(dim=1) for way in ways)
    it.gap = (ways[0] - ways[1]).norm(dim=1)
    it.resolved = STEPS_APART * tolerance.rounding * first[0].length
    it.strayed = it.gap > (history.slack + 2 * history.noise) * torch.maximum(
        *it.moved) + it.resolved
    if history.compared:  # where the first gradient is only rounding, so is the way of a weight
        usual = history.scale.norm() / len(it.names) ** 0.5
        it.strayed &= (history.scale > tolerance.gradients * usual) | (history.scale == 0)


def remember(it):
    """The history with this step, in which nothing is wrong."""
    old, x, y = it.history, it.reference.gradients, it.run.gradients
    zeros = torch.zeros(len(it.names), dtype=torch.float64)
    unseen = zeros + old.scale == 0
    largest = max(old.largest, it.share.max().item())
    # How fast differences grow: the factor 10, and 10 more if they grow so fast, are measured. Adam
    # moves a number by a whole step even if its gradient is only rounding: hence the root.
    growth = min(10.0, largest / (old.largest or largest or 1.0))
    return dataclasses.replace(
        old, slack=max(2 * (0.8 * it.tolerance.gradients) ** 0.5, 10 * growth * largest),
        largest=largest, compared=old.compared + 1,
        first=old.first or (it.reference.weights, it.run.weights), before=x,
        longest=x.length.maximum(zeros + old.longest),
        scale=torch.where(unseen, x.length.maximum(y.length), old.scale),
        noise=torch.where(unseen, x.noise.maximum(y.noise).sqrt(), old.noise))


# Saying


def compare(one, two, float32_inside=False, full_precision=False):
    """Say that run ``two`` equals the reference ``one``, or what differs first. Both are lists of
    recorded lines. The answer begins with EQUAL, DIFFERENT, NOTHING PROVEN or NOTHING TO COMPARE.

    Args:
        float32_inside: allow, in float64, what a softmax or a norm in float32 makes of it.
        full_precision: weights or optimizer states in 16 bits are a fault.
    """
    names, tolerance = names_to_compare(one, two), tolerances(one, two)
    counted = [ranks_that_count(lines) for lines in (one, two)]
    steps = [[run_of(line, names, own) for line, own in zip(lines, counted)]
             for lines in zip(one, two)]
    history, infinite, parted = History(), [], []
    for runs, after in zip(steps, [*zip(one[1:], two[1:]), None]):
        it = find(names, runs, after, history, tolerance, float32_inside)
        finite = it.reference.finite and it.run.finite
        to_check = checks.ALWAYS + [checks.weights_in_16_bits] * full_precision
        if finite and history.slack <= PARTED:
            to_check = to_check + (checks.IN_16_BITS if tolerance.in_16_bits else checks.CHECKS)
        for check in to_check:
            if message := check(it):
                hint = ""
                if it.inside and not float32_inside and check in checks.CHECKS:
                    hint = (". It is as if float32 was in between: if both runs compute something "
                            "in float32, such as a softmax, a norm or rotary angles, give "
                            "--float32-inside")
                return f"DIFFERENT: step {it.reference.line['step']}: {message}{hint}"
        tolerance = it.tolerance
        if not finite:
            infinite.append(it.reference.line["step"])
        elif history.slack > PARTED:
            parted.append(it.reference.line["step"])
        else:
            history, last = remember(it), it
    if len(one) != len(two):
        return (f"DIFFERENT: steps: the run has recorded {len(two)} and the reference {len(one)}, "
                f"and nothing differs in the first {len(steps)}")
    if not finite:
        last = max([-1, *(i for i, runs in enumerate(steps) if all(run.finite for run in runs))])
        return (f"NOTHING TO COMPARE from step {one[last + 1]['step']} on: weights or gradients "
                f"are not finite in both runs")
    return verdict(last, history, one + two, infinite, parted)


def verdict(it, history, lines, infinite, parted):
    """What to say if nothing differs: it depends on what was compared."""
    if not any(line["gradients"] for line in lines):
        return "NOTHING TO COMPARE: neither run has gradients: record before zero_grad"
    if not history.scale.any():
        return "NOTHING TO COMPARE: all gradients are 0 in both runs"
    if not max(sums["sums"][1] for line in lines for sums in line["values"].values()):
        return "NOTHING TO COMPARE: all weights are 0 in both runs"

    n, m = len(it.run.ranks), len(it.reference.ranks)
    it.history = history
    updates = (history.compared - 1) * bool(torch.maximum(*it.moved).any())
    what = (f"{n} {'rank' if n == 1 else 'ranks'} against {m}, {len(it.names)} parameters, "
            f"{updates} updates, {it.tolerance.type}")
    notes = checks.notes(it, lines)
    if it.tolerance.in_16_bits:
        return (f"NOTHING PROVEN: {what}\nFactors, missing gradients and samples agree. Nothing "
                f"else can be compared in 16 bits.\nRecord in float32: it finds 99 % of the faults "
                f"in the same time.{notes}")
    left = checks.not_compared(it, lines, infinite, parted)
    return (f"EQUAL: {what}\nIn the first step gradients may differ by {it.tolerance.gradients:.1e}"
            f", the loss by {it.tolerance.loss:.1e}; the largest difference of gradients is "
            f"{history.largest:.1e}\nNot compared: {'; '.join(left)}{notes}")


def table(one, two, step=0):
    """Lengths of the gradients of a step, and how far they are apart, as lines of text."""
    names = names_to_compare(one, two)
    x, y = (run_of(steps[step], names).gradients for steps in (one, two))
    columns = zip(names, x.length, y.length, y.length / x.length, checks.distance(x, y))
    title = f"gradients of step {one[step]['step']}"
    return "\n".join([f"{title:50}  reference        run      ratio  difference", *(
        "{:50} {:10.3e} {:10.3e} {:10.6f} {:11.1e}".format(*row) for row in columns)])


def read(path):
    """The recorded lines of a file. Raises ValueError in words."""
    with record.open_regular(path) as file:
        if not file.readline(100).startswith(f"{record.HEAD}{record.FORMAT}}}"):
            raise ValueError("it is no recording of this version of parity: record it again")
        lines = []
        for number, text in enumerate(file, 2):
            try:
                lines.append(json.loads(text))
            except ValueError:
                raise ValueError(f"line {number} is cut: did the run crash?") from None
    if not lines:
        raise ValueError("it has no step: did the run crash before its first record?")
    return lines


def main(argv=None):
    parser = argparse.ArgumentParser("python -m tools.parity", description=manual.splitlines()[0])
    parser.add_argument("reference", help="the recording of the run that is right")
    parser.add_argument("run", help="the recording that is compared with it")
    parser.add_argument("--table", action="store_true",
                        help="print gradients of the step that is named, or of the first")
    parser.add_argument("--float32-inside", action="store_true",
                        help="in float64: allow what a softmax or a norm in float32 makes of it")
    parser.add_argument("--full-precision", action="store_true",
                        help="weights or optimizer states that are kept in 16 bits are a fault")
    args = parser.parse_args(argv)
    recordings = []
    for path in args.reference, args.run:
        try:
            recordings.append(read(path))
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
    if os.path.samefile(args.reference, args.run):
        parser.error(f"{args.reference} and {args.run} are the same file: name two recordings")
    message = compare(*recordings, args.float32_inside, args.full_precision)
    if args.table:
        named = [i for i, line in enumerate(recordings[0])
                 if message.startswith(f"DIFFERENT: step {line['step']}: ")]
        print(table(*recordings, *named[:1]))
    print(message)
    return int(not message.startswith("EQUAL"))  # the exit status
