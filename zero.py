"""ZeRO stages 1 and 2: every rank holds the model, but updates only the part that it owns.

Split: the batch; the optimizer states (stage 1) and also the gradients (stage 2), each parameter by its
rows. Replicated: parameters. Use it when AdamW's two states per parameter are what does not fit, and
the model itself does; for more, fsdp.py is stage 3. (ZeRO, arXiv:1910.02054)

    torchrun --nproc_per_node=2 zero.py
    torchrun --nproc_per_node=8 zero.py --stage 1 --grad-accum 4
    torchrun --nproc_per_node=8 zero.py --stage 2 --model small --dtype bfloat16 --compile --lr 1e-3

Sent in a step: the gradients, reduce-scattered, and the updated parameters, all-gathered: P (n-1)/n from
each of n ranks both times, P the bytes of the parameters; together what DDP sends. Stage 1 adds up whole
gradients over the micro-batches and reduces once. Stage 2 reduces a layer's gradients as soon as the
backward pass has them, in every micro-batch, and frees them: less memory, for P (n-1)/n more per further
micro-batch. PyTorch's ZeroRedundancyOptimizer is stage 1 too, but all-reduces the gradients and then
broadcasts the parameters, 3 P (n-1)/n, and has no stage 2: so the collectives are written out here.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from common.arguments import argument_parser, parse_arguments
from common.checkpoint import Checkpoints
from common.data import BatchSampler, TokenDataset, load_batches
from common.errors import SettingError
from common.launch import launch, start_process_group
from common.metrics import Metrics
from common.model import Transformer, checkpoint_activations, compile_layers, init_weights, next_token_loss
from common.optimizer import decay_groups, learning_rate, set_learning_rate


def main(argv=None):
    # Arguments
    parser = argument_parser(__doc__)
    parser.add_argument("--stage", type=int, default=2, help="1: optimizer states are sharded; 2: gradients too")
    args = parse_arguments(parser, argv)
    if args.stage not in (1, 2):
        raise SettingError(f"--stage {args.stage}: zero.py has 1 and 2; stage 3 is fsdp.py, stage 0 is ddp.py")

    # Start-up
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))

    # Model: built without memory, then materialised, each parameter from a seed of its own
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    if args.compile:
        compile_layers(model)
    if args.activation_checkpointing:
        checkpoint_activations(model)
    model.to_empty(device=device)
    init_weights(model, args.seed)
    parameters = dict(model.named_parameters())
    # What is reduced and gathered in one piece: a layer, and each of what is not in one
    modules = [model.model.embed_tokens, *model.model.layers.values(), model.model.norm, model.lm_head]
    buckets = [Bucket(list(module.parameters()), mesh) for module in modules]
    shards = dict(zip(parameters, (shard for bucket in buckets for shard in bucket.shards)))
    in_flight = []  # the bucket that is being reduced: at most one, so that little memory is held twice
    if args.stage == 2:
        for bucket in buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(functools.partial(bucket.arrived, in_flight))

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(shards.values(), args.weight_decay), betas=(args.beta1, args.beta2), fused=True
    )

    # Data
    dataset = TokenDataset(args.data, args.seq_len, args.token_dtype)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps, mesh=mesh
    )
    batches = load_batches(dataset, sampler, args.config.vocab_size, device, args.workers)

    # Resume: the step is all of the data's state
    checkpoints = Checkpoints(args, sampler, shards, optimizer)
    sampler.start = checkpoints.resume()
    for bucket in buckets:
        bucket.all_gather()

    # Loop
    metrics = Metrics(args, device, model, sampler, optimizer, mesh)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        lr = set_learning_rate(optimizer, learning_rate(step, args))
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # mean over this rank's share of the batch
        for micro_batch in range(args.grad_accum):
            inputs, targets = next(batches)  # (B/dp/accum, T)
            with autocast:
                micro_loss = next_token_loss(model(inputs), targets) / args.grad_accum
            micro_loss.backward()
            loss += micro_loss.detach()

        finish(in_flight)
        metrics.after_backward(step)
        if args.stage == 1:
            for bucket in reversed(buckets):
                bucket.reduce_scatter(in_flight)
            finish(in_flight)
        grad_norm = torch.nn.utils.clip_grad_norm_(shards.values(), args.grad_clip).full_tensor()
        optimizer.step()
        for bucket in buckets:
            bucket.all_gather()
        optimizer.zero_grad()

        if metrics.due(step):
            dist.all_reduce(loss, dist.ReduceOp.AVG)  # of equal shares: the mean over the batch
            metrics.log(step, loss, grad_norm, lr)
        metrics.end_step(step)
        checkpoints.after_step(step)

    checkpoints.finish()
    P, n = sum(p.nbytes for p in model.parameters()), mesh.size()
    if args.stage == 1:
        gradients, sent = ("P", P), ("2P(n-1)/n", 2 * P * (n - 1) / n)
    else:
        gradients, sent = ("P/n", P / n), ("(1+a)P(n-1)/n", (1 + args.grad_accum) * P * (n - 1) / n)
    return metrics.close(
        parameters=("P", P), gradients=gradients, optimizer_states=("2P/n", 2 * P / n), sent=sent
    )


class Bucket:
    """Parameters whose gradients, and whose updated rows, travel together.

    Of a parameter of R rows each of n ranks owns ceil(R/n), the last ones perhaps fewer; what travels is
    padded to equal shares. ``shards`` are DTensors of the rows that this rank owns: views of the parameters,
    so that updating a shard updates the parameter.
    """

    def __init__(self, parameters, mesh):
        self.parameters, self.mesh, self.n = parameters, mesh, mesh.size()
        self.shards = [self.as_shard(self.own_rows(p.detach()), p) for p in parameters]
        self.shares = [-(-len(p) // self.n) * p[0].numel() for p in parameters]  # elements for each rank
        self.missing = len(parameters)  # gradients that the backward pass has yet to bring

    def own_rows(self, whole):
        pieces, rank = whole.chunk(self.n), self.mesh.get_local_rank()
        return pieces[rank] if rank < len(pieces) else whole[:0]

    def as_shard(self, rows, parameter):
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(rows, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def arrived(self, in_flight, parameter):
        """A hook, for when the gradient of ``parameter`` is there: the last one sets the bucket off."""
        self.missing -= 1
        if not self.missing:
            self.missing = len(self.parameters)
            self.reduce_scatter(in_flight)

    def reduce_scatter(self, in_flight):
        """Start averaging the gradients over the ranks, each getting its share, and free them."""
        finish(in_flight)
        whole = torch.cat([
            F.pad(p.grad.flatten(), (0, self.n * share - p.numel())).view(self.n, share)
            for p, share in zip(self.parameters, self.shares)
        ], dim=1).flatten()  # (n, sum of shares) as n shares, one after another
        for parameter in self.parameters:
            parameter.grad = None
        self.reduced = whole.new_empty(sum(self.shares))
        self.work = dist.reduce_scatter_single(self.reduced, whole, dist.ReduceOp.AVG, async_op=True)
        in_flight.append(self)

    def keep(self):
        """Wait for the share of this rank, and add it to the gradients of its shards."""
        self.work.wait()
        for parameter, shard, share in zip(self.parameters, self.shards, self.reduced.split(self.shares)):
            rows = shard.to_local()
            rows = share[: rows.numel()].view_as(rows)
            if shard.grad is None:
                shard.grad = self.as_shard(rows, parameter)
            else:
                shard.grad.to_local().add_(rows)
        self.reduced = self.work = None

    @torch.no_grad()
    def all_gather(self):
        """Every rank gets the rows that the others have updated."""
        own = torch.cat([
            F.pad(shard.to_local().flatten(), (0, share - shard.to_local().numel()))
            for shard, share in zip(self.shards, self.shares)
        ])
        whole = own.new_empty(self.n * len(own))
        dist.all_gather_single(whole, own)
        for parameter, rows in zip(self.parameters, whole.view(self.n, -1).split(self.shares, dim=1)):
            parameter.copy_(rows.flatten()[: parameter.numel()].view_as(parameter))


def finish(in_flight):
    """Wait for the bucket that is being reduced, if there is one."""
    while in_flight:
        in_flight.pop().keep()


if __name__ == "__main__":
    launch(main)
