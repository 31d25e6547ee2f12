"""DiLoCo: replicas of the model train alone and meet every few hundred steps, over slow links.

Split: the batch, over all n ranks. These form R replicas (--replicas) of s = n/R ranks each, which
share one copy of the model as in fsdp.py. Each replica trains by AdamW on its share of the batch,
as if it were alone. After every --inner-steps steps, and after the last one, the replicas meet: for
each weight, they average how far it has moved from its last common value. An outer optimizer, SGD
with Nesterov momentum, takes this average for the gradient and updates the common value. All
replicas train on from there. Use it if the links between machines are too slow to send all
gradients in each step, such as 1 Gbit/s between two data centres; each of these is a replica.
(DiLoCo, arXiv:2311.08105)

    torchrun --nproc_per_node=2 examples/diloco.py
    bash run.sh examples/diloco.py --model small --dtype bfloat16 --lr 1e-3
    bash run.sh examples/diloco.py --replicas 4 --inner-steps 500 --save-every 500 --steps 20000

This algorithm is not that of the scripts. Its losses are close to those of ddp.py, but not equal,
and they depend on the number of replicas. Even if the replicas meet in each step it is not DDP,
because AdamW is not linear: it divides by the size of the gradient, so the mean of the replicas'
updates is not the update by the mean gradient. With SGD in place of AdamW, --outer-lr 1 and
--outer-momentum 0 it would be. On a fast network use fsdp.py --replicate, which follows the curve
of one process. The log has the mean of the replicas' losses, and the gradient norm of the first
replica. Between two meetings each replica validates its own weights, on its share of the held-out
data.

Sent between replicas: in a meeting each rank all-reduces its shard of the differences. For P bytes
of parameters it sends (2P/s)(R-1)/R, once in --inner-steps steps; fsdp.py --replicate sends as much
in each step. In each step ``Run`` also all-reduces 40 bytes over all ranks: whether a signal has
asked one to stop, and what it has used of the model. Sent within a replica: what fsdp.py sends,
with s in place of n. Overlap: as in fsdp.py. Exposed: the whole meeting. Beside what fsdp.py holds,
each rank holds its shards of the common weights and of their momentum, 2P/s, and in a meeting P/s
more.

A checkpoint has the common weights under their usual names, which `bash run.sh export` writes for
transformers, and those of each replica, with the states of all. So a run resumes as it was, also
between two meetings, with the same --replicas, on any number of ranks.
"""

import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(1, str(pathlib.Path(__file__).parents[1]))  # where common/ and fsdp.py are
from common.data import BatchSampler, add_text_options, load_steps, open_dataset, open_held_out
from common.launch import launch, start_process_group, world_size
from common.materialise import materialise
from common.model import Transformer, add_model_options, model_config, wrap_layers
from common.options import SettingError, at_least, option_parser, parse_options
from common.run import Run
from common.step import count_targets, decay_groups, seed_step, set_learning_rate
from common.usage import Usage
from fsdp import reduce_by_sum, shard


def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser)
    add_text_options(parser)
    parser.add_argument("--replicas", type=at_least(1), default=2, metavar="R",
                        help="replicas of the model, each sharded over world size / R ranks")
    parser.add_argument("--inner-steps", type=at_least(1), default=10, metavar="N",
                        help="steps from one meeting of the replicas to the next; in the paper 500")
    parser.add_argument("--outer-lr", type=at_least(0, float, above=True), default=0.7,
                        metavar="LR", help="learning rate of the outer optimizer")
    parser.add_argument("--outer-momentum", type=at_least(0, float, below=1), default=0.9,
                        metavar="X", help="Nesterov momentum of the outer optimizer")
    Run.add_options(parser)
    args = parse_options(parser, argv)
    args.config = model_config(args)
    n = world_size()
    check(args, n)  # before the ranks connect
    device = start_process_group(args)
    R = args.replicas
    mesh = init_device_mesh(  # the ranks of a replica are adjacent: they communicate most
        device.type, (R, n // R), mesh_dim_names=("replica", "dp_shard")
    )
    replicas = mesh.get_group("replica")  # the ranks with the same shards, one of each replica

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()
    wrap_layers(layers, args.compile, args.activation_checkpointing, head=model.lm_head)
    # FSDP: what is gathered together; before the optimizer, which updates the shards
    units = [
        [model.model.embed_tokens], *([layer] for layer in layers),
        [model.model.norm, model.lm_head],
    ]
    # DiLoCo: over the ranks of this replica
    shard(
        model, units, mesh["dp_shard"],
        dtype=torch.bfloat16 if args.bfloat16 else None,  # FSDP: no autocast
    )
    reduce_by_sum(model)  # FSDP: each rank's loss is a part of the mean over this replica
    materialise(model, device, args.seed)  # the rows of this rank

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )
    # DiLoCo: what the replicas have in common, and the optimizer that updates it when they meet
    common, outer = make_outer(model.parameters(), args.outer_lr, args.outer_momentum)

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=mesh,  # FSDP: each rank reads its own samples
    )

    # Resume: the step number is the only state of the data
    own, replica = model.state_dict(keep_vars=True), mesh.get_local_rank("replica")
    tensors = {name: common.get(tensor, tensor) for name, tensor in own.items()}  # DiLoCo: common
    tensors |= {f"replica{replica}.{name}": p for name, p in own.items() if p in common}
    run = Run(
        args, model, [optimizer, outer], sampler, dataset, device, mesh,
        held_out=open_held_out(args), tensors=tensors,
        after_evaluation=model.reset_iter_state,  # FSDP: the last unit would stay gathered
        usage=Usage(model),  # FSDP: all ranks must use the same units
    )
    sampler.start = run.resume()

    # Loop
    for step, batch in run.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, sampler.rank)  # FSDP: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch, mesh.get_group("dp_shard"))  # DiLoCo: of this replica
        for inputs, targets in batch:  # (B/n/accum, T)
            micro_loss = model(inputs, targets) / count
            micro_loss.backward()
            loss += micro_loss.detach() / R  # DiLoCo: the mean of the replicas' means is logged

        # FSDP: the norm, of all ranks' shards, is a DTensor; full_tensor() makes a tensor of it.
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        last = step + 1 == args.steps
        if (step + 1) % args.inner_steps == 0 or last:  # DiLoCo: otherwise replicas train on alone
            meet(common, outer, replicas)
        run.after_step(step, loss, grad_norm)
    return run.history


def make_outer(parameters, lr, momentum):
    """What replicas have in common: a dict from each trained one of ``parameters`` to its common
    value, at first a copy, sharded as the parameter is; and the outer optimizer, which updates
    these values: SGD with the learning rate ``lr`` and Nesterov ``momentum``."""
    common = {p: p.detach().clone().requires_grad_() for p in parameters if p.requires_grad}
    outer = torch.optim.SGD(common.values(), lr, momentum, nesterov=momentum > 0)
    if momentum:  # allocated now: memory that is too small fails at the start, not at a meeting
        for value in common.values():
            outer.state[value]["momentum_buffer"] = torch.zeros_like(value)
    return common, outer


@torch.no_grad()
def meet(common, outer, replicas):
    """Let the replicas meet: update the common values by the mean of what the replicas have moved
    away from them, and let all replicas start again from the common values.

    Args:
        common, outer: see ``make_outer``. A parameter, its common value and the gradient of this
            are DTensors (or tensors) of the same shape and placement.
        replicas: the process group of the ranks that hold the same shards, one of each replica.
    """
    reductions = []
    for own, value in common.items():
        value.grad = (value - own) / replicas.size()  # its sum over the replicas is the mean
        local = value.grad.to_local() if isinstance(value, DTensor) else value.grad
        reductions.append(dist.all_reduce(local, group=replicas, async_op=True))
    for reduction in reductions:
        reduction.wait()
    outer.step()
    outer.zero_grad()
    for own, value in common.items():
        own.copy_(value)


def check(args, n):
    """Raise SettingError if n ranks cannot be shared by the replicas."""
    if n % args.replicas:
        raise SettingError(f"--replicas {args.replicas} does not divide the world size {n}: use a "
                           f"divisor")


if __name__ == "__main__":
    launch(main)
