"""One process: the baseline that every other script is diffed against.

Split: nothing. Sent: nothing. Use it for a model that fits on one device, and as the reference:
every other script follows its loss curve, up to rounding. In the shapes below, B is the number of
sequences in the global batch, and T the number of tokens in a sequence.

    python single.py
    python single.py --model small --dtype bfloat16 --compile --steps 1000 --lr 1e-3
    python single.py --data my_tokens.bin --vocab-size 50304 --out runs/mine
"""

import torch

from common.data import BatchSampler, load_steps
from common.launch import launch, restores_process, start_process
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
    Checkpoints.add_options(parser)
    Validation.add_options(parser)
    Report.add_options(parser)
    args = parse_options(parser, argv)
    device = start_process(args)

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

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps
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
    report = Report(args, model, optimizer, [sampler, dataset], device)
    for step, batch in report.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step)  # for dropout, if your model has any
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # mean over the batch: the model returns a sum over targets
        count = count_targets(batch)
        for inputs, targets in batch:  # (B/accum, T)
            micro_loss = model(inputs, targets) / count
            micro_loss.backward()
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
    return report.close(theory.single(args))


if __name__ == "__main__":
    launch(main)
