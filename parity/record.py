"""Records the steps of a training run. It needs torch and this file alone."""

import collections
import dataclasses
import itertools
import json
import math
import os
import re
import stat

import torch
import torch.distributed as dist

FORMAT = 3  # of the recordings
HEAD = '{"parity": '  # a recording begins with it
K, BLOCK = 8, 2**17  # projections; numbers that are projected at once: they stay in the cache
COMPILED = set()  # types of what modules in compiled code return
WRAPPER = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Parity:
    """Records what must not depend on how a run is spread over processes. Every rank makes one.

    Args:
        path: the file that rank 0 writes, a line of JSON for each step. An earlier recording is
            replaced at once. Another file is refused.
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
        modules: if ``model`` is a dict: pairs (name, module), as ``model.named_modules()`` gives
            them. Their outputs show where a forward pass is wrong.
        others: {name: tensor}, what else the run keeps, such as an average of the weights (EMA).
        nudge: 1, 2, ...: move each weight at random by up to one rounding of ``dtype``, by default
            of bfloat16. Two such recordings of the reference show what rounding does: --noise.
    """

    def __init__(self, path, model, optimizer=None, where=None, loss="mean", dtype=None,
                 modules=(), others=None, nudge=0):
        self.path, self.where, self.loss = os.fspath(path), where, loss
        self.types, self.squares, self.factors, self.late = {dtype} - {None}, {}, [], []
        self.outputs, self.without = {}, set()  # without: a gradient in ``record``
        self.file = create(self.path) if rank() == 0 else None
        COMPILED.clear()
        # While steps are recorded: module outputs show types, and where a forward pass is wrong.
        self.hook = torch.nn.modules.module.register_module_forward_hook(self.after_forward)
        if isinstance(model, torch.nn.Module):
            modules = model.named_modules()
            model = dict(model.named_parameters(remove_duplicate=False))
        modules = [*modules]
        self.dropout = [f"{name}.{key} = {p}" for name, module in modules
                        for key, p in vars(module).items() if key == "p" or "dropout" in key
                        if module.training and isinstance(p, float) and 0 < p < 1]
        named = {WRAPPER.sub("", f"{name}.").rstrip("."): module
                 for name, module in modules}  # a wrapper's name is its module's
        self.modules = {module: name for name, module in named.items()}
        buffers = {buffer for _, module in modules for buffer in module.buffers(recurse=False)}
        model = {WRAPPER.sub("", name): p for name, p in model.items()}
        self.parameters = {name: p for name, p in model.items()
                           if p.is_floating_point() or p.is_complex()}
        self.others = {WRAPPER.sub("", name): x for name, x in (others or {}).items()
                       if x.is_floating_point() or x.is_complex()}
        optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        # accelerate wraps an optimizer
        self.optimizers = [getattr(each, "optimizer", each) for each in optimizers if each]
        for each in self.optimizers:
            each.register_step_pre_hook(lambda optimizer, *_: self.before_step(optimizer))
        given = {id(p) for each in self.optimizers for group in each.param_groups
                 for p in group["params"]}
        if nudge:
            self.nudge(nudge, dtype or torch.bfloat16)
        self.left_out = {
            "buffers": len(buffers),
            "parameters of whole numbers": len(model) - len(self.parameters),
            "tensors of the optimizer that are not recorded": len(
                given - {id(p) for p in self.parameters.values()})}

    @torch.no_grad()
    def nudge(self, seed, dtype):
        """Move each number of each weight by up to one rounding, on all ranks alike."""
        for i, p in enumerate({id(p): p for p in self.parameters.values()}.values()):
            p = p.to_local() if hasattr(p, "to_local") else p
            random = torch.Generator(p.device).manual_seed(10**6 * seed + i)
            by = torch.rand(p.shape, generator=random, device=p.device) * 2 - 1
            p.copy_(p * (1 + torch.finfo(dtype).eps / 2 * by))

    @torch.no_grad()
    def after_forward(self, module, inputs, output):
        """Note the type of a module's output, the square of its length and how many numbers it has:
        their mean over all ranks is the same for any cut of the batch, and if activations are
        computed again in the backward pass."""
        tensors = [x for x in tensors_of(output) if x.is_floating_point()]
        if torch.compiler.is_compiling():
            for x in tensors:
                note_compiled(x.dtype)
            return
        self.types.update(x.dtype for x in tensors)
        name = self.modules.get(module)
        if name is None:
            return
        for i, x in enumerate(x for x in tensors if x.ndim and not x.is_meta):
            if hasattr(x, "placements"):
                if any(place.is_partial() for place in x.placements):
                    continue
                x = x.to_local()
            key = f"{name}[{i}]" if i else name
            old = self.outputs.get(key, (0.0, 0))
            self.outputs[key] = old[0] + square(x), old[1] + x.numel()

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

        Raises ValueError if no forward pass has shown in which type the model computes, or if the
        file is gone.
        """
        if not self.optimizers:
            self.hook.remove()
        self.types |= COMPILED
        if not self.types:
            raise ValueError(
                "Parity saw no forward pass before the first record, so it does not know in which "
                "type the model computes: make it before the first forward pass, or give `dtype`, "
                "such as dtype=torch.bfloat16")
        losses = loss if isinstance(loss, (list, tuple)) else [] if loss is None else [loss]
        losses = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in losses]
        batch = batch if isinstance(batch, list) else [batch]
        samples, targets, shifted, numbers = read(batch)
        gradients, self.squares = {}, {}
        for name, p in self.parameters.items():
            if p.grad is not None:
                gradients[name], self.squares[name] = self.summed(name, p.grad, noise=True)
        self.without = self.parameters.keys() - gradients
        states = [x for each in self.optimizers for state in each.state.values()
                  for x in state.values() if torch.is_tensor(x) and x.numel() > 1]
        own = {
            "values": {name: self.summed(name, p)[0] for name, p in self.parameters.items()},
            "gradients": gradients,
            "others": {name: self.summed(name, x)[0] for name, x in self.others.items()},
            "losses": [float(x) for x in losses], "factors": self.factors, "late": self.late,
            "dropout": self.dropout,
            "types": {"modules compute": names_of_types(self.types),
                      "the loss is": names_of_types(x.dtype for x in losses if torch.is_tensor(x)),
                      "weights are kept": names_of_types(
                          p.dtype for p in self.parameters.values()),
                      "optimizer states are kept": names_of_types(x.dtype for x in states)},
            "samples": samples, "numbers": numbers, "targets": targets, "shifted": shifted,
            "outputs": self.outputs, "left_out": self.left_out,
        }
        everyone, self.factors, self.late, self.outputs = [own], [], [], {}
        if dist.is_available() and dist.is_initialized():
            everyone = [None] * dist.get_world_size() if rank() == 0 else None
            dist.gather_object(own, everyone)
        if everyone:
            line = {"step": step, "ranks": everyone, "loss": self.loss,
                    **{kind: merge(everyone, kind) for kind in ("values", "gradients", "others")}}
            refuse_another(self.path, self.file)
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    def parts(self, name, tensor):
        """(shape of the whole, [(part, offsets), ...]) of what this rank holds of a tensor."""
        if tensor.is_complex():  # pairs of real numbers
            tensor = torch.view_as_real(tensor.resolve_conj())
        if hasattr(tensor, "placements"):  # a DTensor
            from torch.distributed.tensor import Replicate
            tensor = tensor.redistribute(placements=[
                Replicate() if place.is_partial() else place for place in tensor.placements])
            # What distributed checkpoints call: nothing public says which part a rank holds.
            (chunk,) = tensor.__create_chunk_list__()
            return tensor.shape, [(tensor.to_local(), chunk.offsets)]
        return self.where and self.where(name, tensor) or (
            tensor.shape, [(tensor, [0] * tensor.ndim)])

    def summed(self, name, tensor, noise=False):
        """([(shape of the whole, offsets, size, sums), ...], square of the length) of what this
        rank holds of a tensor. ``noise``: count the numbers that are only rounding."""
        shape, parts = self.parts(name, tensor)
        parts = [(part.detach().to_dense(), offsets) for part, offsets in parts]
        usual = length = 0.0
        if noise:  # over all parts: one of them may be nothing but rounding
            length = sum(square(part) for part, _ in parts)
            usual = (length / max(sum(part.numel() for part, _ in parts), 1)) ** 0.5
        return [(tuple(shape), tuple(offsets), tuple(part.shape), sums(part, offsets, shape, usual))
                for part, offsets in parts], length

    def before_step(self, optimizer):
        """Note how much longer gradients are than in ``record``, at least and at most, and which
        have come since: steps that are not recorded accuse nobody."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(self.parameters[name]) in own for name in self.squares):
            self.hook.remove()  # this step is not recorded
        awaited = {name for name in self.without if id(self.parameters[name]) in own}
        self.late += [name for name in awaited if self.parameters[name].grad is not None]
        self.without -= awaited
        large = 1e-12 * max(self.squares.values(), default=0.0)  # others may underflow
        for name, p in self.parameters.items():
            if id(p) in own and p.grad is not None and (old := self.squares.pop(name, 0)) > large:
                _, parts = self.parts(name, p.grad)
                factor = (sum(square(part) for part, _ in parts) / old) ** 0.5
                self.factors = [min([factor, *self.factors]), max([factor, *self.factors])]


@torch.compiler.assume_constant_result  # runs while torch compiles: it leaves nothing in a graph
def note_compiled(dtype):
    COMPILED.add(dtype)


def tensors_of(output):
    """All tensors in the output of a module, in their order."""
    if torch.is_tensor(output):
        return [output]
    parts = [*output.values()] if hasattr(output, "items") else output
    parts = parts if isinstance(parts, (list, tuple)) else []
    return [x for part in parts for x in tensors_of(part)]


def rank():
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def names_of_types(types):
    """{name: how many} of floating types."""
    return collections.Counter(str(t).removeprefix("torch.") for t in types
                               if t.is_floating_point or t.is_complex)


def open_regular(path, most=2**30):
    """Open a file to read it. Raises ValueError for a FIFO, a device, a folder, a huge file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for a writer
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        os.close(descriptor)
        raise ValueError(f"{path} is no file of at most {most / 2**30:g} GB")
    return open(descriptor)


def create(path):
    """Begin a recording. Raises ValueError rather than overwrite what is no recording."""
    if os.path.lexists(path):
        with open_regular(path) as file:
            head = file.buffer.read(len(HEAD)).decode(errors="replace")
        if head not in ("", HEAD):
            raise ValueError(f"Parity: {path} exists, and is no recording: name another file")
        os.unlink(path)  # its own run, if it still records, notices it
    file = open(path, "x")  # another file that has come meanwhile is not overwritten
    file.write(f"{HEAD}{FORMAT}}}\n")
    file.flush()
    return file


def refuse_another(path, file):
    """Raise ValueError if ``path`` is no more the open ``file``."""
    if not os.path.exists(path) or not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
        raise ValueError(f"Parity: {path} was removed or replaced while this run recorded it: give "
                         f"each run a file of its own, and record it again")


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
    return float(sum(x.dot(x) for _, x in blocks(tensor.detach().to_dense().reshape(-1))))


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


def sums(tensor, offsets, shape, usual=0.0):
    """Of a part of a tensor of ``shape``: [square of the length, how many numbers are only rounding
    beside a ``usual`` one, K projections]. Projections give the distance of two tensors (Alon,
    Matias, Szegedy: The space complexity of approximating the frequency moments, 1996). Here they
    are on products of a vector over rows and one over columns, which costs two matrix products
    (Indyk, McGregor: Declaring independence via the sketching of sketches, 2008)."""
    device, total = tensor.device, torch.zeros(2 + K, dtype=torch.float64, device=tensor.device)
    if tensor.ndim == 1 and shape[0] > 64:  # as rows of a matrix: a hash for each number is slow
        width = 2 ** min(shape[0].bit_length() // 2, 12)
        for i, piece in enumerate(tensor.split(2**20)):  # padding is a copy
            row, before = divmod(offsets[0] + i * 2**20, width)
            piece = torch.nn.functional.pad(piece, (before, -(before + len(piece)) % width))
            whole = [-(-shape[0] // width), width]
            total += total.new_tensor(sums(piece.view(-1, width), [row, 0], whole, usual))
        return total.tolist()
    # As near to a square as possible, by the shape of the whole, which all ranks know
    cut = min(range(len(shape) + 1), key=lambda i: math.prod(shape[:i]) + math.prod(shape[i:]))
    rows = vectors(tensor.shape[:cut], offsets[:cut], shape[:cut], -1, device)
    if cut == 0:  # a vector
        rows = torch.ones_like(rows)
    columns = vectors(tensor.shape[cut:], offsets[cut:], shape[cut:], 1, device)
    little = usual * (1e-10 if tensor.dtype == torch.float64 else 1e-3)
    for begin, x in blocks(tensor.reshape(len(rows), len(columns))):
        total[0] += torch.linalg.vector_norm(x).square()
        if usual:
            total[1] += x.count_nonzero() - (x.abs() >= little).count_nonzero()
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
        alike = (isinstance(batch, list) and not top and
                 len({getattr(x, "dtype", type(x)) for x in batch}) < 2)
        items = [("", x) for x in batch] if alike else enumerate(batch)
    else:
        items = []
    for key, x in items:
        yield from leaves(x, f"{name}.{key}".strip("."), False)


def read(batch):
    """({name: [a fingerprint of each sample]}, [targets of each micro-batch], [the same, if the
    model shifts them], numbers in all) of a list of micro-batches. 0, -100 and what a mask hides do
    not count: rows may be padded."""
    samples, targets, shifted, numbers = collections.defaultdict(list), [], [], 0
    for micro_batch in batch:
        tensors = [*leaves(micro_batch)]
        named = dict(tensors)
        last = [x for name, x in tensors if re.search("labels|targets", name)] or [*named.values()]
        for x in last[-1:]:
            targets.append(int((x != -100).sum()))
            shifted.append(int((x[:, 1:] != -100).sum()) if x.ndim > 1 else targets[-1])
        numbers += max((x.numel() for _, x in tensors), default=0)
        for name, x in tensors:
            prefix, key = re.fullmatch(r"(.*?)([^.]*)", name).groups()
            mask = named.get(f"{prefix}attention_mask")
            if key in ("input_ids", "position_ids") and mask is not None and mask.shape == x.shape:
                x = x * (mask != 0)
            samples[name] += fingerprints(x.reshape(len(x), -1) if x.numel() else x[:0])
    return samples, targets, shifted, numbers


def fingerprints(x):
    """A hash of each row of integers. Floats may have been computed, and are compared up to
    rounding: [a projection, how far it may be off] of each row."""
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() or x.is_complex() else 0
    if x.is_complex():
        x = torch.view_as_real(x).flatten(1)
    x = x.double() if x.is_floating_point() else x.long()
    hidden = (x == 0) | (x == -100)
    if x.is_floating_point():
        x = x.masked_fill(hidden, 0).nan_to_num()
        along = vectors(x.shape[1:], [0], x.shape[1:], 1, x.device)[:, :1]
        room = max(4 * eps, 2**-12) * x.norm(dim=1, keepdim=True)  # all but 12 bits
        return torch.cat([x @ along, room], 1).tolist()
    mixed = mix(x ^ mix(torch.arange(1, x.shape[1] + 1, device=x.device)))
    return mixed.masked_fill(hidden, 0).sum(1).tolist()


def merge(everyone, kind):
    """{name: its tensor}, from what all ranks have recorded of weights or of gradients. A region
    counts once: ranks that hold it must agree. If not, ``ranks`` says who agrees with whom."""
    tensors, rows = {}, collections.defaultdict(lambda: collections.defaultdict(dict))
    for rank, own in enumerate(everyone):
        for name, parts in own.pop(kind).items():
            for shape, offsets, size, row in parts:
                rows[name, shape][offsets, size][rank] = row
    for (name, shape), regions in rows.items():
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
