"""Which torch these scripts need: every private name in use is listed here, with the reason why no
public one does, and exists in the torch that is installed."""

import ast
import inspect

import torch
from packaging.version import Version
from torch.distributed import _functional_collectives, distributed_c10d, pipelining
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, _utils
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils import _python_dispatch, _pytree

from tests.support.processes import ROOT

SCRIPTS = ("single", "ddp", "zero", "fsdp", "tp", "cp", "pp", "hybrid_3d", "ep", "diloco")
INSTALLED = Version(torch.__version__).release[:2]

# Name: where torch has it, and why no public name does.
PRIVATE = {
    "_apply": (ParallelStyle, "a ParallelStyle of one's own overrides it"),
    "_cdata": (torch.UntypedStorage, "identifies a storage while it changes its size"),
    "_MEM_FORMAT_ENCODING": (metadata, "a class of DCP's index, of which pickles name members"),
    "_PipelineSchedule": (schedules, "see _warmup_p2p"),
    "_are_we_tracing": (_functional_collectives, "a dry run has fake tensors and does not trace"),
    "_compute_bucket_assignment_by_size": (torch.distributed, "DDP's buckets, in a dry run"),
    "_concatenate": (DeviceMesh, "a mesh of one dimension and a flattened one; slicing warns"),
    "_dynamo": (torch, "DDP's optimizer cuts graphs at its buckets, also within a compiled layer"),
    "_disable_current_modes": (_python_dispatch, "what a dry run does not count"),
    "_flatten": (DeviceMesh, "a group over two dimensions of a mesh"),
    "_get_fsdp_state": (FSDPModule, "nothing public tells which modules are gathered together"),
    "_get_init_p2p_neighbors_ops": (
        pipelining.PipelineStage, "torch 2.11 sends to the rank itself; gone from 2.15"
    ),
    "_internal": (torch.testing, "the store of torch's fake process group"),
    "_local_tensor": (DTensor, "to_local() is an operation of autograd, and would be counted"),
    "_output_slot_is_releasable": (
        pipelining.PipelineStage, "from torch 2.15: it takes a dry run's tensors for no tensors"
    ),
    "_overloadpacket": (torch.ops.aten.add.Tensor, "torch's formulas of operations have its name"),
    "_prepare_forward_infra": (
        pipelining.PipelineStage, "torch 2.11 prepares a stage for its first pass only"
    ),
    "_python_dispatch": (torch.utils, "TorchDispatchMode, to see every operation"),
    "_pytree": (torch.utils, "the tensors among the arguments of an operation"),
    "_resolve_process_group": (distributed_c10d, "DTensor's collectives name their group"),
    "_schema": (torch.ops.aten.add.Tensor, "the name of an operation"),
    "_set_pg_timeout": (distributed_c10d, "the timeout of a group that exists"),
    "_sharding_prop": (torch.distributed.tensor, "computes global shapes, which no rank holds"),
    "_subclasses": (torch, "fake tensors"),
    "_type": (torch.ScriptObject, "which arguments of an operation are process groups"),
    "_utils": (torch.distributed.tensor, "compute_local_shape_and_global_offset"),
    "_warmup_p2p": (
        schedules._PipelineSchedule, "a pipeline's ranks vote; a dry run has no other ranks"
    ),
}
# Attributes of objects, in whose class's source they are.
ATTRIBUTES = {
    "_inference_mode": (pipelining.stage, "what the vote of _warmup_p2p decides"),
}
# Without a dash, but in no documentation; and names within strings.
UNDOCUMENTED = {
    "default_pg_timeout": (distributed_c10d, "the timeout of groups that are made later"),
    "default_pg_nccl_timeout": (distributed_c10d, "the same, of NCCL"),
    "optimize_ddp": (torch._dynamo.config, "see _dynamo"),
    "_scaled_dot_product_flash_attention_for_cpu": (
        torch.ops.aten, "attention that returns the log-sum-exp, and takes it back"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (torch.ops.aten, "the same"),
    "_scaled_dot_product_flash_attention": (torch.ops.aten, "the same, on CUDA"),
    "_scaled_dot_product_flash_attention_backward": (torch.ops.aten, "the same, on CUDA"),
    "_scaled_dot_product_efficient_attention": (torch.ops.aten, "the same, on CUDA in float32"),
    "_scaled_dot_product_efficient_attention_backward": (torch.ops.aten, "the same"),
    "_StorageInfo": (filesystem, "the index of a checkpoint names it"),
    "_MEM_FORMAT_ENCODING": (metadata, "the index of a checkpoint names it"),
    "_get_layout": (torch.serialization, "the index of a checkpoint names it"),
    "ignore_compile_internals": (
        _python_dispatch.TorchDispatchMode, "torch.compile runs while operations are counted"
    ),
    "tree_leaves": (_pytree, "see _pytree"),
    "compute_local_shape_and_global_offset": (_utils, "which rows of a tensor a rank holds"),
}
# From when to when torch has a name, and something asks for it.
SPANS = {"_prepare_forward_infra": ((0,), (2, 12)), "_warmup_p2p": ((2, 12), (2, 15)),
         "_get_init_p2p_neighbors_ops": ((0,), (2, 15)),
         "_inference_mode": ((2, 12), (99,)), "_output_slot_is_releasable": ((2, 15), (99,))}
# Public names that end an entry of common/torch_versions.py, and the first version that has them.
ENDS = [(torch.distributed, "all_gather_single", (2, 13)),
        (torch.distributed, "reduce_scatter_single", (2, 13)),
        (torch.distributed, "set_timeout", (2, 14)), (FSDPModule, "reset_iter_state", (2, 13))]


def names_with_a_dash(source):
    """Private names that the source uses and does not itself define, also those that it overrides
    in a subclass of torch's."""
    nodes = list(ast.walk(ast.parse(source)))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used = called - own
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            used.update(node.module.split("."), (alias.name for alias in node.names))
        if isinstance(node, ast.ClassDef) and node.bases:
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            used |= methods - called
    return {name for name in used if name.startswith("_") and not name.startswith("__")}


def test_every_private_name_is_listed():
    paths = [ROOT / f"{name}.py" for name in SCRIPTS]
    folders = "common", "common/services", "examples", "tools", "tools/support", "docs"
    paths += [path for folder in folders for path in ROOT.glob(f"{folder}/*.py")]
    assert len(paths) > 20
    found = set().union(*(names_with_a_dash(path.read_text()) for path in paths))
    # of os, atexit, argparse, sys
    pythons = {"_exit", "_run_exitfuncs", "_get_help_string", "_getframe"}
    kernels = {name for name in UNDOCUMENTED if name.startswith("_scaled_dot_product")}
    assert found - pythons == PRIVATE.keys() | ATTRIBUTES.keys() | kernels
    sources = "".join(path.read_text() for path in paths)
    assert all(name in sources for name in UNDOCUMENTED)


def test_they_exist():
    for name, (owner, _) in (PRIVATE | UNDOCUMENTED | ATTRIBUTES).items():
        first, end = SPANS.get(name, ((0,), (99,)))
        found = (f"self.{name}" in inspect.getsource(owner) if name in ATTRIBUTES
                 else hasattr(owner, name))
        assert found or not first <= INSTALLED < end, name


def test_an_entry_ends_with_the_version_that_it_names():
    entries = (ROOT / "common" / "torch_versions.py").read_text().split("\n\n")
    for owner, name, version in ENDS:
        assert hasattr(owner, name) == (INSTALLED >= version), name
        (entry,) = (text for text in entries if f'"{name}"' in text)
        assert f"Ends with {version[0]}.{version[1]}" in entry
