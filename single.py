"""One process: the baseline that every other script is diffed against.

Split: nothing. Sent: nothing. Use it for a model that fits on one device, and as the reference:
every other script follows its loss curve.

    python single.py
    python single.py --model small --dtype bfloat16 --compile --steps 1000 --lr 1e-3
    python single.py --data my_tokens.bin --vocab-size 50304 --out runs/mine
"""

import torch

from common.arguments import argument_parser, describe, parse_arguments, run_settings
from common.checkpoint import Checkpoints
from common.data import BatchSampler, TokenDataset, fingerprint, load_batches
from common.huggingface import load_weights
from common.launch import launch, start_process
from common.metrics import Metrics
from common.model import (
    Transformer, checkpoint_activations, compile_layers, init_weights, materialise
)
from common.optimizer import (
    decay_groups, learning_rate, set_learning_rate, skip_if_not_finite
)
from common.seed import seed_step
from common.validation import Validation


def main(argv=None):
    # Arguments
    args = parse_arguments(argument_parser(__doc__), argv)

    # Start-up
    device = start_process(args.device)

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed
    # Your own model: torch.manual_seed(args.seed), then MyModel().to(device), in place of the meta
    # device, materialise and init_weights; its initial values, buffers and ties stay as they are.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()
    if args.compile:
        compile_layers(layers)
    if args.activation_checkpointing:
        checkpoint_activations(layers)
    materialise(model, device)
    init_weights(model, args.seed)

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), betas=(args.beta1, args.beta2),
        fused=True,
    )

    # Data
    dataset = TokenDataset(args.data, args.seq_len, args.token_dtype, args.config.vocab_size)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps
    )
    batches = load_batches(dataset, sampler, device, args.workers)
    held_out = args.val_data and TokenDataset(
        args.val_data, args.seq_len, args.token_dtype, args.config.vocab_size, "--val-data"
    )
    validation = Validation(
        held_out, sampler, device, args.val_every, args.val_batches, args.workers
    )

    # Resume: the step number is the only state of the data
    run, may_change = run_settings(args, vars(args.config), fingerprint(dataset))
    checkpoints = Checkpoints(
        args.out, run, model.state_dict(keep_vars=True), optimizer,
        stop=args.steps, may_change=may_change, every=args.save_every, keep=args.keep,
        resume=args.resume, in_background=args.async_save, check_replicas=args.check_replicas,
    )
    sampler.start = checkpoints.resume()
    if args.init_from and not sampler.start:  # a resumed run has the weights of its checkpoint
        load_weights(model, args.init_from)

    # Loop
    loggers = []
    if args.wandb or args.tensorboard:
        from common.loggers import start_loggers
        loggers = start_loggers(args.out, vars(args), sampler.start, args.wandb, args.tensorboard)
    metrics = Metrics(
        args.out, optimizer, [model, *layers], [describe(args, model), sampler, dataset],
        start=sampler.start, stop=args.steps, tokens_per_step=args.batch_size * args.seq_len,
        device=device, log_every=args.log_every, profile=args.profile, loggers=loggers,
        flops_per_token=args.config.flops_per_token(args.seq_len), peak_tflops=args.peak_tflops,
    )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        seed_step(args.seed, step)
        lr = learning_rate(step, args.lr, args.steps, args.warmup_steps, args.min_lr)
        set_learning_rate(optimizer, lr)
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # mean over the batch
        batch = [next(batches) for _ in range(args.grad_accum)]
        count = count_targets(batch)
        for inputs, targets in batch:  # (B/accum, T)
            with autocast:
                micro_loss = model(inputs, targets) / count
            micro_loss.backward()
            loss += micro_loss.detach()

        metrics.after_backward(step)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        skip_if_not_finite(optimizer, grad_norm, step)
        optimizer.step()
        optimizer.zero_grad()

        if metrics.due(step) or checkpoints.due(step):
            metrics.log(step, loss, grad_norm, lr)
        metrics.end_step(step)
        if validation.due(step):
            with metrics.pause(), autocast:
                metrics.log_validation(step, validation.loss(model))
        if checkpoints.after_step(step):
            break

    checkpoints.finish()
    return metrics.close(**theory(sum(p.nbytes for p in model.parameters())))


def count_targets(batch):
    """The number of targets in the micro-batches of a step, without targets of -100. At least 1."""
    return sum((targets != -100).sum() for _, targets in batch).clamp(min=1)


def theory(P):
    """Bytes held and bytes sent in a step, for P bytes of parameters: (formula, bytes) by kind."""
    return {
        "parameters": ("P", P), "gradients": ("P", P), "optimizer_states": ("2P", 2 * P),
        "sent": ("0", 0),
    }


if __name__ == "__main__":
    launch(main)
