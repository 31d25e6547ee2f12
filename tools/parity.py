"""Is your trainer on N processes the run of one? Record both and compare them.

    parity = Parity("two.parity", model, optimizer)     # after the model is parallelised
    parity.record(step, loss, batch)    # every rank; gradients are reduced, and not yet clipped
    python -m tools.parity one.parity two.parity        # --table prints every parameter

Record some five steps of any two layouts: one process and n ranks, DDP and TP, yesterday's commit
and today's. Both start from the same weights, read the same samples and have no dropout. It prints:

    EQUAL               nothing differs but rounding. Exit status 0
    NOTHING FOUND       in 16 bits: what was compared, which proves less. Exit status 0
    DIFFERENT           the first difference and its likely cause. Exit status 1
    NOTHING TO COMPARE  the models do not learn, such as when all gradients are 0. Exit status 1

Recording needs torch alone; comparing needs parity_checks.py beside this file too, which says what
is checked. A recorded step reads weights and gradients once more: it takes up to twice the time of
a plain step if each rank has some 256 tokens or more; with fewer it takes longer.

It cannot see what only the forward pass uses, buffers, what does not act (such as clipping that is
never active), and what lies below the tolerance. So run it in float32 or float64: in bfloat16 it
finds only what is large, such as factors, missing reductions, samples and missing gradients.
Gradients must not be nothing but rounding, as at an optimum; if a ReLU or a router may flip by
rounding, only float64 proves it.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import re

import torch
import torch.distributed as dist

FORMAT = 2  # of the recordings
K, BLOCK = 8, 2**17  # projections; numbers that are projected at once: they stay in the cache
WRAPPER = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Parity:
    """Records what must not depend on how a run is spread over processes. Every rank makes one.

    Args:
        path: the file that rank 0 writes, a line of JSON for each step.
        model: a module, or {name: parameter}: of stages of a pipeline, or shards. What is missing
            in a dict of shards, such as frozen parameters, comes from the model:
            ``dict(model.named_parameters()) | shards``.
        optimizer: one, or a list. What it is given in ``step()`` is compared with what is recorded.
        where: for plain tensors that are shards: ``where(name, tensor)`` returns (shape of the
            whole, [(part of the tensor, offsets in the whole), ...]), or None for a whole tensor.
        loss: "mean" or "sum": how the losses that ranks pass to ``record`` make that of the batch.
            Ranks that read the same samples and have the same loss count once, as under tensor
            parallelism.
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
            batch: the list of micro-batches as this rank has read them, before it cuts them along
                the sequence: each a tensor or NumPy array with a row for each sample, or a tuple,
                list, dict or dataclass of them, nested as you like. The targets are what is called
                labels or targets, or the last.
        """
        self.hook.remove()
        losses = loss if isinstance(loss, (list, tuple)) else [] if loss is None else [loss]
        losses = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in losses]
        self.types.update(getattr(x, "dtype", None) for x in [*losses, *self.parameters.values()])
        if any(few_bits(x) for x in losses if not torch.is_tensor(x)):
            self.types.add(torch.float32)
        losses = [float(x) for x in losses]
        samples, targets, numbers = read(batch if isinstance(batch, list) else [batch])
        gradients = {name: self.summed(name, p.grad)
                     for name, p in self.parameters.items() if p.grad is not None}
        self.squares = {name: sum(row[0] for *_, row in parts) for name, parts in gradients.items()}
        own = {
            "values": {name: self.summed(name, p) for name, p in self.parameters.items()},
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
            line = {"format": FORMAT, "step": step, "ranks": everyone, "loss": self.loss,
                    **{kind: merge(everyone, kind) for kind in ("values", "gradients")}}
            with open(self.path, self.mode) as file:
                file.write(json.dumps(line) + "\n")
        self.mode = "a"

    def parts(self, name, tensor):
        """(shape of the whole, [(part, offsets), ...]) of what this rank holds of a tensor."""
        if hasattr(tensor, "placements"):  # a DTensor
            from torch.distributed.tensor import Replicate
            tensor = tensor.redistribute(placements=[
                Replicate() if place.is_partial() else place for place in tensor.placements])
            # What distributed checkpoints call: nothing public says which part a rank holds.
            (chunk,) = tensor.__create_chunk_list__()
            return tensor.shape, [(tensor.to_local(), chunk.offsets)]
        return self.where and self.where(name, tensor) or (
            tensor.shape, [(tensor, [0] * tensor.ndim)])

    def summed(self, name, tensor):
        """[(shape of the whole, offsets, size, sums), ...] of what this rank holds of a tensor."""
        shape, parts = self.parts(name, tensor)
        return [(tuple(shape), tuple(offsets), tuple(part.shape), sums(part, offsets, shape))
                for part, offsets in parts]

    def before_step(self, optimizer):
        """Note how much longer gradients are than in ``record``: other steps accuse nobody."""
        own = {p for group in optimizer.param_groups for p in group["params"]}
        large = 1e-12 * max(self.squares.values(), default=0.0)  # others may underflow
        for name, p in self.parameters.items():
            if p in own and p.grad is not None and (old := self.squares.pop(name, 0.0)) > large:
                _, parts = self.parts(name, p.grad)
                self.factors.append((sum(square(part) for part, _ in parts) / old) ** 0.5)


def few_bits(x):
    """Whether a number was a float32 before it became a Python float. Not what is only rounding."""
    x = float(x)
    return math.isfinite(x) and abs(x) > 1e-12 and math.frexp(x)[0] * 2**36 % 1 == 0


def mix(x):
    """SplitMix64's finaliser on int64: each bit of x changes half of the bits of the result."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & 2**33 - 1)


def blocks(flat):
    """A tensor of one or two dimensions in float64, in blocks of rows: (first row, block)."""
    block = BLOCK if flat.device.type == "cpu" else 2**24
    rows = max(1, block // max(1, flat[:1].numel()))
    for begin in range(0, len(flat), rows):
        yield begin, flat[begin : begin + rows].double()


@torch.no_grad()
def square(tensor):
    """The square of the length."""
    return float(sum(x.dot(x) for _, x in blocks(tensor.to_dense().reshape(-1))))


def vectors(size, offsets, shape, side, device):
    """(numbers of a part, K) random numbers of variance 1 for a part of a tensor of ``shape``:
    hashes of the flat index in the whole, so that parts add up. ``side``: 1 or -1."""
    rest = torch.arange(math.prod(size), device=device)  # the flat index in the part
    index, stride = torch.ones_like(rest), 1  # in the whole, from 1
    for n, offset, whole in reversed([*zip(size, offsets, shape)]):
        index += (rest % n + offset) * stride
        rest, stride = rest // n, stride * whole
    bits = mix(side * index)[:, None] >> torch.arange(0, 8 * K, 8, device=device) & 255
    # The sizes differ, from 0.5 to 1.5: with signs alone, rows that change places may cancel.
    return ((bits % 128).double() / 127 + 0.5) * (1 - bits // 128 * 2) / (13 / 12) ** 0.5


def sums(tensor, offsets, shape):
    """Of a part of a tensor of ``shape``: [square of the length, how many numbers are only rounding
    beside the others, K projections]. Projections give the distance of two tensors (Alon, Matias,
    Szegedy: The space complexity of approximating the frequency moments, 1996). Here they are on
    products of a vector over rows and one over columns, which costs two matrix products (Indyk,
    McGregor: Declaring independence via the sketching of sketches, 2008)."""
    tensor, device = tensor.detach().to_dense(), tensor.device
    if tensor.ndim == 1 and len(tensor) > 2**20:  # to save memory
        pieces = [sums(piece, [offsets[0] + i * 2**20], shape)
                  for i, piece in enumerate(tensor.split(2**20))]
        return [sum(column) for column in zip(*pieces)]
    # As near to a square as possible, by the shape of the whole, which all ranks know
    cut = min(range(len(shape) + 1), key=lambda i: math.prod(shape[:i]) + math.prod(shape[i:]))
    rows = vectors(tensor.shape[:cut], offsets[:cut], shape[:cut], -1, device)
    if cut == 0:  # a vector
        rows = torch.ones_like(rows)
    columns = vectors(tensor.shape[cut:], offsets[cut:], shape[cut:], 1, device)
    little = 1e-10 if tensor.dtype == torch.float64 else 1e-3  # beside a usual number: rounding
    total = torch.zeros(2 + K, dtype=torch.float64, device=device)
    for begin, x in blocks(tensor.reshape(len(rows), len(columns))):
        own = torch.linalg.vector_norm(x).square()
        usual = (own / max(x.numel(), 1)).sqrt()
        total[0] += own
        total[1] += x.count_nonzero() - (x.abs() >= little * usual).count_nonzero() * (usual > 0)
        total[2:] += (x @ columns * rows[begin : begin + len(x)]).sum(0) / K**0.5
    return total.tolist()


def leaves(batch, name="", top=True):
    """(name, tensor) of all tensors in a structure. What is in an inner list has one name."""
    if hasattr(batch, "full_tensor"):
        batch = batch.full_tensor()
    if type(batch).__module__ == "numpy" and batch.dtype.kind in "biuf":  # not text
        batch = torch.as_tensor(batch)
    if torch.is_tensor(batch):
        if batch.ndim:
            yield name or "0", batch.to_dense()
        return
    if dataclasses.is_dataclass(batch) and not hasattr(batch, "items"):
        batch = vars(batch)
    if hasattr(batch, "items"):
        items = batch.items()
    elif isinstance(batch, (list, tuple)):
        alike = isinstance(batch, list) and not top
        items = [("", x) for x in batch] if alike else enumerate(batch)
    else:
        items = []
    for key, x in items:
        yield from leaves(x, f"{name}.{key}".strip("."), False)


def read(batch):
    """({name: [a fingerprint of each sample]}, [targets of each micro-batch], numbers in all) of a
    list of micro-batches. 0, -100 and what a mask hides do not count: rows may be padded."""
    samples, targets, numbers = collections.defaultdict(list), [], 0
    for micro_batch in batch:
        found = [*leaves(micro_batch)]
        named = dict(found)
        last = [x for name, x in found if re.search("labels|targets", name)] or [*named.values()]
        targets += [int((x != -100).sum()) for x in last[-1:]]
        numbers += max((x.numel() for _, x in found), default=0)
        for name, x in found:
            prefix, key = re.fullmatch(r"(.*?)([^.]*)", name).groups()
            mask = named.get(f"{prefix}attention_mask")
            if key in ("input_ids", "position_ids") and mask is not None and mask.shape == x.shape:
                x = x * (mask != 0)
            samples[name] += fingerprints(x.reshape(len(x), -1) if x.numel() else x[:0])
    return samples, targets, numbers


def fingerprints(x):
    """A hash of each row of integers. Floats may have been computed, and are compared up to
    rounding: [length, two projections, rounding of their type] of each row."""
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() or x.is_complex() else 0
    if x.is_complex():
        x = torch.view_as_real(x).flatten(1)
    x = x.double() if x.is_floating_point() else x.long()
    hidden = (x == 0) | (x == -100)
    if x.is_floating_point():
        x = x.masked_fill(hidden, 0).nan_to_num()
        two = vectors(x.shape[1:], [0], x.shape[1:], 1, x.device)[:, :2]
        lengths = x.norm(dim=1, keepdim=True)
        return torch.cat([lengths, x @ two, torch.full_like(lengths, eps)], 1).tolist()
    mixed = mix(x ^ mix(torch.arange(1, x.shape[1] + 1, device=x.device)))
    return mixed.masked_fill(hidden, 0).sum(1).tolist()


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
        once, mean, total = torch.zeros(3, 2 + K, dtype=torch.float64)
        for copies in regions.values():
            rows = torch.tensor([*copies.values()], dtype=torch.float64)
            unlike = rows.unique(dim=0)  # replicas count once
            once, mean, total = once + rows[0], mean + unlike.mean(0), total + unlike.sum(0)
            apart.append((rows - rows[0])[:, 2:].norm(dim=1).max().item())
            if apart[-1] == max(apart):
                alike = itertools.groupby(sorted(copies, key=copies.get), key=copies.get)
                ranks = " and ".join(map(str, sorted(sorted(group) for _, group in alike)))
        held = sum(math.prod(size) for _, size in regions)
        once[1] /= max(held, 1)
        tensors[name] = {"shape": shape, "held": held, "ranks": ranks, "sums": [
            math.hypot(*apart), *once.tolist(), *mean[2:].tolist(), *total[2:].tolist()]}
    return tensors


def main(argv=None):
    parser = argparse.ArgumentParser("python -m tools.parity", description=__doc__.splitlines()[0])
    parser.add_argument("reference", help="the recording of the run that is right")
    parser.add_argument("run", help="the recording that is compared with it")
    parser.add_argument("--table", action="store_true", help="print gradients of the first step")
    args = parser.parse_args(argv)
    try:  # here, since a trainer that records needs this file alone
        from tools.parity_checks import compare, table
    except ImportError:  # both files are copied into another folder
        from parity_checks import compare, table
    try:
        with open(args.reference) as one, open(args.run) as two:
            one, two = ([json.loads(line) for line in file] for file in (one, two))
        one[0]["ranks"], two[0]["ranks"]
        if any(lines[0].get("format") != FORMAT for lines in (one, two)):
            raise ValueError("another version of tools/parity.py wrote it: record it again")
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"{args.reference} or {args.run} is no recording: {error}")
    message = compare(one, two)
    if args.table:
        print(table(one, two))
    print(message)
    return int(message.startswith(("DIFFERENT", "NOTHING TO COMPARE")))  # the exit status


if __name__ == "__main__":
    raise SystemExit(main())
