"""Tensor parallel: every matrix is split over the ranks, and all ranks work on the same samples.

Split: each layer's heads and MLP columns; the vocabulary of embedding, head and loss; with sequence
parallelism (the default) also the residual stream and the norms, along the sequence. Replicated:
the batch, and the weights of the norms. Use it if a layer is too large for one device, within one
machine: the ranks communicate in every layer, and wait for it. (Megatron-LM, arXiv:1909.08053;
sequence parallelism, arXiv:2205.05198)

    torchrun --nproc_per_node=2 tp.py
    torchrun --nproc_per_node=4 tp.py --no-sequence-parallel --grad-accum 2
    torchrun --nproc_per_node=8 tp.py --model llama3-1b --dtype bfloat16 --activation-checkpointing

Sent in a step by each of n ranks. L: number of layers. X: bytes of the hidden states (B, T, D), in
the type of the matrix products; e: the same in the type of the weights, as the embedding returns
them. t: bytes of one number per token. N: bytes of the norms' weights.

    each layer       2 all-gathers and 2 reduce-scatters of X forward, 2 and 2 backward,
                     or, without sequence parallelism, 2 all-reduces forward, 2 backward
                                                                                 8X(n-1)/n
    embedding, head  1 all-gather and 1 reduce-scatter in each,
                     or 1 all-reduce in each                                (2e+2X)(n-1)/n
    loss             3 all-reduces of a number per token, instead of logits      6t(n-1)/n
    norms            with sequence parallelism, 1 all-reduce of their gradients  2N(n-1)/n

Activation checkpointing repeats the forward transfers that the backward pass needs: each layer
sends 3X(n-1)/n more, or 2X(n-1)/n more without sequence parallelism.

Overlap: none. Each matrix product needs the result of the collective before it, so all of this time
is exposed. That is why the ranks should share the fast links of one machine.
"""

import argparse
import fnmatch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel,
    loss_parallel, parallelize_module,
)

from common.data import BatchSampler, load_steps
from common.errors import SettingError, refuse
from common.launch import launch, rank_and_world_size, restores_process, start_process_group
from common.materialise import materialise
from common.model import Transformer, wrap_layers
from common.model_options import add_model_options
from common.options import option_parser, parse_options
from common.step import count_targets, decay_groups, seed_step, set_learning_rate
from common.tokens import add_text_options, open_dataset

# Services, optional: delete an import and every statement that uses it, but keep the loop
from common.services import theory
from common.services.checkpoint import Checkpoints
from common.services.report import Report
from common.services.settings import run_settings
from common.services.validation import Validation


@restores_process
def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser)
    add_text_options(parser)
    parser.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True,
                        help="split the norms and the residual stream along the sequence")
    Checkpoints.add_options(parser)
    Validation.add_options(parser)
    Report.add_options(parser)
    args = parse_options(parser, argv)
    _, n = rank_and_world_size()
    check(args, n)
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (1, n), mesh_dim_names=("dp", "tp"))
    tp_rank = mesh.get_local_rank("tp") if args.sequence_parallel else 0  # of the residual stream

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()
    wrap_layers(layers, args.compile, args.activation_checkpointing, model.lm_head)
    parallelize(model, mesh["tp"], llama_plan(args.sequence_parallel))  # TP: before the optimizer
    if args.compile:  # TP: a compiled layer cannot take an output that is still on its way
        wait_for_output(model.model.embed_tokens)
    materialise(model, device, args.seed)  # only the rows and columns of this rank
    autocast = torch.autocast(  # without a cache, which would keep every weight in bfloat16
        device.type, torch.bfloat16, enabled=args.bfloat16, cache_enabled=False
    )
    model.forward = autocast(model.forward)

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=mesh["dp"],  # TP: dp has one rank, so all ranks read the same samples
    )
    validation = Validation(
        open_dataset(args, "--val-data"), sampler, device, args.val_every, args.val_batches,
        args.workers,
    )

    # Resume: the step number is the only state of the data
    checkpoints = Checkpoints(
        args.out, run_settings(args, dataset), model.state_dict(keep_vars=True), optimizer,
        stop=args.steps, every=args.save_every, keep=args.keep, in_background=args.async_save,
    )
    sampler.start = checkpoints.resume(args.source)  # steps done

    # Loop
    report = Report(args, model, optimizer, [sampler, dataset], device, mesh)
    for step, batch in report.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, tp_rank)  # TP: dropout is equal where activations are
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # mean over the batch
        count = count_targets(batch)
        for inputs, targets in batch:  # (B/accum, T)
            # TP: the logits are (B/accum, T, V/tp); loss_parallel computes the loss on the shards.
            with loss_parallel():
                micro_loss = model(inputs, targets) / count
                micro_loss.backward()
            loss += micro_loss.detach()

        redistribute_gradients(model, mesh.get_group("tp"))  # TP: before anything uses them
        # TP: the norm is a DTensor; full_tensor() combines the norms of the ranks' shards.
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        report.log(step, loss / n, grad_norm)  # TP: all ranks have the same loss
        checkpoints.after_step(step, grad_norm)
        if validation.due(step):
            with loss_parallel():
                report.log_validation(step, validation.loss(model))
        if checkpoints.stopping:
            break
    checkpoints.finish()
    return report.close(theory.tp(args, n))


def llama_plan(sequence_parallel):
    """How the weights of each module are split, and which layouts its inputs and outputs have.

    A linear layer multiplies by the transpose of its weight (out, in). ColwiseParallel splits
    ``out``: each rank has some of the heads or columns. RowwiseParallel splits ``in``: each rank
    computes partial sums, and the all-reduce or reduce-scatter that follows adds them up. Returns a
    dict for ``parallelize``, from patterns of module names to a ParallelStyle.
    """
    # The residual stream between the layers: (B, T/tp, D) or (B, T, D)
    stream = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.self_attn": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        "model.layers.*.post_attention_layernorm": norm,
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=stream, desired_input_layouts=Replicate()
        ),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=stream),
        "model.norm": norm,
        # Its output is the loss, a replicated scalar. Without targets it would gather the logits.
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }


class Replicated(ParallelStyle):
    """Replicated weights, but as DTensors: clip_grad_norm_ and fused AdamW refuse a mix of Tensor
    and DTensor. Use it for modules that compute the same on all ranks. If each rank gave the module
    its own part of the sequence, its gradient would be partial, and nothing sums the parts.

    ``partial_gradients``: all ranks compute the same, but each uses the output for its own part of
    the sequence or of the heads, such as the scale and shift of adaLN. Then the gradients of the
    output are summed over the ranks.
    """

    def __init__(self, partial_gradients=False):
        super().__init__()
        self.grad_placements = [Partial()] if partial_gradients else None

    def _apply(self, module, mesh):
        def replicate(x):
            if isinstance(x, DTensor):  # within a module whose input is one, see PrepareModuleInput
                return x.redistribute(mesh, [Replicate()])
            if isinstance(x, torch.Tensor):
                return DTensor.from_local(x, mesh, [Replicate()], run_check=False)
            return x

        return distribute_module(
            module, mesh,
            input_fn=lambda _, inputs, mesh: tuple(map(replicate, inputs)),
            output_fn=lambda _, output, mesh: output.to_local(
                grad_placements=self.grad_placements
            ),
        )


def parallelize(model, mesh, plan, whole=None):
    """Split ``model`` in place over ``mesh``, a DeviceMesh of one dimension, as ``plan`` says.
    ``whole``: the whole model, if ``model`` is a pipeline stage, which lacks modules that the plan
    names. Every rank must hold the same weights before the call: nothing is sent. Tied parameters
    stay tied, frozen ones frozen.

    Raises:
        SettingError: the plan does not fit the model; later, in the forward pass: a module gets
            inputs that its style would drop, or positions that cannot be split.
    """
    here = {pattern: style for pattern, style in plan.items() if matching(model, pattern)}
    check_calls(model, mesh.size(), here)  # these hooks run before those of the styles
    before = list(model.named_parameters(remove_duplicate=False))
    trained = [parameter.requires_grad for _, parameter in before]
    parallelize_module(model, mesh, here, src_data_rank=None)
    tie_again(model, before)
    for (name, _), requires_grad in zip(before, trained):  # SequenceParallel thaws frozen norms
        model.get_parameter(name).requires_grad_(requires_grad)
    check_plan(model, plan, whole or model)


def tie_again(model, before):
    """Tie the parameters of ``model`` that parallelize_module has untied. ``before``: its pairs of
    (name, parameter), in which a tied one has several names."""
    names = {}
    for name, parameter in before:
        names.setdefault(parameter, []).append(name)
    for first, *others in names.values():
        tied = model.get_parameter(first)
        for other in others:
            module, _, attribute = other.rpartition(".")
            if getattr(tied, "placements", None) != getattr(
                model.get_parameter(other), "placements", None
            ):
                raise SettingError(f"{first} and {other} are tied: the plan must split both alike")
            setattr(model.get_submodule(module), attribute, tied)


def check_plan(model, plan, whole):
    """Raise SettingError if a ``plan`` by which ``model``, a part of ``whole`` or all of it, has
    been split names a module that ``whole`` does not have, or has left out a parameter."""
    for pattern in plan:
        if not matching(whole, pattern):
            raise SettingError(f"the plan names {pattern}, but the model has no such module")
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise SettingError(
                f"the plan does not reach {name}: add its module, with Replicated() if its weights "
                f"are not to be split"
            )


def check_calls(model, n, plan):
    """Let the modules of ``plan`` raise SettingError if they are called with what PyTorch's styles
    take wrongly, over n ranks."""
    def check_inputs(module, inputs):  # a style takes the first, and drops all others in silence
        if len(inputs) > 1:
            raise SettingError(
                f"{type(module).__name__} was called with {len(inputs)} inputs by position, and "
                f"PyTorch's style of its plan drops all but the first: give the others by keyword"
            )

    def check_positions(module, inputs):  # gloo would abort
        T = inputs[0].shape[1]  # (B, T) or (B, T, D)
        if T % n:
            raise SettingError(
                f"{T} positions cannot be split over {n} tensor-parallel ranks: use a multiple of "
                f"{n}, or no sequence parallelism"
            )

    for pattern, style in plan.items():
        for module in matching(model, pattern):
            if isinstance(style, (ColwiseParallel, RowwiseParallel, SequenceParallel)):
                module.register_forward_pre_hook(check_inputs)
            if isinstance(style, RowwiseParallel) and style.output_layouts == (Shard(1),):
                module.register_forward_pre_hook(check_positions)


def matching(model, pattern):
    """The modules whose names match a pattern of a plan: ``*`` matches no dot. A pipeline stage has
    an Identity in place of a module that it lacks."""
    return [
        module for name, module in model.named_modules()
        if fnmatch.fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")
        and not isinstance(module, nn.Identity)
    ]


def wait_for_output(*modules):
    """Let the output of each module arrive before it is used: ``+ 0`` waits for the collective.
    Otherwise it may be an AsyncCollectiveTensor, which a compiled layer cannot take as input, or a
    view, such as the local part of a DTensor, about which FSDP warns."""
    for module in modules:
        module.register_forward_hook(lambda module, inputs, output: output + 0)


def redistribute_gradients(model, group):
    """Redistribute each gradient to the placements of its parameter: once here; otherwise clipping
    and the optimizer would each do so. Every rank has computed all rows of the embedding's
    gradient, since it looks up all tokens: it only keeps its own rows. Under sequence parallelism
    the norms' gradients are partial sums: one all-reduce over ``group`` adds up all."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    partial = [p for p in parameters if p.grad.placements[0].is_partial()]
    if partial:
        whole = torch.cat([p.grad.to_local().flatten() for p in partial])
        dist.all_reduce(whole, group=group)
        for p, part in zip(partial, whole.split([p.numel() for p in partial])):
            p.grad = DTensor.from_local(
                part.view_as(p), p.device_mesh, p.placements, run_check=False
            )
    for p in parameters:
        p.grad = p.grad.redistribute(placements=p.placements)


def check(args, n):
    """Refuse sizes that cannot be split over n ranks; each would fail with an obscure error later.

    Raises:
        SettingError: the message says which sizes can be split.
    """
    config, sequence = args.config, args.seq_len if args.sequence_parallel else n
    refuse([
        (size % n,
         f"{name} {size} cannot be split over {n} tensor-parallel ranks: use a multiple of {n}, or "
         f"a number of ranks that divides it")
        for name, size in (
            ("--num-attention-heads", config.num_attention_heads),
            ("--num-key-value-heads", config.num_key_value_heads),
            ("--intermediate-size", config.intermediate_size),
            ("--vocab-size", config.vocab_size), ("--seq-len", sequence),
        )
    ])


if __name__ == "__main__":
    launch(main)
