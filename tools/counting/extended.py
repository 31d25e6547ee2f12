"""What a rank counts with many layers, steps or micro-batches, from what it counts with few.

Bytes held, bytes sent and operations are linear in the number of layers, of accumulation steps and
of micro-batches. A peak is not: it is the most of many moments, each linear, and with more layers
another of them may be the most. So ``over_layers`` extends each moment by itself: those of the
first two layers, those of the last, and those between, where each layer adds the same. (Beside the
embedding and the head, larger units are gathered.) And
``over_micro_batches`` makes of a pipeline with a few micro-batches in flight one with many.
"""

import collections
import itertools
import re

from tools.counting.counter import ACTIVATION_DIMS, peak_of

STEPS = 3, 4
# Layers of the two counts: in the second, three are neither at the start nor at the end. The end is
# two layers; of zero.py, which gathers two units ahead, it is three.
SIZES = (5, 7), (6, 8)


def over_layers(few, some, sizes, layers):
    """What would be counted with ``layers``. ``few`` and ``some``: results of ``dry_run.count`` for
    ``sizes``, the layers on each stage of the rank. "estimated" has "memory" in it if these do not
    show that each moment is linear."""
    def extend(a, b):
        return on_line(a, b, *sizes, layers)

    lines, linear = [], True
    moments = by_kind(few["moments"]), by_kind(some["moments"])
    for kind in moments[0].keys() | moments[1].keys():
        a, b = (each.get(kind, []) for each in moments)
        if len(a) == len(b) == 1:
            lines.append((a[0], b[0]))
        elif (len(a), len(b)) == sizes:
            lines += zip(a[:3], b[:3])
            lines += zip(a[2:], b[4:])
            linear &= all(b[2].get(name, 0) + b[4].get(name, 0) == 2 * b[3].get(name, 0)
                          for name in b[3])
        else:
            linear = False
    peaks = [extend(*line) for line in lines]
    whole = all(size == int(size) for peak in peaks for size in peak.values())
    extended = flows(few, some, extend) | {"peak": peak_of(peaks)}
    if linear and whole:
        return extended
    return extended | {"estimated": f"memory {extended.get('estimated', '')}"}


def small_pipeline(in_flight, stage, micro_batches, experts):
    """(micro-batches, stages, stage) of a pipeline, 1F1B, whose rank does in small what one does
    that has ``in_flight`` of ``micro_batches`` at once: it has up to two. It has three if the
    second backward pass would be the last, and with ``experts``, of which the first forward pass
    leaves more than activations."""
    most = 3 if experts or micro_batches == in_flight else 2
    kept, later = min(in_flight, most), stage > 0
    return kept + min(2, micro_batches - in_flight), kept + later, int(later)


def over_micro_batches(n, kept, few, more, micro_batches, in_flight, own, stage, machines):
    """What would be counted with ``micro_batches``, of which ``in_flight`` are there at once, from
    ``few``, the count of a ``small_pipeline`` with ``n`` and ``kept``, and ``more``, that with one
    more. If ``more`` is None, what is sent is estimated. ``own``: bytes of a micro-batch that stay
    to the end of a step. ``machines``: on which each stage is, whole."""
    others = micro_batches - n
    total = collections.Counter(name for name, _ in few["moments"])
    passes = {name: itertools.count(1) for name in total}
    numbered = [(name, next(passes[name]), peak) for name, peak in few["moments"]]
    kind = "at first" if kept < 3 else "in all"  # in the first forward pass parameters are gathered
    start = {i: peak[kind] for name, i, peak in numbered if name == "0. forward"}
    (sent,) = (part["bytes"] for part in few["collectives"] if part["collective"] == "send")
    # A micro-batch leaves a buffer behind, for what other stages send: as much as they are sent.
    received = sent // n
    stays = received + own
    until_backward = start[kept] - start[kept - 1] - received if kept > 1 else 0
    if more is None:
        more = proportional(few, n, n + 1) | {"estimated": "sent"}

    def extend(name, i, peak):
        """As many as can be at once are there but in the first forward and the last backward."""
        full = total[name] == n and (i >= kept if name.endswith(" forward") else i < n)
        added = others * stays + (in_flight - kept) * until_backward * full
        return peak | {kind: peak[kind] + added for kind in ("activations", "in all")}

    moments = [(name, extend(name, i, peak)) for name, i, peak in numbered]
    result = flows(few, more, lambda a, b: on_line(a, b, n, n + 1, micro_batches))
    for kind in "activations", "in all":
        result["held"][kind] = few["held"][kind] + others * stays
    result["collectives"] = [across_stages(part, kept + (stage > 0), stage, machines)
                             for part in result["collectives"]]
    return summed(result) | {"moments": moments, "peak": peak_of([peak for _, peak in moments])}


def proportional(counted, n, micro_batches):
    """``counted``, with operations, and sent activations, of ``micro_batches`` instead of n."""
    collectives = [
        part | {name: part[name] * micro_batches / n
                for name in ("calls", "bytes", "between_machines")
                if part["group"] in ACTIVATION_DIMS or part["collective"] == "all-to-all"}
        for part in counted["collectives"]]
    return counted | {
        "collectives": collectives, "operations": counted["operations"] * micro_batches / n}


def across_stages(part, small, stage, machines):
    """``part`` of the collectives of a pipeline of ``small`` stages, as a rank of ``stage`` sends
    it in one whose stages are on ``machines``."""
    if part["group"] != "pp":
        return part
    if part["collective"] == "send":
        others = machines[max(0, stage - 1) : stage] + machines[stage + 1 : stage + 2]
        size, far = part["bytes"], [machine != machines[stage] for machine in others]
    else:  # of the norm, around a ring
        size = part["bytes"] * (1 - 1 / len(machines)) / (1 - 1 / small)
        far = [a != b for a, b in zip(machines, machines[1:] + machines[:1])]
    return part | {"bytes": size, "between_machines": size * sum(far) / len(far)}


def over_steps(few, some, steps):
    """What would be counted with ``steps`` accumulation steps, from counts of ``STEPS``. The
    moments stay those of four steps: all but the first two and the last are like the third, and
    hold more in each step, such as the tokens of those before."""
    def extend(a, b):
        return on_line(a, b, *STEPS, steps)

    before, moments = collections.defaultdict(list), collections.defaultdict(list)
    for found, counted in (before, few), (moments, some):
        for name, peak in counted["moments"]:
            found[name].append(peak)
    extended = []
    for name, peaks in moments.items():
        n = len(peaks) - len(before[name])  # in each step; 0: outside of them
        first, last = before[name][: 2 * n], before[name][2 * n :]
        third = [{kind: b[kind] - c[kind] + a.get(kind, 0) for kind in b}
                 for a, b, c in zip(last, peaks[2 * n :], peaks[3 * n :]) if n]
        extended += [(name, extend(*pair))
                     for pair in zip([*first, *third, *last], peaks, strict=True)]
    return flows(few, some, extend) | {
        "moments": extended, "peak": peak_of([peak for _, peak in extended])}


def flows(few, some, extend):
    """``some``, with what it held, sent and computed extended."""
    parts = [{(part["collective"], part["group"]): part for part in counted["collectives"]}
             for counted in (few, some)]
    collectives = [extend(parts[0].get(key, {}), part) for key, part in parts[1].items()]
    return summed(some | {
        "held": extend(few["held"], some["held"]),
        "operations": extend(few, some)["operations"], "collectives": collectives,
    })


def summed(counted):
    """``counted``, with what its collectives send in all."""
    return counted | {"sent": round(sum(part["bytes"] for part in counted["collectives"])),
                      "between_machines": round(sum(part["between_machines"]
                                                    for part in counted["collectives"]))}


def on_line(a, b, x_a, x_b, x):
    """The numbers of a dict at x: they are on a line through those of ``a`` and ``b``."""
    def at(name):
        first, rise = a.get(name, 0), (b[name] - a.get(name, 0)) * (x - x_a)
        exact = isinstance(rise, int) and rise % (x_b - x_a) == 0
        return first + (rise // (x_b - x_a) if exact else rise / (x_b - x_a))

    return {name: at(name) if isinstance(b[name], (int, float)) else b[name] for name in b}


def by_kind(moments):
    """The peaks of the moments that differ only in the number of the layer, in its order: a list
    for each (name, how often it was there before)."""
    found, seen = collections.defaultdict(dict), collections.Counter()
    for name, peak in moments:
        number = re.search(r"\.(\d+)\b", name)
        kind = name.replace(number[0], ".*", 1) if number else name
        found[kind, seen[name]][int(number[1]) if number else 0] = peak
        seen[name] += 1
    return {kind: [peaks[i] for i in sorted(peaks)] for kind, peaks in found.items()}
