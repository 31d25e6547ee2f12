"""Names of torch 2.13 for torch 2.11, on the one machine with a GPU that has run us: it has torch
2.11 and cannot have another. Python imports a file of this name when it starts:

    export PYTHONPATH=tests/gpu/torch211:.
    python -m pytest -s tests/gpu/test_cuda.py

No script of a user gets it: torch 2.11 counts wrongly where a compiled function has a collective,
and where replicas of FSDP do not use a part of the model in the last micro-batch.
"""

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

dist.all_gather_single = dist.all_gather_into_tensor
dist.reduce_scatter_single = dist.reduce_scatter_tensor


def free_gathered(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


FSDPModule.reset_iter_state = free_gathered
FSDPModule.set_reduce_scatter_unused_params = lambda model, on, recurse=True: None
# Messages by which neighbours find each other: in a schedule that is a V, a rank would send to
# itself.
PipelineStage._get_init_p2p_neighbors_ops = lambda stage: []
