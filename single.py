"""One process: the baseline that every other script is diffed against.

Split: nothing. Sent: nothing. Use it for what fits on one device, and as the reference: every
other script follows its loss curve.

    python single.py
    python single.py --model small --dtype bfloat16 --compile --steps 1000 --lr 1e-3
    python single.py --data my_tokens.bin --vocab-size 50304 --out runs/mine
"""

import torch

from common.arguments import argument_parser, parse_arguments
from common.checkpoint import Checkpoints
from common.data import BatchSampler, TokenDataset, load_batches
from common.launch import launch, start_process
from common.metrics import Metrics
from common.model import Transformer, checkpoint_activations, compile_layers, init_weights, next_token_loss
from common.optimizer import decay_groups, learning_rate, set_learning_rate


def main(argv=None):
    # Arguments
    args = parse_arguments(argument_parser(__doc__), argv)

    # Start-up
    device = start_process(args)

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

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), betas=(args.beta1, args.beta2), fused=True
    )

    # Data
    dataset = TokenDataset(args.data, args.seq_len, args.token_dtype)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps
    )
    batches = load_batches(dataset, sampler, args.config.vocab_size, device, args.workers)

    # Resume: the step is all of the data's state
    checkpoints = Checkpoints(args, sampler, parameters, optimizer)
    sampler.start = checkpoints.resume()

    # Loop
    metrics = Metrics(args, device, model, sampler, optimizer)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        lr = set_learning_rate(optimizer, learning_rate(step, args))
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # mean over the batch
        for micro_batch in range(args.grad_accum):
            inputs, targets = next(batches)  # (B/accum, T)
            with autocast:
                micro_loss = next_token_loss(model(inputs), targets) / args.grad_accum
            micro_loss.backward()
            loss += micro_loss.detach()

        metrics.after_backward(step)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

        if metrics.due(step):
            metrics.log(step, loss, grad_norm, lr)
        metrics.end_step(step)
        checkpoints.after_step(step)

    checkpoints.finish()
    P = sum(p.nbytes for p in model.parameters())
    return metrics.close(parameters=("P", P), gradients=("P", P), optimizer_states=("2P", 2 * P), sent=("0", 0))


if __name__ == "__main__":
    launch(main)
