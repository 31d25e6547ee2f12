"""Tensor parallel: every matrix is split over the ranks, and all ranks work on the same rows.

Split: each layer's heads and MLP columns, the vocabulary of embedding, head and loss, and with sequence
parallelism (the default) the residual stream and the norms along the sequence. Replicated: the batch, and the
weights of the norms. Use it when a layer is too large for one device, within one machine: it sends in
every layer, and waits for it. (Megatron-LM, arXiv:1909.08053; sequence parallelism, arXiv:2205.05198)

    torchrun --nproc_per_node=2 tp.py
    torchrun --nproc_per_node=4 tp.py --no-sequence-parallel --grad-accum 2
    torchrun --nproc_per_node=8 tp.py --model llama3-1b --dtype bfloat16 --activation-checkpointing --lr 3e-4

Sent in a step, X the bytes of its hidden states (B, T, D), x of the same as the matrices take them (half of X
with bfloat16), L layers, t the bytes of a number per token, N those of the norms, from each of n ranks:

    per layer       all-gather of 2 X forward and 2 x backward, reduce-scatter of 2 x and 2 X   4(X+x)(n-1)/n
      or, without sequence parallelism, all-reduce of 2 x forward and 2 X backward              4(X+x)(n-1)/n
    embedding, head all-gather and reduce-scatter of X each, or all-reduce of X                   4X(n-1)/n
    loss            all-reduce of 3 numbers per token, instead of the logits (B, T, V)            6t(n-1)/n
    norms           with sequence parallelism, all-reduce of their gradients                      2N(n-1)/n

Activation checkpointing repeats of each layer's forward what its backward needs: 2 X + x, or 2 x.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel,
    parallelize_module,
)

from common.arguments import argument_parser, parse_arguments
from common.checkpoint import Checkpoints
from common.data import BatchSampler, TokenDataset, load_batches
from common.environment import rank_and_world_size
from common.errors import SettingError
from common.launch import launch, start_process_group
from common.metrics import Metrics
from common.model import Transformer, checkpoint_activations, compile_layers, init_weights, next_token_loss
from common.optimizer import decay_groups, learning_rate, set_learning_rate


def main(argv=None):
    # Arguments
    parser = argument_parser(__doc__)
    parser.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True,
                        help="split norms and residual stream along the sequence")
    parser.add_argument("--check-replicas", action="store_true",
                        help="check in every step that all ranks have read the same rows")
    args = parse_arguments(parser, argv)

    # Start-up
    n = rank_and_world_size()[1]
    check_divisible(args, n)
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("tp",))

    # Model: built without memory, then materialised, each parameter from a seed of its own
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    if args.compile:
        compile_layers(model)
    if args.activation_checkpointing:
        checkpoint_activations(model)
    parallelize_module(model, mesh, plan(args.sequence_parallel), src_data_rank=None)
    if args.compile:  # a compiled layer takes no tensor that is still arriving, or loses its gradient: + 0 waits for it
        model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output + 0)
    model.to_empty(device=device)  # this rank's rows and columns only
    init_weights(model, args.seed, shard=lambda p, whole: distribute_tensor(
        whole, p.device_mesh, p.placements, src_data_rank=None
    ))
    parameters = dict(model.named_parameters())

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), betas=(args.beta1, args.beta2), fused=True
    )

    # Data
    dataset = TokenDataset(args.data, args.seq_len, args.token_dtype)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        rank=dist.get_rank(), world_size=n, replication=n,
    )
    batches = load_batches(dataset, sampler, args.config.vocab_size, device, args.workers)

    # Resume: the step is all of the data's state
    checkpoints = Checkpoints(args, sampler, parameters, optimizer)
    sampler.start = checkpoints.resume()

    # Loop
    metrics = Metrics(args, device, model, sampler, optimizer, mesh)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        lr = set_learning_rate(optimizer, learning_rate(step, args))
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # mean over the batch
        for micro_batch in range(args.grad_accum):
            inputs, targets = next(batches)  # (B/accum, T)
            if args.check_replicas:
                check_replicas(inputs, mesh)
            with loss_parallel():  # logits (B/accum, T, V/tp): each rank has its part of the vocabulary
                with autocast:
                    micro_loss = next_token_loss(model(inputs), targets) / args.grad_accum
                micro_loss.backward()
            loss += micro_loss.detach().full_tensor()

        for parameter in model.parameters():  # once, where clipping and the optimizer would do it again and again
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        metrics.after_backward(step)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip).full_tensor()
        optimizer.step()
        optimizer.zero_grad()

        if metrics.due(step):
            metrics.log(step, loss, grad_norm, lr)
        metrics.end_step(step)
        checkpoints.after_step(step)

    checkpoints.finish()
    P = sum(p.nbytes for p in model.parameters())
    N = sum(p.nbytes for p in model.parameters() if p.ndim == 1)  # norms
    # X and x: hidden states of a step, as the residual stream has them and as the matrices do (autocast)
    X = args.batch_size * args.seq_len * args.config.hidden_size * args.param_dtype.itemsize
    x = X / 2 if args.dtype == "bfloat16" else X
    tokens, layers = args.batch_size * args.seq_len * args.param_dtype.itemsize, args.config.num_hidden_layers
    again = (2 * X + x if args.sequence_parallel else 2 * x) if args.activation_checkpointing else 0
    sent = layers * (4 * (X + x) + again) + 4 * X + 6 * tokens + (2 * N if args.sequence_parallel else 0)
    formula = "4L(X+x)" + " + Lr" * args.activation_checkpointing + " + 4X + 6t" + " + 2N" * args.sequence_parallel
    return metrics.close(
        parameters=("(P-N)/n + N", (P - N) / n + N), gradients=("(P-N)/n + N", (P - N) / n + N),
        optimizer_states=("2((P-N)/n + N)", 2 * ((P - N) / n + N)),
        sent=(f"({formula})(n-1)/n", sent * (n - 1) / n),
    )


def plan(sequence_parallel):
    """How each module's weights are split, and between which layouts its inputs and outputs change.

    Columns of a weight (out, in) are its rows here, since a linear layer multiplies by the transpose: split
    ``out``, and each rank has some of the heads; split ``in``, and each rank has a part of every sum.
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
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate()),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=stream),
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=stream, use_local_output=False),
    }


class Replicated(ParallelStyle):
    """Weights that every rank holds, as DTensors like all others: clipping and AdamW take no mixture."""

    def _apply(self, module, mesh):
        return distribute_module(
            module, mesh,
            input_fn=lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),
            output_fn=lambda _, output, mesh: output.to_local(),
        )


def check_divisible(args, n):
    """Refuse sizes that cannot be split over n ranks: in the middle of a run each would fail in its own way."""
    sizes = {
        "--num-attention-heads": args.config.num_attention_heads,
        "--num-key-value-heads": args.config.num_key_value_heads,
        "--intermediate-size": args.config.intermediate_size,
        "--vocab-size": args.config.vocab_size,
    }
    if args.sequence_parallel:
        sizes["--seq-len"] = args.seq_len
    for name, size in sizes.items():
        if size % n:
            raise SettingError(
                f"{name} {size} cannot be split over {n} tensor-parallel ranks: use a multiple of {n}, "
                f"or a number of ranks that divides it"
            )


def check_replicas(tokens, mesh):
    """Refuse rows that are not the same on all ranks of ``mesh``: nothing else would notice."""
    least, most = tokens.clone(), tokens.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, mesh.get_group())
    dist.all_reduce(most, dist.ReduceOp.MAX, mesh.get_group())
    if not torch.equal(least, most):
        raise SettingError("the tensor-parallel ranks have read different rows: give the sampler replication")


if __name__ == "__main__":
    launch(main)
