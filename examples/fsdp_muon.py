"""fsdp.py with Muon for the matrices of the layers, and AdamW for embedding, norms and head.

    torchrun --nproc_per_node=2 examples/fsdp_muon.py
    bash run.sh examples/fsdp_muon.py --model small --lr 1e-3

Muon brings all singular values of an update close to 1 (https://kellerjordan.github.io/posts/muon).
Newton-Schulz, some matrix products, does that, and needs the whole matrix, of which each rank has
some rows. So each matrix has an owner: the ranks send it their rows, it computes, and it sends each
rank its rows of the result. A rank owns every n-th matrix. The scale of arXiv:2502.16982 makes
updates as large as AdamW's: --lr and --weight-decay are those of both.

Sent in a step, on top of fsdp.py: two all-to-alls. M: bytes of the matrices. Each of n ranks sends
(2M/n)(n-1)/n, if all own equally much. torch.optim.Muon under FSDP2 has 15 all-gathers for each
matrix that is wide or square, and 10 all-reduces for each tall one. For llama3-8b in float32 on 8
ranks that is 109 GB in a step; here it is 6.1 GB. It also computes in bfloat16, and so its updates
depend on the number of ranks. Here Newton-Schulz has the type of the parameters. With more ranks
than matrices some ranks own none. Exposed: both all-to-alls, and what the owner with most work
computes.
"""

import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(1, str(pathlib.Path(__file__).parents[1]))  # where common/ and fsdp.py are
from common.data import BatchSampler, add_text_options, load_steps, open_dataset, open_held_out
from common.launch import launch, start_process_group, world_size
from common.materialise import materialise
from common.model import Transformer, add_model_options, model_config, wrap_layers
from common.options import option_parser, parse_options
from common.run import Run  # optional: delete it, and every statement that uses it or ``run``
from common.step import count_targets, decay_groups, seed_step, set_learning_rate
from common.usage import Usage
from fsdp import reduce_by_sum, shard


def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser)
    add_text_options(parser)
    Run.add_options(parser)
    args = parse_options(parser, argv)
    args.config = model_config(args)
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (world_size(),), mesh_dim_names=("dp_shard",))

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
    shard(
        model, units, mesh, dtype=torch.bfloat16 if args.bfloat16 else None,  # FSDP: no autocast
    )
    reduce_by_sum(model)  # FSDP: each rank's loss is a part of the mean over all ranks
    materialise(model, device, args.seed)  # the rows of this rank

    # Optimizer: Muon for the matrices of the layers, AdamW for embedding, norms and head
    inner = {p for layer in layers for p in layer.parameters() if p.ndim == 2}
    matrices = [p for p in model.parameters() if p in inner]
    rest = [p for p in model.parameters() if p not in inner]
    optimizer = [
        Muon(matrices, mesh.get_group("dp_shard"), args.lr, args.weight_decay),
        torch.optim.AdamW(decay_groups(rest, args.weight_decay), args.lr, args.betas, fused=True),
    ]

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=mesh,  # FSDP: each rank reads its own samples
    )

    # Resume: the step number is the only state of the data
    run = Run(
        args, model, optimizer, sampler, dataset, device, mesh, held_out=open_held_out(args),
        after_evaluation=model.reset_iter_state,  # FSDP: the last unit would stay gathered
        usage=Usage(model),  # FSDP: all ranks must use the same units
    )
    sampler.start = run.resume()

    # Loop
    for step, batch in run.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, sampler.rank)  # FSDP: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch, dist.group.WORLD)  # FSDP: of all ranks
        for inputs, targets in batch:  # (B/dp/accum, T)
            micro_loss = model(inputs, targets) / count
            micro_loss.backward()
            loss += micro_loss.detach()

        # FSDP: the norm, of all ranks' shards, is a DTensor; full_tensor() makes a tensor of it.
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()
        for each in optimizer:
            each.step()
            each.zero_grad()
        run.after_step(step, loss, grad_norm)
    return run.history


class Muon(torch.optim.Optimizer):
    """Muon for matrices (out, in) that are DTensors, sharded by their rows over the process group
    ``ranks``, as FSDP does. All ranks call ``step``.

    ``lr``: an update is scaled by 0.2 sqrt(max(out, in)), so that it is as large as AdamW's
    (arXiv:2502.16982). ``momentum``: the share of the average of gradients that a step keeps; the
    update is Nesterov's.
    """

    def __init__(self, matrices, ranks, lr, weight_decay=0.1, momentum=0.95):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.ranks = ranks

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, momentum, updates = group["lr"], group["momentum"], []
            matrices = [p for p in group["params"] if p.grad is not None]
            for p in matrices:
                if p not in self.state:
                    self.state[p]["average"] = torch.zeros_like(p)
                gradient, average = p.grad.to_local(), self.state[p]["average"].to_local()
                average.lerp_(gradient, 1 - momentum)
                updates.append(gradient.lerp(average, momentum))
            updates = orthogonalize(updates, [p.shape for p in matrices], self.ranks)
            for p, update in zip(matrices, updates):
                p.mul_(1 - lr * group["weight_decay"])
                p.to_local().sub_(update, alpha=lr * 0.2 * max(p.shape) ** 0.5)


def orthogonalize(shards, shapes, ranks):
    """``newton_schulz`` of matrices that are sharded by their rows over a process group, ``ranks``.
    All of them call it.

    ``shards``: this rank's part of each matrix, ``matrix.chunk(n)[rank]``. ``shapes``: (out, in) of
    the whole matrices. Returns the same parts of the results.
    """
    n, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    owned = [range(r, len(shapes), n) for r in range(n)]  # indices, for each owner
    order = [i for indices in owned for i in indices]

    # To the owners: this rank gets the parts of its own matrices from each rank.
    sizes, to_owners = [], []
    for r, indices in enumerate(owned):
        sizes.append([shard_size(shapes[i], n, r) for i in owned[rank]])
        to_owners.append(sum(shards[i].numel() for i in indices))
    from_ranks = [sum(parts) for parts in sizes]
    sent = torch.cat([shards[i].flatten() for i in order])
    received = sent.new_empty(sum(from_ranks))
    dist.all_to_all_single(received, sent, from_ranks, to_owners, group=ranks)

    # Each owner: the parts of a matrix, one after the other, are the matrix.
    parts = [rows.split(of) for rows, of in zip(received.split(from_ranks), sizes)]
    for i, rows in zip(owned[rank], zip(*parts)):
        result = newton_schulz(torch.cat(rows).view(shapes[i])).flatten()
        for part, new in zip(rows, result.split([len(part) for part in rows])):
            part.copy_(new)  # in ``received``

    # And back, the same way
    dist.all_to_all_single(sent, received, to_owners, from_ranks, group=ranks)
    results = dict(zip(order, sent.split([shards[i].numel() for i in order])))
    return [results[i].view_as(shard) for i, shard in enumerate(shards)]


def shard_size(shape, n, rank):
    """How many numbers of a matrix (out, in) a rank has, if FSDP shards its rows over n ranks."""
    rows = -(-shape[0] // n)  # on the first ranks; the last ones may have fewer, or none
    return max(0, min(rows, shape[0] - rank * rows)) * shape[1]


def newton_schulz(X, steps=5):
    """X (out, in) with all singular values brought close to 1, and the same singular vectors. It
    computes in the type of X. Source: https://kellerjordan.github.io/posts/muon."""
    if len(X) > X.shape[1]:
        return newton_schulz(X.mT, steps).mT  # the products with the shorter side are smaller
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = X @ X.mT
        X = 3.4445 * X + (-4.7750 * gram + 2.0315 * gram @ gram) @ X
    return X


if __name__ == "__main__":
    launch(main)
