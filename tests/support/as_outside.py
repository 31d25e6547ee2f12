"""In the fake world of tools/support/pretend.py: what a real world does too, and fake tensors alone
do not."""

import weakref

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tools.support import pretend

world = pretend.world(2, 0)
world.__enter__()
x = torch.empty(4, 4, requires_grad=True)
for reduced in (functional.all_reduce(x * 1, "sum", dist.group.WORLD),
                functional.all_gather_tensor(x * 1, 0, dist.group.WORLD),
                functional.reduce_scatter_tensor_autograd(x * 1, "sum", 0, dist.group.WORLD)):
    assert type(reduced) is functional.AsyncCollectiveTensor, type(reduced)
    waited = functional.wait_tensor(reduced)  # no second tensor: it would be counted too
    assert waited.untyped_storage()._cdata == reduced.elem.untyped_storage()._cdata
sent = torch.empty(4)
alive, work = weakref.ref(sent), dist.isend(sent, 1)
del sent
assert alive() is not None, "what is sent is held until the wait"
work.wait()
del work
assert alive() is None
