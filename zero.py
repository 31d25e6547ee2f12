"""ZeRO stages 1 and 2: every rank holds the model, but updates only the part that it owns.

Split: the batch; the optimizer states (stage 1) and also the gradients (stage 2), each parameter by
its rows. Replicated: parameters. Use it if AdamW's two states per parameter do not fit beside the
model, but the model itself does. fsdp.py is stage 3. (ZeRO, arXiv:1910.02054)

    torchrun --nproc_per_node=2 zero.py
    torchrun --nproc_per_node=8 zero.py --stage 1 --batch-size 32 --grad-accum 4
    torchrun --nproc_per_node=8 zero.py --stage 2 --model small --dtype bfloat16 --compile --lr 1e-3

Sent in a step: a reduce-scatter of the gradients and an all-gather of the updated parameters. For P
bytes of parameters, each of n ranks sends P(n-1)/n in each of the two: together as much as DDP. The
gradients of a bucket are reduced as soon as the backward pass has all of them, and then freed.
Stage 1 reduces in the last micro-batch only, and adds up whole gradients before. Stage 2 reduces in
every micro-batch: this saves memory, but each further micro-batch sends P(n-1)/n more. With one
micro-batch both stages do the same. The rows of each parameter are padded to a multiple of n, and P
counts the padding. Also all-reduced: how many targets the global batch has, and for each parameter,
whether any rank has used it (8 bytes each). Overlap: reductions run during the backward pass,
gathers during the next forward pass. Exposed: the reduction of the last bucket (the embedding's),
the gather of the first bucket, and whatever takes longer than the computation that should hide it.
PyTorch's ZeroRedundancyOptimizer is stage 1 only, and sends more: it all-reduces the gradients and
broadcasts the parameters, 3P(n-1)/n. So this script calls the collectives itself.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from common.data import BatchSampler, load_steps
from common.errors import SettingError, refuse
from common.launch import launch, restores_process, start_process_group
from common.materialise import materialise
from common.model import Transformer, wrap_layers
from common.model_options import add_model_options
from common.options import option_parser, parse_options
from common.step import count_targets, decay_groups, seed_step, set_learning_rate
from common.tokens import add_text_options, open_dataset
from common.torch_versions import all_gather_single, reduce_scatter_single

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
    parser.add_argument("--stage", type=int, default=2,
                        help="1: shard the optimizer states; 2: shard the gradients too")
    Checkpoints.add_options(parser)
    Validation.add_options(parser)
    Report.add_options(parser)
    args = parse_options(parser, argv)
    check(args)
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
    # ZeRO: what is reduced and gathered together; before the optimizer, which updates the shards
    units = [
        [model.model.embed_tokens], *([layer] for layer in layers),
        [model.model.norm, model.lm_head],
    ]
    buckets, shards = make_buckets(model, units, mesh)

    # Optimizer. ZeRO: it updates the shards
    optimizer = torch.optim.AdamW(
        decay_groups(shards.values(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=mesh,  # ZeRO: each rank reads its own samples
    )
    validation = Validation(
        open_dataset(args, "--val-data"), sampler, device, args.val_every, args.val_batches,
        args.workers,
    )

    # Resume: the step number is the only state of the data
    checkpoints = Checkpoints(
        args.out, run_settings(args, dataset), tensors_to_save(model, shards), optimizer,
        stop=args.steps, every=args.save_every, keep=args.keep, in_background=args.async_save,
    )
    sampler.start = checkpoints.resume(args.source)  # steps done

    # Loop
    report = Report(args, model, optimizer, [sampler, dataset], device, mesh)
    start_gathering(buckets)  # ZeRO: a checkpoint restores only the rows that this rank owns
    for step, batch in report.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, sampler.rank)  # ZeRO: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch, dist.group.WORLD)  # ZeRO: of all ranks
        for i, (inputs, targets) in enumerate(batch):  # (B/dp/accum, T)
            # ZeRO: stage 1 reduces the gradients in the last backward pass, stage 2 in each.
            reduce_in_backward(buckets, args.stage == 2 or i == args.grad_accum - 1)
            micro_loss = model(inputs, targets) / count
            (micro_loss * n).backward()  # ZeRO: times n, since gradients are averaged over ranks
            loss += micro_loss.detach()

        reduce_gradients(buckets)  # ZeRO: reduce the buckets that lack a gradient; wait for all
        # ZeRO: the norm is a DTensor; full_tensor() combines the norms of the ranks' shards.
        grad_norm = torch.nn.utils.clip_grad_norm_(shards.values(), args.max_norm).full_tensor()
        optimizer.step()
        start_gathering(buckets)  # ZeRO: gather the rows that other ranks have updated
        optimizer.zero_grad()
        report.log(step, loss, grad_norm)
        checkpoints.after_step(step, grad_norm)
        if validation.due(step):
            report.log_validation(step, validation.loss(model))
            start_gathering(buckets)  # ZeRO: so that the next step sends what any other sends
        if checkpoints.stopping:
            break
    wait_for_parameters(buckets)  # ZeRO: for whoever reads the weights now
    checkpoints.finish()
    return report.close(theory.zero(args, n))


def make_buckets(model, units, mesh):
    """Make a bucket for each of ``units``, and register the hooks that reduce its gradients during
    the backward pass and wait for its parameters in the forward pass: see ``Bucket``.

    Give ``shards.values()`` to the optimizer and to clip_grad_norm_, and clear their gradients by
    ``optimizer.zero_grad()``: ``model.zero_grad()`` does not reach them. Unless all ranks start
    with the same weights, call ``start_gathering`` before the first step.

    Args:
        model: materialised; its frozen parameters stay as they are.
        units: lists of modules, or parameters, that together hold all parameters of ``model``, in
            the order in which the model uses them. Put modules with tied parameters in one unit.
        mesh: a DeviceMesh of one dimension.

    Returns the buckets, and a dict from the name of each parameter to its shard: a DTensor for the
    optimizer and for checkpoints.

    Raises:
        SettingError: a parameter is in no unit, or in two, or has no rows or numbers.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 or not parameter.numel():
            raise SettingError(
                f"{name} has no rows to split, its shape is {tuple(parameter.shape)}: give it the "
                f"shape (1,), or delete it"
            )
    units = [unit for unit in units if trainable_parameters(unit)]
    buckets = [Bucket(trainable_parameters(unit), mesh) for unit in units]
    shards = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            holders = [bucket for bucket in buckets if parameter in bucket.shards]
            if len(holders) != 1:
                raise SettingError(
                    f"{name} is in {len(holders)} of the units: it must be in one; put modules "
                    f"that share a parameter in one unit"
                )
            shards[name] = holders[0].shards[parameter]

    for i, (unit, bucket) in enumerate(zip(units, buckets)):
        for parameter in bucket.parameters:  # phase 1
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, bucket=bucket: on_gradient(parameter, bucket, buckets)
            )
        for part in unit:  # phase 3
            # Parameters and containers (ModuleList) are not called: the model waits in their place.
            called = isinstance(part, nn.Module) and type(part).forward is not nn.Module.forward
            (part if called else model).register_forward_pre_hook(
                lambda *_, count=i + 1: wait_for_parameters(buckets, count)
            )
    model.register_forward_hook(lambda *_: start_all_gathers(buckets))
    return buckets, shards


def trainable_parameters(unit):
    """The parameters of a unit that are not frozen, each once."""
    parameters = {}  # a dict, which keeps the order
    for part in unit:
        for parameter in [part] if isinstance(part, nn.Parameter) else part.parameters():
            if parameter.requires_grad:
                parameters[parameter] = None
    return list(parameters)


def tensors_to_save(model, shards):
    """The state dict of ``model``, with the shards in place of their parameters, under every name
    that a parameter has."""
    shard_of = {p: shards[name] for name, p in model.named_parameters() if name in shards}
    return {name: shard_of.get(x, x) for name, x in model.state_dict(keep_vars=True).items()}


class Bucket:
    """The parameters of one unit, which are sent together. Of each parameter, each of n ranks owns
    ceil(rows/n) rows, its shard; the last ranks may own fewer.

    In a step a bucket goes through three phases:

    1. Reduce, during the backward pass: as soon as all gradients of the bucket are there, one
       reduce-scatter averages them over the ranks. Each rank receives the rows of its shards.
    2. Update: the optimizer updates the shards. In the parameters, the rows that other ranks own
       are now stale.
    3. Gather, during the next forward pass: one all-gather replaces the stale rows, before a module
       of the unit uses them.
    """

    def __init__(self, parameters, mesh):
        self.parameters, self.mesh = parameters, mesh
        self.shards = {}  # by parameter; a view, so that updating a shard updates the parameter
        self.padded_sizes = []  # numel of each shard with its padding: the same on all ranks
        n, rank = mesh.size(), mesh.get_local_rank()
        for parameter in parameters:
            # 3 ranks, a parameter (8, 4): 3, 3 and 2 rows, all padded to 3 rows of 12 numbers
            rows = -(-len(parameter) // n)  # rounded up
            of_rank = parameter.detach()[rank * rows : (rank + 1) * rows]
            self.shards[parameter] = as_shard(of_rank, parameter, mesh)
            self.padded_sizes.append(rows * parameter[0].numel())
        # Phase 1
        self.due = False  # True: this backward pass has to reduce it
        self.awaited = set()  # the last gradient of these lets the reduce-scatter start
        self.reached = set()  # those that have got a gradient on this rank in this step
        self.reduce_scatter = None  # while it runs: its work handle and its output
        # Phase 3
        self.stale = False  # True: this rank lacks rows that other ranks have updated
        self.all_gather = None  # while it runs: its work handle and its output


def as_shard(rows, parameter, mesh):
    """A DTensor of the shape of ``parameter``, of which this rank owns ``rows``."""
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


# Phase 1, reduce: gradients of the parameters -> reduce-scatter -> gradients of the shards


def reduce_in_backward(buckets, enabled):
    """Call it before each micro-batch. If ``enabled``, the next backward pass reduces each bucket
    as soon as all its gradients are there. If not, the gradients stay whole on each rank, and later
    backward passes add to them."""
    reduce_in_order(buckets, complete=False)  # what the last backward pass did not reach
    for bucket in buckets:
        bucket.due, bucket.awaited = enabled, set(bucket.parameters)


def on_gradient(parameter, bucket, buckets):
    """Post-accumulate-grad hook: the last gradient of a bucket lets its reduce-scatter start.

    Raises:
        SettingError: the parameter was used before its rows arrived.
    """
    if bucket.stale:
        raise SettingError(
            f"a parameter of the shape {tuple(parameter.shape)} was used without a call of a "
            f"module of its unit: add the module that uses it"
        )
    bucket.reached.add(parameter)
    bucket.awaited.discard(parameter)
    if not bucket.awaited:
        reduce_in_order(buckets)


def reduce_in_order(buckets, complete=True):
    """Start to reduce the buckets that are due, from the last one to the first. Some parameters may
    get a gradient on other ranks only: in this fixed order all ranks still reduce the same buckets
    together. With ``complete`` stop at the first one that awaits a gradient."""
    for bucket in reversed(buckets):
        if bucket.due:
            if complete and bucket.awaited:
                break
            start_all_gathers(buckets)
            start_reduce_scatter(bucket, buckets)


def start_reduce_scatter(bucket, buckets):
    """Start to average the gradients of ``bucket`` over the ranks, and free ``parameter.grad``."""
    finish_reduce_scatter(buckets)  # only one runs, so that only one bucket's gradients exist twice
    whole = take_gradients(bucket)
    received = torch.empty_like(whole[0])
    # Over one rank NCCL's AVG may write zeros: https://github.com/pytorch/pytorch/issues/144045
    op = dist.ReduceOp.AVG if len(whole) > 1 else dist.ReduceOp.SUM
    work = reduce_scatter_single(
        received, whole.view(-1), op, bucket.mesh.get_group(), async_op=True
    )
    bucket.reduce_scatter, bucket.due = (work, received), False


def take_gradients(bucket):
    """Copy the gradients of ``bucket`` into one tensor, (n, numbers), and free each as soon as it
    is copied. Row i is what rank i receives, with zeros as padding and where there is none. Without
    copies each parameter would need a reduce-scatter of its own: nine for a layer, not one."""
    n, sizes = bucket.mesh.size(), bucket.padded_sizes
    whole = bucket.parameters[0].detach().new_empty(n, sum(sizes))
    for parameter, part, size in zip(bucket.parameters, whole.split(sizes, dim=1), sizes):
        if parameter.grad is None:
            part.zero_()
            continue
        gradient, padding = parameter.grad.flatten(), n * size - parameter.numel()
        part.copy_((F.pad(gradient, (0, padding)) if padding else gradient).view(n, size))
        parameter.grad = None
    return whole


def finish_reduce_scatter(buckets):
    """Wait for the reduce-scatter that is running, if there is one, and add its output to the
    gradients of the shards."""
    for bucket in buckets:
        if bucket.reduce_scatter is None:
            continue
        work, received = bucket.reduce_scatter
        work.wait()
        for parameter, part in zip(bucket.parameters, received.split(bucket.padded_sizes)):
            shard = bucket.shards[parameter]
            rows = shard.to_local()
            gradient = part[: rows.numel()].view_as(rows)  # without the padding
            if shard.grad is None:
                shard.grad = as_shard(gradient, parameter, bucket.mesh)
            else:
                shard.grad.to_local().add_(gradient)
        bucket.reduce_scatter = None


def reduce_gradients(buckets):
    """Call it after the last backward pass of a step. Reduce the buckets that are still whole,
    because that backward pass did not reach all their parameters, and wait for the last one.
    A parameter that no rank has used gets no gradient, as in one process.

    Raises:
        SettingError: a gradient arrived after its bucket was reduced.
    """
    reduce_in_order(buckets, complete=False)
    # On the host: a sum of 0 does not say that a parameter was not used.
    used = [p in bucket.reached for bucket in buckets for p in bucket.parameters]
    used = torch.tensor(used, dtype=torch.int64)
    agreed = dist.all_reduce(
        used, dist.ReduceOp.MAX, group=buckets[0].mesh.get_group(), async_op=True
    )
    finish_reduce_scatter(buckets)
    wait_for_parameters(buckets)  # a gather that ends after the update would overwrite it
    agreed.wait()
    used = iter(used.tolist())
    for bucket in buckets:
        bucket.reached.clear()
        for parameter, shard in bucket.shards.items():
            if not next(used):
                shard.grad = None
            if parameter.grad is not None:
                raise SettingError(
                    f"a gradient of the shape {tuple(parameter.shape)} arrived after its bucket "
                    f"was reduced: call reduce_in_backward before each backward pass"
                )


# Phase 2, update: gradients of the shards -> optimizer.step() in main -> updated shards

# Phase 3, gather: updated shards -> all-gather -> updated parameters


def start_gathering(buckets):
    """Call it after each step of the optimizer, and after loading a checkpoint. The next forward
    pass gathers all parameters: while it uses one bucket, the next two are on their way. Hooks make
    the modules of the units wait for their rows. All other code that reads parameters must call
    ``wait_for_parameters`` first."""
    wait_for_parameters(buckets)  # of modules that a validation did not use
    for bucket in buckets:
        bucket.stale = True
    start_all_gathers(buckets[:2])


def start_all_gathers(buckets):
    """Start to gather those of ``buckets`` that are stale and not yet on their way. All are started
    before a backward pass begins, so that ranks that use other modules start the same ones."""
    for bucket in buckets:
        if bucket.stale and not bucket.all_gather:
            start_all_gather(bucket)


@torch.no_grad()
def start_all_gather(bucket):
    """Start to send the rows that this rank has updated, and to receive the others' rows."""
    rows = [shard.to_local().flatten() for shard in bucket.shards.values()]
    updated = torch.cat([
        F.pad(part, (0, size - len(part))) for part, size in zip(rows, bucket.padded_sizes)
    ])
    whole = updated.new_empty(bucket.mesh.size() * len(updated))
    work = all_gather_single(whole, updated, bucket.mesh.get_group(), async_op=True)
    bucket.all_gather = work, whole


@torch.no_grad()
def finish_all_gather(bucket):
    """Wait for the rows of the other ranks, and copy them into the parameters."""
    work, whole = bucket.all_gather
    work.wait()
    parts = whole.view(bucket.mesh.size(), -1).split(bucket.padded_sizes, dim=1)
    for parameter, part in zip(bucket.parameters, parts):  # part: (n, padded size)
        if part.numel() == parameter.numel():  # without padding one copy, not two
            rows_of_ranks = parameter.unflatten(0, (len(part), -1))
            rows_of_ranks.copy_(part.view_as(rows_of_ranks))
        else:
            parameter.copy_(part.flatten()[: parameter.numel()].view_as(parameter))
    bucket.all_gather, bucket.stale = None, False


def wait_for_parameters(buckets, count=None):
    """Wait until the first ``count`` buckets, by default all, have the rows of all ranks. A hook
    calls it before each module of a unit."""
    for i, bucket in enumerate(buckets[:count]):
        if bucket.stale:
            finish_all_gather(bucket)
            start_all_gathers(buckets[i + 2 : i + 3])  # bucket i + 1 is already on its way


def check(args):
    """Refuse a stage that this script does not have.

    Raises:
        SettingError: the message says which script has it.
    """
    refuse([(
        args.stage not in (1, 2),
        f"--stage {args.stage}: zero.py has 1 and 2; stage 3 is fsdp.py, stage 0 is ddp.py",
    )])


if __name__ == "__main__":
    launch(main)
