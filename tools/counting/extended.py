"""What a rank counts in a large model and a long step, from dry runs of a small one.

Bytes held, bytes sent and operations are linear in the number of layers, of accumulation steps and
of micro-batches. A peak is not: it is the most of many moments, each linear, and with more layers
another of them may be the most. So ``extend`` extends each moment by itself: those of the first
three layers, those of the last, and those between, where each layer adds the same. (Beside the
embedding and the head, larger units are gathered.) And ``over_micro_batches`` makes of a pipeline
with a few micro-batches in flight one with many.
"""

import collections
import re

from tools.command import ROOT
from tools.counting import one_rank
from tools.counting.counter import totals
from tools.counting.pipeline import accumulated
from tools.counting.theory import bubble

# Layers of the two counts: in the second, three are neither at the start nor at the end. The end is
# two layers; of what gathers two units ahead, it is three.
LAYERS = (5, 7), (6, 8)
STEPS = 4, 5  # the third, the one before the last and the last are moments of their own


class Rank:
    """A rank of a strategy, which counts a small model in a small pipeline, and extends that.

    Args:
        pipeline: the strategy's.
        place: of the rank on the axis of the pipeline. Of all ranks of this place the first counts.
        words: the script, and its options.
        args: those of plan.
    """

    def __init__(self, pipeline, place, words, args):
        self.pipeline, self.place, self.words, self.args = pipeline, place, words, args
        self.steps, self.micro_batches = accumulated(words)
        self.layers = pipeline.layers[place]
        self.in_flight = min(pipeline.n - place, self.micro_batches)
        self.few, self.n, self.counted_at = self.micro_batches, pipeline.n, place
        if self.steps == 1:
            self.choose_small_pipeline()

    def choose_small_pipeline(self):
        """Of 1F1B: a rank of a small pipeline does what this one does, with two micro-batches at
        once. Three are needed if no forward pass follows a backward pass, and with experts: their
        first forward pass leaves more than activations."""
        after = self.micro_batches - self.in_flight
        kept = min(self.in_flight, 3 if self.args.config.num_experts or not after else 2)
        few, place = kept + min(2, after), int(self.place > 0)
        if few < self.micro_batches and self.pipeline.total(self.layers, kept + place, place):
            self.few, self.n, self.counted_at = few, kept + place, place

    def count(self):
        """What the rank counts, as ``one_rank.count``."""
        for few, some in LAYERS:
            if self.layers > few + some and self.total(few) and self.total(some):
                counts = self.count_steps(few), self.count_steps(some)
                if extended := extend(*counts, by_layer, (few, some), self.layers):
                    return extended
        return self.count_steps(self.layers)

    def total(self, size):
        """The layers of the whole model, if the stage of the rank has ``size``. None: no number of
        them gives it that."""
        if size == self.layers and self.n == self.pipeline.n:
            return self.args.config.num_hidden_layers
        return self.pipeline.total(size, self.n, self.counted_at)

    def count_steps(self, size):
        """With ``size`` layers in its stage."""
        if self.steps > max(STEPS):
            few, some = (self.dry_run(size, steps) for steps in STEPS)
            if extended := extend(few, some, by_step, STEPS, self.steps):
                return extended
        counted = self.dry_run(size, self.steps)
        return self.over_micro_batches(counted) if self.few < self.micro_batches else counted

    def dry_run(self, size, steps):
        args, ranks = self.args, self.pipeline.per_place
        batch_size = (args.batch_size * steps * self.few) // (self.steps * self.micro_batches)
        less = f"--num-hidden-layers {self.total(size)} --grad-accum {steps}"
        if self.few < self.micro_batches:
            less += f" --microbatches {self.few}"
        if "--pp" in self.words:
            less += f" --pp {self.n}"
        script, *words = [*self.words, *less.split(), "--batch-size", str(batch_size)]
        return one_rank.count_apart(str(ROOT / script), words, ranks * self.n,
                                    ranks * self.counted_at, args.nproc_per_node)

    def over_micro_batches(self, counted):
        """What it would count with all micro-batches, from ``counted`` in the small pipeline."""
        pipeline, few, kept = self.pipeline, self.few, self.n - self.counted_at
        kind = "at first" if kept < 3 else "in all"  # the first pass gathers parameters
        starts = [peak[kind] for name, peak in counted["moments"] if name == "0. forward"]
        (sent,) = (part["bytes"] for part in counted["collectives"] if part["collective"] == "send")
        # A micro-batch leaves to the end of the step a buffer for what other stages send, as much
        # as they are sent; its tokens and targets; and on the last stage its loss.
        received, loss = sent // few, 4 * (self.place == pipeline.n - 1)
        left = received + 16 * pipeline.tokens(self.words) + loss
        until_backward = starts[kept - 1] - starts[kept - 2] - received if kept > 1 else 0
        stays = (self.micro_batches - few) * left
        full = stays + (self.in_flight - kept) * until_backward
        more = self.micro_batches / few
        return counted | totals(
            [self.across_stages(part, more) for part in counted["collectives"]],
            [*self.with_more(counted["moments"], stays, full)],
        ) | {
            "held": more_activations(counted["held"], stays),
            "bubble": bubble("1f1b", pipeline.n, 1, self.micro_batches),
            "operations": counted["operations"] * more, "world_size": self.args.devices,
            "rank": self.place * pipeline.per_place,
        }

    def with_more(self, moments, stays, full):
        """``moments`` with more activations: ``full`` more while as many micro-batches as can be
        are there, which is not so in the first forward and in the last backward pass."""
        kept, seen = self.n - self.counted_at, collections.Counter()
        total = collections.Counter(name for name, _ in moments)
        for name, peak in moments:
            seen[name] += 1
            there = seen[name] >= kept if name.endswith(" forward") else seen[name] < self.few
            of_each = total[name] == self.few  # a moment of each micro-batch
            yield name, more_activations(peak, full if there and of_each else stays)

    def across_stages(self, part, more):
        """``part`` of the collectives, of ``more`` times as many micro-batches, in all stages."""
        part, n, place = dict(part), self.pipeline.n, self.place
        machines = [i * self.pipeline.per_place // self.args.nproc_per_node for i in range(n)]
        if part["group"] in ("tp", "cp") or part["collective"] in ("send", "all-to-all"):
            for name in "calls", "bytes", "between_machines":
                part[name] *= more
        if part["group"] != "pp":
            return part
        if part["collective"] == "send":
            neighbours = machines[max(0, place - 1) : place] + machines[place + 1 : place + 2]
            far = [machine != machines[place] for machine in neighbours]
        else:  # of the norm, around a ring
            part["bytes"] *= (1 - 1 / n) / (1 - 1 / self.n)
            far = [a != b for a, b in zip(machines, machines[1:] + machines[:1])]
        part["between_machines"] = part["bytes"] * sum(far) / len(far)
        return part


def more_activations(sizes, added):
    return sizes | {kind: sizes[kind] + added for kind in ("activations", "in all")}


def extend(small, large, grouped, sizes, number):
    """What would be counted with ``number`` layers or steps. ``small`` and ``large``: what is
    counted with the two ``sizes`` of them; ``grouped``: a function that groups their moments. None:
    the two counts do not show that each moment is linear."""
    in_small, in_large = grouped(small["moments"], sizes[0]), grouped(large["moments"], sizes[1])
    if in_small.keys() != in_large.keys():
        return None
    moments = []
    for kind, peaks in in_small.items():
        pairs = same_moments(peaks, in_large[kind], sizes)
        if not pairs:
            return None
        moments += [(kind[0], on_line(sizes, number, *pair)) for pair in pairs]
    if any(size != int(size) for _, peak in moments for size in peak.values()):
        return None
    parts = {(part["collective"], part["group"]): part for part in small["collectives"]}
    collectives = []
    for part in large["collectives"]:
        smaller = parts.get((part["collective"], part["group"]), {})
        collectives.append(on_line(sizes, number, smaller, part))
    return large | totals(collectives, moments) | {
        "held": on_line(sizes, number, small["held"], large["held"]),
        "operations": on_line(sizes, number, small, large)["operations"],
    }


def same_moments(small, large, sizes):
    """Pairs of the peaks of a kind in two counts, each at the same place from the start or from the
    end; []: they have no such places, or those between are on no line."""
    if len(small) == len(large) == 1:  # in no layer, or in no step
        return [(small[0], large[0])]
    if (len(small), len(large)) != sizes:
        return []
    between = large[2:-2]
    if len(between) > 2:
        first, second, third, *_ = between
        if any(first.get(name, 0) + third.get(name, 0) != 2 * second[name] for name in second):
            return []
    last = len(small) - 2
    return [*zip(small[:3], large[:3]), *zip(small[-last:], large[-last:])]


def on_line(sizes, number, small, large):
    """A dict of numbers at ``number``: at the two ``sizes`` it is ``small`` and ``large``."""
    found, run = dict(large), sizes[1] - sizes[0]
    for name, value in large.items():
        if isinstance(value, (int, float)):
            first = small.get(name, 0)
            rise = (value - first) * (number - sizes[0])
            found[name] = first + (rise / run if rise % run else rise // run)  # to the byte
    return found


def by_layer(moments, _):
    """The peaks of the moments that differ only in the number of the layer, in its order: a list
    for each (name, how often it was there before)."""
    found, seen = collections.defaultdict(dict), collections.Counter()
    for name, peak in moments:
        number = re.search(r"\.(\d+)\b", name)
        layer = int(number[1]) if number else 0
        kind = re.sub(r"\.\d+\b", ".*", name, count=1)
        found[kind, seen[name]][layer] = peak
        seen[name] += 1
    for kind, peaks in found.items():  # in the backward pass the last layer came first
        found[kind] = [peaks[layer] for layer in sorted(peaks)]
    return found


def by_step(moments, steps):
    """The peaks of the moments that differ only in the accumulation step, in its order: a list for
    each (name, how often it was there before in the step). What is not in each step is alone."""
    total, seen = collections.Counter(name for name, _ in moments), collections.Counter()
    found = collections.defaultdict(list)
    for name, peak in moments:
        in_step = total[name] // steps or total[name]
        found[name, seen[name] % in_step].append(peak)
        seen[name] += 1
    return found
