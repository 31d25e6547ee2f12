"""Every private name of torch that these scripts use is listed here, with the reason why no public
one does."""

import ast

from tests.support.processes import ROOT

PRIVATE = {
    "_apply": "a ParallelStyle of one's own overrides it",
    "_cdata": "identifies a storage while it changes its size",
    "_MEM_FORMAT_ENCODING": "a class of DCP's index, of which pickles name members",
    "_PipelineSchedule": "see _warmup_p2p",
    "_are_we_tracing": "a dry run has fake tensors and does not trace",
    "_cached_plans_key": "DCP keeps the plans of saves by it, of other runs in this process too",
    "_compute_bucket_assignment_by_size": "DDP's buckets, in a dry run",
    "_concatenate": "a mesh of one dimension and a flattened one; slicing warns",
    "_dynamo": "DDP's optimizer cuts graphs at its buckets, also within a compiled layer",
    "_disable_current_modes": "what a dry run does not count",
    "_flatten": "a group over two dimensions of a mesh",
    "_get_fsdp_state": "nothing public tells which modules are gathered together",
    "_get_init_p2p_neighbors_ops": "torch 2.11 sends to the rank itself; gone from 2.15",
    "_inference_mode": "what the vote of _warmup_p2p decides",
    "_internal": "the store of torch's fake process group",
    "_local_tensor": "to_local() is an operation of autograd, and would be counted",
    "_output_slot_is_releasable": "from torch 2.15: it takes a dry run's tensors for no tensors",
    "_overloadpacket": "torch's formulas of operations have its name",
    "_prepare_forward_infra": "torch 2.11 prepares a stage for its first pass only",
    "_python_dispatch": "TorchDispatchMode, to see every operation",
    "_pytree": "the tensors among the arguments of an operation",
    "_resolve_process_group": "DTensor's collectives name their group",
    "_scaled_dot_product_efficient_attention": "see the flash kernels; on CUDA in float32",
    "_scaled_dot_product_efficient_attention_backward": "the same",
    "_scaled_dot_product_flash_attention": "returns the log-sum-exp, and takes it back; on CUDA",
    "_scaled_dot_product_flash_attention_backward": "the same",
    "_scaled_dot_product_flash_attention_for_cpu": "the same, on the CPU",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "the same",
    "_schema": "the name of an operation",
    "_set_pg_timeout": "the timeout of a group that exists",
    "_sharding_prop": "computes global shapes, which no rank holds",
    "_subclasses": "fake tensors",
    "_type": "which arguments of an operation are process groups",
    "_utils": "compute_local_shape_and_global_offset",
    "_warmup_p2p": "a pipeline's ranks vote; a dry run has no other ranks",
}
OF_PYTHON = {"_exit", "_run_exitfuncs", "_get_help_string", "_getframe"}


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
    folders = "", "common/", "common/services/", "examples/", "tools/", "tools/support/", "docs/"
    paths = [path for folder in folders for path in ROOT.glob(f"{folder}*.py")]
    assert len(paths) > 20
    found = set().union(*(names_with_a_dash(path.read_text()) for path in paths))
    assert found - OF_PYTHON == PRIVATE.keys()
