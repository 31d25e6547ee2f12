"""Counts what one step holds in memory and what it sends, from the operations it issues.

Nothing here is an estimate. Bytes held are the storages that are alive. Bytes sent are the sizes of
the tensors that collectives were called with, times the share of them that a ring sends.
"""

import collections
import weakref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

# For each operation: its name in a report, and the share of a tensor that each of n ranks sends.
# all-to-all and send are direct, all others a ring (Patarasu and Yuan, 2009). The tensor is the
# input, but of an all-gather the output. Operations that are not listed are not counted.
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
    """Counts between ``__enter__`` and ``__exit__``:

    - ``now`` and ``peak``: for each kind of ``HELD``, the bytes that are alive on this rank, and
      the most that were alive at once. What is of no other kind counts as an activation. "in all"
      is the sum of the kinds.
    - ``sent``: the bytes that this rank sends, by (collective, group), and ``calls``, the number of
      calls. A group is named by its dimension of ``mesh``, or "world".

    With torch.compile it counts the compiled layers: what they allocate and send.

    Args:
        optimizer: its parameters and states are what this rank holds.
        modules: the model and its layers. A hook on each finds the parameters that it uses, which
            may be gathered copies of the optimizer's parameters. Modules within a compiled layer
            get no hook: with a hook torch.compile would compile the layer again.
        mesh: the DeviceMesh of the run, or None.
        activation_dims: collectives over these dimensions of ``mesh`` move activations, those over
            other dimensions parameters and gradients.
    """

    def __init__(self, optimizer, modules, mesh=None, activation_dims=("tp", "cp", "pp")):
        super().__init__()
        self.modules = list(modules)
        self.now, self.peak = collections.Counter(), collections.Counter()
        self.sent, self.calls = collections.Counter(), collections.Counter()
        self.alive = {}  # key of a storage -> [weak reference, kind, bytes]
        self.watched = {}  # by id: parameters that a module has used
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

    @classmethod
    def ignore_compile_internals(cls):
        """Without this method torch.compile skips code that runs under this mode, now and later."""
        return True

    def __enter__(self):
        for module in self.modules:
            self.handles.append(module.register_forward_pre_hook(self.watch))
        # FSDP frees and allocates storages by changing their size.
        self.resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self.resized(storage, size)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self.resize
        for handle in self.handles:
            handle.remove()

    def watch(self, module, inputs):
        for parameter in module.parameters():
            self.track(parameter, "parameters")
            if id(parameter) not in self.watched and parameter.requires_grad:
                self.watched[id(parameter)] = parameter
                hook = parameter.register_post_accumulate_grad_hook(self.watch_gradient)
                self.handles.append(hook)

    def watch_gradient(self, parameter):
        if parameter.grad is not None:
            self.track(parameter.grad, "gradients")

    def track_gradients(self, optimizer):
        """Count gradients that no hook has seen, such as those reduced after the backward pass."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.track(parameter.grad, "gradients")

    def track(self, tensor, kind):
        """Count the storage of ``tensor`` as ``kind``, until it is freed."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if is_traceable_wrapper_subclass(tensor):
            return  # the tensor inside is tracked by itself
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = [weakref.ref(storage, lambda _: self.freed(key)), kind, 0]
        entry = self.alive[key]
        if HELD.index(kind) < HELD.index(entry[1]):  # it was allocated as an activation
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
            return NotImplemented  # DTensor then issues operations on plain tensors
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if function.namespace in ("c10d", "_c10d_functional") and name in COLLECTIVES:
            self.collective(name, args, out)
        if name == "split" and args[0].untyped_storage()._cdata not in self.alive:
            return out  # a buffer of gloo's own, in its wait() for a reduce-scatter
        # recv writes into a buffer that may have been allocated before the counting began.
        for leaf in tree_leaves([out, args] if name == "recv_" else out):
            if isinstance(leaf, torch.Tensor):
                self.track(leaf, "activations")
        return out

    def collective(self, name, args, out):
        label, share = COLLECTIVES[name]
        group = group_of(args)
        dim = self.dims.get(group.group_name) or self.name_of(group)
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        # The operations of c10d take their output as the first argument.
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
                own = label == "all-gather" and tensor is tensors[0]  # this rank's part
                if isinstance(tensor, torch.Tensor) and not own:
                    self.track(tensor, kind)

    @staticmethod
    def name_of(group):
        """The name of a flattened dimension of a mesh, otherwise "world"."""
        kind, _, name = group.group_desc.partition("mesh_")
        return name or "world"

    def sent_share(self, share, name, args, group):
        position = {"all_to_all_single": 2, "alltoall_base_": 4}.get(name)
        splits = None if position is None else args[position]
        if splits:  # an uneven all-to-all sends everything but the part for this rank
            return 1 - splits[group.rank()] / sum(splits)
        return share(group.size())


def group_of(args):
    """The process group of a collective, which is an object or a name among its arguments."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in arg._type().name():
            return dist.ProcessGroup.unbox(arg)
    name = next(arg for arg in reversed(args) if isinstance(arg, str))
    return dist.distributed_c10d._resolve_process_group(name)
