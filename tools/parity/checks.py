"""The checks of a step, causes before their effects. Each is a function of a ``Step`` that returns
a message, which begins with the name of what is wrong, or None. A check may rely on it that the
checks above it in its list found nothing.

To teach parity a new fault: write a check, and put it into a list at the end of this file before
the checks that would give the fault another name. What makes gradients differ is a list of its own,
``CAUSES``.
"""

import collections
import itertools
import math

import torch

# Limits, relative; compare.py has the others.
PROJECTED = 1e-12  # rounding of the projections, in float64
COPIES = 1e-6  # further apart, two numbers of float32 are no copies
CLIPPED = 1e-5  # how inexact the length of all gradients is, which each rank computes
EVEN = 6  # measured: rounding of one parameter beside that of another 5; tanh for GELU 8
MISSING = 1e-3  # a gradient that is so much shorter is missing; what is left is rounding
EXPLAINED = 0.1  # of a difference, what a cause may leave over
SAME_OUTPUT = 8  # roundings of the mean square of a module's output; measured: 0.3


def distance(x, y, r=1.0):
    """(N,) how far r x and y are apart, estimated; the differences of their lengths are exact."""
    apart = (r * x.sketch - y.sketch).norm(dim=1)
    return apart.maximum((abs(r) * x.length - y.length).abs())


# Words


def coarsest(ranks, *kinds):
    """The name of the coarsest recorded type of some kinds, or None."""
    names = {name for rank in ranks for kind in kinds for name in rank["types"][kind]}
    return max(names, key=lambda name: torch.finfo(getattr(torch, name)).eps, default=None)


def factor(run, r, near):
    """Say what a factor is, from the sizes of the run."""
    first = run.ranks[0]["targets"]
    n, dp, a = len(run.ranks), len(run.targets), len(first)
    sizes = {"the ranks": n, "the micro-batches": a, "the targets": sum(run.targets),
             "a rank's targets": sum(first)}
    if n > 1 and a > 1:
        sizes["ranks x micro-batches"] = n * a
    if 1 < dp < n:
        sizes |= {"ranks that read the same samples": n // dp,
                  "ranks that read different samples": dp}
    for word, ratio in ("times", r), ("divided by", 1 / (r or math.nan)):
        causes = [name for name, size in sizes.items() if size > 1 and abs(ratio / size - 1) < near]
        if causes:
            return f"{word} {sizes[causes[0]]}, as many as {' or '.join(causes)}"
    return f"times {r:.{4 if abs(r - 1) > 0.01 else 8}g}"


def group(it, chosen):
    """Name the parameters that are ``chosen``."""
    names = [*itertools.compress(it.names, chosen)]
    if len(names) == len(it.names):
        return "every parameter"
    if len(names) < 3:
        return " and ".join(names)
    return f"{names[0]} to {names[-1]} ({len(names)} of {len(it.names)} parameters)"


def same_samples(run, whose=""):
    """How many ranks read the same samples, or ""."""
    alike = max(collections.Counter(str(rank["samples"]) for rank in run.ranks).values())
    several = alike > 1 and run.ranks[0]["samples"]
    return f"{alike} ranks{whose} read the same samples" if several else ""


def zero_in_both(it):
    """(N,) bool: the gradient of a parameter is there, and 0, in both runs."""
    there = torch.tensor([all(name in run.line["gradients"] for run in (it.reference, it.run))
                          for name in it.names])
    return there & (it.reference.gradients.length + it.run.gradients.length == 0)


def whose(it):
    return f"those of {group(it, it.off)}" if not it.everywhere or zero_in_both(it).any() else "all"


def how_far(it):
    share = it.share[it.off]
    return f"{whose(it)} differ, by {share.min():.1g} to {share.max():.1g}"


def about_the_loss(it):
    """The loss of both runs: it tells a wrong forward pass from a wrong backward pass."""
    want, have = it.reference.loss, it.run.loss
    if not it.loss_known:
        return ""
    if it.loss_right:
        module = wrong_module(it)
        look = f", but {module}" if module else ": look at the backward pass and the reduction"
        return f"; the loss is right ({have:.7g} and {want:.7g}){look}"
    return f"; the loss is wrong too ({have:.7g}, not {want:.7g}): {forward_pass_of(it)}"


def where_it_begins(it):
    """A backward pass begins at the last parameter: below the first wrong one all are wrong."""
    last = max(it.off.nonzero(), default=0)
    share_below = (it.off | it.unclear)[:last].double().mean()
    if last + 1 < len(it.names) and it.off.sum() > 2 and share_below > 0.8:
        return f"; wrong up to {it.names[last]}, right after it"
    return ""


def about_dropout(it):
    active = sorted({x for rank in it.reference.ranks + it.run.ranks for x in rank["dropout"]})
    if not active:
        return ""
    return f"; dropout is on, so no two layouts can agree: {', '.join(active[:2])}"


def outputs_of(run):
    """{module: (mean square of its output, how many numbers it has)}, over all ranks, in the order
    in which modules return."""
    sums = {}
    for rank in run.ranks:
        for name, (square, numbers) in rank["outputs"].items():
            old = sums.get(name, (0.0, 0))
            sums[name] = old[0] + square, old[1] + numbers
    return {name: (square / max(numbers, 1), numbers) for name, (square, numbers) in sums.items()}


def modules_are_comparable(it):
    """Not if ranks may hold parts of them, as in a pipeline, or if they have read other inputs."""
    runs = it.reference, it.run
    want, have = map(outputs_of, runs)
    for run in runs:
        held = {str([*rank["outputs"]]) for rank in run.ranks}
        if run.replicas > 1 and (run.ranks[0]["by_hand"] or len(held) > 1):
            return False
    # Ranks that read the same samples may compute the same, or each a part.
    m, n = (run.replicas for run in runs)
    one, two = (sum(rank["numbers"] for rank in run.ranks) / run.replicas for run in runs)
    return one == two and any(have.get(name, (0, 0))[1] in (size, size * n / m, size * n, size / m)
                              for name, (_, size) in want.items())


def wrong_module(it):
    """Say which is the first module whose output differs, in the order in which modules of the
    reference return; "" if the outputs of all agree or cannot be compared."""
    if it.history.compared or not modules_are_comparable(it):
        return ""
    before, have = "the first of all", outputs_of(it.run)
    room = max(SAME_OUTPUT * it.tolerance.eps, PROJECTED)
    for name, (square, _) in outputs_of(it.reference).items():
        if name in have:
            called = f"`{name or 'the model itself'}`"
            if not abs(have[name][0] - square) <= room * square:
                return f"the first module whose output differs is {called}, {before}"
            before = f"after {called}"
    return ""


def forward_pass_of(it):
    """Which module is wrong, or that it is the loss, if outputs of modules are comparable."""
    if it.history.compared:
        return ("it was right in the step before: look at weights that are stale or not gathered, "
                "at buffers and caches, or at the loss")
    if not modules_are_comparable(it):
        return ("look at the forward pass (outputs of modules are not compared: ranks hold parts "
                "of them, or they have read other inputs)")
    if module := wrong_module(it):
        return module
    want, have = (sum(run.targets) for run in (it.reference, it.run))
    counts = f"; the run has {have} targets, the reference {want}" if want != have else ""
    return ("the outputs of all modules agree: look at the loss: targets, their shift, padding, "
            f"weights of samples, its sum over ranks, or what is done to the logits{counts}")


# Checks of every step


def step_numbers(it):
    """Whether both runs have recorded the same steps."""
    want, have = it.reference.line["step"], it.run.line["step"]
    if want != have:
        return f"steps: the run has recorded step {have} in place of step {want}"


def parameter_names(it):
    """Whether both runs have recorded the same parameters."""
    lines = it.reference.line, it.run.line
    for which, other in zip(("reference", "run"), lines[::-1]):
        if odd := [name for name in it.names if name not in other["values"]]:
            return f"names: only the {which} has {', '.join(odd[:3])} (see `model` in Parity)"


def shapes(it):
    """Whether parameters have the same shape, and ranks together hold each number."""
    for name in it.names:
        want, have = (run.line["values"][name] for run in (it.reference, it.run))
        if want["shape"] != have["shape"]:
            return f"shapes: {name} is {have['shape']}, not {want['shape']}"
        if have["held"] != math.prod(have["shape"]):
            return (f"shapes: ranks hold {have['held']} numbers of {name}, which has "
                    f"{math.prod(have['shape'])}")


def types(it):
    """Whether both runs compute in the same types, and keep the same. A loss may have none."""
    for kind in it.run.ranks[0]["types"]:
        want, have = (coarsest(run.ranks, kind) for run in (it.reference, it.run))
        if want and have and want != have:
            return f"types: {kind} in {have}, and in the reference in {want}"


def weights_in_16_bits(it):
    """Whether weights or optimizer states are kept in 16 bits: a check that one asks for."""
    if coarse := sixteen_bits(it.run.ranks):
        return f"types: {', '.join(coarse)}"


def sixteen_bits(ranks):
    """["weights are kept in bfloat16 (3 of 5)", ...]"""
    found = []
    for kind in "weights are kept", "optimizer states are kept":
        counts = ranks[0]["types"][kind]
        few = [name for name in counts if torch.finfo(getattr(torch, name)).bits < 32]
        found += [f"{kind} in {name} ({counts[name]} of {sum(counts.values())})" for name in few]
    return found


def not_finite(it):
    """Whether one run alone has NaN or infinity. A step in which both have them is left out: a loss
    scale that is too large."""
    if it.reference.finite != it.run.finite:
        which, run = ("run", it.run) if it.reference.finite else ("reference", it.reference)
        bad = ~(run.weights.finite & run.gradients.finite)
        return f"not finite: in the {which} alone, weights or gradients of {group(it, bad)}"


def copies_of_weights(it):
    """Whether ranks that hold the same part of a parameter hold the same values."""
    v, first = it.run.weights, not it.history.compared
    bad = v.spread > (PROJECTED if first else COPIES) * v.length
    if not bad.any():
        return None
    ranks = it.run.line["values"][it.names[bad.nonzero()[0]]]["ranks"]
    if first:
        return f"initial weights: ranks {ranks} hold different values of {group(it, bad)}"
    return (f"update: ranks {ranks} hold different weights of {group(it, bad)}: a rank skips a "
            f"step, or updates them by another gradient")


def initial_weights(it):
    """Whether both runs start from the same weights."""
    w, v = it.reference.weights, it.run.weights
    bad = distance(w, v) / w.length.clamp(min=1e-300) > PROJECTED
    if bad.any() and not it.history.compared:
        return f"initial weights: other values of {group(it, bad)}"


def samples(it):
    """Whether the run has read the samples of the reference, each equally often; and if not, which
    of a batch's tensors differ."""
    lines, messages, agree = (it.reference.line, it.run.line), [], []
    for key in tensors_in(all, *lines):
        want, have = ([rank["samples"].get(key, []) for rank in line["ranks"]] for line in lines)
        if message := other_rows(want, have):
            distinct = len({str(row) for rows in want for row in rows})
            messages.append((distinct, message, key))
        else:
            agree.append(key)
    if messages:
        which = f"{listed(key for *_, key in messages)}, not {listed(agree)}: " if agree else ""
        # A mask has few distinct rows, and says least.
        return f"samples: {which}{max(messages, key=lambda message: message[0])[1]}"


def listed(keys):
    return ", ".join(f"`{key}`" for key in keys)


def tensors_in(how, *lines):
    """The names of tensors that ``all`` or ``any`` of the runs have recorded of their batches."""
    keys = [[key for rank in line["ranks"] for key in rank["samples"]] for line in lines]
    return [key for key in dict.fromkeys(sum(keys, [])) if how(key in own for own in keys)]


def other_rows(want_of_ranks, have_of_ranks):
    """Say which samples the run has lost, repeated or replaced, or None. Each is read by equally
    many ranks."""
    want, have = ([*itertools.chain(*ranks)] for ranks in (want_of_ranks, have_of_ranks))
    n, m = len(want), len(have)
    if n and m and all(isinstance(row, list) for row in want + have):  # floats, up to rounding
        times = math.gcd(n, m)
        want, have = (torch.tensor(sorted(rows), dtype=torch.float64).repeat_interleave(k, 0)
                      for rows, k in ((want, m // times), (have, n // times)))
        far = (want - have)[:, 0].abs() > want[:, 1] + have[:, 1]
        return "other samples are read, or some are repeated" if far.any() else None
    want, have = (collections.Counter(map(str, rows)) for rows in (want, have))
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
        ranks = [i for i, own in enumerate(have_of_ranks) if top in map(str, own)]
        return f"{message}, one is read {have[top]} times, by ranks {ranks}"
    return message


# Checks of a step that is finite, and in which rounding has not yet parted the runs


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
    return (f"update: weights of {group(it, bad)} have moved differently, by up to {by:.1g} of "
            f"their way{why}: learning rate, decay, clipping, the optimizer, or a rank skips it")


def reduction(it):
    """Whether ranks that hold the same part of a parameter hold the same gradient of it."""
    y, run = it.run.gradients, it.run
    bad = y.spread > it.tolerance.gradients * (y.length + it.floor) + it.loose
    if not bad.any():
        return None
    i = (bad * y.length).argmax()
    gaps = [(it.reference.gradients.sketch - of_ranks)[i].norm() for of_ranks in (y.mean, y.total)]
    why = f"they must be {'averaged' if gaps[0] < gaps[1] else 'added up'}"
    if min(gaps) > it.allowed[i]:
        why = f"neither their sum nor their mean is right{where_it_begins(it)}{about_the_loss(it)}"
    ranks = run.line["gradients"][it.names[bad.nonzero()[0]]]["ranks"]
    return (f"reduction: ranks {ranks} hold different gradients of {group(it, bad)}: {why}"
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
    if not r or not (distance(x, y, r) <= limit)[it.off | it.everywhere].all():
        return None
    near = max(1e-3, min(0.1, 2 * it.tolerance.gradients))
    loss = about_the_loss(it)
    if it.loss_known and not it.loss_right and abs(it.loss_ratio / r - 1) < min(near, abs(r - 1)):
        loss = "; the loss too"
    elif it.loss_right and zero_in_both(it).any():
        loss = (": the reduction, or the scale of an adapter whose output is still 0, such as "
                "LoRA's alpha / r; the loss is right")
    return f"gradients: {whose(it)}: {factor(it.run, r, near)}{loss}"


def missing(it):
    """Whether some gradients are 0 or nearly so in one run alone."""
    x, y = it.reference.gradients.length, it.run.gradients.length
    if (bad := it.off & (x < MISSING * y)).any():
        return f"gradients: only the run has those of {group(it, bad)}: frozen in the reference?"
    if not it.run.line["gradients"]:
        return ("gradients: missing: the run has none: it records after zero_grad, or gradients "
                "are never synchronised (FSDP2: set_requires_gradient_sync)")
    if (bad := it.off & (y < MISSING * x)).any():
        return f"gradients: missing: those of {group(it, bad)}{about_the_loss(it)}"


def not_cleared(it):
    """Whether gradients are, or hold, those of the step before."""
    if not it.history.compared:
        return None
    x, y, old = (z.sketch[it.off].flatten() for z in (
        it.reference.gradients, it.run.gradients, it.history.before))
    shares = torch.linalg.pinv(torch.stack([x, old], 1)) @ y
    rest = (shares[0] * x + shares[1] * old - y).norm()
    if rest < EXPLAINED * (y - x).norm():
        if abs(shares[0]) < EXPLAINED:
            return (f"gradients: late: {whose(it)} are those of the step before: a reduction that "
                    f"nobody waits for?")
        return (f"gradients: not cleared: {whose(it)} hold {shares[1]:.3g} of those of the step "
                f"before")


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
        if module := wrong_module(it):
            return f"gradients: forward pass: {how_far(it)}, and the loss hardly: {module}"
        uneven = f" (ranks have {min(counts)} to {max(counts)} targets: a mean of means?)"
        return (f"gradients: part of the batch, or the backward pass of the loss: {how_far(it)}, "
                f"and the loss is right ({it.run.loss:.7g} and {it.reference.loss:.7g}): samples "
                f"are lost or weigh more{uneven if min(counts) < max(counts) else ''}, ranks clip "
                f"before the reduction, or a loss has a backward of its own")


def mean_of_means(it):
    """Whether the loss is right once the losses of ranks, or of micro-batches, are weighted. A
    model may shift the labels itself: then the first of a row is no target."""
    if not it.loss_known or it.loss_right:
        return None
    for kind in "targets", "shifted":
        of_micro_batches = [pair for rank in it.run.counted
                            if len(rank[kind]) == len(rank["losses"])
                            for pair in zip(rank[kind], rank["losses"])]
        of_ranks = [(sum(rank[kind]), sum(rank["losses"])) for rank in it.run.counted]
        for pairs in filter(None, (of_micro_batches, of_ranks)):
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
            f"{how_far(it)}: {forward_pass_of(it)}")


def gradients(it):
    """Whether gradients differ; then ``CAUSES``, in their order, say why. In 16 bits only some of
    them show."""
    if not it.off.any():
        return None
    for cause in CAUSES_IN_16_BITS if it.tolerance.in_16_bits else CAUSES:
        if message := cause(it):
            return message + about_dropout(it)


def loss(it):
    """The loss is wrong, and the gradients are right."""
    if it.loss_known and not it.loss_right:
        same = same_samples(it.run)
        return (f"loss: it is {it.run.loss}, not {it.reference.loss} "
                f"({factor(it.run, it.loss_ratio, 1e-3)}), and the gradients agree: "
                f"{same and f'{same}, or '}how the losses of ranks or micro-batches are averaged")


def clipping(it):
    """Whether gradients are scaled as in the reference between ``record`` and the optimizer. A
    reference that clips each tensor by itself proves nothing."""
    if not it.given:  # the last step
        return None
    want, have = (factors or [0.0] for factors in it.given)
    x, y = it.reference.gradients, it.run.gradients
    inexact = CLIPPED + 4 * it.tolerance.rounding  # the norm is computed in the type of the weights
    low, high = min(have), max(have)
    if max(want) - min(want) > inexact * max(want):
        return None
    wrong = f"clipping: by a wrong norm or before the reduction: scaled by {high:.6g},"
    if high - low > inexact * high:
        return f"{wrong} elsewhere by {low:.6g}, as by the norm of a part, or of each tensor"
    r = (high * y.length.norm() / (max(want) * x.length.norm())).item()
    room = it.tolerance.gradients + CLIPPED + it.history.slack
    limit = room * (1 + torch.as_tensor(it.history.longest).norm() / x.length.norm())
    if 0 < r < math.inf and abs(r - 1) > limit:
        return f"{wrong} not by {max(want):.6g} ({factor(it.run, r, 0.01)})"


# Lists of checks. ``ALWAYS``: of every step. ``CHECKS``: of a step that is finite, and in which
# rounding has not yet parted the runs. ``AFTER_ROUNDING``: those of them that prove nothing if
# training has amplified rounding. ``IN_16_BITS``: in place of ``CHECKS``. ``CAUSES``: of gradients
# that differ; the last one always has an answer.
ALWAYS = [step_numbers, parameter_names, shapes, types, not_finite, copies_of_weights,
          initial_weights, samples]
CHECKS = [update, reduction, gradients, mean_of_means, loss, clipping]
AFTER_ROUNDING = [gradients, mean_of_means, loss, clipping]
IN_16_BITS = [reduction, gradients]
CAUSES_IN_16_BITS = [lost_tie, scaled, missing]
CAUSES = [*CAUSES_IN_16_BITS, not_cleared, rounding, some_gradients, mean_of_means,
          part_of_the_batch, forward_pass]


# If nothing differs


def not_compared(it, lines, infinite, parted):
    """What an EQUAL does not prove, in words. ``it``: the last step that was compared; ``lines``:
    all that both runs have recorded; ``infinite``, ``parted``: steps of which little is known."""
    left = []
    if infinite:
        left.append(f"steps {', '.join(map(str, infinite))} (not finite in both runs)")
    if parted:
        left.append(f"gradients and updates from step {parted[0]} on (rounding of the steps before "
                    f"has parted the runs)")
    both, either = (tensors_in(how, it.reference.line, it.run.line) for how in (all, any))
    if not both:
        left.append("samples (no tensor has the same name in both batches)")
    elif both != either:
        left.append(f"{listed(key for key in either if key not in both)} (in one batch alone)")
    if not it.loss_known:
        left.append("the loss (it is not recorded)")
    trained = (it.history.scale > 0) | (it.reference.gradients.length > 0)
    if not trained.all():
        left.append(f"gradients of {(~trained).sum()} parameters (0 or None in both runs)")

    moves = torch.maximum(*it.moved)
    factors = [x for line in lines for rank in line["ranks"] for x in rank["factors"]]
    if it.history.compared == 1:
        left.append("updates and clipping (one step is compared)")
    else:
        small = (trained & (moves <= it.resolved)).sum()
        if not moves.any():
            left.append("updates (no weight moves)")
        elif small:
            left.append(f"updates of {small} parameters (too small for {it.tolerance.type})")
        if not factors:
            left.append("what the optimizer is given (Parity has no `optimizer`)")
        elif max(abs(x - 1) for x in factors) < CLIPPED:
            left.append("clipping (it is never active)")
        left.append("the update after the last step")
    ranks = it.reference.ranks + it.run.ranks
    for kind in ranks[0]["left_out"]:
        if count := max(rank["left_out"][kind] for rank in ranks):
            left.append(f"{kind} ({count})")
    return left


def notes(it, lines):
    """What is no fault by itself, but worth a look, in words."""
    found = sixteen_bits(lines[-1]["ranks"])
    found += filter(None, [same_samples(it.run), same_samples(it.reference, " of the reference")])
    return f"\nNote: {'; '.join(found)}" if found else ""
