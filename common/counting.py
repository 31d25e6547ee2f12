"""Counts what one step holds in memory and what it sends, from the operations it issues.

Nothing here is an estimate: bytes held are the storages that are alive, bytes sent are the sizes of
the tensors that collectives were called with, times what a ring sends of them.
"""

import collections
import weakref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# By operation: its name in a report, and the share of the counted tensor that each of n ranks sends in a
# ring (Patarasu and Yuan, 2009). Counted is the whole: the input, or of an all-gather the output.
COLLECTIVES = {
    "allreduce_": ("all-reduce", lambda n: 2 * (n - 1) / n),
    "all_reduce": ("all-reduce", lambda n: 2 * (n - 1) / n),
    "all_reduce_": ("all-reduce", lambda n: 2 * (n - 1) / n),
    "_allgather_base_": ("all-gather", lambda n: (n - 1) / n),
    "all_gather_into_tensor": ("all-gather", lambda n: (n - 1) / n),
    "_reduce_scatter_base_": ("reduce-scatter", lambda n: (n - 1) / n),
    "reduce_scatter_tensor": ("reduce-scatter", lambda n: (n - 1) / n),
    "alltoall_base_": ("all-to-all", lambda n: (n - 1) / n),
    "all_to_all_single": ("all-to-all", lambda n: (n - 1) / n),
    "broadcast_": ("broadcast", lambda n: (n - 1) / n),
    "send": ("send", lambda n: 1),
}
HELD = ("parameters", "gradients", "optimizer states", "activations")


class StepCounter(TorchDispatchMode):
    """Between ``__enter__`` and ``__exit__``, counts

    ``now`` and ``peak``: by kind of ``HELD``, the bytes that are alive on this rank, and the most that were at
    once; activations are all that is none of the others. "in all" is their sum.
    ``sent``: bytes that this rank sends, by (collective, group), and ``calls``, how many there were. A
    group is named by its dimension of ``mesh``; collectives over the dimensions ``activation_dims`` move
    activations, those over others parameters and gradients.

    Args:
        mesh: the DeviceMesh, or None.
    """

    def __init__(self, optimizer, mesh=None, activation_dims=("tp", "cp", "pp")):
        super().__init__()
        self.now, self.peak = collections.Counter(), collections.Counter()
        self.sent, self.calls = collections.Counter(), collections.Counter()
        self.alive = {}  # key of a storage -> [weak reference, kind, bytes]
        self.watched = {}  # by id: parameters as modules use them
        self.handles = []
        self.activation_dims = activation_dims
        self.dims = {} if mesh is None else {
            mesh.get_group(dim).group_name: dim for dim in mesh.mesh_dim_names
        }
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.track(parameter, "parameters")
        for state in optimizer.state.values():
            for value in state.values():
                self.track(value, "optimizer states")

    def __enter__(self):
        # A parameter as a module uses it is not always the one of the optimizer: it may be gathered.
        self.handles.append(register_module_forward_pre_hook(self.watch))
        # Storages are also freed and made by changing their size.
        self.resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self.resized(storage, size)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self.resize
        for handle in self.handles:
            handle.remove()

    def watch(self, module, inputs):
        for parameter in module.parameters(recurse=False):
            self.track(parameter, "parameters")
            if id(parameter) not in self.watched and parameter.requires_grad:
                self.watched[id(parameter)] = parameter
                self.handles.append(parameter.register_post_accumulate_grad_hook(self.watch_gradient))

    def watch_gradient(self, parameter):
        if parameter.grad is not None:
            self.track(parameter.grad, "gradients")

    def track_gradients(self, optimizer):
        """Those that hooks have not seen: what was reduced or split after the backward pass, say."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.track(parameter.grad, "gradients")

    def track(self, tensor, kind):
        """Count the storage of ``tensor`` as ``kind``, until it is freed."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
            return  # a wrapper around a tensor that comes by itself
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = [weakref.ref(storage, lambda _: self.freed(key)), kind, 0]
        entry = self.alive[key]
        if HELD.index(kind) < HELD.index(entry[1]):  # what was made as an activation turns out to be more
            self.add(entry[1], -entry[2])
            entry[1:] = kind, 0
        self.add(entry[1], storage.nbytes() - entry[2])
        entry[2] = storage.nbytes()

    def add(self, kind, difference):
        self.now[kind] += difference
        self.now["in all"] += difference
        for name in (kind, "in all"):
            self.peak[name] = max(self.peak[name], self.now[name])

    def freed(self, key):
        _, kind, size = self.alive.pop(key)
        self.add(kind, -size)

    def resized(self, storage, size):
        self.resize(storage, size)
        if entry := self.alive.get(storage._cdata):
            self.add(entry[1], storage.nbytes() - entry[2])
            entry[2] = storage.nbytes()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it issues operations on plain tensors in turn
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if function.namespace in ("c10d", "_c10d_functional") and name in COLLECTIVES:
            self.collective(name, args, out)
        # What is received may have been allocated before the counting began.
        for leaf in tree_leaves([out, args] if name == "recv_" else out):
            if isinstance(leaf, torch.Tensor):
                self.track(leaf, "activations")
        return out

    def collective(self, name, args, out):
        label, share = COLLECTIVES[name]
        group = _group(args)
        dim = self.dims.get(group.group_name, "world")
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        # In c10d's own calls the output is an argument too, and comes first.
        into = name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")
        tensors = [inputs[1]] if into else inputs
        size = sum(tensor.nbytes for tensor in tensors)
        if label == "all-gather":
            size *= group.size()
        self.calls[label, dim] += 1
        self.sent[label, dim] += size * self.sent_share(share, name, args, group)
        if dim not in self.activation_dims:
            kind = "parameters" if label == "all-gather" else "gradients"
            for tensor in [*inputs, *tree_leaves(out)]:
                if isinstance(tensor, torch.Tensor) and (label != "all-gather" or tensor is not tensors[0]):
                    self.track(tensor, kind)

    def sent_share(self, share, name, args, group):
        splits = args[2] if name == "all_to_all_single" else args[4] if name == "alltoall_base_" else None
        if splits:  # uneven: all but what stays here
            return 1 - splits[group.rank()] / sum(splits)
        return share(group.size())


def _group(args):
    """The process group among the arguments of a collective: an object, or its name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in arg._type().name():
            return dist.ProcessGroup.unbox(arg)
    name = next(arg for arg in reversed(args) if isinstance(arg, str))
    return dist.distributed_c10d._resolve_process_group(name)
