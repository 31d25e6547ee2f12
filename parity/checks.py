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
FLOAT32_INSIDE = 2**-16  # measured: rotary angles in float32 1e-6; a wrong eps of a norm 5e-5
MISSING = 1e-3  # a gradient that is so much shorter is missing; what is left is rounding
EXPLAINED = 0.1  # of a difference, what a cause may leave over
ROUNDINGS = 8  # of a tensor, between two steps of sound runs
SAME_OUTPUT = 8  # roundings of the mean square of a module's output; measured: 0.3


def distance(x, y, r=1.0):
    """(N,) how far r x and y are apart, estimated; the differences of their lengths are exact."""
    apart = (r * x.sketch - y.sketch).norm(dim=1)
    return apart.maximum((abs(r) * x.length - y.length).abs())


# Words


def coarsest(ranks, *kinds):
    """The name of the coarsest recorded type of some kinds, or None."""
    names = {name for rank in ranks for kind in kinds for name in rank["types"][kind]}
    return max(sorted(names), key=lambda name: torch.finfo(getattr(torch, name)).eps, default=None)


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
    several = run.alike > 1 and run.ranks[0]["samples"]
    return f"{run.alike} ranks{whose} read the same samples" if several else ""


def whose(it):
    return "all" if it.everywhere and not it.dead.any() else f"those of {group(it, it.off)}"


def about_the_loss(it):
    """The loss of both runs: it tells a wrong forward pass from a wrong backward pass."""
    want, have = it.reference.loss, it.run.loss
    if not it.loss_known:
        return ""
    if not it.loss_right:
        return f"; the loss is wrong too ({have:.7g}, not {want:.7g}): {forward_pass_of(it)}"
    module = wrong_module(it)
    look = f", but {module}" if module else ": look at the backward pass and the reduction"
    right = "right within rounding" if it.room else "right"
    return f"; the loss is {right} ({have:.7g} and {want:.7g}){look}"


def where_it_begins(it):
    """A backward pass begins at the last parameter: below the first wrong one all are wrong."""
    last = max(it.off.nonzero(), default=0)
    share_below = (it.off | it.unclear)[:last].double().mean()
    if last + 1 < len(it.names) and it.off.sum() > 2 and share_below > 0.8:
        return f"; wrong up to {it.names[last]}, correct after it"
    return ""


def about_dropout(it):
    active = sorted({x for rank in it.reference.ranks + it.run.ranks for x in rank["dropout"]})
    words = f"; dropout is on, so no two layouts can agree: {', '.join(active[:2])}"
    return words if active else ""


def about_float32(it):
    """A hint, if gradients in float64 differ by no more than a softmax in float32 makes of them."""
    far = it.loss_known and abs(it.loss_ratio - 1) > FLOAT32_INSIDE
    if it.tolerance.eps > PROJECTED or it.share.max() > FLOAT32_INSIDE or far:
        return ""
    return (". It is as if float32 was in between: if both runs compute something in float32, such "
            "as a softmax, a norm or rotary angles, give --float32-inside")


def late(it):
    """A hint, if gradients appear, or grow, between ``record`` and the optimizer."""
    ranks = [rank for line in it.after[1:] for rank in line["ranks"]]  # of the run
    appear = any(rank.get("late") for rank in ranks)
    if appear or it.given and max(it.given[1], default=1.0) > 1.001:
        return ". They are complete only later: clip, and record, when gradients are reduced"
    return ""


def about_updates(it):
    """A hint: in 16 bits rounding may hide an update that differs, and not what follows from it."""
    if not it.room or not it.history.compared:
        return ""
    return ". Or the update before it differs by less than shows: learning rate, decay, optimizer"


def outputs_of(run):
    """{module: (mean square of its output, how many numbers it has)}, over all ranks, in the order
    in which modules return."""
    sums = {}
    for rank in run.ranks:
        for name, (square, numbers) in rank["outputs"].items():
            old = sums.get(name, (0.0, 0))
            sums[name] = old[0] + square, old[1] + numbers
    return {name: (square / max(numbers, 1), numbers) for name, (square, numbers) in sums.items()}


def room_of_outputs(it, name=None):
    """How far the mean squares of a module's outputs may be apart, relative."""
    if it.room:
        return it.room.outputs.get(name, max(it.room.outputs.values(), default=0))
    return max(SAME_OUTPUT * it.tolerance.eps, PROJECTED) + it.history.slack


def parts_of_a_sum(run, name, numbers, room):
    """Whether ranks that read the same samples have unlike outputs of a module, all as large as the
    whole: tensor parallelism adds them up later."""
    held = collections.defaultdict(list)
    for rank in run.ranks:
        if name in rank["outputs"]:
            held[str(rank["samples"])].append(rank["outputs"][name])
    whole = numbers / len(held)
    return any(min(own)[0] < (1 - room) * max(own)[0] and {n for _, n in own} == {whole}
               for own in held.values())


def wrong_module(it):
    """Say which is the first module whose output differs, in the order in which modules of the
    reference return; "" if all agree. None if they cannot be compared: ranks may hold parts of
    them, as in a pipeline, or they have read other inputs. Of a module whose output is right a part
    may differ, as experts do that are other ones on each rank."""
    runs = it.reference, it.run
    want, have = map(outputs_of, runs)
    for run in runs:
        held = {str([*rank["outputs"]]) for rank in run.ranks}
        if run.alike > 1 and len(held) > 1:
            return None
    # Ranks that read the same samples may compute the same, or each a part.
    m, n = (run.alike for run in runs)
    one, two = (sum(rank["numbers"] for rank in run.ranks) / run.alike for run in runs)
    both = [name for name in want if name in have]
    sizes = [(want[name][1], have[name][1]) for name in both]
    if one != two or not any(b in (a, a * n / m, a * n, a / m) for a, b in sizes):
        return None
    before, room, summed = "the first of all", room_of_outputs(it), False
    wrong = [name for name in both
             if not abs(have[name][0] - want[name][0]) <= room_of_outputs(it, name) * want[name][0]]
    right = {name.partition("[")[0] for name in both} - {name.partition("[")[0] for name in wrong}
    for name in both:
        called = f"`{'' if name.partition('[')[0] else 'the model itself'}{name}`"
        whole = {name[:i] for i, letter in enumerate(name) if letter == "."}
        if name in wrong and not right & whole:
            summed = parts_of_a_sum(it.run, name, want[name][1] / m, room)
            if not summed:
                return f"the first module whose output differs is {called}, {before}"
        elif name not in wrong:
            before, summed = f"after {called}", False
    return None if summed else ""


def forward_pass_of(it):
    """Which module is wrong, or that it is the loss, if outputs of modules are comparable."""
    rows = [str(rank["samples"]) for rank in it.run.ranks]
    in_any_order = [str({key: sorted(own) for key, own in rank["samples"].items()})
                    for rank in it.run.ranks]
    if len({*in_any_order}) < len({*rows}):
        return "ranks read the same samples in another order"
    module = wrong_module(it)
    if it.history.compared:
        stale = "look at weights that are stale or not gathered, at buffers and caches"
        if module is None:
            return f"it was right in the step before: {stale}, or at the loss"
        if module:
            return f"{module}; it was right in the step before: {stale}"
    if module is None:
        why = "ranks hold parts of them, or they have read other inputs"
        if not all(outputs_of(run) for run in (it.reference, it.run)):
            why = "they are not recorded: see `modules` in Parity"
        return f"look at the forward pass (outputs of modules are not compared: {why})"
    if module:
        return module
    want, have = (sum(run.targets) for run in (it.reference, it.run))
    counts = f"; the run has {have} targets, the reference {want}" if want != have else ""
    agree = f" up to {room_of_outputs(it):.0e}" if it.history.compared else ""
    return (f"the outputs of all modules agree{agree}: look at the loss: targets, their shift, "
            f"padding, weights of samples, its sum over ranks, or what is done to the logits"
            f"{counts}")


# Checks of every step


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
    bad = it.run.weights.spread > COPIES * it.run.weights.length
    if not bad.any():
        return None
    ranks = it.run.line["values"][it.names[bad.nonzero()[0]]]["ranks"]
    if not it.history.compared:
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
    wrong, both = {}, tensors_in(it, all)
    for key in both:
        want, have = ([rank["samples"].get(key, []) for rank in run.ranks]
                      for run in (it.reference, it.run))
        if message := other_rows(want, have):
            distinct = len({str(row) for rows in want for row in rows})
            wrong[key] = distinct, message
    if wrong:
        which = f"{listed(wrong)}: " if len(wrong) < len(both) else ""
        # A mask has few distinct rows, and says least.
        message = max(wrong.values(), key=lambda pair: pair[0])[1]
        if "missing" not in message and (same := same_samples(it.run)):
            message = f"{message}: {same}"
        return f"samples: {which}{message}"


def listed(keys):
    return ", ".join(f"`{key}`" for key in keys)


def tensors_in(it, how):
    """The names of tensors that ``all`` or ``any`` of the runs have recorded of their batches."""
    keys = [[key for rank in run.ranks for key in rank["samples"]]
            for run in (it.reference, it.run)]
    return [key for key in dict.fromkeys(sum(keys, [])) if how(key in own for own in keys)]


def other_rows(want_of_ranks, have_of_ranks):
    """Say which samples the run has lost, repeated or replaced, or None. Each is read by equally
    many ranks."""
    want, have = ([*itertools.chain(*ranks)] for ranks in (want_of_ranks, have_of_ranks))
    n, m = len(want), len(have)
    if n and m and all(isinstance(row, list) for row in want + have):  # floats, up to rounding
        times = math.gcd(n, m)
        pairs = zip(sorted(want * (m // times)), sorted(have * (n // times)))
        far = any(abs(a - b) > room + more for (a, room), (b, more) in pairs)
        return "other samples are read, or some are repeated" if far else None
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
    alike &= abs(ratio[0] - 1) / ratio[0].clamp(min=1) > (1 - EXPLAINED) * by
    why = f" ({factor(it.run, ratio[0].item(), 0.02)})" if alike else ""
    return (f"update: weights of {group(it, bad)} have moved differently, by up to {by:.1g} of "
            f"their way{why}: learning rate, decay, clipping, the optimizer, or a rank skips it")


def reduction(it):
    """Whether ranks that hold the same part of a parameter hold the same gradient of it."""
    y = it.y
    room = it.tolerance.gradients * (y.length + it.floor) + it.loose
    bad = y.spread > (it.allowed if it.room else room)
    if not bad.any():
        return None
    i = (bad * y.length).argmax()
    gaps = [(it.x.sketch - of_ranks)[i].norm() for of_ranks in (y.mean, y.total)]
    why = f"they must be {'averaged' if gaps[0] < gaps[1] else 'added up'}"
    if min(gaps) > it.allowed[i]:
        why = f"neither their sum nor their mean is right{where_it_begins(it)}{about_the_loss(it)}"
    ranks = it.run.line["gradients"][it.names[bad.nonzero()[0]]]["ranks"]
    return f"reduction: ranks {ranks} hold different gradients of {group(it, bad)}: {why}"


def averaged(run, kind):
    """[(targets, loss), ...] of what may be averaged: the micro-batches of each rank, those of all
    ranks together, or the ranks. ``kind``: how targets are counted."""
    pairs = [[*zip(rank[kind], rank["losses"])] for rank in run.counted
             if len(rank[kind]) == len(rank["losses"])]
    together = [*zip(*pairs)] if len({len(own) for own in pairs}) == 1 else []
    sums = [tuple(map(sum, zip(*own))) for own in together]
    ranks = [(sum(rank[kind]), sum(rank["losses"])) for rank in run.counted]
    return [rows for rows in (sum(pairs, []), sums, ranks) if rows]


def weighted(run, pairs):
    """The loss, with those of ``pairs`` weighted by their targets."""
    counts, losses = torch.tensor(pairs, dtype=torch.float64).T
    return run.loss * (counts @ losses / counts.sum() / losses.mean()).item()


def mean_of_means(it):
    """Whether the loss is right once the losses of ranks, or of micro-batches, are weighted. A
    model may shift the labels itself: then the first of a row is no target."""
    if not it.loss_known or it.loss_right:
        return None
    want, have = it.reference.loss, it.run.loss
    room = it.tolerance.loss + it.history.slack
    if it.room:
        room = it.room.loss / (abs(want) or 1.0)
    for kind in "targets", "shifted":
        right = [weighted(it.reference, pairs) for pairs in averaged(it.reference, kind)]
        for loss in (weighted(it.run, pairs) for pairs in averaged(it.run, kind)):
            if abs(loss - want) <= min(room * abs(want), EXPLAINED * abs(have - want)):
                return "loss: a mean of means: with losses weighted by targets it is right"
            times = factor(it.run, loss / (want or math.nan), min(room, 1e-3))
            if "as many as" in times and abs(loss - have) > room * abs(have):
                return f"loss: a mean of means, {times}"
            if any(abs(loss - other) <= room * abs(loss) and abs(loss - have) > room * abs(have)
                   and abs(other - want) > room * abs(want) for other in right):
                return ("loss: a mean of means, in the reference too: with losses weighted by "
                        "targets both are equal")


def lost_tie(it):
    """Whether the gradients of two names add up to that of one tensor in the reference."""
    x, y = it.x, it.y
    for i, j in itertools.combinations(it.off.nonzero().flatten().tolist(), 2):
        tied = [z.sketch[i].equal(z.sketch[j]) for z in (x, y)]
        gap = (x.sketch[i] - y.sketch[i] - y.sketch[j]).norm()
        if tied == [True, False] and gap <= it.allowed[i]:
            return f"a tie is lost: those of {it.names[i]} and {it.names[j]} must add up"


def scaled(it):
    """Whether one factor makes the gradients right: an average in place of a sum, a loss scale."""
    x, y = it.x, it.y
    i = (it.off * (x.length + y.length)).argmax()
    r = ((x.sketch[i] @ y.sketch[i]).sign() * y.length[i] / x.length[i]).item()
    limit = abs(r) * it.allowed
    if not r or not (distance(x, y, r) <= limit)[it.off | it.everywhere].all():
        return None
    share = it.allowed[i] / x.length[i] if it.room else it.tolerance.gradients
    near = max(1e-3, min(0.1, 2 * float(share)))
    loss = about_the_loss(it)
    if it.loss_known and not it.loss_right and abs(it.loss_ratio / r - 1) < min(near, abs(r - 1)):
        loss = "; the loss too"
    elif it.loss_right and it.dead.any():
        loss = (": the reduction, or the scale of an adapter whose output is still 0, such as "
                "LoRA's alpha / r; the loss is right")
    as_alike = it.run.alike / it.reference.alike
    if it.everywhere and as_alike > 1 and abs(r / as_alike - 1) < near:
        loss += f"; {same_samples(it.run)}"
    want, have = it.given or ([], [])
    if it.everywhere and max(want, default=1.0) < 0.999 < min(have, default=0.0) and r < 1:
        loss += "; or the run clips by hand, by another norm"
    return f"{whose(it)}: {factor(it.run, r, near)}{loss}"


def missing(it):
    """Whether some gradients are 0 or nearly so in one run alone."""
    x, y = it.x.length, it.y.length
    if (bad := it.off & (x < MISSING * y)).any():
        return f"only the run has those of {group(it, bad)}: frozen in the reference?"
    if not it.run.line["gradients"]:
        return ("missing: the run has none: it records after zero_grad, or gradients are never "
                "synchronised (FSDP2: set_requires_gradient_sync)")
    if (bad := it.off & (y < MISSING * x)).any():
        frozen = "" if late(it) else "; or they are frozen"
        return f"missing: those of {group(it, bad)}{about_the_loss(it)}{frozen}"


def explained_by(y, *vectors):
    """(shares, rest): the multiples of ``vectors`` whose sum is nearest to the vector ``y``, and
    how far it stays from it."""
    matrix = torch.stack(vectors, 1)
    shares = torch.linalg.pinv(matrix) @ y
    return shares, (matrix @ shares - y).norm()


def not_cleared(it):
    """Whether gradients are, or hold, those of the step before, and no multiple of the right ones
    explains them as well."""
    if not it.history.compared:
        return None
    x, y, old = (z.sketch[it.off].flatten() for z in (it.x, it.y, it.history.before))
    (share, of_old), rest = explained_by(y, x, old)
    left = EXPLAINED
    if it.room:  # rounding is left over, too
        left = max(left, min(0.5, (it.allowed[it.off].norm() / (y - x).norm()).item() / 4))
    if rest < left * min((y - x).norm(), explained_by(y, x)[1]) and (
            abs(of_old) > (EXPLAINED if it.room else 0)):
        if abs(share) < EXPLAINED:
            return (f"late: {whose(it)} are those of the step before: a reduction that nobody "
                    f"waits for?")
        return f"not cleared: {whose(it)} hold {of_old:.3g} of those of the step before"


def nearly_scaled(it):
    """Whether one factor makes the gradients nearly right, in all: a small part of the loss, such
    as an auxiliary loss, may have another one."""
    x, y = (z.sketch[it.off].flatten() for z in (it.x, it.y))
    (r,), rest = explained_by(y, x)
    if rest < EXPLAINED * (y - x).norm():
        near = max(1e-3, min(0.1, (rest / y.norm()).item()))
        r = r.item() if abs(r - 1) < EXPLAINED else float(f"{r:.2g}")
        return f"{whose(it)}: nearly {factor(it.run, r, near)}{about_the_loss(it)}"


def rounding(it):
    """Whether gradients are as far apart as the rounding of a type with fewer bits. Rounding is
    even over the parameters; the difference that another formula makes is not."""
    share = (distance(it.x, it.y) / it.x.length)[it.off]
    middle, most = share.median(), share.max()
    if not it.room and it.everywhere and it.loss_right and most < EVEN * share.min():
        for word, low in ("bfloat16", 2**-11), ("float16", 2**-15), ("float32", 2**-28):
            if low < middle and most < 64 * low:
                return (f"rounding: they differ by {middle:.0e}, as if {word} was in between (see "
                        f"dtype)")


def unexplained(it):
    """Nothing else explains the difference: where it begins, or the loss, says where to look."""
    want, have = it.reference.loss, it.run.loss
    share = it.share[it.off]
    if not it.everywhere:
        return (f"{whose(it)} differ, by up to {share.max():.1g}{where_it_begins(it)}"
                f"{about_the_loss(it)}")
    differ = f"{whose(it)} differ, by {share.min():.1g} to {share.max():.1g}"
    if not it.loss_known:
        return f"{differ}: record the loss, to tell whether the forward pass is right"
    if not it.loss_right:
        return f"forward pass: the loss is {have}, not {want}; {differ}: {forward_pass_of(it)}"
    if module := wrong_module(it):
        return f"forward pass: {differ}, and the loss hardly: {module}"
    counts = [sum(rank["targets"]) for rank in it.run.ranks]
    uneven = f" (ranks have {min(counts)} to {max(counts)} targets: a mean of means?)"
    return (f"part of the batch, or the backward pass of the loss: {differ}, and the loss is right "
            f"({have:.7g} and {want:.7g}): samples are lost or weigh more"
            f"{uneven if min(counts) < max(counts) else ''}, ranks clip before the reduction, or a "
            f"loss has a backward of its own")


def gradients(it):
    """Whether gradients differ; then ``CAUSES``, in their order, say why. In 16 bits only some of
    them show."""
    if not it.off.any():
        return None
    for cause in CAUSES if it.exact else CAUSES_IN_16_BITS:
        if message := cause(it):
            hint = about_updates(it) if cause is unexplained else ""
            return f"gradients: {message}{about_float32(it)}{late(it)}{hint}"


def loss(it):
    """The loss is wrong, and the gradients are right."""
    if it.loss_known and not it.loss_right:
        same = same_samples(it.run)
        if it.history.compared:
            return (f"loss: it is {it.run.loss}, not {it.reference.loss}, and gradients differ by "
                    f"no more than {it.share.max():.0e}: {forward_pass_of(it)}{about_updates(it)}")
        or_else = f"; or, as rounding hides small faults: {forward_pass_of(it)}" if it.room else ""
        return (f"loss: it is {it.run.loss}, not {it.reference.loss} "
                f"({factor(it.run, it.loss_ratio, 1e-3)}), and the gradients agree: "
                f"{same and f'{same}, or '}how the losses of ranks or micro-batches are averaged"
                f"{or_else}")


def clipping(it):
    """Whether gradients are scaled as in the reference between ``record`` and the optimizer. A
    reference that clips each tensor by itself proves nothing."""
    if not it.given:  # the last step
        return None
    want, have = (factors or [0.0] for factors in it.given)
    x, y = it.x, it.y
    inexact = CLIPPED + 4 * it.tolerance.rounding  # the norm is computed in the type of the weights
    low, high = min(have), max(have)
    if max(want) - min(want) > inexact * max(want):
        return None
    why = "by a wrong norm or before the reduction"
    if abs(low - 1) < inexact and abs(high - 1) < inexact:
        why = "not active, as without it, or with another limit or norm"
    wrong = f"clipping: {why}: scaled by {high:.6g},"
    if high - low > inexact * high:
        return f"{wrong} elsewhere by {low:.6g}, as by the norm of a part, or of each tensor"
    r = (high * y.length.norm() / (max(want) * x.length.norm())).item()
    room = it.tolerance.gradients + CLIPPED + it.history.slack
    limit = room * (1 + torch.as_tensor(it.history.longest).norm() / x.length.norm())
    if it.room:
        limit = CLIPPED + (it.room.lengths.norm() / x.length.norm()).item()
    if 0 < r < math.inf and abs(r - 1) > limit:
        return f"{wrong} not by {max(want):.6g} ({factor(it.run, r, min(0.01, max(limit, 1e-4)))})"


def other_tensors(it):
    """Whether what a run keeps beside its weights, such as an average of them, is that of the
    reference, and moves as there."""
    want, have = (run.line.get("others", {}) for run in (it.reference, it.run))
    for name in it.names_of_others:
        if want[name]["shape"] != have[name]["shape"]:
            return (f"shapes: {name}, which is saved too, is {have[name]['shape']}, not "
                    f"{want[name]['shape']}: if each rank keeps a part, make it a DTensor, as "
                    f"torch.zeros_like does of a parameter that is one")
    x, y = it.others
    unlike = y.spread > COPIES * y.length
    other = distance(x, y) > PROJECTED * x.length if not it.history.compared else unlike & False
    moved = it.others_moved
    # Where the gradient of a weight is only rounding, so is an average of this weight.
    shapes = [str(it.reference.line["values"][name]["shape"]) for name in it.names]
    inexact = [max((noise for noise, shape in zip(it.inexact.tolist(), shapes)
                    if shape == str(want[name]["shape"])), default=0.0)
               for name in it.names_of_others]
    room = ROUNDINGS * it.tolerance.rounding * x.length + (
        it.history.slack + torch.tensor(inexact)) * moved
    for bad, words in [(unlike, "ranks hold different values of"), (other, "other values of"),
                       (it.others_gap > room, "other ways, since the first step, of")]:
        if bad.any():
            names = [*itertools.compress(it.names_of_others, bad)]
            return (f"saved: {words} {' and '.join(names[:2])} ({len(names)} of {len(bad)} tensors "
                    f"that are saved beside the weights): an average of stale weights?")


# Lists of checks. ``ALWAYS``: of every step. ``CHECKS``: of a step that is finite, and in which
# rounding has not yet parted the runs. ``AFTER_ROUNDING``: those of them that prove nothing if
# training has amplified rounding. ``IN_16_BITS``: in place of ``CHECKS``. ``CAUSES``: of gradients
# that differ; the last one always has an answer.
ALWAYS = [parameter_names, shapes, types, not_finite, copies_of_weights, initial_weights, samples]
AFTER_ROUNDING = [mean_of_means, gradients, loss, clipping]
CHECKS = [update, reduction, *AFTER_ROUNDING, other_tensors]
IN_16_BITS = [reduction, gradients]
CAUSES_IN_16_BITS = [lost_tie, scaled, missing]
CAUSES = [*CAUSES_IN_16_BITS, not_cleared, nearly_scaled, rounding, unexplained]


# If nothing differs


def not_compared(it, lines):
    """What an EQUAL does not prove, in words; the arguments are those of ``compare.verdict``."""
    infinite, parted = it.history.infinite, it.history.parted
    both, either = (tensors_in(it, how) for how in (all, any))
    alone = [key for key in either if key not in both]
    trained = (it.history.scale > 0) | (it.x.length > 0)
    idle = (~trained).sum()
    small = (trained & (torch.maximum(*it.moved) <= it.resolved)).sum()
    factors = [abs(x - 1) for line in lines for rank in line["ranks"] for x in rank["factors"]]
    ranks = it.reference.ranks + it.run.ranks
    left_out = {kind: max(rank["left_out"][kind] for rank in ranks)
                for kind in ranks[0]["left_out"]}
    rows = [
        (infinite, f"steps {', '.join(map(str, infinite))} (not finite in both runs)"),
        (parted, f"gradients and updates from step {min(parted, default=0)} on (rounding of the "
                 f"steps before has parted the runs)"),
        (not both, "samples (no tensor has the same name in both batches)"),
        (both and alone, f"{listed(alone)} (in one batch alone)"),
        (not it.loss_known, "the loss (it is not recorded)"),
        (idle, f"gradients of {idle} parameters (0 or None in both runs)"),
        (it.room and it.hidden.any(),
         f"gradients of {it.hidden.sum()} parameters (rounding hides them)"),
    ]
    if it.history.compared == 1:
        rows.append((True, "updates and clipping (one step is compared)"))
    else:
        rows += [
            (small, f"updates of {small} parameters (0, or too small for {it.tolerance.type})"),
            (not factors, "what the optimizer is given (Parity has no `optimizer`)"),
            (factors and max(factors) < CLIPPED, "clipping (it is never active)"),
            (True, "the update after the last step"),
        ]
    kept = [key for run in (it.reference, it.run) for key in run.line.get("others", {})
            if key not in it.names_of_others]
    rows.append((kept, f"{listed(kept[:2])} ({len(kept)} tensors that one run alone saves)"))
    rows += [(count, f"{kind} ({count})") for kind, count in left_out.items()]
    return [sentence for applies, sentence in rows if applies]


def notes(it, lines):
    """What is no fault by itself, but worth a look, in words."""
    notes = sixteen_bits(lines[-1]["ranks"])
    if it.history.clipped:
        which, _ = it.history.clipped
        notes.append(f"clipped: the {which} clips by hand, before it is recorded; what gradients "
                     f"were before is compared")
    notes += filter(None, [same_samples(it.run), same_samples(it.reference, " of the reference")])
    return f"\nNote: {'; '.join(notes)}" if notes else ""
