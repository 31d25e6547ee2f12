"""Compares two recordings of tools/parity.py: a list of checks, causes before their effects.

``compare`` goes through the recorded steps. ``find`` measures once what is off in a step. Then each
check of the lists ``ALWAYS`` and ``CHECKS`` looks at it, in their order, and the first one that has
an answer names what is wrong. So a check may rely on it that the checks above it found nothing.

To teach it a new fault: write a check, a function of a ``Step`` that returns a message or None, and
put it into a list before the checks that would give the fault another name. What makes gradients
differ is a list of its own, ``CAUSES``.
"""

import collections
import itertools
import math
import re
from dataclasses import dataclass, field

import torch


@dataclass
class Tensors:
    """What one run has recorded of its weights or gradients in one step; a row is a parameter."""

    length: torch.Tensor  # (N,) Euclidean length
    sketch: torch.Tensor  # (N, K) projections: two sketches are as far apart as the tensors
    spread: torch.Tensor  # (N,) how far apart the copies are that several ranks hold
    noise: torch.Tensor  # (N, 2) share of numbers that are rounding, in float32 and in float64
    mean: torch.Tensor  # (N, K) sketch of the mean of unlike copies
    total: torch.Tensor  # (N, K) sketch of the sum of unlike copies


@dataclass
class Run:
    """What one run has recorded in one step."""

    line: dict  # as it stands in the file
    ranks: list  # a dict of each rank
    targets: list  # how many targets each batch has that ranks have read
    loss: float  # of the global batch; NaN if it is not recorded
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
    noise: torch.Tensor = 0.0  # (N,) which share of that gradient is nothing but rounding


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
    targets = max(sum(steps[0]["targets"]) for steps in (one, two)) or 2**16
    numbers = max(sum(rank["numbers"] for rank in steps[0]["ranks"]) for steps in (one, two))
    # Sums over the batch are a random walk of roundings. Its length has an end, as measured: longer
    # sums are made of blocks.
    numbers = min(numbers or 2**16, 2**16)
    # Roundings of products are a random walk through the layers.
    sums = eps * parameters**0.5 + 2 * accumulate * numbers**0.5
    # In 16 bits a ReLU or a router flips here and there: measured, up to 0.2 of a gradient.
    coarse = min(types) > 2**-12
    return Tolerance(
        weights=1e-12 if weight_types[0] == weight_types[1] else weight_eps, rounding=weight_eps,
        sums=sums, gradients=max(sums, 0.3 if coarse else 1e-12), accumulate=accumulate,
        # The losses of few targets round as those of one. 16: measured, for sums in any order.
        loss=2 * eps * max(parameters / targets, 1.0) ** 0.5 + 16 * accumulate, coarse=coarse,
        unequal=types[0] != types[1])


def run_of(line, names):
    """A recorded line as tensors. What has no gradient has a gradient of 0."""
    def tensors(kind):
        width = len(next(iter(line["values"].values()))["sums"])
        rows = torch.tensor([line[kind][name]["sums"] if name in line[kind] else [0.0] * width
                             for name in names], dtype=torch.float64)
        K = (width - 4) // 3
        return Tensors(spread=rows[:, 0], length=rows[:, 1].sqrt(), noise=rows[:, 2:4],
                       sketch=rows[:, 4 : 4 + K], mean=rows[:, -2 * K : -K], total=rows[:, -K:])

    return Run(line, line["ranks"], line["targets"],
               math.nan if line["loss"] == [] else line["loss"],
               tensors("values"), tensors("gradients"))


def distance(x, y, r=1.0):
    """(N,) how far r x and y are apart, estimated; the differences of their lengths are exact."""
    apart = (r * x.sketch - y.sketch).norm(dim=1)
    return apart.maximum((abs(r) * x.length - y.length).abs())


def find(names, lines, after, history, tolerance):
    """Measure what is off in one step of both runs: no check measures it again.

    ``lines`` are those of both runs, and ``after`` those of the next step, or None.
    """
    reference, run = (run_of(line, names) for line in lines)
    it = Step(names, reference, run, history, tolerance)
    if after:
        it.given = tuple([x for rank in line["ranks"] for x in rank["factors"]] for line in after)
    x, y, slack = reference.gradients, run.gradients, history.slack
    it.finite = bool((reference.weights.length + x.length).isfinite().all())
    it.parted = slack > 0.3

    apart = distance(x, y)
    it.floor = 0.1 * x.length.norm() / len(names) ** 0.5 + history.longest
    it.loose = slack * (history.longest + x.length)  # the weights differ by rounding already
    it.allowed = tolerance.gradients * (x.length + it.floor) + it.loose
    it.share = apart / (x.length + it.floor).clamp(min=1e-300)
    it.off = apart > it.allowed
    it.unclear = ~it.off & (x.length <= 2 * it.allowed)

    first = history.first or (reference.weights, run.weights)
    ways = [now.weights.sketch - then.sketch for now, then in zip((reference, run), first)]
    it.moved = tuple(way.norm(dim=1) for way in ways)
    it.gap = (ways[0] - ways[1]).norm(dim=1)
    most = torch.maximum(*it.moved)
    it.strayed = it.gap > (
        (slack + 2 * history.noise) * most + 8 * tolerance.rounding * first[0].length)
    if history.compared:  # where the first gradient is only rounding, so is the way of a weight
        usual = history.scale.norm() / len(names) ** 0.5
        it.strayed &= (history.scale > tolerance.gradients * usual) | (history.scale == 0)

    want, have = reference.loss, run.loss
    it.loss_known = not (math.isnan(want) or math.isnan(have))
    # What rounding of the weights, and the way that they have moved apart, do to the loss
    room = tolerance.accumulate * x.length.norm() * reference.weights.length.norm() + slack * (
        (x.length + history.longest) @ it.moved[0])
    it.loss_right = abs(have - want) <= tolerance.loss * abs(want) + room
    return it


def remember(it):
    """The history with this step, in which nothing is wrong."""
    old, x, y, w = it.history, it.reference.gradients, it.run.gradients, it.reference.weights
    noise = x.noise.maximum(y.noise)[:, int(it.tolerance.accumulate < 1e-12)].sqrt()
    unseen = torch.zeros(len(it.names), dtype=torch.float64) + old.scale == 0
    largest = max(old.largest, it.share.max().item())
    # How fast differences grow: the factor 10, and 10 more if they grow so fast, are measured. Adam
    # moves a number by a whole step even if its gradient is only rounding: hence the root.
    growth = min(10.0, largest / (old.largest or largest or 1.0))
    return History(
        slack=max(2 * (0.8 * it.tolerance.gradients) ** 0.5, 10 * growth * largest),
        largest=largest, compared=old.compared + 1, first=old.first or (w, it.run.weights),
        before=x, longest=x.length.maximum(torch.as_tensor(old.longest)),
        scale=torch.where(unseen, x.length.maximum(y.length), torch.as_tensor(old.scale)),
        noise=torch.where(unseen, noise, torch.as_tensor(old.noise).double()))


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


def parameter_names(it):
    """Whether both runs have recorded the same parameters."""
    odd = it.reference.line["values"].keys() ^ it.run.line["values"]
    if odd:
        return f"names: only one of the runs has {', '.join(sorted(odd)[:3])}"


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
    if (bad := v.spread > 1e-12 * v.length).any():
        ranks = it.run.line["values"][it.names[bad.nonzero()[0]]]["ranks"]
        return f"initial weights: ranks {ranks} hold different values of {it.group(bad)}"
    far = distance(w, v) / w.length.clamp(min=1e-300)
    if (bad := far > it.tolerance.weights).any():
        permuted = far[bad].min() > 0.1 and w.length.allclose(v.length, 1e-9, 0)
        more = ", of the same length: are parts in another order?" if permuted else ""
        return f"initial weights: other values of {it.group(bad)}{more}"


def samples(it):
    """Whether the run has read the samples of the reference, each equally often."""
    for key in dict.fromkeys(key for rank in it.reference.ranks for key in rank["samples"]):
        rows = [[rank["samples"].get(key, []) for rank in run.ranks]
                for run in (it.reference, it.run)]
        want, have = (collections.Counter(itertools.chain(*ranks)) for ranks in rows)
        n, m = want.total(), have.total()  # every sample is read by equally many ranks
        more = [row for row in have if have[row] * n > want[row] * m]
        if not more:
            continue
        lost, others = len(want.keys() - have), len(set(more) - want.keys())
        message = f"samples: {lost} of {len(want)} are missing"
        top = max(more, key=have.get)
        if others:
            return (f"{message}, and {others} other samples are read instead: another "
                    f"seed, order or start")
        if have[top] > 1:
            ranks = [i for i, own in enumerate(rows[1]) if top in own]
            return f"{message}, one is read {have[top]} times, by ranks {ranks}"
        return message


def copies_of_weights(it):
    """Whether ranks that hold the same part of a parameter still hold the same values."""
    v = it.run.weights
    if it.history.compared and (bad := v.spread > 1e-6 * v.length).any():
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
    alike = ratio.max() - ratio.min() < 0.1 * abs(ratio[0] - 1)
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
        if max(norms) < 1.00001 * min(norms):
            why = f"each rank has clipped its own to {norms[0]:.3g}: reduce before clipping"
    ranks = run.line["gradients"][it.names[bad.nonzero()[0]]]["ranks"]
    return f"reduction: ranks {ranks} hold different gradients of {it.group(bad)}: {why}"


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
        ratio = it.run.loss / (it.reference.loss or math.nan)
        loss = "; the loss too" if abs(ratio / r - 1) < near else about_the_loss(it)
        return f"gradients: {whose(it)}: {factor(it.run, r, near)}{loss}"


def missing(it):
    """Whether some gradients are 0 or nearly so in the run alone."""
    bad = it.off & (it.run.gradients.length < 1e-3 * it.reference.gradients.length)
    if bad.any():
        return f"gradients: missing: those of {it.group(bad)}{about_the_loss(it)}"


def not_cleared(it):
    """Whether the gradients of the step before were added to those of this one."""
    if not it.history.compared:
        return None
    more = (it.run.gradients.sketch - it.reference.gradients.sketch)[it.off].flatten()
    old = it.history.before.sketch[it.off].flatten()
    r = more @ old / (old @ old)
    if (more - r * old).norm() < 0.1 * more.norm():
        return f"gradients: not cleared: {whose(it)} hold {r:.3g} of those of the step before"


def rounding(it):
    """Whether gradients are as far apart as the rounding of a type with fewer bits."""
    middle, most = it.share[it.off].median(), it.share[it.off].max()
    if it.everywhere and it.loss_right:
        for word, low in ("bfloat16", 2**-12), ("float16", 2**-15), ("float32", 2**-28):
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
        return (f"gradients: part of the batch, or the backward pass of the loss: {how_far(it)}, "
                f"and the loss is right ({it.run.loss:.7g} and {it.reference.loss:.7g}): samples "
                f"are lost or weigh more, ranks clip before the reduction, a wrong group, label "
                f"smoothing, positions that are doubled, or a loss with a backward of its own")


def mean_of_means(it):
    """Whether the loss is right once the losses of ranks, or of micro-batches, are weighted."""
    if not it.loss_known or it.loss_right:
        return None
    of_micro_batches = [pair for rank in it.run.ranks
                        for pair in zip(rank["counts"], rank["losses"])]
    of_ranks = [(sum(rank["targets"]), sum(rank["losses"]))
                for rank in it.run.ranks if rank["losses"]]
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
        ratio = it.run.loss / (it.reference.loss or math.nan)
        return (f"loss: it is {it.run.loss}, not {it.reference.loss} "
                f"({factor(it.run, ratio, 1e-3)}), and the gradients agree: how the losses of "
                f"ranks or micro-batches are averaged")


def clipping(it):
    """Whether gradients are scaled as in the reference between ``record`` and the optimizer. A
    reference that clips each tensor by itself proves nothing."""
    want, have = (factors or [0.0] for factors in it.given)
    x, y = it.reference.gradients, it.run.gradients
    inexact = 1e-5 + 4 * it.tolerance.rounding  # the norm is computed in the type of the weights
    low, high = min(have), max(have)
    if max(want) - min(want) > inexact * max(want):
        return None
    wrong = f"clipping: by a wrong norm or before the reduction: scaled by {high:.6g},"
    if high - low > inexact * high:
        return f"{wrong} elsewhere by {low:.6g}, as by the norm of a part"
    r = (high * y.length.norm() / (max(want) * x.length.norm())).item()
    room = it.tolerance.gradients + 1e-5 + it.history.slack
    limit = room * (1 + torch.as_tensor(it.history.longest).norm() / x.length.norm())
    if 0 < r < math.inf and abs(r - 1) > limit:
        return f"{wrong} not by {max(want):.6g} ({factor(it.run, r, 0.01)})"


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
    scaled,
    missing,
    not_cleared,
    rounding,
    some_gradients,
    part_of_the_batch,
    mean_of_means,
    forward_pass,
]

ALWAYS = [  # checks of every step
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


def compare(one, two):
    """Say that run ``two`` equals the reference ``one``, or what differs first."""
    history, tolerance = History(), tolerances(one, two)
    steps = [*zip(one, two)]
    for lines, after in zip(steps, [*steps[1:], None]):
        it = find([*one[0]["values"]], lines, after, history, tolerance)
        close = it.finite and not it.parted
        for check in ALWAYS + CHECKS * close:
            if message := check(it):
                return f"DIFFERENT: step {lines[0]['step']}: {message}"
        if close:
            history = remember(it)
    if not history.compared:
        return "DIFFERENT: the reference is not finite"
    though = ", though one computes in a coarser type" if tolerance.unequal else ""
    return (f"EQUAL up to rounding, {history.compared} of {len(steps)} steps{though}: gradients up "
            f"to {tolerance.gradients:.1e}, the loss up to {tolerance.loss:.1e} in the first; "
            f"largest difference: {history.largest:.1e}")


def table(one, two):
    """Lengths of the gradients of the first step, and how far they are apart, as lines of text."""
    names = [*one[0]["values"]]
    x, y = (run_of(steps[0], names).gradients for steps in (one, two))
    columns = zip(names, x.length, y.length, y.length / x.length, distance(x, y))
    return "\n".join([f"{'gradient':50}  reference        run      ratio  difference", *(
        "{:50} {:10.3e} {:10.3e} {:10.6f} {:11.1e}".format(*row) for row in columns)])
