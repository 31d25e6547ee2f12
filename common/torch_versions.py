"""What some of the supported versions of torch, 2.11 to 2.15, lack or do wrong. Each entry names
the version that ends it: from there on, torch's own name can take its place."""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

from common.errors import SettingError

try:
    from torch.distributed import config
except ImportError:
    config = None  # 2.11 has no options of this kind

# Ends with 2.13: before, only the old names of these functions exist.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# Ends with 2.13: compiled by 2.11, an autograd.Function around a collective fails, or loses its
# gradients without an error. With this decorator the graph of a compiled layer breaks there.
not_compiled = torch.compiler.disable

# Ends with 2.13: before, a pipeline whose backward pass has two parts frees the last node after the
# first part, if it is an autograd.Function, such as a loss in chunks.
keeps_last_function = torch.__version__ >= "2.13"

# Ends with 2.14, where it is public: the timeout of a process group that exists.
set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


# Words in the errors that gloo raises, as RuntimeError, when another process has died: 2.15 does so
# too. NCCL and the store raise classes, of which each is a DistError.
GLOO_WORDS = (
    "Timed out waiting", "Application timeout caused pair closure", "Connection closed by peer",
    "Connection reset by peer", "Broken pipe",
)
# Words in the errors of a setting that is too large, of a data worker that was killed, stands still
# or has no shared memory, and of --compile without a compiler, which torch raises as RuntimeError.
SETTING_WORDS = (
    "can't allocate memory", "not enough memory", "overflow", "DataLoader worker (pid",
    "DataLoader timed out", "unable to allocate shared memory", "unable to write to file </torch",
    "No working C++ compiler", "Failed to find C compiler",
)


def is_lost_peer(error):
    """Whether another process has ended, or was silent for too long."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in GLOO_WORDS)
    )


def is_a_setting(error):
    """Whether a setting asks for too much memory or for a compiler that is missing, or a data
    worker has ended or stands still."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SETTING_WORDS)


def reshard(model):
    """Free the gathered parameters that a forward pass without a backward pass leaves. Otherwise
    the next forward pass uses them again, even if the shards have changed.

    Ends with 2.13: ``model.reset_iter_state()``. It also forgets which units the forward pass used;
    without it the next backward pass gathers one unit too many.
    """
    if hasattr(model, "reset_iter_state"):
        return model.reset_iter_state()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reduce_unused_parameters(model):
    """Let FSDP also reduce the parameters that got no gradient on this rank, as zeros.

    Ends with 2.13: ``model.set_reduce_scatter_unused_params(True)``. Before, SettingError.
    """
    if not hasattr(model, "set_reduce_scatter_unused_params"):
        raise SettingError(
            f"reduce_unused needs torch 2.13, this is {torch.__version__}: let every rank call all "
            f"parts, and add 0 times the output of those that its samples do not use"
        )
    model.set_reduce_scatter_unused_params(True)
    model.reduces_unused = True  # for compare_calls


def separate_directions(group):
    """Let PipelineStages that are made later send forward and backward over communicators of their
    own, if ``group`` has NCCL. On one communicator a rank cannot send while it waits to receive,
    and looped and V-shaped schedules can deadlock, as torch's comment on this option says.

    Ends with the version that does so by default. The option came with 2.14, and has its second
    name from 2.15 on. It fails on gloo.
    """
    for name in ("pipeline_per_direction_p2p", "pipeline_per_edge_p2p"):
        if "nccl" in dist.get_backend(group) and hasattr(config, name):
            setattr(config, name, True)


def skip_first_messages(stages):
    """Let each PipelineStage of ``stages`` send nothing before its first micro-batch.

    Ends with 2.12: torch 2.11 first sends to the rank of the next stage, which fails if that is the
    same rank, as at the tip of a V."""
    for stage in stages:
        stage._get_init_p2p_neighbors_ops = list


def pass_on_no_gradients_in_eval(stages):
    """Let ``schedule.eval`` run PipelineStages in a V. Where a stage and the next one are on one
    rank, torch passes on gradients between them, also in an evaluation, which has none.

    Ends with no version yet: 2.11 to 2.15 raise "can't steal_bwd_input".
    """
    def unless_evaluating(stage, method):
        return lambda *args: method(*args) if stage.has_backward else None

    for stage in stages:
        stage.get_local_bwd_output = unless_evaluating(stage, stage.get_local_bwd_output)
        stage.set_local_bwd_input = unless_evaluating(stage, stage.set_local_bwd_input)
