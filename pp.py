"""Pipeline parallel: each rank holds some of the layers, and micro-batches flow through the ranks.

Split: the model by its layers, into stages; each micro-batch of --grad-accum into M smaller ones,
so that the stages work at the same time. Replicated: nothing; all ranks read the same samples. Use
it if a model does not fit and links are slow, as between machines: only hidden states travel, and
only to the next stage. The price is the bubble: ranks wait while the pipeline fills and drains.

    torchrun --nproc_per_node=2 pp.py
    torchrun --nproc_per_node=4 pp.py --schedule gpipe --microbatches 8
    torchrun --nproc_per_node=2 pp.py --schedule zerobubble --stages-per-rank 3 --model small

Sent in a step, over each border between stages on two ranks, whatever M is: X bytes of hidden
states forward and X bytes of gradients backward. X: B T D numbers in the type of matrix products
(B: sequences in the global batch, T: tokens in a sequence, D: hidden size). All ranks also
all-reduce the gradient norm, and in logged steps the loss.

Three schedules of 3 ranks, one stage on each, and 4 micro-batches; time runs from left to right. 0
to 3 is the forward pass of a micro-batch, aa to dd its backward pass, which takes twice as long.
Dots are the bubble. zerobubble splits the backward pass: a computes the gradient of the stage's
input, A the gradients of the stage's weights.

    gpipe       rank 0   0 1 2 3 . . . . . . a a b b c c d d
                rank 1   . 0 1 2 3 . . . a a b b c c d d . .
                rank 2   . . 0 1 2 3 a a b b c c d d . . . .

    1f1b        rank 0   0 1 2 . . . . a a 3 b b . c c . d d
                rank 1   . 0 1 . . a a 2 b b 3 c c . d d . .
                rank 2   . . 0 a a 1 b b 2 c c 3 d d . . . .

    zerobubble  rank 0   0 1 2 . . a A 3 b B c C d D
                rank 1   . 0 1 . a 2 b A 3 c B d C D
                rank 2   . . 0 a 1 b 2 c A 3 d B C D

--schedule       stages of rank r    what it does, with n ranks and v stages on each
gpipe            r                   all micro-batches forward, then all backward (arXiv:1811.06965)
1f1b             r                   backward as soon as possible: rank r stores the activations of
                                     n-r micro-batches instead of M (PipeDream, arXiv:1806.03377)
interleaved1f1b  r, n+r, 2n+r, ...   1f1b with 1/v of the bubble, for v times the traffic
                                     (Megatron-LM, arXiv:2104.04473)
loopedbfs        r, n+r, 2n+r, ...   gpipe with 1/v of the bubble, for v times the traffic
                                     (arXiv:2211.05953)
zerobubble       r, n+r, 2n+r, ...   backward in two parts: first the gradient that the previous
                                     stage waits for; the gradients of the weights fill the bubble
                                     (arXiv:2401.10241)
zbv              r, 2n-1-r           zerobubble with its stages in a V: the last one is on rank 0
dualpipev        r, 2n-1-r           stages in a V; overlaps a forward with a backward pass
                                     (DeepSeek-V3, arXiv:2412.19437)

The bubble is (n-1)/(vM+n-1) of a step; with the backward pass in two parts (n-1)/(3vM+n-1), if each
part takes as long as the forward pass. The layers are distributed such that the stages have about
equally many parameters, the embedding's not counted. Overlap: sends and receives run while the rank
computes another micro-batch. Exposed: the bubble and the norm. The zero-bubble schedules reach zero
only if a rank may start the next step before the global gradient norm is known; here no rank may.
"""

import copy
import functools
import itertools
import logging
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import config, pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from common.data import BatchSampler, add_text_options, load_steps, open_dataset, open_held_out
from common.launch import launch, start_process_group, world_size
from common.materialise import materialise, names_of_parameters
from common.model import (
    Transformer, add_model_options, compute_in_bfloat16, model_config, wrap_layers
)
from common.options import SettingError, at_least, option_parser, parse_options, refuse
from common.run import Run  # optional: delete it, and every statement that uses it or ``run``
from common.step import count_targets, decay_groups, seed_step, set_learning_rate

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
V_SHAPED = ("zbv", "dualpipev")  # stages r and 2n-1-r on rank r
SPLIT_BACKWARD = ("zerobubble", "zbv", "dualpipev")  # gradients of inputs first, of weights later


def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser)
    add_text_options(parser)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b",
                        help="the order in which the stages work")
    parser.add_argument("--microbatches", type=at_least(1), default=4, metavar="M",
                        help="micro-batches into which the pipeline cuts each of the --grad-accum "
                        "micro-batches")
    parser.add_argument("--stages-per-rank", type=at_least(1), metavar="N",
                        help="stages on each rank; None: 1 for gpipe and 1f1b, otherwise 2")
    Run.add_options(parser)
    args = parse_options(parser, argv)
    args.config = model_config(args)
    n = world_size()
    if not args.stages_per_rank:
        args.stages_per_rank = 1 if args.schedule in ONE_STAGE else 2
    check(args, n)
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("pp",))
    M, v = args.microbatches, args.stages_per_rank
    rank, group = mesh.get_rank(), mesh.get_group()
    # PP: when a rank dies, torch.distributed.pipelining prints the schedule on all other ranks.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

    # Model: built on the meta device; PP: then this rank's stages are materialised
    with torch.device("meta"):
        whole = Transformer(args.config).to(args.param_dtype)
    stage_layers = split_layers(len(whole.model.layers), n * v, cost_of_head(whole))
    stages = stages_of(rank, n, v, args.schedule)
    parts = [keep_stage(copy.deepcopy(whole), stage_layers, stage) for stage in stages]
    check_stages(whole, parts, group)
    for part in parts:
        layers = part.model.layers.values()
        wrap_layers(layers, args.compile, args.activation_checkpointing, head=part.lm_head)
        materialise(part, device, args.seed)
        if args.bfloat16:
            compute_in_bfloat16(part, device)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    with torch.device("meta"):  # what travels: a micro-batch of tokens, hidden states, the loss
        tokens = torch.empty(
            args.batch_size // (args.grad_accum * M), args.seq_len, dtype=torch.int64
        )
        hidden = torch.empty(*tokens.shape, args.config.hidden_size, dtype=args.compute_dtype)
        output = torch.empty((), dtype=args.param_dtype)
    # PP: the targets of a global batch, which each step writes here; the schedule does not scale.
    count = torch.ones((), dtype=torch.int64, device=device)
    schedule = make_schedule(
        args.schedule, parts, stages, len(stage_layers), M, tokens, hidden, output,
        lambda micro_loss, targets: micro_loss / count, group, device,
    )

    def loss_of_stages(micro_batch):  # PP: for validation; the rank of the last stage has the loss
        inputs, targets = micro_batch
        losses = []
        count.fill_(1)  # PP: the loss is a sum here
        schedule.eval(inputs, targets=targets, target=targets, losses=losses, return_outputs=False)
        return sum(losses), (targets != -100).sum() if losses else 0

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(parameters, args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(  # PP: without a mesh, so all ranks read the same samples
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps
    )

    # Resume: the step number is the only state of the data
    run = Run(
        args, parts, optimizer, sampler, dataset, device, mesh, held_out=open_held_out(args),
        loss_of=loss_of_stages, size=sum(p.numel() for p in whole.parameters()),  # PP: not a stage
    )
    sampler.start = run.resume()

    # Loop
    for step, batch in run.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, rank)  # PP: stages have their own dropout
        set_learning_rate(optimizer, step, args)
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # PP: 0 but on the last stage
        count.copy_(count_targets(batch))  # PP: for the loss of each micro-batch
        for inputs, targets in batch:  # (B/accum, T)
            # PP: forward and backward; the first stage uses the inputs, the last the targets.
            losses = []
            schedule.step(
                inputs, targets=targets, target=targets, losses=losses, return_outputs=False
            )
            loss += sum(micro_loss.detach() for micro_loss in losses)

        grad_norm = clip_over_stages(parameters, args.max_norm, group)  # PP: of all stages
        optimizer.step()
        optimizer.zero_grad()
        run.after_step(step, loss, grad_norm)
    return run.history


def cost_of_head(model):
    """The cost of the head, in layers: a module costs as much as it has parameters."""
    head, layer = (
        sum(p.numel() for p in module.parameters())
        for module in (model.lm_head, model.model.layers["0"])
    )
    return head / layer


def split_layers(num_layers, num_stages, head):
    """The layers of each stage, as ranges, such that the slowest stage has as little to compute as
    possible. The last stage also has the head, which costs as much as ``head`` layers (2.4 in an 8B
    Llama 3); the embedding of the first stage costs nothing. If the others cannot have equally many
    layers, later stages get one layer more, because earlier stages keep more activations. Raises
    SettingError: there are more stages than layers, embedding and head.
    """
    if num_stages == 1:
        return [range(num_layers)]
    most = num_layers + 2
    if num_stages > most:
        raise SettingError(
            f"there are {num_stages} stages (ranks x --stages-per-rank), but {num_layers} layers, "
            f"embedding and head fill {most} at most: start fewer ranks, or lower "
            f"--stages-per-rank, or raise --num-hidden-layers")
    others = num_stages - 1

    def slowest(last):  # layers that the slowest stage computes, if the last stage has so many
        return max(math.ceil((num_layers - last) / others), last + head)

    # Each stage in between gets at least one layer. Of equal splits the last stage has most.
    last = min(range(num_layers - others + 1, -1, -1), key=slowest)
    each, remainder = divmod(num_layers - last, others)
    sizes = [each + (stage >= others - remainder) for stage in range(others)] + [last]
    borders = [0, *itertools.accumulate(sizes)]
    return [range(first, end) for first, end in itertools.pairwise(borders)]


def stages_of(rank, n, v, schedule):
    """The stages on ``rank``, in their order: a V over the n ranks, or v rounds over the ranks."""
    if schedule in V_SHAPED:
        return [rank, 2 * n - 1 - rank]
    return list(range(rank, n * v, n))


def keep_stage(model, layers, stage):
    """Delete everything from ``model`` that is not of ``stage``; the rest keeps its names. Returns
    the model."""
    for name in list(model.model.layers):
        if int(name) not in layers[stage]:
            del model.model.layers[name]
    if stage > 0:
        model.model.embed_tokens = nn.Identity()
    if stage < len(layers) - 1:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
    return model


def check_stages(whole, parts, group):
    """Refuse a trained parameter that several stages have: each would train a copy of its own, and
    only one copy is saved. A tie can be seen only in the whole model, before it is cut.

    Args:
        whole: the whole model, on the meta device.
        parts: the modules of this rank's stages, cut from copies of it.
        group: the process group of the pipeline. All of its ranks call this function.

    Raises SettingError, which names the parameter and what to do, on all ranks.
    """
    names = [[*dict(part.named_parameters(remove_duplicate=False))] for part in parts]
    of_ranks = [None] * group.size()
    dist.all_gather_object(of_ranks, names, group=group)
    stages = [set(stage) for rank in of_ranks for stage in rank]
    for names in names_of_parameters(whole):
        shared = sum(not stage.isdisjoint(names) for stage in stages) > 1
        if shared and whole.get_parameter(names[0]).requires_grad:  # frozen copies stay equal
            raise SettingError(
                f"several stages have the parameter {' = '.join(names)}: delete it from all stages "
                f"but one (layers must keep their names, as in a ModuleDict), and untie tied "
                f"weights, or keep both modules in one stage"
            )


def make_schedule(
    name, parts, numbers, num_stages, M, tokens, hidden, output, loss_fn, group, device
):
    """Connect this rank's stages to the pipeline.

    Args:
        name: one of ``SCHEDULES``.
        parts: the modules of this rank's stages. The first stage takes tokens, all others hidden
            states; the last returns what ``loss_fn`` takes, all others hidden states.
        numbers: the numbers of this rank's stages, of ``num_stages`` in all; see ``stages_of``.
        M: the number of micro-batches in a call of ``schedule.step``.
        tokens, hidden: meta tensors with the shapes (B/M, T) and (B/M, T, D) of one micro-batch and
            with the types that travel. Without them the pipeline would run the model to learn them.
        output: a meta tensor like the output of the last stage for one micro-batch.
        loss_fn: takes the output of the last stage and the targets. The schedule adds up the
            gradients of all micro-batches and does not scale them.
        group: the process group of the pipeline, in the order of the ranks.

    Returns the schedule. All ranks call ``schedule.step(inputs, target=targets, losses=[])``.
    Raises SettingError: the schedule cannot work with M; in a step, the output of a stage is not
    like ``hidden``, or that of the last one not like ``output``.
    """
    hidden = hidden.requires_grad_()

    # On one communicator of NCCL a rank cannot send while it waits to receive, and looped and
    # V-shaped schedules can deadlock. From 2.14 on torch can have one for each direction; 2.15 has
    # another name for it.
    for option in ("pipeline_per_direction_p2p", "pipeline_per_edge_p2p"):
        if "nccl" in dist.get_backend(group) and hasattr(config, option):
            setattr(config, option, True)
    stages = []
    for stage, part in zip(numbers, parts):
        returned = hidden if stage < num_stages - 1 else output
        part.register_forward_hook(functools.partial(check_output, stage, returned))
        stages.append(pipelining.PipelineStage(
            part, stage, num_stages, device, group=group,
            input_args=hidden if stage else tokens, output_args=returned,
        ))
    pass_on_no_gradients_in_eval(stages)
    try:
        return SCHEDULES[name](
            stages[0] if name in ONE_STAGE else stages, M, loss_fn=loss_fn, scale_grads=False
        )
    except ValueError as error:  # the micro-batches are too few, or make no even rounds
        raise SettingError(f"--microbatches {M}, schedule {name}: {error}") from None


def check_output(stage, expected, part, inputs, output):
    """A hook of the part that is ``stage``: gloo would abort if another shape or type arrived."""
    found, wanted = ([*x.shape, x.dtype] for x in (output, expected))
    if found != wanted:
        raise SettingError(
            f"stage {stage} returns {found}, and make_schedule was told {wanted}: tell it what "
            f"this stage returns, or let all stages return the same shape and type")


def pass_on_no_gradients_in_eval(stages):
    """Let ``schedule.eval`` run PipelineStages. Where a stage and the next one are on one rank, as
    in a V, torch passes on gradients between them, also in an evaluation, which has none: 2.13 to
    2.15 raise "can't steal_bwd_input"."""
    def unless_evaluating(stage, method):
        def call(*args):
            if stage.has_backward:
                return method(*args)
        return call

    for stage in stages:
        stage.get_local_bwd_output = unless_evaluating(stage, stage.get_local_bwd_output)
        stage.set_local_bwd_input = unless_evaluating(stage, stage.set_local_bwd_input)


def clip_over_stages(parameters, max_norm, group):
    """``torch.nn.utils.clip_grad_norm_`` for parameters that are spread over pipeline stages: the
    global norm is the root of the sum of the squares of the stages' norms. The parameters of a
    stage may be DTensors, also on several meshes. Returns the norm."""
    parameters = list(parameters)
    like = parameters[0].to_local() if isinstance(parameters[0], DTensor) else parameters[0]
    total = like.new_zeros((), dtype=torch.promote_types(like.dtype, torch.float32))
    by_mesh = {}  # torch refuses DTensors on several meshes at once
    for p in parameters:
        by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    for alike in by_mesh.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in alike if p.grad is not None])
        total += (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    for alike in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm)
    return norm


def check(args, n):
    """Raise SettingError, in words, if the schedule cannot do on n ranks what ``args`` say."""
    name, M, accum, v = args.schedule, args.microbatches, args.grad_accum, args.stages_per_rank
    allowed = 1 if name in ONE_STAGE else 2
    pieces = accum * M
    refuse([
        (name in (*ONE_STAGE, *V_SHAPED) and v != allowed,
         f"--stages-per-rank {v}: --schedule {name} has {allowed} on each rank; use {allowed}, or "
         f"interleaved1f1b"),
        (args.batch_size % pieces,
         f"--batch-size {args.batch_size} cannot be cut evenly into {accum} accumulation steps x "
         f"{M} micro-batches: use a multiple of {pieces}, such as "
         f"{args.batch_size // pieces * pieces or pieces}, or change --microbatches"),
        (name in SPLIT_BACKWARD and args.compile,
         f"--compile with --schedule {name}: a compiled layer has one backward pass, so each part "
         f"would run all of it; use interleaved1f1b, or leave --compile out"),
        (name in SPLIT_BACKWARD and args.activation_checkpointing,
         f"--activation-checkpointing with --schedule {name}: each layer would be computed again "
         f"for each of its weights; use interleaved1f1b, or leave --activation-checkpointing out"),
    ])
    split_layers(args.config.num_hidden_layers, n * v, head=0)


if __name__ == "__main__":
    launch(main)
