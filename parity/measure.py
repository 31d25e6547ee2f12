"""Measures what is off in a step of two recordings: a ``Step``. How far sound runs may be apart is
a ``Room``: it follows from the types that they compute in, or noise.py has measured it."""

import collections
import dataclasses
import json
import math

import torch

from .recording import K

# Limits, relative. What is said to be measured are many sound runs and many faults.
PROJECTED = 1e-12  # rounding of the projections, in float64
COPIES = 1e-6  # further apart, two numbers of float32 are no copies
CLIPPED = 1e-5  # how inexact the length of all gradients is, which each rank computes
FLOAT32_INSIDE = 2**-16  # measured: rotary angles in float32 1e-6; a wrong eps of a norm 5e-5
ROUNDINGS = 8  # of a tensor, between two steps of sound runs
SAME_OUTPUT = 8  # roundings of the mean square of a module's output; measured: 0.3
SHORT = 0.1  # a gradient that is shorter than this share of the usual one is as inexact as it
PARTED = 0.3  # rounding that has parted the runs so far hides every fault of gradients


class Tensors:
    """What one run has recorded of its weights or gradients in one step, N tensors, multiplied by
    ``factor``. What has no gradient has a gradient of 0."""

    def __init__(self, recorded, names, factor=1.0):
        nothing = {"held": 1, "tiny": 0.0, "spread": 0.0, "length": 0.0}
        nothing["sketches"] = 3 * [K * [0.0]]
        chosen = [recorded.get(name, nothing) for name in names]

        def of_all(key):
            return torch.tensor([own[key] for own in chosen], dtype=torch.float64)

        self.there = torch.tensor([name in recorded for name in names])  # (N,) bool: recorded
        self.numbers = of_all("held").clamp(min=1)  # (N,)
        self.tiny = of_all("tiny")  # (N,) the share of numbers that are only rounding
        self.spread = factor * of_all("spread")  # (N,) how far apart the copies of ranks are
        self.length = factor * of_all("length")  # (N,) Euclidean
        self.finite = self.length.isfinite()  # (N,) bool
        self.norm = self.length.norm()  # of all together
        # (N, K) projections: two sketches are as far apart as the tensors; of unlike copies their
        # mean and their sum
        sketches = factor * of_all("sketches").view(-1, 3, K)
        self.sketch, self.mean, self.total = sketches.unbind(1)


class Recorded:
    """What one run has recorded in one step. ``counted``: see ``ranks_that_count``."""

    def __init__(self, line, names, counted=()):
        self.line = line  # as it stands in the file
        self.ranks = line["ranks"]  # a dict of each
        self.step = line["step"]
        self.others = line["others"]
        self.weights = Tensors(line["values"], names)
        self.gradients = Tensors(line["gradients"], names)
        self.finite = bool((self.weights.finite & self.gradients.finite).all())
        readers = collections.defaultdict(list)
        for i, rank in enumerate(self.ranks):
            readers[str(rank["samples"])].append(i)
        self.readers = max(readers.values(), key=len)  # ranks that read the same samples
        self.alike = len(self.readers)
        # How many targets each batch has that ranks have read; ranks may read the same
        targets = self.each("targets")
        self.targets = [sum(targets[i]) for i, *_ in readers.values() if targets[i]]
        self.numbers = sum(self.each("numbers")) / self.alike  # what a batch has, as it is padded
        # The names of the tensors of a batch, in their order
        self.tensors = dict.fromkeys(key for samples in self.each("samples") for key in samples)
        self.updates = max(self.each("updates"))  # since the record before
        # What gradients were scaled by between the record before and the optimizer
        self.factors = sum(self.each("factors"), [])
        # {module: how many numbers it returns, over all ranks}, in the order in which they return
        self.returned = collections.Counter()
        squares = collections.Counter()
        for outputs in self.each("outputs"):
            for name, (square, n) in outputs.items():
                squares[name] += square
                self.returned[name] += n
        # {module: the mean square of its output}
        self.outputs = {name: squares[name] / max(n, 1) for name, n in self.returned.items()}
        self.counted = [self.ranks[rank] for rank in counted]
        self.loss = None  # of the global batch
        self.parts = 0.0  # the same of its recorded parts without their signs
        if counted:
            losses = [loss for rank in self.counted for loss in rank["losses"]]
            n = len(counted) if line["loss"] == "mean" else 1
            self.loss = sum(losses) / n
            self.parts = sum(map(abs, losses)) / n

    def each(self, key):
        """What each rank has recorded under a key."""
        return [rank[key] for rank in self.ranks]

    def rows(self, key, kind="samples"):
        """The fingerprints of a tensor of the batch, of all ranks."""
        return sum([rows.get(key, []) for rows in self.each(kind)], [])


def recorded(lines, names):
    """[Recorded of each line]"""
    counted = ranks_that_count(lines)
    return [Recorded(line, names, counted) for line in lines]


def ranks_that_count(lines):
    """The ranks whose losses make that of the batch. Of ranks that read the same samples and have
    the same loss in all steps, as under tensor parallelism, one counts."""
    first, counted = lines[0], []
    for rank, own in enumerate(first["ranks"]):
        again = any(same_loss(lines, rank, other) for other in counted)
        if own["losses"] and (first["loss"] == "parts" or not again):
            counted.append(rank)
    return counted


def same_loss(lines, one, two):
    """Whether two ranks read the same samples, and have the same loss in all steps."""
    steps = [(line["ranks"][one], line["ranks"][two]) for line in lines]
    own, other = steps[0]
    return own["samples"] == other["samples"] and all(
        math.isclose(sum(a["losses"]), sum(b["losses"]), rel_tol=COPIES) for a, b in steps)


def names_to_compare(one, two):
    """The names of parameters in both runs; of a tied tensor the first, unless the tie is lost."""
    names = {}  # in their order
    for lines in one, two:
        again = repeated_names(lines)
        names |= {name: None for name in lines[0]["values"] if name not in again}
    return [*names]


def repeated_names(lines):
    """The names of tensors that have the same values and gradients in all steps as an earlier one,
    and a gradient that is not 0."""
    seen, names = set(), set()
    kinds = [line[kind] for line in lines for kind in ("values", "gradients")]
    for name, gradient in lines[0]["gradients"].items():
        key = json.dumps([recorded.get(name) for recorded in kinds])
        if gradient["length"] and key in seen:
            names.add(name)
        seen.add(key)
    return names


def distance(x, y, r=1.0):
    """(N,) how far r x and y are apart, estimated; the differences of their lengths are exact."""
    apart = (r * x.sketch - y.sketch).norm(dim=1)
    return apart.maximum((abs(r) * x.length - y.length).abs())


def eps_of(name):
    return torch.finfo(getattr(torch, name)).eps


def coarsest(ranks, *kinds):
    """The name of the coarsest recorded type of some kinds, or None."""
    names = {name for rank in ranks for kind in kinds for name in rank[kind]}
    return max(sorted(names), key=eps_of, default=None)


# How far sound runs may be apart


@dataclasses.dataclass
class Room:
    """How far a sound run may be off in one step."""

    gradients: torch.Tensor  # (N,) N parameters
    lengths: torch.Tensor  # (N,) of gradients
    moves: torch.Tensor  # (N,) of weights, since the first step
    loss: float
    of_parts: float  # what else the loss may be off, relative to the sum of its parts
    outputs: float  # of the mean square of a module's output, relative
    measured: bool = False  # by noise.py


class Tolerance:
    """How far two sound runs are apart in their first step, relative: it follows from the types
    that they compute in, and from their sizes. ``one``, ``two``: [Recorded of each step]."""

    def __init__(self, one, two, float32_inside=False):
        first = one[0], two[0]
        ranks = one[0].ranks + two[0].ranks
        self.type = coarsest(ranks, "modules compute", "the loss is", "weights are kept")
        self.eps = eps_of(self.type)
        self.rounding = eps_of(coarsest(ranks, "weights are kept"))  # of one number of a weight
        # Of the length of all gradients, which is computed in the type of the weights
        self.clipped = CLIPPED + 4 * self.rounding
        self.in_16_bits = self.eps > 2**-12
        # Measured: of the parts of a loss, with noise or without
        self.of_parts = max(COPIES, 2 * eps_of(coarsest(ranks, "the loss is") or "float32"))
        float32_inside = float32_inside and self.eps < 2**-23
        if float32_inside:
            self.type, self.eps = f"{self.type} with float32 inside", 2**-23

        parameters = len(one[0].line["values"])
        targets = max(sum(own.targets) for own in first) or 2**16
        numbers = max(own.numbers for own in first) or 2**16
        # Roundings of products are a random walk through the layers. Sums over the batch are one,
        # too; its length has an end, as measured: longer sums are made of blocks.
        # 6: measured, of the bias of a convolution, whose gradient is one sum over all images.
        sums = self.eps * (parameters**0.5 + 6 * min(numbers, 2**16) ** 0.5)
        if self.in_16_bits:  # a ReLU or a router flips here and there: measured, up to 0.2
            sums = max(sums, 0.3)
        self.outputs = max(SAME_OUTPUT * self.eps, PROJECTED)
        self.gradients = FLOAT32_INSIDE if float32_inside else max(sums, PROJECTED)
        # The losses of few targets round as those of one. 16: measured, for sums in any order.
        self.loss = self.eps * (2 * max(parameters / targets, 1.0) ** 0.5 + 16)
        # Terms may cancel before their sum is recorded, if a loss can be negative. 1: the size of
        # normalised advantages; measured: 0.7.
        losses = sum((sum(own.each("losses"), []) for own in one + two), [])
        self.cancelled = self.eps * (min(losses, default=0.0) < 0)

    def room(self, it):
        """The Room of a Step, of which steps before it have taken their part."""
        x, history, slack = it.x, it.history, it.slack
        longest = history.longest + x.length
        gradients = self.gradients * (x.length + it.floor) + slack * longest
        moves = (slack + 2 * history.inexact) * it.moved.amax(0)
        moves += ROUNDINGS * self.rounding * it.first[0].length
        moves = torch.where(it.known, moves, math.inf)
        # What rounding of the weights, and that they have moved apart, do to the loss
        loss = self.eps * x.norm * it.reference.weights.norm
        loss += slack * longest @ it.moved[0] + self.cancelled
        outputs = self.outputs + slack
        return Room(gradients, gradients, moves, loss.item(), self.loss, outputs)


# What is off


class History:
    """What a step needs to know of the steps before it."""

    def __init__(self, parameters, steps=()):
        self.steps = steps  # [(the reference, the run), ...] of all that is recorded
        self.slack = 0.0  # how far rounding of earlier steps has parted the runs, relative
        self.started = 0.0  # the largest difference of gradients in the first step, relative
        self.largest = 0.0  # the largest one up to now
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
        self.inexact = zeros  # (N,) the root of the share of it that is only rounding

    def add(self, it):
        """Remember a step in which nothing is wrong."""
        if not it.finite:
            self.infinite.append(it.reference.step)
            return
        if it.parted:
            self.parted.append(it.reference.step)
            return
        x, y, share = it.x, it.y, it.largest
        largest = max(self.largest, share)
        # How fast differences grow: the factor 10, and 10 more if they grow so fast, are measured.
        # Adam moves a number by a whole step even if its gradient is only rounding: hence the root.
        growth = min(10.0, largest / (self.largest or largest or 1.0))
        # What rounding does follows from how far gradients are apart, if they may be further.
        rounding = min(it.tolerance.gradients, 10 * max(largest, it.tolerance.eps))
        self.slack = max(2 * (0.8 * rounding) ** 0.5, 10 * growth * largest)
        self.started = self.started or max(share, it.tolerance.eps)
        self.largest = largest
        self.compared += 1
        self.first = it.first
        self.first_others = self.first_others or it.others
        self.clipped = it.clipped or self.clipped
        self.before = x
        self.longest = self.longest.maximum(x.length)
        unseen = self.scale == 0
        self.scale = torch.where(unseen, x.length.maximum(y.length), self.scale)
        self.inexact = torch.where(unseen, x.tiny.maximum(y.tiny).sqrt(), self.inexact)


class Step:
    """One step of both runs, and what is off in it.

    Args:
        reference, run: Recorded of the step.
        after: those of the next step, or nothing.
        room: what noise.py has measured, or None.
        clipped: which of the runs clips by hand, before it is recorded, and to which length: what
            it had before is compared.
    """

    def __init__(self, names, reference, run, after, history, tolerance, room=None, clipped=None):
        self.names = names  # N parameters
        self.reference, self.run = self.runs = reference, run
        self.after, self.history, self.tolerance = after, history, tolerance
        self.clipped = clipped
        self.x, self.y = reference.gradients, run.gradients
        # Of both runs: what gradients are scaled by before the optimizer
        self.given = [own.factors for own in after]
        if clipped:
            unclip = (self.x.norm / self.y.norm).item()
            self.y = Tensors(run.line["gradients"], names, unclip)
            if after:
                self.given[1] = [x / unclip for x in self.given[1]]
        self.finite = reference.finite and run.finite
        self.slack = history.slack  # as it is in this step
        self.measure_moves()
        # (N,) short gradients are as inexact as one of this length
        self.floor = SHORT * self.x.norm / len(names) ** 0.5 + history.longest
        self.room = room or tolerance.room(self)
        self.noisy = self.room.measured
        self.exact = self.noisy or not tolerance.in_16_bits  # all can be compared
        self.measure_gradients()
        self.measure_loss()

    def measure_moves(self):
        """Of weights, and of what both runs keep beside them, such as an average (EMA)."""
        history = self.history
        now = self.reference.weights, self.run.weights
        self.first = history.first or now
        self.moves, self.moved, self.moved_apart = moves(now, self.first)
        # (N,) bool: how a weight moves is rounding where its first gradient is
        scale = history.scale
        usual = scale.norm() / len(self.names) ** 0.5
        self.known = (scale > self.tolerance.gradients * usual) | (scale == 0)
        want, have = self.reference.others, self.run.others
        self.names_of_others = [name for name in want if name in have]  # M tensors
        self.others = tuple(Tensors(own, self.names_of_others) for own in (want, have))
        # (M,) how far they have moved, and how far apart
        _, moved, self.others_apart = moves(self.others, history.first_others or self.others)
        self.others_moved = moved.amax(0)

    def measure_gradients(self):
        x, y = self.x, self.y
        self.apart = distance(x, y)  # (N,)
        self.allowed = self.room.gradients  # (N,) how far gradients may be apart
        usual = (x.length + self.floor).clamp(min=1e-300)
        self.share = self.apart / usual  # (N,) relative
        self.largest = self.share.max().item()
        # (N,) bool: gradients differ. Errors of many numbers mostly cancel in a length.
        longer = (x.length - y.length).abs()
        self.off = (self.apart > self.allowed) | (longer > self.room.lengths)
        there = x.length > 0
        self.hidden = there & (x.length <= self.allowed)  # (N,) bool: by rounding
        self.mostly_hidden = bool(2 * self.hidden.sum() > there.sum())
        # Whether rounding of the steps before hides too much
        self.parted = self.slack > PARTED
        if self.noisy:
            self.parted = self.history.compared > 0 and self.mostly_hidden
        # (N,) bool: too short to prove anything
        self.unclear = ~self.off & (x.length <= 2 * self.allowed)
        self.everywhere = bool((self.off | self.unclear).all())
        # (N,) bool: gradients are 0 in both runs
        self.dead = x.there & (x.length + y.length == 0)

    def measure_loss(self):
        want, have = self.reference.loss, self.run.loss
        recorded = None not in (want, have)
        self.loss_known = recorded and (math.isfinite(want) or math.isfinite(have))
        self.loss_right = False
        self.loss_ratio = math.nan
        if self.loss_known:  # each part rounds by itself; the parts may cancel
            parts = max(self.reference.parts, self.run.parts)
            self.room_of_loss = self.room.loss + self.room.of_parts * parts
            self.loss_right = abs(have - want) <= self.room_of_loss < math.inf
            self.loss_ratio = have / (want or math.nan)


def moves(now, first):
    """How the tensors of both runs have moved since the first step: (2, N, K) their moves, (2, N)
    how far, and (N,) how far apart."""
    both = torch.stack([tensors.sketch - then.sketch for tensors, then in zip(now, first)])
    one, two = both
    return both, both.norm(dim=2), (one - two).norm(dim=1)


def measure(*step):
    """A Step; if one of the runs clips by hand, of gradients as they were before."""
    it = Step(*step)
    clipped = clips_by_hand(it) if it.off.any() else None
    if clipped:
        before = Step(*step, clipped=clipped)
        it = it if before.off.any() else before
    return it


def clips_by_hand(it):
    """(which run clips by hand, before it is recorded; the length that it clips to), or None. One
    does if both runs give gradients of the same length to their optimizers: the other clips after
    it is recorded."""
    x, y = it.x.norm.item(), it.y.norm.item()
    room = it.tolerance.clipped
    if not (x and y and math.isfinite(x + y)):
        return None
    if not it.given:  # the last step
        which, length = it.history.clipped or ("run", 0.0)
        now = y if which == "run" else x
        return it.history.clipped if abs(now - length) <= room * length else None
    if not all(it.given):
        return None
    want, have = map(max, it.given)
    low, lowest = map(min, it.given)
    if want - low > room * want or have - lowest > room * have:  # several factors
        return None
    if abs(have * y - want * x) > room * have * y:
        return None
    one = abs(want - 1) < room  # clipped already, or never
    two = abs(have - 1) < room
    if one == two:
        return None
    return ("reference", x) if one else ("run", y)
