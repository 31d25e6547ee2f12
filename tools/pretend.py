"""Pretends to be one rank of many: with torch's fake tensors, which have shapes but no memory, and
its fake process group, which sends nothing. With these, parts of torch would behave differently
than in a real run: they are replaced.

Call ``enter`` once in a process: nothing puts these parts of torch back.
"""

import functools
import types

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d, pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Pretend(FakeTensorMode):
    """New tensors are fake: they have a shape, a type and a device, but no memory. Operations on
    real tensors alone, such as those of a DeviceMesh, give real tensors, and tensors on the meta
    device stay there."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(is_traceable_wrapper_subclass(x) for x in tensors):
            return NotImplemented  # a DTensor, for example, then calls operations on plain tensors
        if function._schema.name == "_c10d_functional::_wrap_tensor_autograd":
            return functional.AsyncCollectiveTensor(*args)  # as outside of fake mode
        if function._schema.name == "_c10d_functional::wait_tensor":
            return args[0]  # in fake mode it would return another tensor
        device = kwargs.get("device")
        stays = torch.device(device).type == "meta" if device is not None else tensors
        if stays and not any(isinstance(x, FakeTensor) for x in tensors):
            return function(*args, **kwargs)
        return super().__torch_dispatch__(function, kinds, args, kwargs)


def enter(world_size, rank):
    """Be ``rank`` of ``world_size`` ranks. Tensors that are made from now on are fake, and
    collectives return at once."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    # Not in this mode: a mesh reads the numbers of its ranks; DTensor's propagator computes global
    # shapes, which no rank holds, with fake tensors of its own.
    for owner, names in {
        DeviceMesh: ("__init__", "__getitem__", "_flatten"),
        ShardingPropagator: ("_propagate_tensor_meta_non_cached",),
    }.items():
        for name in names:
            setattr(owner, name, outside(getattr(owner, name)))
    DeviceMesh._concatenate = staticmethod(outside(DeviceMesh._concatenate))
    torch.utils.swap_tensors = swap_or_set(torch.utils.swap_tensors)
    functional._are_we_tracing = lambda: False  # it says yes if tensors are fake
    dist.isend = distributed_c10d.isend = keep_tensor(dist.isend)
    dist.Reducer, dist.Logger = Reducer, Silent
    DistributedDataParallel.__init__ = functools.partialmethod(
        DistributedDataParallel.__init__, init_sync=False
    )
    schedules._PipelineSchedule._warmup_p2p = warm_up
    Pretend().__enter__()


def outside(function):
    """Returns ``function`` such that it runs outside of fake mode and is not counted."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return wrapped


def swap_or_set(swap):
    """``Module.to`` would swap fake parameters, which fails: their mode has weak references to
    them. Returns a function that sets their data instead."""

    def swapped(old, new):
        if isinstance(old, FakeTensor):
            old.data = new.data
        else:
            swap(old, new)

    return swapped


def keep_tensor(isend):
    """The object that waits for a send keeps the tensor alive, as with gloo."""

    def isend_and_keep(tensor, *args, **kwargs):
        work = isend(tensor, *args, **kwargs)
        return types.SimpleNamespace(wait=work.wait, is_completed=work.is_completed, tensor=tensor)

    return isend_and_keep


def warm_up(schedule, stages, *_):
    """The warm-up of a pipeline: its ranks vote whether all know the shapes to send. They do."""
    for stage in stages:
        stage._inference_mode = pipelining.stage.InferenceMode.STATIC


class Reducer:
    """Averages gradients in DistributedDataParallel; torch's own Reducer, in C++, needs memory.

    It collects gradients in buckets, and all-reduces a bucket when it is full. After the first
    backward pass it rebuilds the buckets in the order in which gradients arrived.
    """

    def __init__(self, parameters, buckets, _limits, group, _sparse, most, _unused, as_view, _names,
                 first, *_):
        self.parameters, self.group, self.as_view = parameters, group, as_view
        self.limits, self.arrived, self.pending = [first, most], [], None
        self.make_buckets(buckets)
        self.nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in parameters]
        for i, node in enumerate(self.nodes):
            node.register_hook(lambda *_, i=i: self.on_gradient(i))

    def make_buckets(self, buckets):
        self.buckets, self.place = [], {}
        for indices in buckets:
            parameters = [self.parameters[i] for i in indices]
            sizes = [p.numel() for p in parameters]
            flat = torch.empty(sum(sizes), dtype=parameters[0].dtype)
            for i, p, part in zip(indices, parameters, flat.split(sizes)):
                self.place[i] = len(self.buckets), part.view(p.shape)
            self.buckets.append((indices, flat))

    def _rebuild_buckets(self):
        if not self.arrived:
            return False
        parameters = [self.parameters[i] for i in self.arrived]
        buckets, _ = dist._compute_bucket_assignment_by_size(
            parameters, self.limits, [False] * len(parameters), self.arrived
        )
        self.make_buckets(buckets)
        self.arrived = None
        return True

    def prepare_for_backward(self, _):
        self.pending = [len(indices) for indices, _ in self.buckets]

    @torch.no_grad()
    def on_gradient(self, i):
        if self.pending is None:  # under no_sync()
            return
        if self.arrived is not None:
            self.arrived.append(i)
        (bucket, view), p = self.place[i], self.parameters[i]
        torch.mul(p.grad, 1 / self.group.size(), out=view)
        if self.as_view:
            p.grad = view
        self.pending[bucket] -= 1
        if not self.pending[bucket]:
            dist.all_reduce(self.buckets[bucket][1], group=self.group)
        if not any(self.pending):
            self.pending = None

    def prepare_for_forward(self):
        pass

    def set_logger(self, logger):
        pass


class Silent:
    """A logger for DDP that logs nothing."""

    def __init__(self, reducer):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: None
