"""Compares two recordings of tools/parity.py: a list of checks, causes before their effects.

``compare`` goes through the recorded steps. ``find`` measures once what is off in a step. Then each
check of the lists ``ALWAYS`` and ``CHECKS`` looks at it, in their order, and the first one that has
an answer names what is wrong. So a check may rely on it that the checks above it found nothing.
Once rounding has parted the runs, as in 16 bits after the first step, the checks of ``CRUDE`` take
the place of ``CHECKS``.

To teach it a new fault: write a check, a function of a ``Step`` that returns a message or None, and
put it into a list before the checks that would give the fault another name. What makes gradients
differ is a list of its own, ``CAUSES``. All lists stand together above ``compare``. A message
begins with the name of what is wrong, by which its check is found.

How far sound runs are apart stands in ``tolerances``. The limits that a check needs beside it are
the constants below.
"""

import collections
import dataclasses
import itertools
import json
import math
import re
from dataclasses import dataclass

import torch

# Limits, relative. What is said to be measured are many sound runs and many faults; the rest has
# much room on both sides.
FAR = 1.5  # a factor that is wrong in any type; sound runs in 16 bits are within 1.01
PARTED = 0.3  # rounding that has parted the runs so far hides every fault of gradients
SHORT = 0.1  # a gradient that is shorter than this share of the usual one is as inexact as it
PROJECTED = 1e-12  # rounding of the projections, in float64
COPIES = 1e-6  # further apart, two numbers of float32 are no copies
CLIPPED = 1e-5  # how inexact the length of all gradients is, which each rank computes
FLOAT32_INSIDE = 2**-16  # measured: rotary angles in float32 1e-6; a wrong eps of a norm 5e-5
STEPS_APART = 8  # roundings of a weight between two steps of sound runs
EVEN = 6  # measured: rounding of one parameter beside that of another 5; tanh for GELU 8
MISSING = 1e-3  # a gradient that is so much shorter is missing; what is left is rounding
EXPLAINED = 0.1  # of a difference, what a cause may leave over
UNCLEARED = 0.2  # measured: sound runs in 16 bits 0.01; clipping has shortened old gradients
RESTING = 0.25  # a way of so many roundings may be no way in 16 bits


@dataclass
class Tensors:
    """What one run has recorded of its weights or gradients in one step; a row is a parameter."""

    length: torch.Tensor  # (N,) Euclidean length
    sketch: torch.Tensor  # (N, K) projections: two sketches are as far apart as the tensors
    spread: torch.Tensor  # (N,) how far apart the copies are that several ranks hold
    noise: torch.Tensor  # (N,) share of numbers that are only rounding beside the others
    mean: torch.Tensor  # (N, K) sketch of the mean of unlike copies
    total: torch.Tensor  # (N, K) sketch of the sum of unlike copies


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


@dataclass
class Tolerance:
    """How far sound runs are apart in their first step, relative; see ``tolerances``."""

    weights: float  # of weights that each run has drawn or read by itself
    rounding: float  # of one number of the type of the weights
    sums: float  # of gradients, from rounding alone
    gradients: float  # of gradients, also if rounding flips a ReLU or a router
    loss: float
    accumulate: float  # of one addition of the type that sums use
    coarse: bool  # both runs compute in 16 bits
    unequal: bool  # one of the runs computes in a coarser type than the other
    float32: float  # what ``sums`` is in float32
    inside: bool = False  # float64 outside, and the rounding of float32


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
    norms: tuple = ([], [])  # of both runs: the length of all gradients, in all steps


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
    strayed: torch.Tensor = None  # (N,) bool: weights have moved differently

    finite: bool = True  # the reference is finite
    parted: bool = False  # rounding has parted the runs: gradients prove nothing any more
    loss_known: bool = False  # both runs have recorded it
    loss_right: bool = False
    loss_ratio: float = math.nan  # of the run's to that of the reference

    @property
    def everywhere(self):
        """All gradients are off, but for those that are too short to prove anything."""
        return bool((self.off | self.unclear).all())

    def group(self, chosen):
        return describe(self.names, self.unclear, chosen)


# Finding


def tolerances(one, two):
    """How far two sound runs are apart, from the types that they compute in and their sizes."""
    def coarsest(key):
        return [max(eps for rank in steps[0]["ranks"] for eps in rank[key]) for steps in (one, two)]

    types, weight_types = coarsest("eps"), coarsest("weight_eps")
    eps, weight_eps = max(types), max(weight_types)
    accumulate = min(eps, 2**-23)  # matrix products of 16 bits are summed in float32
    parameters = len(one[0]["values"])
    targets = max(sum(targets_of_batches(steps[0])) for steps in (one, two)) or 2**16
    numbers = max(sum(rank["numbers"] for rank in steps[0]["ranks"]) for steps in (one, two))
    # In 16 bits a ReLU or a router flips here and there: measured, up to 0.2 of a gradient.
    coarse = min(types) > 2**-12
    sums = rounding_of_sums(eps, accumulate, parameters, numbers)
    return Tolerance(
        weights=PROJECTED if weight_types[0] == weight_types[1] else weight_eps,
        rounding=weight_eps, sums=sums, gradients=max(sums, 0.3 if coarse else PROJECTED),
        accumulate=accumulate,
        # The losses of few targets round as those of one. 16: measured, for sums in any order.
        loss=2 * eps * max(parameters / targets, 1.0) ** 0.5 + 16 * accumulate, coarse=coarse,
        float32=rounding_of_sums(2**-23, 2**-23, parameters, numbers), unequal=types[0] != types[1])


def rounding_of_sums(eps, accumulate, parameters, numbers):
    # Roundings of products are a random walk through the layers. Sums over the batch are one, too;
    # its length has an end, as measured: longer sums are made of blocks.
    # 6: measured, of the bias of a convolution, whose gradient is one sum over all images.
    return eps * parameters**0.5 + 6 * accumulate * min(numbers or 2**16, 2**16) ** 0.5


def allow_float32(tolerance, largest):
    """The tolerance for a run in float64 with something inside that computes in float32, such as a
    softmax or a norm. Nothing that is recorded shows its type: the differences are the evidence.
    8: how much larger than in the first step, the ``largest``, they may become."""
    gradients = max(tolerance.gradients, min(tolerance.float32, 8 * largest))
    return dataclasses.replace(
        tolerance, inside=True, sums=gradients, gradients=gradients, loss=(2 + 16) * 2**-23,
        accumulate=2**-23)


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
        copies = any(all(math.isclose(a, b, rel_tol=COPIES) for a, b in zip(losses, others))
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


def distance(x, y, r=1.0):
    """(N,) how far r x and y are apart, estimated; the differences of their lengths are exact."""
    apart = (r * x.sketch - y.sketch).norm(dim=1)
    return apart.maximum((abs(r) * x.length - y.length).abs())


def find(names, runs, after, history, tolerance):
    """Measure once what is off in one step of both runs, for all checks that look at it.

    ``after``: the lines of both runs of the next step, or None.
    """
    it = Step(names, *runs, history, tolerance)
    if after:
        it.given = tuple([x for rank in line["ranks"] for x in rank["factors"]] for line in after)
    it.finite = bool((it.reference.weights.length + it.reference.gradients.length).isfinite().all())
    it.parted = history.slack > PARTED
    find_in_gradients(it)
    find_in_loss(it)
    largest = it.share.max().item()
    in_float64 = tolerance.accumulate < PROJECTED and not history.compared
    inside = min(tolerance.float32, FLOAT32_INSIDE)
    if in_float64 and largest <= inside and (it.off.any() or not it.loss_right):
        it.tolerance = allow_float32(tolerance, largest)
        find_in_gradients(it)
        find_in_loss(it)
    find_in_weights(it)
    return it


def find_in_gradients(it):
    x, history = it.reference.gradients, it.history
    apart = distance(x, it.run.gradients)
    it.floor = SHORT * x.length.norm() / len(it.names) ** 0.5 + history.longest
    it.loose = history.slack * (history.longest + x.length)  # weights differ by rounding already
    it.allowed = it.tolerance.gradients * (x.length + it.floor) + it.loose
    it.share = apart / (x.length + it.floor).clamp(min=1e-300)
    it.off = apart > it.allowed
    it.unclear = ~it.off & (x.length <= 2 * it.allowed)


def find_in_loss(it):
    x, w, slack = it.reference.gradients, it.reference.weights, it.history.slack
    want, have = it.reference.loss, it.run.loss
    it.loss_known = None not in (want, have)
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
    it.strayed = it.gap > ((history.slack + 2 * history.noise) * torch.maximum(*it.moved)
                           + STEPS_APART * tolerance.rounding * first[0].length)
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


# Words


def factor(run, r, near):
    """Say what a factor is, from the sizes of the run."""
    first = run.ranks[0]["targets"]
    n, dp, a = len(run.ranks), len(run.targets), len(first)
    sizes = {"the ranks": n, "the micro-batches": a, "the targets": sum(run.targets),
             "a rank's targets": sum(first), "ranks x micro-batches": n * a}
    if 1 < dp < n:
        sizes |= {"ranks that read the same samples": n // dp,
                  "ranks that read different samples": dp,
                  "ranks that read different samples x micro-batches": dp * a}
    for word, ratio in ("times", r), ("divided by", 1 / (r or math.nan)):
        causes = [name for name, size in sizes.items() if size > 1 and abs(ratio / size - 1) < near]
        if causes:
            simple = [name for name in causes if " x " not in name] or causes
            return f"{word} {sizes[simple[0]]}, such as {' or '.join(simple)}"
    power = 200 < r < math.inf and abs(math.log2(r) - round(math.log2(r))) < near
    scaled = ", a power of two: a loss scale that is not undone?" if power else ""
    return f"times {r:.4g}{scaled}"


NORM = r"norm|\bln_"  # part of the name of a normalisation
LABELS = (  # a pattern of names, and what to call the parameters that match: few labels are best
    (".*", "every parameter"),
    (rf".*({NORM}).*", "the norms"),
    (rf"(?!.*({NORM})).*", "all but the norms"),
    (r"(.*?\.)?(\d+)\..*", r"layer \2"),
    (r"(.*?\.)?\d+\.", "every "),
    ("$", ""),
)


def describe(names, unclear, off):
    """Say in a few words which parameters are ``off``; ``unclear`` ones may be among them."""
    found = []
    for pattern, label in LABELS:
        labels = [re.sub(f"^{pattern}", label, name) for name in names]
        used = list(dict.fromkeys(itertools.compress(labels, off)))
        if all(may for label, may in zip(labels, off | unclear) if label in used):
            found.append(used)
    words = min(found, key=len)
    few = f"{words[0]} to {words[-1]} ({off.sum()} of {len(names)} parameters)"
    return few if len(words) > 4 else ", ".join(words)


def about_the_loss(it):
    """The loss of both runs: it tells a wrong forward pass from a wrong backward pass."""
    want, have = it.reference.loss, it.run.loss
    if not it.loss_known:
        return ""
    if it.loss_right:
        return (f"; the loss is right ({have:.7g} and {want:.7g}): look at the backward pass and "
                f"the reduction")
    return f"; the loss is wrong too ({have:.7g}, not {want:.7g}): look at the forward pass"


def where_it_begins(it):
    """A backward pass begins at the last parameter: below the first wrong one all are wrong."""
    last = max(it.off.nonzero(), default=0)
    share_below = (it.off | it.unclear)[:last].double().mean()
    if last + 1 < len(it.names) and it.off.sum() > 2 and share_below > 0.8:
        return f"; wrong from {it.names[last]} on down, right above it"
    return ""


def about_dropout(it):
    active = sorted({x for rank in it.reference.ranks + it.run.ranks for x in rank["dropout"]})
    if not active:
        return ""
    return f"; dropout is on, so no two layouts can agree: {', '.join(active[:2])}"


# Checks


def step_numbers(it):
    """Whether both runs have recorded the same steps."""
    want, have = it.reference.line["step"], it.run.line["step"]
    if want != have:
        return f"steps: the run has recorded step {have} in place of step {want}"


def parameter_names(it):
    """Whether both runs have recorded the same parameters."""
    lines = it.reference.line, it.run.line
    for which, line, other in zip(("reference", "run"), lines, lines[::-1]):
        if odd := [name for name in it.names if name not in other["values"]]:
            frozen = not any(name in line["gradients"] for name in odd)
            more = ", which has no gradients of them: see `model` in Parity" if frozen else ""
            return f"names: only the {which} has {', '.join(odd[:3])}{more}"


def shapes(it):
    """Whether parameters have the same shape, and ranks together hold each number."""
    for name in it.names:
        want, have = (run.line["values"][name] for run in (it.reference, it.run))
        if want["shape"] != have["shape"]:
            return f"shapes: {name} is {have['shape']}, not {want['shape']}"
        if have["held"] != math.prod(have["shape"]):
            return (f"shapes: ranks hold {have['held']} numbers of {name}, which has "
                    f"{math.prod(have['shape'])}")


def not_finite(it):
    """Whether only the run has NaN or infinity. A step in which the reference has them is left out:
    a loss scale that is too large."""
    bad = ~(it.run.weights.length + it.run.gradients.length).isfinite()
    if it.finite and bad.any():
        return f"not finite: weights or gradients of {it.group(bad)}"


def initial_weights(it):
    """Whether ranks start from the same weights, and runs too."""
    if it.history.compared:
        return None
    w, v = it.reference.weights, it.run.weights
    if (bad := v.spread > PROJECTED * v.length).any():
        ranks = it.run.line["values"][it.names[bad.nonzero()[0]]]["ranks"]
        return f"initial weights: ranks {ranks} hold different values of {it.group(bad)}"
    far = distance(w, v) / w.length.clamp(min=1e-300)
    if (bad := far > it.tolerance.weights).any():
        permuted = far[bad].min() > 0.1 and w.length.allclose(v.length, 1e-9, 0)
        more = ", of the same length: are parts in another order?" if permuted else ""
        return f"initial weights: other values of {it.group(bad)}{more}"


def samples(it):
    """Whether the run has read the samples of the reference, each equally often; and if not, which
    of a batch's tensors differ."""
    def distinct(key):  # a mask has few distinct rows, and says least
        ranks = it.reference.ranks
        return len({str(row) for rank in ranks for row in rank["samples"].get(key, [])})

    messages, agree = {}, []
    for key in tensors_in(all, it.reference.line, it.run.line):
        want, have = ([rank["samples"].get(key, []) for rank in run.ranks]
                      for run in (it.reference, it.run))
        if message := other_rows(*numbered(want, have)):
            messages[key] = message
        else:
            agree.append(key)
    if messages:
        which = ""
        if agree:
            differ, agrees = (f"{verb}s" if len(keys) == 1 else verb
                              for verb, keys in (("differ", messages), ("agree", agree)))
            which = f"{listed(messages)} {differ}, {listed(agree)} {agrees}: "
        return f"samples: {which}{messages[max(messages, key=distinct)]}"


def listed(keys):
    return ", ".join(f"`{key}`" for key in keys)


def tensors_in(how, *lines):
    """The names of tensors that ``all`` or ``any`` of the runs have recorded of their batches."""
    keys = [[key for rank in line["ranks"] for key in rank["samples"]] for line in lines]
    return [key for key in dict.fromkeys(sum(keys, [])) if how(key in own for own in keys)]


def numbered(*runs):
    """Samples as numbers, equal ones as the same. ``runs``: [[fingerprint, ...] of each rank]."""
    rows = [row for ranks in runs for rank in ranks for row in rank]
    if not any(isinstance(row, list) for row in rows):
        return runs
    if not all(isinstance(row, list) for row in rows):  # whole numbers in one run alone
        return [[[0] * len(rank) for rank in ranks] for ranks in runs]
    rows = torch.tensor(rows, dtype=torch.float64)  # [length, two projections, rounding]
    # Floats are computed, and so may differ by some roundings, but for 12 bits.
    near = (4 * rows[:, 3]).clamp(min=2**-12) * rows[:, 0]
    numbers, old = torch.arange(len(rows)), None  # near rows get one, also through a third row
    while old is None or not numbers.equal(old):
        old = numbers.clone()
        for i in range(0, len(rows), 1000):
            limit = torch.maximum(near[i : i + 1000, None], near)
            joined = torch.cdist(rows[i : i + 1000, :3], rows[:, :3], p=math.inf) <= limit
            numbers[i : i + 1000] = torch.where(joined, numbers, len(rows)).amin(1)
    numbers = iter(numbers.tolist())
    return [[[next(numbers) for _ in rank] for rank in ranks] for ranks in runs]


def other_rows(want_of_ranks, have_of_ranks):
    """Say which samples the run has lost, repeated or replaced, or None."""
    want, have = (collections.Counter(itertools.chain(*ranks))
                  for ranks in (want_of_ranks, have_of_ranks))
    n, m = want.total(), have.total()  # every sample is read by equally many ranks
    more = [row for row in have if have[row] * n > want[row] * m]
    if not more:
        return None
    lost, others = len(want.keys() - have), len(set(more) - want.keys())
    message = f"{lost} of {len(want)} are missing"
    if others:
        return (f"{message}, and {others} other samples are read instead: another seed, order or "
                f"start, or a batch that is recorded after it was cut")
    top = max(more, key=have.get)
    if have[top] > 1:
        ranks = [i for i, own in enumerate(have_of_ranks) if top in own]
        return f"{message}, one is read {have[top]} times, by ranks {ranks}"
    return message


def copies_of_weights(it):
    """Whether ranks that hold the same part of a parameter still hold the same values."""
    v = it.run.weights
    if it.history.compared and (bad := v.spread > COPIES * v.length).any():
        ranks = it.run.line["values"][it.names[bad.nonzero()[0]]]["ranks"]
        return (f"update: ranks {ranks} hold different weights of {it.group(bad)}: a rank skips a "
                f"step, or updates them by another gradient")


def update(it):
    """Whether weights have moved as in the reference since the first step: the learning rate, the
    optimizer and its states, and clipping, of the steps before this one."""
    if not (bad := it.strayed).any():
        return None
    way, other = it.moved
    by = (it.gap / way.maximum(other))[bad].max()
    ratio = (other / way)[bad]
    alike = ratio.max() - ratio.min() < EXPLAINED * abs(ratio[0] - 1)
    why = f" ({factor(it.run, ratio[0].item(), 0.02)})" if alike else ""
    return (f"update: weights of {it.group(bad)} have moved differently, by up to {by:.1g} of "
            f"their way{why}: learning rate, decay, clipping, the optimizer, or a rank skips it")


def reduction(it):
    """Whether ranks that hold the same part of a parameter hold the same gradient of it."""
    y, run = it.run.gradients, it.run
    bad = y.spread > it.tolerance.sums * (y.length + it.floor) + it.loose
    if not bad.any():
        return None
    i = (bad * y.length).argmax()
    gaps = [(it.reference.gradients.sketch - of_ranks)[i].norm() for of_ranks in (y.mean, y.total)]
    norms = [rank["norm"] for rank in run.ranks]
    why = f"they must be {'averaged' if gaps[0] < gaps[1] else 'added up'}"
    if min(gaps) > it.allowed[i]:
        why = f"neither their sum nor their mean is right{where_it_begins(it)}{about_the_loss(it)}"
        if bad.all() and max(norms) < (1 + CLIPPED) * min(norms):
            why = f"each rank has clipped its own to {norms[0]:.3g}: reduce before clipping"
    ranks = run.line["gradients"][it.names[bad.nonzero()[0]]]["ranks"]
    return (f"reduction: ranks {ranks} hold different gradients of {it.group(bad)}: {why}"
            f"{about_dropout(it)}")


def lost_tie(it):
    """Whether the gradients of two names add up to that of one tensor in the reference."""
    x, y = it.reference.gradients, it.run.gradients
    for i, j in itertools.combinations(it.off.nonzero().flatten().tolist(), 2):
        tied = [z.sketch[i].equal(z.sketch[j]) for z in (x, y)]
        gap = (x.sketch[i] - y.sketch[i] - y.sketch[j]).norm()
        if tied == [True, False] and gap <= it.allowed[i]:
            return (f"gradients: a tie is lost: those of {it.names[i]} and {it.names[j]} must add "
                    f"up")


def scaled(it):
    """Whether one factor makes the gradients right: an average in place of a sum, a loss scale."""
    x, y = it.reference.gradients, it.run.gradients
    i = (it.off * (x.length + y.length)).argmax()
    r = ((x.sketch[i] @ y.sketch[i]).sign() * y.length[i] / x.length[i]).item()
    limit = it.tolerance.gradients * (y.length + abs(r) * it.floor) + abs(r) * it.loose
    if r and (distance(x, y, r) <= limit)[it.off | it.everywhere].all():
        near = max(1e-3, min(0.1, 2 * it.tolerance.gradients))
        loss = "; the loss too" if abs(it.loss_ratio / r - 1) < near else about_the_loss(it)
        return f"gradients: {whose(it)}: {factor(it.run, r, near)}{clipped_already(it)}{loss}"


def clipped_already(it):
    """Whether the run was recorded after clipping: all norms that are smaller are the same."""
    smaller = [have for want, have in zip(*it.history.norms) if have < 0.999 * want]
    if it.everywhere and len(smaller) > 1 and max(smaller) < 1.001 * min(smaller):
        return f", recorded after clipping? The norm of the run is {smaller[0]:.4g} again and again"
    return ""


def trained_in_one_run(it):
    """Whether parameters have gradients in the run alone."""
    x, y = it.reference.line["gradients"], it.run.line["gradients"]
    only = torch.tensor([name in y and name not in x for name in it.names])
    if (it.off & only).any():
        return (f"gradients: only the run has those of {it.group(it.off & only)}: frozen in the "
                f"reference?")


def missing(it):
    """Whether some gradients are 0 or nearly so in the run alone."""
    bad = it.off & (it.run.gradients.length < MISSING * it.reference.gradients.length)
    if not bad.any():
        return None
    if not it.run.line["gradients"]:
        return "gradients: missing: the run has none: record before zero_grad"
    none = all(name not in it.run.line["gradients"] for name in itertools.compress(it.names, bad))
    why = ". They are None: frozen in the run?" if none else ""
    return f"gradients: missing: those of {it.group(bad)}{about_the_loss(it)}{why}"


def not_cleared(it):
    """Whether the gradients of the step before were added to those of this one."""
    if not it.history.compared:
        return None
    more = (it.run.gradients.sketch - it.reference.gradients.sketch)[it.off].flatten()
    old = it.history.before.sketch[it.off].flatten()
    r = more @ old / (old @ old)
    if (more - r * old).norm() < EXPLAINED * more.norm():
        return f"gradients: not cleared: {whose(it)} hold {r:.3g} of those of the step before"


def rounding(it):
    """Whether gradients are as far apart as the rounding of a type with fewer bits. Rounding is
    even over the parameters; the difference that another formula makes is not."""
    x = it.reference.gradients
    share = (distance(x, it.run.gradients) / x.length)[it.off]
    middle, most = share.median(), share.max()
    if it.everywhere and it.loss_right and most < EVEN * share.min():
        for word, low in ("bfloat16", 2**-11), ("float16", 2**-15), ("float32", 2**-28):
            if low < middle and most < 64 * low:
                return (f"gradients: rounding: they differ by {middle:.0e}, as if {word} was in "
                        f"between (see dtype)")


def some_gradients(it):
    """Some gradients are wrong, and others are right: says where it begins."""
    if not it.everywhere:
        return (f"gradients: {whose(it)} differ, by up to {it.share[it.off].max():.1g}"
                f"{where_it_begins(it)}{about_the_loss(it)}")


def part_of_the_batch(it):
    """All gradients are wrong, and the loss is right."""
    if it.loss_right:
        counts = [sum(rank["targets"]) for rank in it.run.ranks]
        uneven = f" (ranks have {min(counts)} to {max(counts)} targets: a mean of means?)"
        return (f"gradients: part of the batch, or the backward pass of the loss: {how_far(it)}, "
                f"and the loss is right ({it.run.loss:.7g} and {it.reference.loss:.7g}): samples "
                f"are lost or weigh more{uneven if min(counts) < max(counts) else ''}, ranks clip "
                f"before the reduction, a wrong group, label smoothing, positions that are "
                f"doubled, another formula, such as an approximation of GELU, or a loss with a "
                f"backward of its own")


def mean_of_means(it):
    """Whether the loss is right once the losses of ranks, or of micro-batches, are weighted."""
    if not it.loss_known or it.loss_right:
        return None
    of_micro_batches = [pair for rank in it.run.counted
                        for pair in zip(rank["counts"], rank["losses"])]
    of_ranks = [(sum(rank["targets"]), sum(rank["losses"])) for rank in it.run.counted]
    for pairs in of_micro_batches, of_ranks:
        counts, losses = torch.tensor(pairs, dtype=torch.float64).T
        weighted = it.run.loss * (counts @ losses / counts.sum() / losses.mean()).item()
        room = (it.tolerance.loss + it.history.slack) * abs(it.reference.loss)
        if abs(weighted - it.reference.loss) <= room:
            return "loss: a mean of means: with losses weighted by targets it is right"


def forward_pass(it):
    """All gradients are wrong, and so is the loss."""
    if not it.loss_known:
        return (f"gradients: {how_far(it)}: record the loss, to tell whether the forward pass is "
                f"right")
    return (f"gradients: forward pass: the loss is {it.run.loss}, not {it.reference.loss}; "
            f"{how_far(it)}: mask, positions, arithmetic, weights that are not gathered, ranks "
            f"that must share samples, or a mean of means")


def loss(it):
    """The loss is wrong, and the gradients are right."""
    if it.loss_known and not it.loss_right:
        return (f"loss: it is {it.run.loss}, not {it.reference.loss} "
                f"({factor(it.run, it.loss_ratio, 1e-3)}), and the gradients agree: how the losses "
                f"of ranks or micro-batches are averaged")


def clipping(it):
    """Whether gradients are scaled as in the reference between ``record`` and the optimizer. A
    reference that clips each tensor by itself proves nothing."""
    want, have = (factors or [0.0] for factors in it.given)
    x, y = it.reference.gradients, it.run.gradients
    inexact = CLIPPED + 4 * it.tolerance.rounding  # the norm is computed in the type of the weights
    low, high = min(have), max(have)
    if max(want) - min(want) > inexact * max(want):
        return None
    wrong = f"clipping: by a wrong norm or before the reduction: scaled by {high:.6g},"
    if high - low > inexact * high:
        return (f"{wrong} elsewhere by {low:.6g}, as by the norm of a part, or of each tensor")
    r = (high * y.length.norm() / (max(want) * x.length.norm())).item()
    room = it.tolerance.gradients + CLIPPED + it.history.slack
    limit = room * (1 + torch.as_tensor(it.history.longest).norm() / x.length.norm())
    if 0 < r < math.inf and abs(r - 1) > limit:
        return f"{wrong} not by {max(want):.6g} ({factor(it.run, r, 0.01)})"


def crude_update(it):
    """Whether weights have moved about as far as in the reference, since the first step."""
    way, other = it.moved
    one_rounding = it.tolerance.rounding * it.history.first[0].length
    all_of = other.norm() / way.norm()
    if way.norm() > RESTING * one_rounding.norm() and not 1 / FAR <= all_of <= FAR:
        still = " They do not move: does the optimizer have them?" if all_of == 0 else ""
        return (f"update: the weights have moved {all_of:.2g} times as far as in the reference: "
                f"learning rate, decay, clipping, or the optimizer.{still}")
    resting = (other == 0) & (way > 2 * one_rounding)
    if resting.any():
        which = describe(it.names, torch.zeros_like(resting), resting)
        return f"update: weights of {which} do not move: does the optimizer have them?"


def crude_not_cleared(it):
    """Whether gradients are those of the reference and of its step before."""
    x, y, old = (it.reference.gradients.sketch.flatten(), it.run.gradients.sketch.flatten(),
                 it.history.before.sketch.flatten())
    both = torch.stack([x, old], 1)
    shares = torch.linalg.pinv(both) @ y
    rest = (both @ shares - y).norm()
    if shares[1] > UNCLEARED and rest < min(0.3 * y.norm(), 0.5 * (x - y).norm()):
        return (f"gradients: not cleared: they hold about {shares[1]:.1g} of those of the step "
                f"before")


def whose(it):
    return "all" if it.everywhere else f"those of {it.group(it.off)}"


def how_far(it):
    share = it.share[it.off]
    return f"all differ, by {share.min():.1g} to {share.max():.1g}"


def gradients(it):
    """Whether gradients differ; then ``CAUSES``, in their order, say why."""
    if not it.off.any():
        return None
    for cause in CAUSES:
        if message := cause(it):
            return message + about_dropout(it)


CAUSES = [  # of gradients that differ; the last one always has an answer
    lost_tie,
    trained_in_one_run,
    scaled,
    missing,
    not_cleared,
    rounding,
    some_gradients,
    mean_of_means,
    part_of_the_batch,
    forward_pass,
]

ALWAYS = [  # checks of every step
    step_numbers,
    parameter_names,
    shapes,
    not_finite,
    initial_weights,
    samples,
    copies_of_weights,
]

CHECKS = [  # of a step in which the reference is finite, and rounding has not yet parted the runs
    update,
    reduction,
    gradients,
    mean_of_means,
    loss,
    clipping,
]


CRUDE = [  # of a step in which rounding has parted the runs
    crude_update,
    crude_not_cleared,
]


def compare(one, two):
    """Say that run ``two`` equals the reference ``one``, or what differs first. Both are lists of
    recorded lines. The first word of the answer is EQUAL, DIFFERENT or NOTHING."""
    names, tolerance = names_to_compare(one, two), tolerances(one, two)
    counted = [ranks_that_count(lines) for lines in (one, two)]
    steps = [[run_of(line, names, own) for line, own in zip(lines, counted)]
             for lines in zip(one, two)]
    history = History(norms=tuple(
        [run.gradients.length.norm().item() for run in runs] for runs in zip(*steps)))
    crude = 0
    for runs, after in zip(steps, [*zip(one[1:], two[1:]), None]):
        it = find(names, runs, after, history, tolerance)
        checks = CHECKS if not it.parted else CRUDE
        for check in ALWAYS + checks * it.finite:
            if message := check(it):
                return f"DIFFERENT: step {it.reference.line['step']}: {message}"
        tolerance = it.tolerance
        crude += it.finite and it.parted
        if it.finite and not it.parted:
            history = remember(it)
        elif it.finite:
            history = dataclasses.replace(history, before=it.reference.gradients)
    if len(one) != len(two):
        return (f"DIFFERENT: steps: the run has recorded {len(two)} and the reference {len(one)}, "
                f"and nothing differs in the first {len(steps)}")
    return verdict(it, history, len(steps), crude, one + two)


def verdict(it, history, steps, crude, lines):
    """What to say if nothing differs: it depends on what was compared."""
    weights = max(sums["sums"][1] for line in lines for sums in line["values"].values())
    if not history.compared:
        return "NOTHING TO COMPARE: the reference is not finite"
    if not any(line["gradients"] for line in lines):
        return "NOTHING TO COMPARE: neither run has gradients: record before zero_grad"
    if not max(max(norms) for norms in history.norms):
        return "NOTHING TO COMPARE: all gradients are 0 in both runs"
    if not weights:
        return "NOTHING TO COMPARE: all weights are 0 in both runs"

    tolerance = it.tolerance
    left = []
    both, either = (tensors_in(how, it.reference.line, it.run.line) for how in (all, any))
    if not both:
        left.append("samples (no tensor has the same name in both batches)")
    elif both != either:
        left.append(f"{listed(key for key in either if key not in both)} (in one batch alone)")
    if not it.loss_known:
        left.append("the loss (it is not recorded)")
    if steps == 1:
        left.append("updates (one step is recorded)")
    elif not torch.maximum(*it.moved).any():
        left.append("updates (no weight moves)")
    not_compared = f". Not compared: {', '.join(left)}" if left else ""
    though = ", though one computes in a coarser type" if tolerance.unequal else ""
    if tolerance.inside:
        though += ", as if float32 was in between"
    within = (f"gradients up to {tolerance.gradients:.1e}, the loss up to {tolerance.loss:.1e} in "
              f"the first; largest difference: {history.largest:.1e}")
    then = (f". Then rounding has parted the runs: in {crude} of the steps only samples and copies "
            f"were compared, and how far weights have moved, up to a factor of {FAR}"
            ) if crude else ""
    found, more = "EQUAL up to rounding", ""
    if tolerance.coarse or crude and history.compared == 1:
        found, more = "NOTHING FOUND", ". Record float32 or float64 to know that the runs are equal"
    return (f"{found}, {history.compared} of {steps} steps{though}: {within}{then}{not_compared}"
            f"{more}")


def table(one, two):
    """Lengths of the gradients of the first step, and how far they are apart, as lines of text."""
    names = names_to_compare(one, two)
    x, y = (run_of(steps[0], names).gradients for steps in (one, two))
    columns = zip(names, x.length, y.length, y.length / x.length, distance(x, y))
    return "\n".join([f"{'gradient':50}  reference        run      ratio  difference", *(
        "{:50} {:10.3e} {:10.3e} {:10.6f} {:11.1e}".format(*row) for row in columns)])
