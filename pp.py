"""Pipeline parallel: each rank holds some of the layers, and micro-batches flow through the ranks.

Split: the model by its layers, into stages; the batch into M micro-batches, so that the stages work at the
same time. Replicated: nothing; all ranks read the same rows. Use it when a model does not fit and links are
slow, as between machines: only hidden states travel, to the next rank only. The price is the bubble: ranks
wait while the pipeline fills and drains.

    torchrun --nproc_per_node=2 pp.py
    torchrun --nproc_per_node=4 pp.py --schedule gpipe --microbatches 8
    torchrun --nproc_per_node=2 pp.py --schedule zerobubble --stages-per-rank 3 --model small --lr 1e-3

Sent in a step: A = batch x T x D x 4 bytes of hidden states forward, and as much of gradients backward, over
each border between stages on two ranks, whatever M is. (And two scalars, the gradient norm and the loss.)

--schedule       stages of rank r    what it does, on p ranks
gpipe            r                   all micro-batches forward, then all backward (arXiv:1811.06965)
1f1b             r                   backward as soon as possible: rank r keeps the activations of p-r
                                     micro-batches instead of M (PipeDream, arXiv:1806.03377)
interleaved1f1b  r, p+r, 2p+r, ...   with V stages per rank 1/V of the bubble, for V times the traffic
                                     (Megatron-LM, arXiv:2104.04473)
loopedbfs        r, p+r, 2p+r, ...   the same for gpipe (arXiv:2211.05953)
zerobubble       r, p+r, 2p+r, ...   backward in two halves: the gradient that the previous stage waits for
                                     at once, those of the weights to fill the bubble (arXiv:2401.10241)
zbv              r, 2p-1-r           the same, the stages in a V: the last one is on rank 0 again
dualpipev        r, 2p-1-r           a V, each forward paired with a backward (DualPipe, arXiv:2412.19437)

The bubble is (p-1)/(VM+p-1) of a step; with backward in halves (p-1)/(3VM+p-1), if each takes as long as
forward. Zero it is only where ranks go on to the next step before they know the norm of all gradients; here
none does. The measured one, of the last step, says something only where each rank has a core or GPU of its own.
"""

import copy
import itertools
import logging
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

from common.arguments import argument_parser, at_least, parse_arguments
from common.checkpoint import Checkpoints
from common.data import BatchSampler, TokenDataset, load_batches
from common.environment import rank_and_world_size
from common.errors import SettingError
from common.launch import launch, start_process_group
from common.metrics import Metrics
from common.model import Transformer, checkpoint_activations, compile_layers, init_weights, next_token_loss
from common.optimizer import decay_groups, learning_rate, set_learning_rate

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved1f1b": pipelining.ScheduleInterleaved1F1B,
    "loopedbfs": pipelining.ScheduleLoopedBFS,
    "zerobubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
ONE_STAGE = ("gpipe", "1f1b")  # on each rank
V_SHAPED = ("zbv", "dualpipev")  # stages r and 2p-1-r on rank r
SPLIT_BACKWARD = ("zerobubble", "zbv", "dualpipev")  # into gradients of inputs and of weights


def main(argv=None):
    # Arguments
    parser = argument_parser(__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="the order in which stages work")
    parser.add_argument("--microbatches", type=at_least(1), default=4, metavar="M",
                        help="what the pipeline cuts each of the --grad-accum micro-batches into")
    parser.add_argument("--stages-per-rank", type=at_least(1), metavar="V",
                        help="None: 1 for gpipe and 1f1b, 2 for the others")
    args = parse_arguments(parser, argv)
    args.stages_per_rank = args.stages_per_rank or (1 if args.schedule in ONE_STAGE else 2)

    # Start-up
    rank, p = rank_and_world_size()
    check(args, p)  # first: a rank that leaves while others still connect makes these fail in their own words
    device = start_process_group(args)
    # When a rank dies, the engine would print the whole schedule on each of the others.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    mesh = init_device_mesh(device.type, (p,), mesh_dim_names=("pp",))

    # Model: built without memory, then this rank's stages materialised, each parameter from a seed of its own
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = split_layers(args.config.num_hidden_layers, p * args.stages_per_rank)  # of each stage
    own = stages_of(rank, p, args)
    parts = [part_of(model, layers, stage) for stage in own]
    for part in parts:
        if args.compile:
            compile_layers(part)
        if args.activation_checkpointing:
            checkpoint_activations(part)
        part.to_empty(device=device)
        init_weights(part, args.seed)
    parameters = {name: parameter for part in parts for name, parameter in part.named_parameters()}

    # Pipeline: told the shapes of what travels, or it would run the model once to see them
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    b = args.batch_size // (args.grad_accum * args.microbatches)
    with torch.device("meta"):
        tokens = torch.empty(b, args.seq_len, dtype=torch.long)
        # In param_dtype under autocast too: it leaves the sums of the residual stream alone.
        shape = b, args.seq_len, args.config.hidden_size
        hidden = torch.empty(shape, dtype=args.param_dtype, requires_grad=True)
    stages = []
    for stage, part in zip(own, parts):
        part.forward = autocast(part.forward)  # not around the schedule: backward has the types it needs
        stages.append(pipelining.PipelineStage(
            part, stage, len(layers), device, group=mesh.get_group(),
            input_args=hidden if stage else tokens, output_args=hidden,  # of the last stage it is not used
        ))
    schedule = SCHEDULES[args.schedule](
        stages[0] if args.schedule in ONE_STAGE else stages, args.microbatches, scale_grads=False,
        # The mean over the batch: scale_grads would divide what earlier calls have added up, again.
        loss_fn=lambda logits, targets: next_token_loss(logits, targets) / args.microbatches / args.grad_accum,
    )

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(parameters.values(), args.weight_decay), betas=(args.beta1, args.beta2), fused=True
    )

    # Data
    dataset = TokenDataset(args.data, args.seq_len, args.token_dtype)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        rank=rank, world_size=p, replication=p,
    )
    batches = load_batches(dataset, sampler, args.config.vocab_size, device, args.workers)

    # Resume: the step is all of the data's state
    checkpoints = Checkpoints(args, sampler, parameters, optimizer)
    sampler.start = checkpoints.resume()

    # Loop
    metrics = Metrics(args, device, model, sampler, optimizer, mesh, picture=picture(args, layers, p))
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        lr = set_learning_rate(optimizer, learning_rate(step, args))
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # mean over the batch, on the last stage
        if step == args.steps - 1:
            computing, in_all = watch(schedule, stages, device)
        for micro_batch in range(args.grad_accum):
            inputs, targets = next(batches)  # (B/accum, T), of which each rank uses what its stages need
            losses = []
            schedule.step(inputs, target=targets, losses=losses, return_outputs=False)
            loss += sum(micro_loss.detach() for micro_loss in losses)

        metrics.after_backward(step)
        # The norm over all stages: the root of the sum of their squares.
        grad_norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters.values()])
        dist.all_reduce(grad_norm.square_())
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), args.grad_clip, grad_norm.sqrt_())
        optimizer.step()
        optimizer.zero_grad()

        if metrics.due(step):
            dist.all_reduce(loss)  # zero but on the rank of the last stage
            metrics.log(step, loss, grad_norm, lr)
        metrics.end_step(step)
        checkpoints.after_step(step)

    checkpoints.finish()
    P = sum(parameter.nbytes for parameter in parameters.values())
    A = args.batch_size * args.seq_len * args.config.hidden_size * hidden.element_size()
    sends = sum(
        other not in own for stage in own for other in (stage - 1, stage + 1) if 0 <= other < len(layers)
    )
    waiting = torch.tensor(1 - sum(computing) / sum(in_all), device=device)
    dist.all_reduce(waiting, dist.ReduceOp.AVG)
    history = metrics.close(
        parameters=("P, of its stages", P), gradients=("P", P), optimizer_states=("2P", 2 * P),
        sent=(f"{sends} A", sends * A),
    )
    metrics.say(f"bubble: {float(waiting):.1%} of the last step, mean over ranks; theory {bubble(args, p)}")
    return history


def split_layers(num_layers, num_stages):
    """The layers of each stage, as ranges, as even as they go.

    Embedding and head, on the first and the last stage, count as a layer each, so that these stages get a
    layer less, at the least none. What is over goes to the first stages: the embedding costs less than a
    layer, the head of a large vocabulary more.
    """
    each, over = divmod(num_layers + 2, num_stages)
    firsts = [stage * each + min(stage, over) - 1 for stage in range(num_stages + 1)]  # -1: the embedding
    return [range(max(first, 0), min(last, num_layers)) for first, last in itertools.pairwise(firsts)]


def stages_of(rank, p, args):
    """The stages on ``rank``, in order: in a V, or round and round the ranks."""
    if args.schedule in V_SHAPED:
        return [rank, 2 * p - 1 - rank]
    return list(range(rank, p * args.stages_per_rank, p))


def part_of(model, layers, stage):
    """A copy of ``model`` with nothing but what ``stage`` holds; parameters keep their names."""
    part = copy.deepcopy(model)
    for name in list(part.model.layers):
        if int(name) not in layers[stage]:
            del part.model.layers[name]
    if stage > 0:
        part.model.embed_tokens = nn.Identity()
    if stage < len(layers) - 1:
        part.model.norm, part.lm_head = nn.Identity(), nn.Identity()
    return part


def bubble(args, p):
    """How long ranks wait in a step, in theory: formula and value."""
    k = 3 if args.schedule in SPLIT_BACKWARD else 1
    wait = (p - 1) / (k * args.stages_per_rank * args.microbatches + p - 1)
    filled = 2 * p - 1 if args.schedule in V_SHAPED else p  # micro-batches that it takes
    least = "" if args.microbatches >= filled else "at least "
    return f"{least}(p-1)/({k if k > 1 else ''}VM+p-1) = {wait:.1%}"


def picture(args, layers, p):
    """Lines that say which rank holds what."""
    size = args.batch_size // (args.grad_accum * args.microbatches)
    yield (
        f"pipeline {args.schedule}: {args.microbatches} micro-batches of {size} x {args.seq_len} tokens "
        f"through {len(layers)} stages, bubble {bubble(args, p)}"
    )
    for rank in range(p):
        yield f"rank {rank}: " + " | ".join(contents(layers, stage) for stage in stages_of(rank, p, args))


def contents(layers, stage):
    words = ["embedding"] * (stage == 0)
    if held := layers[stage]:
        words.append(f"layers {held[0]}-{held[-1]}" if len(held) > 1 else f"layer {held[0]}")
    return ", ".join(words + ["head"] * (stage == len(layers) - 1))


def watch(schedule, stages, device):
    """From now on, note the seconds that stages compute, and those that the schedule takes in all.

    What is queued on the device is waited for each time, so this is for one step only.
    """
    computing, in_all = [], []
    wait = torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None

    def timed(function, seconds):
        def call(*args, **kwargs):
            wait()  # for the input that is still on its way, too: that is not computing
            began = time.perf_counter()
            result = function(*args, **kwargs)
            wait()
            seconds.append(time.perf_counter() - began)
            return result

        return call

    for stage in stages:
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(stage, name, timed(getattr(stage, name), computing))
    schedule.step = timed(schedule.step, in_all)
    return computing, in_all


def check(args, p):
    """Refuse what the schedule cannot do on ``p`` ranks.

    Raises:
        SettingError: and says what it can do.
    """
    name, M, V, accum = args.schedule, args.microbatches, args.stages_per_rank, args.grad_accum
    if name in ONE_STAGE and V != 1:
        raise SettingError(
            f"--stages-per-rank {V}: --schedule {name} has 1 on each rank; use 1, or interleaved1f1b"
        )
    if name in V_SHAPED and V != 2:
        raise SettingError(f"--stages-per-rank {V}: --schedule {name} has 2 on each rank; use 2, or zerobubble")
    most = args.config.num_hidden_layers + 2
    if p * V > most:
        raise SettingError(
            f"{p} ranks x {V} stages are {p * V}, but {most - 2} layers, embedding and head fill {most} at "
            f"most: start fewer ranks, or lower --stages-per-rank, or raise --num-hidden-layers"
        )
    least = {"1f1b": p, "dualpipev": 2 * p}.get(name, 1)
    if M < least:
        raise SettingError(
            f"--microbatches {M} is too few for --schedule {name} on {p} ranks: use at least {least}, or "
            f"another schedule"
        )
    rounds = max(1, M // p)
    if name in ("interleaved1f1b", "zerobubble") and M % rounds:
        raise SettingError(
            f"--microbatches {M}: --schedule {name} cannot make {rounds} even rounds of them on {p} ranks; "
            f"use a multiple of {p}, such as {M // p * p} or {M // p * p + p}"
        )
    if args.batch_size % (accum * M):
        below = args.batch_size // (accum * M) * accum * M
        raise SettingError(
            f"--batch-size {args.batch_size} cannot be cut evenly into {accum} accumulation steps x {M} "
            f"micro-batches: use a multiple of {accum * M}, such as {below or accum * M}, or change "
            f"--microbatches"
        )
    if name in SPLIT_BACKWARD and args.compile:
        raise SettingError(
            f"--compile with --schedule {name}: a compiled layer has one backward pass, so each half would run "
            f"all of it; use interleaved1f1b, or leave --compile out"
        )
    if name in SPLIT_BACKWARD and args.activation_checkpointing:
        raise SettingError(
            f"--activation-checkpointing with --schedule {name}: each layer would be run again for each of its "
            f"weights; use interleaved1f1b, or leave --activation-checkpointing out"
        )


if __name__ == "__main__":
    launch(main)
