"""Is your trainer on N processes the run of one? Record both runs, and compare them.

    parity = Parity("two.parity", model, optimizer)     # after the model is parallelised
    parity.record(step, loss, batch)    # every rank; after the last backward pass and the reduction
                                        # of the gradients, before clipping

    python -m tools.parity one.parity two.parity        # --table prints every parameter

Record some five steps of any two layouts: one process and n ranks, DDP and TP, yesterday's commit
and today's. Both runs start from the same weights, read the same samples and have no dropout. The
command prints EQUAL, up to which size and for how many steps, or names the first difference and its
likely cause and exits with 1. This file needs torch alone.

Rank 0 writes a line of JSON for each step, with the length of each parameter and gradient and 4
projections on vectors of +1 and -1, which give the distance of two tensors (Alon, Matias, Szegedy:
The space complexity of approximating the frequency moments, 1996). A sign is a hash of the flat
index in the whole tensor: projections of shards add up, and so do those of the two gradients of a
lost tie. Sums are in float64, over blocks: no copy of the model is made.

Gradients of the first step differ if |d| > tol (|g| + 0.1 |G| / sqrt N), where G is all of them, N
the number of tensors, tol = eps sqrt N + 2 eps_acc sqrt m, eps that of the coarsest type of
parameters, products and loss, eps_acc that of float32 unless all is float64, and m the number of
targets in a step, 65,536 at most. Losses may differ by 2 eps sqrt N / sqrt m + 16 eps_acc, weights
after the first update by 2 sqrt(0.8 tol) of their way. Later all may differ by 10 times the largest
difference that was accepted before, and by up to 10 times more if it has grown so much in a step:
these factors are measured, not derived. Where they allow 0.3, rounding has parted the runs: only
samples, clipping and copies are still compared.

It cannot see what only the forward pass uses, buffers, what does not act (such as clipping that is
never active), and what lies below the tolerance. So run it in float32 or float64: in bfloat16 it
finds only factors, missing reductions, samples and missing gradients.
"""

import argparse
import collections
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import torch
import torch.distributed as dist

K = 4  # projections
BLOCK = 2**18  # numbers that are summed at once
WRAPPERS = "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"


class Parity:
    """Records what must not depend on how a run is spread over processes. Every rank makes one.

    Args:
        path: the file that rank 0 writes.
        model: a module, or {name: parameter}: of stages of a pipeline, or shards.
        optimizer: one, or a list. What it is given in ``step()`` is compared with what is recorded.
        where: for plain tensors that are shards: ``where(name, tensor)`` returns (shape of the
            whole, [(part of the tensor, offsets in the whole), ...]), or None for a whole tensor.
        loss: "mean" or "sum": how the losses that ranks pass to ``record`` make that of the batch.
        dtype: the type of matrix products, where no module shows it: a dict of parameters under
            autocast. For TF32 give torch.float16.
    """

    def __init__(self, path, model, optimizer=None, where=None, loss="mean", dtype=None):
        if loss not in ("mean", "sum"):
            raise ValueError(f"loss is {loss!r}: it must be 'mean' or 'sum'")
        self.path, self.where, self.loss, self.mode = path, where, loss, "w"
        distributed = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self.types, self.hooks, self.dropout = {dtype}, [], []
        self.squares, self.factors = {}, []  # see before_step
        if isinstance(model, torch.nn.Module):
            self.watch(model)
            model = dict(model.named_parameters(remove_duplicate=False))
        self.parameters = {".".join(part for part in name.split(".") if part not in WRAPPERS): p
                           for name, p in model.items()}
        first = {p: name for name, p in reversed(self.parameters.items())}  # of its names
        self.tied = {name: first[p] for name, p in self.parameters.items() if first[p] != name}
        for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            each = getattr(each, "optimizer", each)  # accelerate wraps it
            if each is not None:
                each.register_step_pre_hook(lambda optimizer, *_: self.before_step(optimizer))

    def watch(self, model):
        """Note in which types modules compute, until the first record, and which drop out."""
        def see(module, inputs, output):
            self.types.add(getattr(output, "dtype", None))

        for name, module in model.named_modules():
            if any(p.ndim > 1 for p in module.parameters(recurse=False)):
                self.hooks.append(module.register_forward_hook(see))
            for key, value in vars(module).items():
                drops = "dropout" in key or key == "p" and "Dropout" in type(module).__name__
                if drops and isinstance(value, float) and value > 0 and module.training:
                    self.dropout.append(f"{name}.{key} = {value}")

    @torch.no_grad()
    def record(self, step, loss=None, batch=None):
        """Record a step. Every rank calls it.

        Args:
            step: its number.
            loss: of this rank: a number; a list, the losses of micro-batches, which add up; or None
                on a rank that has none, such as the first stages of a pipeline.
            batch: the list of micro-batches as this rank has read them: tensors with a row for each
                sample, in tuples, lists or dicts.
        """
        for hook in self.hooks:
            hook.remove()
        losses = loss if isinstance(loss, (list, tuple)) else [] if loss is None else [loss]
        losses = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in losses]
        self.types.update(getattr(x, "dtype", None) for x in losses)
        losses = [float(x) for x in losses]
        if any(x and math.isfinite(x) and math.frexp(x)[0] * 2**36 % 1 == 0 for x in losses):
            self.types.add(torch.float32)  # a float of so few bits was a tensor of this type
        micro_batches, samples = batch if isinstance(batch, list) else [batch], {}
        for micro_batch in micro_batches:
            for key, tensor in tensors_in(micro_batch):
                samples.setdefault(key, []).extend(hashes(tensor))
        gradients = {name: self.parts(name, p.grad)
                     for name, p in self.parameters.items() if p.grad is not None}
        own = {
            "values": {name: self.parts(name, p) for name, p in self.parameters.items()},
            "gradients": gradients, "tied": self.tied, "losses": losses, "samples": samples,
            "dtypes": [str(p.dtype) for p in self.parameters.values()], "factors": self.factors,
            "types": [str(t) for t in self.types if t and t.is_floating_point],
            "dropout": self.dropout,
            "targets": [*map(targets, micro_batches)],
        }
        self.squares = {name: square(parts) for name, parts in gradients.items()}
        self.factors = []
        everyone = [None] * self.world if self.rank == 0 else None
        if self.world > 1:
            dist.gather_object(own, everyone)
        if self.rank == 0:
            line = {"step": step} | merge(everyone if self.world > 1 else [own], self.loss)
            with open(self.path, self.mode) as file:
                file.write(json.dumps(line) + "\n")
        self.mode = "a"

    def parts(self, name, tensor):
        """[(shape of the whole, offsets, size, sums), ...] of what this rank holds of a tensor."""
        if hasattr(tensor, "placements"):  # a DTensor
            from torch.distributed.tensor import Replicate
            tensor = tensor.redistribute(placements=[
                Replicate() if place.is_partial() else place for place in tensor.placements])
            # What distributed checkpoints call: nothing public says which part a rank holds.
            (chunk,) = tensor.__create_chunk_list__()
            shape, parts = tensor.shape, [(tensor.to_local(), chunk.offsets)]
        else:
            whole = tensor.shape, [(tensor, [0] * tensor.ndim)]
            shape, parts = self.where and self.where(name, tensor) or whole
        return [(tuple(shape), tuple(offsets), tuple(part.shape), sums(part, offsets, shape))
                for part, offsets in parts]

    @torch.no_grad()
    def before_step(self, optimizer):
        """Note how much longer the gradients are than in ``record``: once after each record, so
        that steps which are not recorded accuse nobody."""
        own = {p for group in optimizer.param_groups for p in group["params"]}
        large = 1e-12 * max(self.squares.values(), default=0.0)  # others may underflow
        for name, p in self.parameters.items():
            if p in own and p.grad is not None and (before := self.squares.pop(name, 0.0)) > large:
                self.factors.append(math.sqrt(square(self.parts(name, p.grad)) / before))


def mix(x):
    """SplitMix64's finaliser on int64: each bit of x changes half of the bits of the result."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & 2**33 - 1)


def sums(tensor, offsets, shape):
    """Of a part of a tensor of ``shape``: [square of the length, K projections, how many numbers
    are only rounding beside the others, in float32 and in float64]."""
    flat, device = tensor.detach().reshape(-1), tensor.device
    total = torch.zeros(K + 3, dtype=torch.float64, device=device)
    bits = torch.arange(40, 40 + K, device=device)[:, None]
    for begin in range(0, len(flat), BLOCK):
        x = flat[begin : begin + BLOCK].double()
        rest = torch.arange(begin, begin + len(x), device=device)  # the flat index in the part
        index, stride = torch.ones_like(rest), 1  # in the whole, from 1
        for size, offset, whole in reversed(list(zip(tensor.shape, offsets, shape))):
            index += (rest % size + offset) * stride
            rest, stride = rest // size, stride * whole
        signs = 1 - 2 * (mix(index) >> bits & 1)  # (K, numbers)
        size, usual = x.abs(), x.square().mean().sqrt()
        total += torch.cat([x.square().sum()[None], signs.double() @ x / math.sqrt(K), torch.stack(
            [((size > 0) & (size < share * usual)).sum() for share in (1e-3, 1e-10)])])
    return total.tolist()


def square(parts):
    return sum(row[0] for *_, row in parts)


def tensors_in(batch, key=""):
    """Yields (key, tensor) for the tensors in nested tuples, lists and dicts."""
    if torch.is_tensor(batch) and batch.ndim:
        yield key, batch
    elif isinstance(batch, (list, tuple)):
        batch = dict(enumerate(batch))
    if isinstance(batch, Mapping):
        for name, part in batch.items():
            yield from tensors_in(part, f"{key}.{name}")


def hashes(tensor):
    """A hash of each row. 0 and -100 count nothing, so rows may be padded to other lengths."""
    x = tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
    x = x.double().view(torch.int64) if x.is_floating_point() else x.long()
    columns = mix(torch.arange(1, x.shape[1] + 1, device=x.device))
    return mix(x ^ columns).masked_fill((x == 0) | (x == -100), 0).sum(1).tolist()


def targets(micro_batch):
    """How many targets are not -100. A model of Hugging Face shifts its labels itself."""
    found = [tensor for _, tensor in tensors_in(micro_batch)]
    if isinstance(micro_batch, Mapping) and "labels" in micro_batch:
        found = [micro_batch["labels"][..., 1:]]
    return int((found[-1] != -100).sum()) if found else 0


def merge(everyone, loss):
    """The record of a step, from those of all ranks."""
    found, readers = {"values": {}, "gradients": {}}, {}
    for rank, own in enumerate(everyone):
        for kind, tensors in found.items():
            for name, parts in own[kind].items():
                tensors.setdefault(name, []).extend((rank, *part) for part in parts)
        if own["samples"]:
            readers.setdefault(json.dumps(own["samples"]), []).append(rank)
    losses = [sum(own["losses"]) for own in everyone if own["losses"]]
    factors = [factor for own in everyone for factor in own["factors"]]
    return {
        **{kind: {name: merge_parts(parts) for name, parts in tensors.items()}
           for kind, tensors in found.items()},
        **{key: sorted({name for own in everyone for name in own[key]})
           for key in ("dtypes", "types", "dropout")},
        **{key: [own[key] for own in everyone] for key in ("losses", "targets")},
        "tied": {name: first for own in everyone for name, first in own["tied"].items()},
        "loss": losses and sum(losses) / (len(losses) if loss == "mean" else 1),
        "norms": [math.sqrt(sum(map(square, own["gradients"].values()))) for own in everyone],
        "readers": [(ranks, json.loads(samples)) for samples, ranks in readers.items()],
        "factors": [min(factors), max(factors)] if factors else [0.0, 0.0],
    }


def merge_parts(parts):
    """One tensor, from (rank, shape, offsets, size, sums) of all ranks. A region counts once: ranks
    that hold it must agree. If not, ``spread`` says how far they are apart and ``ranks`` who agrees
    with whom, and ``mean`` and ``total`` are the projections of their mean and of their sum."""
    regions, spread, ranks = {}, [], []
    for rank, shape, offsets, size, row in parts:
        regions.setdefault((offsets, size), {})[rank] = row
    once, mean, total = torch.zeros(3, K + 3, dtype=torch.float64)
    for held in regions.values():
        rows = torch.tensor(list(held.values()), dtype=torch.float64)
        once, mean, total = once + rows[0], mean + rows.mean(0), total + rows.sum(0)
        spread.append((rows - rows[0])[:, 1 : K + 1].norm(dim=1).max().item())
        if spread[-1] == max(spread):
            alike = itertools.groupby(sorted(held, key=held.get), key=held.get)
            ranks = sorted(sorted(group) for _, group in alike)
    return {
        "shape": shape, "length": once[0].sqrt().item(), "noise": once[K + 1 :].tolist(),
        "held": sum(math.prod(size) for _, size in regions), "spread": math.hypot(*spread),
        "ranks": ranks, "sketch": once[1 : K + 1].tolist(), "mean": mean[1 : K + 1].tolist(),
        "total": total[1 : K + 1].tolist(),
    }


NOTHING = {"length": 0.0, "noise": [0.0] * 2, "held": 0, "spread": 0.0, "ranks": [],
           "sketch": [0.0] * K, "mean": [0.0] * K, "total": [0.0] * K}


def eps_of(dtype):
    return torch.finfo(getattr(torch, dtype.removeprefix("torch."))).eps


def columns(step, kind, names):
    """What ``merge_parts`` says of these parameters: tensors, a parameter in each row."""
    rows = [step[kind].get(name, NOTHING) for name in names]
    return SimpleNamespace(**{
        key: torch.tensor([row[key] for row in rows], dtype=torch.float64)
        for key in NOTHING if key != "ranks"})


def distance(x, y, r=1.0):
    """The distances of r x and y, estimated; the differences of their lengths are exact."""
    apart = (r * x.sketch - y.sketch).norm(dim=1)
    return apart.maximum((abs(r) * x.length - y.length).abs())


class Comparison:
    """Recording ``two`` against ``one``, the reference. Each verdict is a method that returns a
    message if it applies. The lists at the end say in which order they are tried."""

    def __init__(self, one, two):
        self.one, self.two, (a, b) = one, two, (one[0], two[0])
        self.names = [name for name in a["values"]  # what both runs tie comes once
                      if name not in a["tied"] or name not in b["tied"]]
        self.weight_eps = max(map(eps_of, a["dtypes"] + b["dtypes"]))
        eps = max(map(eps_of, a["dtypes"] + b["dtypes"] + a["types"] + b["types"]))
        self.exact = eps == eps_of("torch.float64")
        eps_acc = eps if self.exact else eps_of("torch.float32")
        N, m = len(self.names), min(max(count(a), count(b)) or 2**16, 2**16)
        # Roundings of products make a random walk through the layers, and sums one over targets.
        self.tolerance = eps * N**0.5 + 2 * eps_acc * m**0.5
        self.loss_tolerance = 2 * eps * (N / m) ** 0.5 + 16 * eps_acc
        # Adam moves an element by a whole step even if its gradient is only rounding.
        self.update_tolerance = 2 * (0.8 * self.tolerance) ** 0.5

    def first_difference(self):
        """The message of the first verdict that applies, or None."""
        self.slack = self.largest = self.together = 0
        for self.k, (self.a, self.b) in enumerate(zip(self.one, self.two)):
            self.look()
            verdicts = [*self.START * (self.k == 0), *self.ALWAYS]
            if self.slack <= 0.3:
                self.together += 1
                verdicts += [*self.TOGETHER, *self.GRADIENTS * bool(self.off.any()), *self.LAST]
            for verdict in verdicts:
                if message := verdict(self):
                    return f"step {self.a['step']}: {message}"
            largest = max(self.largest, self.share.max().item())
            self.growth = min(10.0, largest / (self.largest or largest or 1.0))
            self.largest = largest

    def look(self):
        """Compare step k. w and x: weights and gradients of the reference, v and y: of the run."""
        w, v, x, y = (columns(step, kind, self.names) for kind in ("values", "gradients")
                      for step in (self.a, self.b))
        if self.k == 0:
            self.first, self.x, self.y = (w, v, x, y), x, y
        self.before, self.slack_before = (self.x, self.y), self.slack
        self.w, self.v, self.x, self.y = w, v, x, y
        if self.k:
            self.slack = max(self.update_tolerance, 10 * self.growth * self.largest)
        self.floor = 0.1 * x.length.norm() / len(self.names) ** 0.5
        changed, apart = distance(x, self.before[0]), distance(x, y)
        self.share = apart / (x.length + changed + self.floor).clamp(min=1e-300)
        self.loose = self.slack * (changed + x.length)  # the weights differ by rounding already
        self.allowed = self.tolerance * (x.length + self.floor) + self.loose
        self.off = apart > self.allowed
        self.unclear = ~self.off & (x.length <= 2 * self.allowed)  # too short to prove anything
        self.everywhere = bool((self.off | self.unclear).all())
        some = self.off.any() and not self.everywhere
        self.who = f"gradients of {self.group(self.off)}" if some else "all gradients"
        a, b = self.a["loss"], self.b["loss"]
        self.ratio = b / a if a and b else 0.0  # of the losses, if both runs have them
        self.loss_right = abs(self.ratio - 1) <= self.loss_tolerance + self.slack
        self.behind = "; the loss is right: look behind it" * self.loss_right

    # Verdicts on the first step

    def names_and_shapes(self):
        ours, theirs = self.a["values"], self.b["values"]
        for run, names in ("reference", ours.keys() - theirs), ("run", theirs.keys() - ours):
            if names:
                return f"names: only the {run} has {', '.join(sorted(names)[:3])}"
        for name in self.names:
            shape, held = theirs[name]["shape"], theirs[name]["held"]
            if shape != ours[name]["shape"]:
                return f"shape: {name} is {shape}, not {ours[name]['shape']}"
            if held != math.prod(shape):
                return f"shape: ranks hold {held} numbers of {name}, {shape}: look at where()"

    def initial_weights(self):
        far = distance(self.w, self.v) / self.w.length.clamp(min=1e-300)
        mixed = len({*self.a["dtypes"], *self.b["dtypes"]}) > 1
        off = far > max(1e-12, mixed * self.weight_eps)
        if off.any():
            permuted = far[off].min() > 0.1 and self.w.length.allclose(self.v.length, 1e-9, 0)
            words = ", of the same length: are parts in another order?" * permuted
            return f"initial weights: other values of {self.group(off)}{words}"

    # Verdicts on every step

    def not_finite(self):
        for words, columns in (("weights of the reference", self.w), ("weights", self.v),
                               ("gradients of the reference", self.x), ("gradients", self.y)):
            if (off := ~columns.length.isfinite()).any():
                return f"not finite: {words}: {self.group(off)}"

    def copies_of_weights(self):
        limit, words = (1e-6, "weights") if self.k else (1e-12, "initial weights")
        if (off := self.v.spread > limit * self.v.length).any():
            ranks = self.ranks("values", off)
            return f"{words}: {ranks} hold different values of {self.group(off)}"

    def clipping(self):
        """What the optimizer was given in the step before."""
        (low, high), (lowest, highest) = self.b["factors"], self.a["factors"]
        rounding = 1e-5 + 4 * self.weight_eps
        if highest - lowest > rounding * highest:
            return None  # the reference clips each tensor or element by itself
        if high - low > rounding * high:
            return (f"clipping: gradients are scaled by {low:.6g} to {high:.6g} before the update, "
                    f"not all alike: by the norm of a part, or before the reduction")
        x, y = (gradients.length.norm().item() for gradients in self.before)
        ratio = high * y / (highest * x) if highest * x * high * y else 1.0
        slack = self.tolerance + 1e-5 + self.slack_before
        if abs(ratio - 1) > slack and self.slack_before <= 0.3:
            return (f"clipping: gradients are scaled by {high:.6g} before the update, not by "
                    f"{highest:.6g} ({self.factor(ratio, 0.01)}): by a wrong norm")

    def samples(self):
        for key in sorted({key for _, rows in self.a["readers"] for key in rows}):
            want, have = (collections.Counter(
                row for ranks, rows in step["readers"] for row in rows.get(key, []) * len(ranks)
            ) for step in (self.a, self.b))
            # Every sample is read by equally many ranks: k in the reference, m in the run.
            k, m = want.total(), have.total()
            if more := [row for row in have if have[row] * k > want[row] * m]:
                lost, others = len(want.keys() - have), len(set(more) - want.keys())
                most = max(more, key=have.get)
                readers = [[rank] for ranks, rows in self.b["readers"] for rank in ranks
                           if most in rows.get(key, [])]
                words = f"{say(readers)} reads one twice" if have[most] > 1 else "none is repeated"
                if others:
                    words = f"{others} others are read: another seed, order or start, or cut rows"
                elif len(readers) > 1:
                    words = f"{say(readers)} read the same"
                return f"samples: {lost} of {len(want)} are missing, {words}"

    # Verdicts while rounding has not parted the runs

    def update(self):
        """Compare the ways that the weights have gone since the first step."""
        w, v, x, y = self.first
        ways = self.w.sketch - w.sketch, self.v.sketch - v.sketch
        way, other, apart = (vectors.norm(dim=1) for vectors in (*ways, ways[0] - ways[1]))
        noise = x.noise.maximum(y.noise)[:, int(self.exact)] / x.held.clamp(min=1)
        off = apart > (self.slack + 2 * noise.sqrt()) * way.maximum(other) + (
            8 * self.weight_eps * w.length)
        # Where a gradient is only rounding, so is the way of the parameter.
        off &= (x.length > self.tolerance * x.length.norm() / len(off) ** 0.5) & (y.length > 0)
        if off.any():
            ratio = (other / way)[off]
            words = ""
            if ratio.max() < 1.02 * ratio.min():
                words = f", {self.factor(ratio[0].item(), 0.02)}"
            by = (apart / way.maximum(other))[off].max()
            return (f"update: after equal gradients, weights of {self.group(off)} go another way, "
                    f"by up to {by:.0e} of it{words}: learning rate, weight decay, the optimizer, "
                    f"or a rank that does not update its part")

    def copies_of_gradients(self):
        x, y, norms = self.x, self.y, self.b["norms"]
        off = y.spread > self.tolerance * (y.length + self.floor) + self.loose
        if off.any():
            i = (off * y.length).argmax()
            mean, total = ((x.sketch - all_ranks)[i].norm() for all_ranks in (y.mean, y.total))
            why = "they must be averaged" if mean < total else "they must be added up"
            if min(mean, total) > self.allowed[i]:
                why = f"neither their sum nor their mean is right{self.where()}"
                if max(norms) < 1.00001 * min(norms):
                    why = f"each rank has clipped its own to {norms[0]:.3g}: reduce before clipping"
            return (f"not reduced: {self.ranks('gradients', off)} hold different gradients of "
                    f"{self.group(off)}: {why}")

    # Verdicts on gradients that differ

    def tie_lost(self):
        for name, first in self.one[0]["tied"].items() - self.two[0]["tied"].items():
            i, j = self.names.index(first), self.names.index(name)
            if (self.x.sketch[i] - self.y.sketch[i] - self.y.sketch[j]).norm() <= self.allowed[i]:
                return f"a tie is lost: the sum of the gradients of {first} and {name} is right"

    def scaled(self):
        x, y = self.x, self.y
        i = (self.off * (x.length + y.length)).argmax()
        r = ((x.sketch[i] @ y.sketch[i]).sign() * y.length[i] / x.length[i]).item()
        allowed = self.tolerance * (y.length + abs(r) * self.floor) + abs(r) * self.loose
        if r and (distance(x, y, r) <= allowed)[self.off | self.everywhere].all():
            loose = max(1e-3, min(0.1, 2 * self.tolerance))
            loss = "; the loss too" if abs(self.ratio / r - 1) < loose else self.behind
            return f"{self.who}: {self.factor(r, loose)}{loss}"

    def missing(self):
        for word, some, none in ("missing", self.x, self.y), ("unexpected", self.y, self.x):
            if (off := self.off & (none.length < 1e-3 * some.length)).any():
                return f"{word} gradients: of {self.group(off)}{self.behind}"

    def not_cleared(self):
        far = (self.y.sketch - self.x.sketch)[self.off].flatten()
        old = self.before[0].sketch[self.off].flatten()
        r = far @ old / (old @ old)
        if self.k and (far - r * old).norm() < 0.1 * far.norm():
            return f"not cleared: {self.who} hold {r:.3g} of those of the step before"

    def rounded(self):
        middle, most = self.share[self.off].median(), self.share.max()
        for word, low in ("bfloat16", 2**-12), ("float16", 2**-15), ("float32", 2**-28):
            if self.everywhere and self.loss_right and low < middle and most < 64 * low:
                return (f"rounding: all gradients differ, by {middle:.0e}, as if {word} had been "
                        f"in between; the loss is right")

    def only_some(self):
        if not self.everywhere:
            return f"{self.who} differ, by up to {self.share.max():.0e}{self.where()}"

    def all_point_elsewhere(self):
        how = f"all gradients point elsewhere, by {self.share.min():.0e} to {self.share.max():.0e}"
        later = "; all is right before: look at what a step leaves behind (weights that are not " \
            "gathered, buffers, random state)" * (self.k > 0)
        if self.loss_right:
            return (f"part of the batch: {how}, and the loss is right: gradients of samples are "
                    f"lost or weigh more, as when ranks clip before the reduction{later}")
        if dropping := self.a["dropout"] + self.b["dropout"]:
            return f"dropout is on, so no two layouts can agree: {', '.join(dropping[:2])}"
        if not self.ratio:
            return f"{how}: record the loss, to tell whether the forward pass is right"
        most = self.group(self.share >= self.share.quantile(0.8))
        counts = [n for of_rank in self.b["targets"] for n in of_rank]
        uneven = f"; or a mean of means: targets are uneven, {counts[:4]}" * (len(set(counts)) > 1)
        return self.mean_of_means() or (
            f"forward pass: the loss is {self.b['loss']}, not {self.a['loss']}; {how}, most those "
            f"of {most}: mask, positions, arithmetic, or ranks that must read the same samples and "
            f"do not{uneven}{later}")

    # Verdicts on the loss

    def mean_of_means(self):
        """Weighted by the targets of ranks or micro-batches, the losses are right."""
        pairs = [both for both in zip(self.b["targets"], self.b["losses"]) if both[1]]
        if all(len(n) == len(x) for n, x in pairs):
            pairs = [([n], [x]) for both in pairs for n, x in zip(*both)]
        counts, losses = [sum(n) for n, _ in pairs], [sum(x) for _, x in pairs]
        weighted = sum(n * x for n, x in zip(counts, losses)) / (sum(counts) or 1)
        if len(set(counts)) > 1 and sum(losses):
            ratio = self.ratio * weighted * len(losses) / sum(losses)
            if abs(ratio - 1) <= self.loss_tolerance + self.slack:
                return f"a mean of means: weighted by the targets {counts[:4]} the losses are right"

    def averaging(self):
        if self.ratio and not self.loss_right:
            return self.mean_of_means() or (
                f"loss only: it is {self.b['loss']}, not {self.a['loss']} "
                f"({self.factor(self.ratio, 1e-3)}), and the gradients agree: how the losses of "
                f"ranks or micro-batches are averaged")

    START = names_and_shapes, initial_weights
    ALWAYS = not_finite, copies_of_weights, clipping, samples
    TOGETHER = update, copies_of_gradients
    GRADIENTS = (tie_lost, scaled, missing, not_cleared, rounded, only_some, all_point_elsewhere)
    LAST = (averaging,)

    # Words

    def where(self):
        """Where it goes wrong: a backward pass goes from the last parameter to the first."""
        if not self.loss_right:
            return "; nor is the loss: a sum over ranks is missing in the forward pass, or ranks " \
                "that must read the same samples do not" * bool(self.ratio)
        last = max(self.off.nonzero(), default=0)
        right = (~self.off & ~self.unclear)[:last].sum()
        down = last + 1 < len(self.names) and self.off.sum() > 2 and right < 0.2 * last
        return f"; wrong from {self.names[last]} on down, right above it" * down + self.behind

    def factor(self, r, loose):
        """Say what r is, from the sizes of the run."""
        n, dp, a = len(self.b["losses"]), len(self.b["readers"]), len(self.b["targets"][0])
        sizes = {"the ranks": n, "the micro-batches": a, "ranks x micro-batches": n * a,
                 "the targets": count(self.b), "a rank's targets": sum(self.b["targets"][0])}
        if 1 < dp < n:
            sizes |= {"ranks that read the same samples": n // dp,
                      "ranks that read different samples": dp,
                      "ranks that read different samples x micro-batches": dp * a}
        for word, ratio in ("times", r), ("divided by", 1 / r):
            causes = {}  # the first words for each size, but both where n = a
            for words, size in sizes.items():
                if size > 1 and abs(ratio / size - 1) < loose and not (" x " in words and causes):
                    causes[words] = size
            if causes:
                return f"{word} {max(causes.values())}: {' or '.join(causes)}"
            if 1.5 < ratio < 64.5 and abs(ratio / round(ratio) - 1) < loose:
                return f"{word} {round(ratio)}: a pipeline's micro-batches, or a number in the code"
        power = r > 200 and abs(math.log2(r) - round(math.log2(r))) < loose
        return f"times {r:.4g}" + ", a power of two: a loss scale that is not undone" * power

    def ranks(self, kind, off):
        first = self.names[off.nonzero()[0]]
        return say(self.b[kind][first]["ranks"])

    def group(self, off):
        """Say in a few words which parameters these are; ``unclear`` ones may be among them."""
        chosen, may = ([name for name, is_in in zip(self.names, mask) if is_in]
                       for mask in (off, off | self.unclear))
        found = []
        for pattern, label in (
            (".*", "every parameter"), (r".*(norm|\bln_).*", "the norms"),
            (r"(?!.*(norm|\bln_)).*", "all but the norms"),
            (r"(.*?\.)?(\d+)\..*", r"layer \2"), (r"(.*?\.)?\d+\.", "every "), ("$", ""),
        ):
            labels = {name: re.sub(f"^{pattern}", label, name) for name in self.names}
            used = list(dict.fromkeys(labels[name] for name in chosen))
            if all(name in may for name in self.names if labels[name] in used):
                found.append(used)
        words = min(found, key=len)
        few = f"{words[0]} to {words[-1]} ({len(chosen)} of {len(self.names)} parameters)"
        return few if len(words) > 4 else ", ".join(words)


def say(groups):
    """Ranks that hold the same stand together."""
    words = [str(ranks[0]) if len(ranks) == 1 else str(tuple(ranks)) for ranks in groups]
    return f"rank{'s' * (len(words) > 1)} {' and '.join(words)}"


def count(step):
    """The targets of a step. Ranks that read the same count once."""
    return sum(sum(step["targets"][ranks[0]]) for ranks, _ in step["readers"])


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tools.parity", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", help="the recording of the run that is right")
    parser.add_argument("run", help="the recording that is compared with it")
    parser.add_argument("--table", action="store_true",
                        help="print the gradient of every parameter in the first step")
    args = parser.parse_args(argv)
    recordings = []
    for path in (args.reference, args.run):
        try:
            with open(path) as file:
                recordings.append([json.loads(line) for line in file])
            recordings[-1][0]["values"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            parser.error(f"{path} is no recording: {error!r}")
    comparison = Comparison(*recordings)
    message = comparison.first_difference()
    if args.table:
        print(f"{'gradient':50}  reference        run      ratio  difference")
        for name, x, y, d in zip(comparison.names, *(z.length for z in comparison.first[2:]),
                                 distance(*comparison.first[2:])):
            print(f"{name:50} {x:10.3e} {y:10.3e} {y / x:10.6f} {d:11.1e}")
    if message:
        print(f"DIFFERENT: {message}")
        sys.exit(1)
    steps = min(map(len, recordings))
    print(f"EQUAL up to rounding, {comparison.together} of {steps} steps: in the first, gradients "
          f"up to {comparison.tolerance:.1e}, the loss up to {comparison.loss_tolerance:.1e}")


if __name__ == "__main__":
    main()
