"""What a rank counts with many layers, from what it counts with few.

Bytes held, bytes sent and operations are linear in the number of layers, and in the number of
accumulation steps. A peak is not: it is the most of many moments, each linear, and with more layers
another of them may be the most. So ``over_layers`` extends each moment by itself: those of the
first two layers, those of the last three, and those between, where each layer adds the same.
(Beside the embedding and the head, larger units are gathered: by zero.py two units ahead.)
"""

import collections
import re

from tools.support.stand_ins import peak_of

STEPS = 3, 4
SIZES = 6, 8  # layers of the two counts: with 8 three are neither at the start nor at the end


def over_layers(few, some, layers):
    """What would be counted with ``layers``. ``few`` and ``some``: results of ``dry_run.count`` for
    ``SIZES`` layers, on each stage of the rank. "estimated" is set if these do not show that each
    moment is linear."""
    def extend(a, b):
        return on_line(a, b, *SIZES, layers)

    lines, linear = [], True
    moments = by_kind(few["moments"]), by_kind(some["moments"])
    for kind in moments[0].keys() | moments[1].keys():
        a, b = (each.get(kind, []) for each in moments)
        if len(a) == len(b) == 1:
            lines.append((a[0], b[0]))
        elif (len(a), len(b)) == SIZES:
            lines += zip(a[:3], b[:3])
            lines += zip(a[2:], b[4:])
            linear &= all(b[2].get(name, 0) + b[4].get(name, 0) == 2 * b[3].get(name, 0)
                          for name in b[3])
        else:
            linear = False
    peaks = [extend(*line) for line in lines]
    whole = all(size == int(size) for peak in peaks for size in peak.values())
    extended = flows(few, some, extend) | {"peak": peak_of(peaks)}
    return extended if linear and whole else extended | {"estimated": True}


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
    return some | {
        "held": extend(few["held"], some["held"]),
        "operations": extend(few, some)["operations"],
        "collectives": collectives,
        "sent": round(sum(part["bytes"] for part in collectives)),
        "between_machines": round(sum(part["between_machines"] for part in collectives)),
    }


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
