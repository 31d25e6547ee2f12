"""Is your trainer on N processes the run of one? Record both and compare them.

    parity = Parity("two.parity", model, optimizer)     # after the model is parallelised
    parity.record(step, loss, batch)    # every rank; gradients are reduced, and not yet clipped
    python -m tools.parity one.parity two.parity        # --table prints every parameter

Record some five steps of any two layouts: one process and n ranks, DDP and TP, yesterday's commit
and today's. Both start from the same weights, read the same samples and have no dropout. It prints
EQUAL, or names the first difference and its likely cause and exits with 1. Recording needs torch
alone; comparing needs parity_checks.py beside this file too, which says what is checked.

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
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"{args.reference} or {args.run} is no recording: {error}")
    message = compare(one, two)
    if args.table:
        print(table(one, two))
    print(message)
    return int(message.startswith("DIFFERENT"))  # the exit status


if __name__ == "__main__":
    raise SystemExit(main())
