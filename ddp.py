"""Data parallel: every rank holds the whole model and trains it on its share of each batch.

Split: the batch. Replicated: parameters, gradients, optimizer states. Use it if all of these fit on
one device: it is the simplest strategy. (DDP, arXiv:2006.15704)

    torchrun --nproc_per_node=2 ddp.py
    torchrun --nproc_per_node=8 ddp.py --model small --dtype bfloat16 --compile --lr 1e-3
    torchrun --nproc_per_node=8 ddp.py --data my_tokens.bin --vocab-size 50304 --out runs/mine

Sent in a step: one all-reduce of the gradients, in buckets. It runs during the backward pass of the
last micro-batch: a bucket is sent while the gradients of the next one are computed. In a ring, each
of n ranks sends 2P(n-1)/n, where P is the bytes of the gradients, whatever the batch size. And one
number is all-reduced: how many targets the global batch has (8 bytes).
Exposed, so that all ranks wait for it: the last bucket, with the gradients of the first layers,
since nothing is left to compute meanwhile.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from common.data import BatchSampler, load_steps
from common.launch import launch, restores_process, start_process_group
from common.materialise import materialise
from common.model import Transformer, wrap_layers
from common.model_options import add_model_options
from common.options import option_parser, parse_options
from common.step import count_targets, decay_groups, seed_step, set_learning_rate
from common.tokens import add_text_options, open_dataset

# Services, optional: delete an import and every statement that uses it, but keep the loop
from common.services import theory
from common.services.checkpoint import Checkpoints
from common.services.ddp_buckets import arrange_buckets
from common.services.report import Report
from common.services.settings import run_settings
from common.services.validation import Validation


@restores_process
def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser)
    add_text_options(parser)
    Checkpoints.add_options(parser)
    Validation.add_options(parser)
    Report.add_options(parser)
    args = parse_options(parser, argv)
    device = start_process_group(args)
    n = dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("dp",))

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()
    wrap_layers(layers, args.compile, args.activation_checkpointing, model.lm_head)
    materialise(model, device, args.seed)
    autocast = torch.autocast(  # without a cache, which would keep every weight in bfloat16
        device.type, torch.bfloat16, enabled=args.bfloat16, cache_enabled=False
    )
    model.forward = autocast(model.forward)
    # DDP: train by calling replica, not model: otherwise nothing averages the gradients
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # DDP: torch.compile would cut the graph of a layer at every 25 MB of gradients
    replica.forward = torch._dynamo.config.patch(optimize_ddp=False)(replica.forward)

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=mesh,  # DDP: each rank reads its own samples
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
    arrange_buckets(replica, sampler, dataset[0])  # DDP: a resumed run has the same bits
    report = Report(args, model, optimizer, [sampler, dataset], device, mesh)
    for step, batch in report.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, sampler.rank)  # DDP: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch, dist.group.WORLD)  # DDP: of all ranks
        for i, (inputs, targets) in enumerate(batch):  # (B/dp/accum, T)
            # DDP: gradients add up on each rank; the last backward pass averages them over ranks.
            last = i == args.grad_accum - 1
            with contextlib.nullcontext() if last else replica.no_sync():
                micro_loss = replica(inputs, targets) / count
                (micro_loss * n).backward()  # DDP: times n, since gradients are averaged over ranks
            loss += micro_loss.detach()

        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        report.log(step, loss, grad_norm)
        checkpoints.after_step(step, grad_norm)
        if validation.due(step):
            report.log_validation(step, validation.loss(model))
        if checkpoints.stopping:
            break
    checkpoints.finish()
    return report.close(theory.ddp(args, n))


if __name__ == "__main__":
    launch(main)
