"""Compares two recordings, step by step. A ``Step`` measures once what is off in a step; then the
checks of checks.py look at it, causes before their effects, and the first one that has an answer
names what is wrong. How far sound runs are apart stands in ``Tolerance``."""

import argparse
import copy
import itertools
import json
import math
import os
from collections import Counter

import torch

from . import __doc__ as manual
from . import checks, noise, record
from .record import K

STEP = {"step", "ranks", "loss", "values", "gradients"}  # what each line has
# Limits, relative. What is said to be measured are many sound runs and many faults.
PARTED = 0.3  # rounding that has parted the runs so far hides every fault of gradients
AMPLIFIED = 100  # training that has made differences so much larger makes anything of rounding


class Tensors:
    """What one run has recorded of its weights or gradients in one step; a row is a parameter. What
    has no gradient has a gradient of 0."""

    def __init__(self, recorded, names):
        rows = torch.tensor([recorded[name]["sums"] if name in recorded else [0.0] * (3 + 3 * K)
                             for name in names], dtype=torch.float64).view(-1, 3 + 3 * K)
        self.there = torch.tensor([name in recorded for name in names])  # (N,) bool: recorded
        self.spread = rows[:, 0]  # (N,) how far apart the copies are that several ranks hold
        self.length = rows[:, 1].sqrt()  # (N,) Euclidean length
        self.noise = rows[:, 2]  # (N,) share of numbers that are only rounding beside the others
        # (N, K) projections: two sketches are as far apart as the tensors
        self.sketch = rows[:, 3 : 3 + K]
        self.mean = rows[:, 3 + K : 3 + 2 * K]  # (N, K) sketch of the mean of unlike copies
        self.total = rows[:, 3 + 2 * K :]  # (N, K) sketch of the sum of unlike copies
        self.finite = self.length.isfinite()  # (N,) bool
        self.numbers = torch.tensor([recorded[name]["held"] if name in recorded else 1
                                     for name in names]).clamp(min=1)  # (N,)

    def times(self, factor):
        """The same tensors, multiplied by a number."""
        scaled = copy.copy(self)
        for name in "spread", "length", "sketch", "mean", "total":
            setattr(scaled, name, factor * getattr(self, name))
        return scaled


class Run:
    """What one run has recorded in one step. ``counted``: see ``ranks_that_count``."""

    def __init__(self, line, names, counted=()):
        self.line, self.ranks = line, line["ranks"]  # as it stands in the file; a dict of each rank
        self.counted = [self.ranks[rank] for rank in counted]
        self.targets = targets_of_batches(line)
        self.weights = Tensors(line["values"], names)
        self.gradients = Tensors(line["gradients"], names)
        self.finite = bool((self.weights.finite & self.gradients.finite).all())
        # How many ranks read the same samples
        self.alike = max(Counter(str(rank["samples"]) for rank in self.ranks).values(), default=0)
        self.loss, self.parts = None, 0.0  # of the global batch; its recorded parts without signs
        if self.counted:
            losses = [loss for rank in self.counted for loss in rank["losses"]]
            n = len(self.counted) if line["loss"] == "mean" else 1
            self.loss, self.parts = sum(losses) / n, sum(map(abs, losses)) / n


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

    runs = [(lines[0]["values"], repeated(lines)) for lines in (one, two)]
    return [name for name in {**one[0]["values"], **two[0]["values"]}
            if not all(name in tied for values, tied in runs if name in values)]


# Finding


class Tolerance:
    """How far two sound runs are apart in their first step, relative: it follows from the types
    that they compute in, and from their sizes."""

    def __init__(self, one, two, float32_inside=False):
        ranks = one[0]["ranks"] + two[0]["ranks"]
        self.type = checks.coarsest(ranks, "modules compute", "the loss is", "weights are kept")
        self.eps = torch.finfo(getattr(torch, self.type)).eps
        weights = checks.coarsest(ranks, "weights are kept")
        self.rounding = torch.finfo(getattr(torch, weights)).eps  # of one number of a weight
        self.in_16_bits = self.eps > 2**-12
        of_loss = checks.coarsest(ranks, "the loss is") or "float32"
        self.of_loss = max(checks.COPIES, 2 * torch.finfo(getattr(torch, of_loss)).eps)  # measured
        float32_inside = float32_inside and self.eps < 2**-23
        if float32_inside:
            self.type, self.eps = f"{self.type} with float32 inside", 2**-23
        parameters = len(one[0]["values"])
        targets = max(sum(targets_of_batches(steps[0])) for steps in (one, two)) or 2**16
        numbers = max(sum(rank["numbers"] for rank in steps[0]["ranks"]) for steps in (one, two))
        # Roundings of products are a random walk through the layers. Sums over the batch are one,
        # too; its length has an end, as measured: longer sums are made of blocks.
        # 6: measured, of the bias of a convolution, whose gradient is one sum over all images.
        sums = self.eps * (parameters**0.5 + 6 * min(numbers or 2**16, 2**16) ** 0.5)
        if self.in_16_bits:  # a ReLU or a router flips here and there: measured, up to 0.2
            sums = max(sums, 0.3)
        self.gradients = checks.FLOAT32_INSIDE if float32_inside else max(sums, checks.PROJECTED)
        # The losses of few targets round as those of one. 16: measured, for sums in any order.
        self.loss = self.eps * (2 * max(parameters / targets, 1.0) ** 0.5 + 16)
        # Terms may cancel before their sum is recorded, if a loss can be negative. 1: the size of
        # normalised advantages; measured: 0.7.
        negative = any(loss < 0 for line in one + two for rank in line["ranks"]
                       for loss in rank["losses"])
        self.cancelled = self.eps if negative else 0.0


class History:
    """What the checks of a step need to know of the steps before it."""

    def __init__(self, parameters):
        self.slack = 0.0  # how far rounding of earlier steps has parted the runs, relative
        self.started = 0.0  # the largest difference of gradients in the first step, relative
        self.largest = 0.0  # the largest one up to now
        self.times = 0.0  # the largest one up to now, as a share of what may be, if measured
        self.compared = 0  # steps
        self.infinite = []  # steps in which neither run is finite
        self.parted = []  # steps of which rounding hides too much
        self.first = None  # the weights of both runs in the first step that was compared
        self.first_others = None  # what the runs keep beside their weights, in that step
        self.clipped = None  # which of the runs clips by hand, and the length that it clips to
        self.before = None  # the gradients of the reference in the step before
        zeros = torch.zeros(parameters, dtype=torch.float64)
        self.longest = zeros  # (N,) the longest gradient of the reference up to now
        self.scale = zeros  # (N,) the length of the first gradient that is not 0
        self.noise = zeros  # (N,) the root of the share of it that is only rounding

    def add(self, it):
        """Remember a step in which nothing is wrong."""
        x, y, share = it.x, it.y, it.share.max().item()
        largest = max(self.largest, share)
        # How fast differences grow: the factor 10, and 10 more if they grow so fast, are measured.
        # Adam moves a number by a whole step even if its gradient is only rounding: hence the root.
        growth = min(10.0, largest / (self.largest or largest or 1.0))
        # What rounding does follows from how far gradients are apart, if they may be further.
        rounding = min(it.tolerance.gradients, 10 * max(largest, it.tolerance.eps))
        self.slack = max(2 * (0.8 * rounding) ** 0.5, 10 * growth * largest)
        self.started, self.largest = self.started or max(share, it.tolerance.eps), largest
        self.times = max(self.times, it.times)
        self.compared += 1
        self.first = self.first or (it.reference.weights, it.run.weights)
        self.first_others = self.first_others or it.others
        self.clipped = it.clipped or self.clipped
        self.before = x
        self.longest = self.longest.maximum(x.length)
        unseen = self.scale == 0
        self.scale = torch.where(unseen, x.length.maximum(y.length), self.scale)
        self.noise = torch.where(unseen, x.noise.maximum(y.noise).sqrt(), self.noise)


class Step:
    """One step of both runs, and what is off in it. ``after``: the lines of the next step;
    ``room``: a noise.Room, or None."""

    def __init__(self, names, reference, run, after, history, tolerance, room=None):
        self.names, self.reference, self.run = names, reference, run  # N parameters
        self.x, self.y = reference.gradients, run.gradients
        self.history, self.tolerance, self.room = history, tolerance, room
        self.slack = history.slack  # as it is in this step
        self.finite = reference.finite and run.finite
        self.after = after
        # Of both runs: what gradients were scaled by before the optimizer
        self.given = [[x for rank in line["ranks"] for x in rank["factors"]] for line in after]
        self.clipped = None  # see History
        self.exact = bool(room) or not tolerance.in_16_bits  # all can be compared
        self.measure_gradients()
        if self.off.any():
            self.undo_clipping_by_hand()
        self.measure_weights()
        self.measure_others()
        self.measure_loss()

    def measure_gradients(self):
        x, y, history = self.x, self.y, self.history
        apart = checks.distance(x, y)
        # (N,) short gradients are as inexact as one of this length
        self.floor = noise.SHORT * x.length.norm() / len(self.names) ** 0.5 + history.longest
        # (N,) what earlier steps allow: weights differ by rounding already
        self.loose = history.slack * (history.longest + x.length)
        # (N,) how far gradients may be apart
        self.allowed = self.tolerance.gradients * (x.length + self.floor) + self.loose
        if self.room:
            self.allowed = self.room.gradients
        self.share = apart / (x.length + self.floor).clamp(min=1e-300)  # (N,) how far, relative
        self.off = apart > self.allowed  # (N,) bool: gradients differ
        if self.room:  # errors of many numbers mostly cancel in a length
            self.off |= (x.length - y.length).abs() > self.room.lengths
        self.times = (apart / self.allowed.clamp(min=1e-300)).max().item()
        # (N,) bool: rounding hides the gradient
        self.hidden = (x.length > 0) & (x.length <= self.allowed)
        # Whether rounding of the steps before hides too much
        self.parted = history.slack > PARTED
        if self.room:
            self.parted = bool(history.compared and 2 * self.hidden.sum() > (x.length > 0).sum())
        # (N,) bool: too short to prove anything
        self.unclear = ~self.off & (x.length <= 2 * self.allowed)
        self.everywhere = bool((self.off | self.unclear).all())
        # (N,) bool: gradients are 0 in both runs
        self.dead = x.there & (x.length + y.length == 0)

    def undo_clipping_by_hand(self):
        """If one of the runs clips by hand, before it is recorded, compare what it had before. It
        does, if one factor makes all gradients right, and if both runs give gradients of the same
        length to their optimizers: the other run clips after it is recorded."""
        x, y = self.x.length.norm().item(), self.y.length.norm().item()
        room = checks.CLIPPED + 4 * self.tolerance.rounding
        if not (x and y and math.isfinite(x + y)):
            return
        if self.given and all(self.given):
            if any(max(factors) - min(factors) > room * max(factors) for factors in self.given):
                return
            want, have = map(max, self.given)  # one factor each
            by_hand = [abs(scale - 1) < room for scale in (want, have)]
            if sum(by_hand) != 1 or abs(have * y - want * x) > room * have * y:
                return
            clipped = ("run", y) if by_hand[1] else ("reference", x)
        elif not self.given and self.history.clipped:  # the last step
            clipped = which, length = self.history.clipped
            if abs((y if which == "run" else x) - length) > room * length:
                return
        else:
            return
        before = self.y, self.given
        self.y, self.clipped = self.y.times(x / y), clipped
        self.given = self.given and [self.given[0], [y / x * have for have in self.given[1]]]
        self.measure_gradients()
        if self.off.any():
            (self.y, self.given), self.clipped = before, None
            self.measure_gradients()

    def measure_loss(self):
        x, w, history = self.x, self.reference.weights, self.history
        want, have = self.reference.loss, self.run.loss
        self.loss_known = None not in (want, have) and (math.isfinite(want) or math.isfinite(have))
        self.loss_right, self.loss_ratio = False, math.nan
        if self.loss_known:
            # What rounding of the weights, and the way that they have moved apart, do to the loss
            room = self.tolerance.eps * x.length.norm() * w.length.norm() + history.slack * (
                (x.length + history.longest) @ self.moved[0])
            # Each part rounds by itself; the parts may cancel.
            parts = max(self.reference.parts, self.run.parts)
            room += self.tolerance.loss * parts + self.tolerance.cancelled
            if self.room:
                room = self.room.loss + self.tolerance.of_loss * parts
            self.loss_right = bool(abs(have - want) <= room < math.inf)
            self.loss_ratio = have / (want or math.nan)

    def measure_weights(self):
        history, tolerance = self.history, self.tolerance
        now = self.reference.weights, self.run.weights
        first = history.first or now
        ways = [weights.sketch - then.sketch for weights, then in zip(now, first)]
        # (N,) how far weights have moved since the first step, in both runs
        self.moved = tuple(way.norm(dim=1) for way in ways)
        self.gap = (ways[0] - ways[1]).norm(dim=1)  # (N,) the length of the difference of the ways
        # (N,) how far a weight must move to prove anything
        self.resolved = checks.ROUNDINGS * tolerance.rounding * first[0].length
        self.strayed = self.gap > self.resolved + (
            history.slack + 2 * history.noise) * torch.maximum(*self.moved)  # (N,) bool
        # (N,) how far rounding of its gradients may part a weight, as a share of its way
        self.inexact = 2 * history.noise
        if self.room:
            self.resolved = self.room.ways
            self.strayed = self.gap > self.resolved
        elif history.compared:  # the way of a weight is rounding where its first gradient is
            usual = history.scale.norm() / len(self.names) ** 0.5
            known = (history.scale > tolerance.gradients * usual) | (history.scale == 0)
            self.strayed &= known
            self.inexact = torch.where(known, self.inexact, math.inf)

    def measure_others(self):
        """What both runs keep beside their weights, such as an average of them (EMA)."""
        want, have = (run.line.get("others", {}) for run in (self.reference, self.run))
        self.names_of_others = [name for name in want if name in have]
        self.others = tuple(Tensors(own, self.names_of_others) for own in (want, have))
        ways = [now.sketch - then.sketch
                for now, then in zip(self.others, self.history.first_others or self.others)]
        # (M,) how far they have moved since the first step, and are apart
        self.others_moved = torch.maximum(*(way.norm(dim=1) for way in ways))
        self.others_gap = (ways[0] - ways[1]).norm(dim=1)


# Saying


def compare(one, two, float32_inside=False, full_precision=False, nudged=()):
    """Say that run ``two`` equals the reference ``one``, or what differs first. Both are lists of
    recorded lines. The answer begins with EQUAL, DIFFERENT, NOTHING PROVEN or NOTHING TO COMPARE.

    Args:
        float32_inside: allow, in float64, what a softmax or a norm in float32 makes of it.
        full_precision: weights or optimizer states in 16 bits are a fault.
        nudged: in 16 bits: recordings of the reference with nudged weights, which show what
            rounding does. Raises ValueError if they are something else.
    """
    if full_precision and (coarse := checks.sixteen_bits(two[-1]["ranks"])):
        return f"DIFFERENT: types: {', '.join(coarse)}"
    names, tolerance = names_to_compare(one, two), Tolerance(one, two, float32_inside)
    rooms = rooms_of(names, one, nudged, tolerance) if nudged else itertools.repeat(None)
    counted = [ranks_that_count(lines) for lines in (one, two)]
    history, last = History(len(names)), None
    steps = [*itertools.takewhile(lambda lines: lines[0]["step"] == lines[1]["step"],
                                  zip(one, two))]
    for lines, after, room in zip(steps, [*steps[1:], ()], rooms):
        runs = [Run(line, names, own) for line, own in zip(lines, counted)]
        it = Step(names, *runs, after, history, tolerance, room)
        if message := first_fault(it):
            return message
        if not it.finite:
            history.infinite.append(lines[0]["step"])
        elif it.parted:
            history.parted.append(lines[0]["step"])
        else:
            history.add(it)
            last = it
    n = len(steps)
    if n < max(len(one), len(two)):
        want, have = (([line["step"] for line in lines] + ["none"])[n] for lines in (one, two))
        return (f"DIFFERENT: steps: nothing differs in the first {n}, but the next one is {have} "
                f"in the run and {want} in the reference")
    if not it.finite:
        *_, since = itertools.takewhile(history.infinite.__contains__,
                                        (line["step"] for line in one[::-1]))
        return (f"NOTHING TO COMPARE from step {since} on: weights or gradients are not finite in "
                f"both runs")
    return verdict(last, one + two)


def rooms_of(names, one, nudged, tolerance):
    """[noise.Room of each step]. Raises ValueError unless ``nudged`` are recordings of the
    reference with nudged weights: others would hide faults, or invent them."""
    if not tolerance.in_16_bits:
        raise ValueError(f"the runs compute in {tolerance.type}: compare them without it")
    if len(nudged) < 2:
        raise ValueError("give two recordings or more, with nudge=1 and nudge=2")
    runs = []
    for i, lines in enumerate([one, *nudged]):
        if len(lines) < len(one):
            raise ValueError(f"recording {i} has {len(lines)} steps, the reference {len(one)}")
        counted = ranks_that_count(lines)
        runs.append([Run(line, names, counted) for line in lines[:len(one)]])
        first = runs[i][0]
        if any(first.weights.sketch.equal(other[0].weights.sketch) for other in runs[:i]):
            raise ValueError(f"the weights of recording {i} are not nudged: give Parity nudge={i}")
        it = Step(names, runs[0][0], first, (), History(len(names)), tolerance)
        for check in checks.parameter_names, checks.shapes, checks.types, checks.samples:
            if message := check(it):
                raise ValueError(f"recording {i} is another run: {message}")
    return noise.measure(runs, tolerance)


def first_fault(it):
    """What the first check says that finds something in a step, or None."""
    step, history, found = it.reference.line["step"], it.history, checks.ALWAYS
    if it.finite and not it.parted:
        found = found + (checks.CHECKS if it.exact else checks.IN_16_BITS)
    for check in found:
        if not (message := check(it)):
            continue
        amplified = history.largest > AMPLIFIED * history.started > 0 and not it.room
        if check in checks.AFTER_ROUNDING and amplified:
            return (f"NOTHING TO COMPARE from step {step} on: the runs differ, and it may be "
                    f"rounding, which training has amplified "
                    f"{history.largest / history.started:.0e} times: lower the learning rate, or "
                    f"record fewer steps")
        return f"DIFFERENT: step {step}: {message}{checks.about_dropout(it)}"


def verdict(it, lines):
    """What to say if nothing differs: it depends on what was compared. ``it``: the last step that
    was compared; ``lines``: all that both runs have recorded."""
    if not it.history.scale.any():
        return ("NOTHING TO COMPARE: all gradients are 0 or missing in both runs: record before "
                "zero_grad")
    if not it.reference.weights.length.any():
        return "NOTHING TO COMPARE: all weights are 0 in both runs"
    n, m = len(it.run.ranks), len(it.reference.ranks)
    updates = (it.history.compared - 1) * bool(torch.maximum(*it.moved).any())
    what = (f"{n} {'rank' if n == 1 else 'ranks'} against {m}, {len(it.names)} parameters, "
            f"{updates} updates, {it.tolerance.type}")
    notes = checks.notes(it, lines)
    if not it.exact:
        return (f"NOTHING PROVEN: {what}\nFactors, missing gradients and samples agree. Nothing "
                f"else can be compared in 16 bits.\nRecord in float32: it finds 99 % of the faults "
                f"in the same time. Or give --noise: it finds 92 %.{notes}")
    left = checks.not_compared(it, lines)
    if it.room:
        seen = (it.x.length > 0) & ~it.hidden
        if 2 * seen.sum() < (it.x.length > 0).sum():
            return (f"NOTHING TO COMPARE: {what}\nRounding hides most gradients: they are not "
                    f"larger than {noise.TIMES} times what it does to nudged runs{notes}")
        shares = (it.allowed / it.x.length)[seen]
        return (f"EQUAL within rounding: {what}\nGradients differ by at most "
                f"{noise.TIMES * it.history.times:.1f} times what rounding does to nudged runs; "
                f"more than {noise.TIMES} times is a fault. Unless it is a factor, no fault shows "
                f"that changes half of the gradients by less than {shares.median():.0%} and the "
                f"others by less than {shares.max():.0%}\nNot compared: {'; '.join(left)}{notes}")
    return (f"EQUAL: {what}\nIn the first step gradients may differ by {it.tolerance.gradients:.1e}"
            f", the loss by {it.tolerance.loss:.1e}, then gradients and updates by "
            f"{it.slack:.1e}; the largest difference of gradients is "
            f"{it.history.largest:.1e}\nNot compared: {'; '.join(left)}{notes}")


def table(one, two, step=0):
    """Lengths of the gradients of a step, and how far they are apart, as lines of text."""
    names = names_to_compare(one, two)
    x, y = (Tensors(steps[step]["gradients"], names) for steps in (one, two))
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
            if not isinstance(lines[-1], dict) or not STEP <= lines[-1].keys():
                raise ValueError(f"line {number} is no step of a recording: record it again")
    if not lines:
        raise ValueError("it has no step: is `record` called (in a Trainer with max_grad_norm 0 it "
                         "is not), or did the run crash before its first record?")
    return lines


def main(argv=None):
    parser = argparse.ArgumentParser("python -m parity", allow_abbrev=False,
                                     description=(manual or "").partition("\n")[0])
    parser.add_argument("reference", help="the recording of the run that is right")
    parser.add_argument("run", help="the recording that is compared with it")
    parser.add_argument("--table", action="store_true",
                        help="print gradients of the step that is named, or of the first")
    parser.add_argument("--float32-inside", action="store_true",
                        help="in float64: allow what a softmax or a norm in float32 makes of it")
    parser.add_argument("--full-precision", action="store_true",
                        help="weights or optimizer states that are kept in 16 bits are a fault")
    parser.add_argument("--noise", nargs="+", default=[], metavar="NUDGED",
                        help="in 16 bits: two or more recordings of the reference with nudge=1, 2")
    args = parser.parse_args(argv)
    recordings = []
    for path in args.reference, args.run, *args.noise:
        try:
            recordings.append(read(path))
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
    if os.path.samefile(args.reference, args.run):
        parser.error(f"{args.reference} and {args.run} are the same file: name two recordings")
    recordings, nudged = recordings[:2], recordings[2:]
    try:
        message = compare(*recordings, args.float32_inside, args.full_precision, nudged)
    except ValueError as error:
        parser.error(f"--noise: {error}")
    if args.table:
        named = [i for i, line in enumerate(recordings[0])
                 if message.startswith(f"DIFFERENT: step {line['step']}: ")]
        print(table(*recordings, *named[:1]))
    print(message)
    return int(not message.startswith("EQUAL"))  # the exit status
