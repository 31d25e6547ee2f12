"""Is your trainer on N processes the run of one? Record both and compare them.

    parity = Parity("two.parity", model, optimizer)     # after the model is parallelised
    parity.record(step, loss, batch)    # every rank; gradients are reduced, and not yet clipped
    python -m tools.parity one.parity two.parity        # --table prints every parameter

Record some five steps of any two layouts: one process and n ranks, DDP and TP, yesterday's commit
and today's. Both start from the same weights, read the same samples and have no dropout. It prints
EQUAL, or names the first difference and its likely cause and exits with 1. It needs torch alone.

It cannot see what only the forward pass uses, buffers, what does not act (such as clipping that is
never active), and what lies below the tolerance. So run it in float32 or float64: in bfloat16 it
finds only factors, missing reductions, samples and missing gradients. Gradients must not be nothing
but rounding, as at an optimum; if a ReLU or a router may flip by rounding, only float64 proves it.
"""

import argparse
import collections
import itertools
import json
import math
import re
from types import SimpleNamespace

import torch
import torch.distributed as dist

K, BLOCK = 4, 2**18  # projections; numbers that are summed at once
WRAPPER = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Parity:
    """Records what must not depend on how a run is spread over processes. Every rank makes one.

    Args:
        path: the file that rank 0 writes, a line of JSON for each step.
        model: a module, or {name: parameter}: of stages of a pipeline, or shards.
        optimizer: one, or a list. What it is given in ``step()`` is compared with what is recorded.
        where: for plain tensors that are shards: ``where(name, tensor)`` returns (shape of the
            whole, [(part of the tensor, offsets in the whole), ...]), or None for a whole tensor.
        loss: "mean" or "sum": how the losses that ranks pass to ``record`` make that of the batch.
        dtype: the type of matrix products, if no module's output shows it. For TF32 torch.float16.
    """

    def __init__(self, path, model, optimizer=None, where=None, loss="mean", dtype=None):
        self.path, self.where, self.loss, self.mode = path, where, loss, "w"
        self.types, self.dropout, self.squares, self.factors = {dtype}, [], {}, []
        self.hook = torch.nn.modules.module.register_module_forward_hook(  # until the first record
            lambda module, inputs, output: self.types.add(getattr(output, "dtype", None)))
        if isinstance(model, torch.nn.Module):
            self.dropout = [f"{name}.{key} = {p}" for name, module in model.named_modules()
                            for key, p in vars(module).items() if key == "p" or "dropout" in key
                            if module.training and isinstance(p, float) and 0 < p < 1]
            model = dict(model.named_parameters(remove_duplicate=False))
        self.parameters = {WRAPPER.sub("", n): p for n, p in model.items() if p.is_floating_point()}
        for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            if each := getattr(each, "optimizer", each):  # accelerate wraps it
                each.register_step_pre_hook(lambda optimizer, *_: self.before_step(optimizer))

    @torch.no_grad()
    def record(self, step, loss=None, batch=None):
        """Record a step. Call it on every rank, when gradients are reduced, and not yet clipped.

        Args:
            loss: of this rank: a number; a list, the losses of micro-batches, which add up; or None
                on a rank that has none, such as the first stages of a pipeline.
            batch: the list of micro-batches as this rank has read them: each a tensor with a row
                for each sample, or a tuple, list or dict of them, the targets last.
        """
        self.hook.remove()
        losses = loss if isinstance(loss, (list, tuple)) else [] if loss is None else [loss]
        losses = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in losses]
        self.types.update(getattr(x, "dtype", None) for x in [*losses, *self.parameters.values()])
        losses = [float(x) for x in losses]
        if any(x and math.isfinite(x) and math.frexp(x)[0] * 2**36 % 1 == 0 for x in losses):
            self.types.add(torch.float32)  # a float of so few bits was a tensor of this type
        samples, targets, numbers = read(batch if isinstance(batch, list) else [batch])
        gradients = {name: self.parts(name, p.grad)
                     for name, p in self.parameters.items() if p.grad is not None}
        self.squares = {name: sum(row[0] for *_, row in parts) for name, parts in gradients.items()}
        own = {
            "values": {name: self.parts(name, p) for name, p in self.parameters.items()},
            "gradients": gradients, "norm": sum(self.squares.values()) ** 0.5,
            "losses": losses, "factors": self.factors, "dropout": self.dropout,
            "weight_eps": [torch.finfo(p.dtype).eps for p in self.parameters.values()],
            "eps": [torch.finfo(t).eps for t in self.types if getattr(t, "is_floating_point", 0)],
            "samples": samples, "numbers": numbers, "targets": targets,  # of these, in each loss:
            "counts": targets if len(targets) == len(losses) else [sum(targets)],
        }
        everyone, self.factors = [own], []
        if dist.is_available() and dist.is_initialized():
            everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(own, everyone)
        if everyone:
            losses = [sum(own["losses"]) for own in everyone if own["losses"]]
            line = {"step": step, "ranks": everyone,
                    "loss": losses and sum(losses) / {"mean": len(losses), "sum": 1}[self.loss],
                    "targets": list({str(own["samples"]): sum(own["targets"])  # of each batch
                                     for own in everyone if own["targets"]}.values()),
                    **{kind: merge(everyone, kind) for kind in ("values", "gradients")}}
            with open(self.path, self.mode) as file:
                file.write(json.dumps(line) + "\n")
        self.mode = "a"

    def parts(self, name, tensor):
        """[(shape of the whole, offsets, size, sums), ...] of what this rank holds of a tensor."""
        shape, parts = tensor.shape, [(tensor, [0] * tensor.ndim)]
        if hasattr(tensor, "placements"):  # a DTensor
            from torch.distributed.tensor import Replicate
            tensor = tensor.redistribute(placements=[
                Replicate() if place.is_partial() else place for place in tensor.placements])
            # What distributed checkpoints call: nothing public says which part a rank holds.
            (chunk,) = tensor.__create_chunk_list__()
            parts = [(tensor.to_local(), chunk.offsets)]
        elif self.where and (shards := self.where(name, tensor)):
            shape, parts = shards
        return [(tuple(shape), tuple(offsets), tuple(part.shape), sums(part, offsets, shape))
                for part, offsets in parts]

    def before_step(self, optimizer):
        """Note how much longer gradients are than in ``record``: other steps accuse nobody."""
        own = {p for group in optimizer.param_groups for p in group["params"]}
        large = 1e-12 * max(self.squares.values(), default=0.0)  # others may underflow
        for name, p in self.parameters.items():
            if p in own and p.grad is not None and (old := self.squares.pop(name, 0.0)) > large:
                self.factors.append((sum(x[0] for *_, x in self.parts(name, p.grad)) / old) ** 0.5)


def mix(x):
    """SplitMix64's finaliser on int64: each bit of x changes half of the bits of the result."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & 2**33 - 1)


def sums(tensor, offsets, shape):
    """Of a part of a tensor of ``shape``: [square of the length, how many numbers are only rounding
    beside the others, in float32 and in float64, K projections on vectors of +1 and -1]. They give
    the distance of two tensors (Alon, Matias, Szegedy: The space complexity of approximating the
    frequency moments, 1996). Signs are hashes of the flat index in the whole: parts add up."""
    flat, device = tensor.detach().to_dense().reshape(-1), tensor.device
    total = torch.zeros(3 + K, dtype=torch.float64, device=device)
    for begin in range(0, len(flat), BLOCK):
        x = flat[begin : begin + BLOCK].double()
        rest = torch.arange(begin, begin + len(x), device=device)  # the flat index in the part
        index, stride = torch.ones_like(rest), 1  # in the whole, from 1
        for size, offset, whole in reversed(list(zip(tensor.shape, offsets, shape))):
            index += (rest % size + offset) * stride
            rest, stride = rest // size, stride * whole
        signs = 1 - 2 * (mix(index) >> torch.arange(40, 40 + K, device=device)[:, None] & 1)
        size, usual = x.abs(), x.square().mean().sqrt()
        small = [(size > 0) & (size < share * usual) for share in (1e-3, 1e-10)]
        total += torch.cat([torch.stack([x.square(), *small]).sum(1), signs.double() @ x / K**0.5])
    return total.tolist()


def read(batch):
    """({name: a hash of each sample}, [targets of each micro-batch], numbers in all) of a list of
    micro-batches. 0, -100 and what a mask hides count nothing in hashes: rows may be padded."""
    samples, targets, numbers = collections.defaultdict(list), [], 0
    for tensors in batch:
        tensors = [tensors] if torch.is_tensor(tensors) else tensors or ()
        tensors = tensors.items() if hasattr(tensors, "items") else enumerate(tensors)
        tensors = {name: x for name, x in tensors if torch.is_tensor(x) and x.ndim}
        targets += [int((x != -100).sum()) for x in list(tensors.values())[-1:]]
        numbers += max((x.numel() for x in tensors.values()), default=0)
        mask = tensors.get("attention_mask", torch.ones(0))
        for name, x in tensors.items():
            x = x * mask if name in ("input_ids", "position_ids") and mask.shape == x.shape else x
            x = x.reshape(len(x), math.prod(x.shape[1:]))
            x = x.double().view(torch.int64) if x.is_floating_point() else x.long()
            mixed = mix(x ^ mix(torch.arange(1, x.shape[1] + 1, device=x.device)))
            samples[str(name)] += mixed.masked_fill((x == 0) | (x == -100), 0).sum(1).tolist()
    return samples, targets, numbers


def merge(everyone, kind):
    """{name: its tensor}, from what all ranks have recorded of weights or of gradients. A region
    counts once: ranks that hold it must agree. If not, ``ranks`` says who agrees with whom."""
    tensors, found = {}, collections.defaultdict(lambda: collections.defaultdict(dict))
    for rank, own in enumerate(everyone):
        for name, parts in own.pop(kind).items():
            for shape, offsets, size, row in parts:
                found[name, shape][offsets, size][rank] = row
    for (name, shape), regions in found.items():
        apart, ranks = [], ""
        once, mean, total = torch.zeros(3, 3 + K, dtype=torch.float64)
        for copies in regions.values():
            rows = torch.tensor([*copies.values()], dtype=torch.float64)
            unlike = rows.unique(dim=0)  # replicas count once
            once, mean, total = once + rows[0], mean + unlike.mean(0), total + unlike.sum(0)
            apart.append((rows - rows[0])[:, 3:].norm(dim=1).max().item())
            if apart[-1] == max(apart):
                alike = itertools.groupby(sorted(copies, key=copies.get), key=copies.get)
                ranks = " and ".join(map(str, sorted(sorted(group) for _, group in alike)))
        held = sum(math.prod(size) for _, size in regions)
        once[1:3] /= max(held, 1)
        tensors[name] = {"shape": shape, "held": held, "ranks": ranks, "sums": [
            math.hypot(*apart), *once.tolist(), *mean[3:].tolist(), *total[3:].tolist()]}
    return tensors


def columns(step, kind, names):
    """What ``merge`` says of these parameters: tensors, a parameter in each row."""
    rows = torch.tensor([step[kind][name]["sums"] if name in step[kind] else [0.0] * (4 + 3 * K)
                         for name in names], dtype=torch.float64)
    return SimpleNamespace(
        spread=rows[:, 0], length=rows[:, 1].sqrt(), noise=rows[:, 2:4], sketch=rows[:, 4 : 4 + K],
        mean=rows[:, -2 * K : -K], total=rows[:, -K:])


def distance(x, y, r=1.0):
    """The distances of r x and y, estimated; the differences of their lengths are exact."""
    apart = (r * x.sketch - y.sketch).norm(dim=1)
    return apart.maximum((abs(r) * x.length - y.length).abs())


def factor(step, r, near):
    """Say what r is, from the sizes of the run."""
    first = step["ranks"][0]["targets"]
    n, dp, a = len(step["ranks"]), len(step["targets"]), len(first)
    sizes = {"the ranks": n, "the micro-batches": a, "the targets": sum(step["targets"]),
             "a rank's targets": sum(first), "ranks x micro-batches": n * a}
    if 1 < dp < n:
        sizes |= {"ranks that read the same samples": n // dp,
                  "ranks that read different samples": dp,
                  "ranks that read different samples x micro-batches": dp * a}
    for word, ratio in ("times", r), ("divided by", 1 / (r or math.nan)):
        causes = [name for name, size in sizes.items() if size > 1 and abs(ratio / size - 1) < near]
        if causes:
            simple = [name for name in causes if " x " not in name] or causes
            return f"{word} {sizes[simple[0]]}: {' or '.join(simple)}"
    power = 200 < r < math.inf and abs(math.log2(r) - round(math.log2(r))) < near
    scaled = ", a power of two: a loss scale that is not undone" if power else ""
    return f"times {r:.4g}{scaled}"


def describe(names, unclear, off):
    """Say in a few words which parameters are ``off``; ``unclear`` ones may be among them."""
    found = []
    for pattern, label in (
            (".*", "every parameter"), (r".*(norm|\bln_).*", "the norms"),
            (r"(?!.*(norm|\bln_)).*", "all but the norms"),
            (r"(.*?\.)?(\d+)\..*", r"layer \2"), (r"(.*?\.)?\d+\.", "every "), ("$", "")):
        labels = [re.sub(f"^{pattern}", label, name) for name in names]
        used = list(dict.fromkeys(itertools.compress(labels, off)))
        if all(may for label, may in zip(labels, off | unclear) if label in used):
            found.append(used)
    words = min(found, key=len)
    few = f"{words[0]} to {words[-1]} ({off.sum()} of {len(names)} parameters)"
    return few if len(words) > 4 else ", ".join(words)


def compare(one, two):
    """Say that run ``two`` equals the reference ``one``, or what differs, causes before effects."""
    a, b, names = one[0], two[0], [*one[0]["values"]]
    weight_types, types = ([max(x for rank in step["ranks"] for x in rank[key]) for step in (a, b)]
                           for key in ("weight_eps", "eps"))
    weight_eps, eps, eps_acc = max(weight_types), max(types), min(max(types), 2**-23)
    N, m = len(names), max(sum(a["targets"]), sum(b["targets"])) or 2**16
    M = max(sum(rank["numbers"] for rank in step["ranks"]) for step in (a, b)) or 2**16
    # Roundings of products make a random walk through the layers, and sums one over the batch.
    fine = eps * N**0.5 + 2 * eps_acc * min(M, 2**16) ** 0.5
    tolerance = max(fine, 0.3 if min(types) > 2**-12 else 1e-12)  # 16 bits flip ReLUs and routers
    loss_tolerance = 2 * eps * max(N / m, 1.0) ** 0.5 + 16 * eps_acc
    slack = largest = together = 0
    for k, (a, b) in enumerate(zip(one, two)):
        at = f"DIFFERENT: step {a['step']}:"
        # w and x: weights and gradients of the reference, v and y: of the run.
        w, v, x, y = (columns(step, kind, names)
                      for kind in ("values", "gradients") for step in (a, b))
        if not together:
            first_w, first_v, x_before, longest, g, noise = w, v, x, *torch.zeros(3, N).double()
        apart, floor = distance(x, y), 0.1 * x.length.norm() / N**0.5 + longest
        share = apart / (x.length + floor).clamp(min=1e-300)
        loose = slack * (longest + x.length)  # the weights differ by rounding already
        allowed = tolerance * (x.length + floor) + loose
        off = apart > allowed
        unclear = ~off & (x.length <= 2 * allowed)  # too short to prove anything
        group = lambda chosen: describe(names, unclear, chosen)

        if odd := a["values"].keys() ^ b["values"]:
            return f"{at} names: only one of the runs has {', '.join(sorted(odd)[:3])}"
        for name in names:
            want, have = (step["values"][name]["shape"] for step in (a, b))
            if (held := b["values"][name]["held"]) != math.prod(want) or want != have:
                return f"{at} shape: {name} is {have}, not {want}, and ranks hold {held} numbers"
        finite, bad = (w.length + x.length).isfinite().all(), ~(v.length + y.length).isfinite()
        if finite and bad.any():
            return f"{at} not finite: weights or gradients of {group(bad)}"
        words = "weights" if k else "initial weights"
        if (bad := v.spread > (1e-6 if k else 1e-12) * v.length).any():
            sets = b["values"][names[bad.nonzero()[0]]]["ranks"]
            return f"{at} {words}: ranks {sets} hold different values of {group(bad)}"
        far = distance(w, v) / w.length.clamp(min=1e-300)
        if k == 0 and (bad := far > (1e-12 if len({*weight_types}) == 1 else weight_eps)).any():
            permuted = far[bad].min() > 0.1 and w.length.allclose(v.length, 1e-9, 0)
            more = ", of the same length: are parts in another order?" if permuted else ""
            return f"{at} {words}: other values of {group(bad)}{more}"

        for key in dict.fromkeys(key for rank in a["ranks"] for key in rank["samples"]):
            rows = [[rank["samples"].get(key, []) for rank in step["ranks"]] for step in (a, b)]
            want, have = (collections.Counter(itertools.chain(*ranks)) for ranks in rows)
            n, m = want.total(), have.total()  # every sample is read by equally many ranks
            if more := [row for row in have if have[row] * n > want[row] * m]:
                lost, others = len(want.keys() - have), len(set(more) - want.keys())
                top = max(more, key=have.get)
                ranks = [i for i, own in enumerate(rows[1]) if top in own]
                words = ""
                if others:
                    words = f", {others} others are read: another seed, order or start"
                elif have[top] > 1:
                    words = f", one is read {have[top]} times, by ranks {ranks}"
                return f"{at} samples: {lost} of {len(want)} are missing{words}"

        if slack > 0.3 or not finite:  # rounding has parted the runs, or a loss scale is too high
            continue
        ways = w.sketch - first_w.sketch, v.sketch - first_v.sketch  # since the first step
        way, other, gap = (vectors.norm(dim=1) for vectors in (*ways, ways[0] - ways[1]))
        bad = gap > (slack + 2 * noise) * way.maximum(other) + 8 * weight_eps * first_w.length
        # Where the first gradient is only rounding, so is the way of the parameter.
        bad &= (g > tolerance * g.norm() / N**0.5) | (g == 0)
        if bad.any():
            r, by = (other / way)[bad], (gap / way.maximum(other))[bad].max()
            alike = r.max() - r.min() < 0.1 * abs(r[0] - 1)
            why = f", {factor(b, r[0], 0.02)}" if alike else ""
            return (f"{at} update: weights of {group(bad)} go another way, by up to {by:.0e} of it"
                    f"{why}: learning rate, decay, clipping, the optimizer, or a rank skips it")

        everywhere, known = bool((off | unclear).all()), [] not in (a["loss"], b["loss"])
        want, have = (step["loss"] if known else math.nan for step in (a, b))
        ratio = have / (want or math.nan)
        room = eps_acc * x.length.norm() * w.length.norm() + slack * (x.length + longest) @ way
        loss_right = abs(have - want) <= loss_tolerance * abs(want) + room
        behind = ""
        if loss_right:
            behind = "; the loss is right: look behind it"
        elif known:
            behind = "; nor is the loss right: look at the forward pass"
        last = max(off.nonzero(), default=0)  # a backward pass begins at the last parameter
        down = last + 1 < N and off.sum() > 2 and (off | unclear)[:last].double().mean() > 0.8
        where = behind
        if down:
            where = f"; wrong from {names[last]} on down, right above it{behind}"
        if (bad := y.spread > fine * (y.length + floor) + loose).any():
            i, norms = (bad * y.length).argmax(), [rank["norm"] for rank in b["ranks"]]
            mean, total = ((x.sketch - of_ranks)[i].norm() for of_ranks in (y.mean, y.total))
            why = "they must be averaged" if mean < total else "they must be added up"
            if min(mean, total) > allowed[i]:
                why = f"neither their sum nor their mean is right{where}"
                if max(norms) < 1.00001 * min(norms):
                    why = f"each rank has clipped its own to {norms[0]:.3g}: reduce before clipping"
            sets = b["gradients"][names[bad.nonzero()[0]]]["ranks"]
            return f"{at} not reduced: ranks {sets} hold different gradients of {group(bad)}: {why}"

        if off.any():
            who = "all gradients" if everywhere else f"gradients of {group(off)}"
            for i, j in itertools.combinations(off.nonzero().flatten().tolist(), 2):
                was_tied, is_tied = (z.sketch[i].equal(z.sketch[j]) for z in (x, y))
                gap = (x.sketch[i] - y.sketch[i] - y.sketch[j]).norm()
                if was_tied and not is_tied and gap <= allowed[i]:
                    return f"{at} a tie is lost: gradients of {names[i]} and {names[j]} must add up"

            i = (off * (x.length + y.length)).argmax()
            r = ((x.sketch[i] @ y.sketch[i]).sign() * y.length[i] / x.length[i]).item()
            limit = tolerance * (y.length + abs(r) * floor) + abs(r) * loose
            if r and (distance(x, y, r) <= limit)[off | everywhere].all():
                near = max(1e-3, min(0.1, 2 * tolerance))
                words = "; the loss too" if abs(ratio / r - 1) < near else behind
                return f"{at} {who}: {factor(b, r, near)}{words}"

            if (bad := off & (y.length < 1e-3 * x.length)).any():
                return f"{at} missing gradients: of {group(bad)}{behind}"
            more, old = (y.sketch - x.sketch)[off].flatten(), x_before.sketch[off].flatten()
            r = more @ old / (old @ old)
            if k and (more - r * old).norm() < 0.1 * more.norm():
                return f"{at} not cleared: {who} hold {r:.3g} of those of the step before"

            least, middle, most = (f(share[off]) for f in (torch.min, torch.median, torch.max))
            for word, low in ("bfloat16", 2**-12), ("float16", 2**-15), ("float32", 2**-28):
                if everywhere and loss_right and low < middle and most < 64 * low:
                    return f"{at} rounding: {middle:.0e}, as if {word} was in between (see dtype)"

            if not everywhere:
                return f"{at} {who} differ, by up to {most:.0e}{where}"
            how = f"all gradients point elsewhere, by {least:.0e} to {most:.0e}"
            if loss_right:
                return (f"{at} part of the batch: {how}, the loss is right: samples are lost or "
                        f"weigh more, as when ranks clip before the reduction, or in a wrong group")
            if dropping := sorted({x for rank in a["ranks"] + b["ranks"] for x in rank["dropout"]}):
                return f"{at} dropout is on, so no two layouts can agree: {', '.join(dropping[:2])}"
            if not known:
                return f"{at} {how}: record the loss, to tell whether the forward pass is right"

        if known and not loss_right:
            micro = [pair for rank in b["ranks"] for pair in zip(rank["counts"], rank["losses"])]
            whole = [(sum(it["targets"]), sum(it["losses"])) for it in b["ranks"] if it["losses"]]
            for pairs in micro, whole:
                counts, losses = torch.tensor(pairs, dtype=torch.float64).T
                r = ratio * (counts @ losses / counts.sum() / losses.mean()).item()
                if abs(r - 1) <= loss_tolerance + slack:
                    return f"{at} a mean of means: with losses weighted by targets it is right"
            words = f"the loss is {have}, not {want}"
            if off.any():
                return (f"{at} forward pass: {words}; {how}: mask, positions, arithmetic, weights "
                        f"that are not gathered, ranks that must share samples, or a mean of means")
            return (f"{at} loss only: {words} ({factor(b, ratio, 1e-3)}), and the gradients agree: "
                    f"how the losses of ranks or micro-batches are averaged")

        # What the optimizer was given, in the next line; unless the reference clips each tensor
        want, have = ([x for step in steps[k + 1 : k + 2] for rank in step["ranks"]
                       for x in rank["factors"]] or [0.0] for steps in (one, two))
        rounding, low, high = 1e-5 + 4 * weight_eps, min(have), max(have)
        if max(want) - min(want) <= rounding * max(want):
            words = f"{at} clipping by a wrong norm or before the reduction: scaled by {high:.6g},"
            if high - low > rounding * high:
                return f"{words} others by {low:.6g}, as by the norm of a part"
            r = (high * y.length.norm() / (max(want) * x.length.norm())).item()
            limit = (tolerance + 1e-5 + slack) * (1 + longest.norm() / x.length.norm())
            if 0 < r < math.inf and abs(r - 1) > limit:
                return f"{words} not by {max(want):.6g} ({factor(b, r, 0.01)})"

        noise = torch.where(g == 0, x.noise.maximum(y.noise)[:, int(eps < 1e-12)].sqrt(), noise)
        g = torch.where(g == 0, x.length.maximum(y.length), g)  # the first gradient that is not 0
        x_before, longest, together = x, longest.maximum(x.length), together + 1
        before, largest = largest, max(largest, share.max().item())
        # Adam moves an element by a whole step even if its gradient is only rounding: hence the
        # root. The factor 10, and 10 more if differences grow so fast, are measured, not derived.
        growth = min(10.0, largest / (before or largest or 1.0))
        slack = max(2 * (0.8 * tolerance) ** 0.5, 10 * growth * largest)
    verdict = "EQUAL up to rounding" if together else "DIFFERENT: the reference is not finite"
    though = ", though one computes in a coarser type" if types[0] != types[1] else ""
    return (f"{verdict}, {together} of {k + 1} steps{though}: gradients up to {tolerance:.1e}, "
            f"the loss up to {loss_tolerance:.1e} in the first; largest difference: {largest:.1e}")


def main(argv=None):
    parser = argparse.ArgumentParser("python -m tools.parity", description=__doc__.splitlines()[0])
    parser.add_argument("reference", help="the recording of the run that is right")
    parser.add_argument("run", help="the recording that is compared with it")
    parser.add_argument("--table", action="store_true", help="print gradients of the first step")
    args = parser.parse_args(argv)
    try:
        with open(args.reference) as one, open(args.run) as two:
            one, two = ([json.loads(line) for line in file] for file in (one, two))
        one[0]["ranks"], two[0]["ranks"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"{args.reference} or {args.run} is no recording: {error}")
    message = compare(one, two)
    if args.table:
        x, y = (columns(steps[0], "gradients", one[0]["values"]) for steps in (one, two))
        print(f"{'gradient':50}  reference        run      ratio  difference")
        for row in zip(one[0]["values"], x.length, y.length, y.length / x.length, distance(x, y)):
            print("{:50} {:10.3e} {:10.3e} {:10.6f} {:11.1e}".format(*row))
    print(message)
    return int(message.startswith("DIFFERENT"))  # the exit status


if __name__ == "__main__":
    raise SystemExit(main())
