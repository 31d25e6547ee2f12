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
micro-batch both stages do the same. One number is also all-reduced: how many targets the global
batch has (8 bytes, 16(n-1)/n sent). Overlap: reductions run during the backward pass, gathers
during the next forward pass. Exposed: the reduction of the last bucket (the embedding's), the
gather of the first bucket, and whatever takes longer than the computation that should hide it.
PyTorch's ZeroRedundancyOptimizer is stage 1 only, and sends more: it all-reduces the gradients and
broadcasts the parameters, 3P(n-1)/n. So this script calls the collectives itself.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from common.data import BatchSampler, load_steps, open_dataset
from common.errors import SettingError, refuse
from common.launch import launch, start_process_group
from common.materialise import materialise
from common.model import Transformer, wrap_layers
from common.options import option_parser, parse_options
from common.step import count_targets, decay_groups, seed_step, set_learning_rate

# Services: each comes off with the lines that name it
from common.services import theory
from common.services.checkpoint import Checkpoints
from common.services.report import Report
from common.services.settings import run_settings
from common.services.validation import Validation

# torch 2.11 has only the old names of these functions.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def main(argv=None):
    parser = option_parser(__doc__)
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
    # Your own model: torch.manual_seed(args.seed), then MyModel().to(device, args.param_dtype), in
    # place of the meta device and materialise; its values, buffers and ties stay as they are.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()
    wrap_layers(layers, args.compile, args.activation_checkpointing)
    materialise(model, device, args.seed)
    autocast = torch.autocast(  # without a cache, which would keep every weight in bfloat16
        device.type, torch.bfloat16, enabled=args.bfloat16, cache_enabled=False
    )
    model.forward = autocast(model.forward)
    # ZeRO: what is reduced and gathered together; before the optimizer, which updates the shards
    groups = [
        [model.model.embed_tokens], *([layer] for layer in layers),
        [model.model.norm, model.lm_head],
    ]
    buckets, shards = make_buckets(model, groups, mesh)

    # Optimizer. ZeRO: it updates the shards
    optimizer = torch.optim.AdamW(
        decay_groups(shards.values(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps, mesh=mesh
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
    sampler.start = checkpoints.resume(newest=args.resume, step=args.resume_from)  # steps done

    # Loop
    report = Report(args, model, optimizer, [sampler, dataset], device, mesh)
    start_gathering(buckets)  # ZeRO: a checkpoint restores only the rows that this rank owns
    for step, batch in report.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, sampler.rank)  # ZeRO: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch, dist.group.WORLD)  # ZeRO: of all ranks
        for micro_batch, (inputs, targets) in enumerate(batch):  # (B/dp/accum, T)
            # ZeRO: stage 1 reduces the gradients in the last backward pass, stage 2 in each.
            reduce_in_backward(buckets, args.stage == 2 or micro_batch == args.grad_accum - 1)
            micro_loss = model(inputs, targets) / count
            (micro_loss * n).backward()  # ZeRO: times n, since gradients are averaged over ranks
            loss += micro_loss.detach()

        reduce_gradients(buckets)  # ZeRO: of parameters that the last backward pass did not reach
        # ZeRO: the norm is a DTensor; full_tensor() combines the norms of the ranks' shards.
        grad_norm = torch.nn.utils.clip_grad_norm_(shards.values(), args.max_norm).full_tensor()
        optimizer.step()
        start_gathering(buckets)  # ZeRO: the rows that other ranks have updated; see there
        optimizer.zero_grad()
        report.log(step, loss, grad_norm)
        if validation.due(step):
            report.log_validation(step, validation.loss(model))
            start_gathering(buckets)  # ZeRO: so that the next step sends what any other sends
        if checkpoints.after_step(step, grad_norm):
            break
    wait_for_parameters(buckets)  # ZeRO: for whoever reads the weights now
    checkpoints.finish()
    return report.close(theory.zero(args, n))


def make_buckets(model, groups, mesh):
    """Make a bucket for each of ``groups``. Hooks reduce a bucket as soon as the backward pass has
    its gradients, if ``reduce_in_backward`` says so, and wait for its parameters before the forward
    pass uses them.

    Give ``shards.values()`` to the optimizer and to clip_grad_norm_, and clear their gradients by
    ``optimizer.zero_grad()``: ``model.zero_grad()`` does not reach them. Unless all ranks start
    with the same weights, call ``start_gathering`` before the first step.

    Args:
        model: materialised; its frozen parameters stay as they are.
        groups: lists of modules, or parameters, that together hold all parameters of ``model``, in
            the order in which the model uses them. Tied parameters belong into one group.
        mesh: a DeviceMesh of one dimension.

    Returns the buckets, and a dict from the name of each parameter to its shard: a DTensor for the
    optimizer and for checkpoints.

    Raises:
        SettingError: a parameter is in no group, or in two, or has no rows.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise SettingError(f"{name} has no rows to split: give it the shape (1,)")
    buckets, bucket_of, shards = [], {}, {}
    for group in groups:
        found = {  # a dict: each parameter once
            p: None for part in group
            for p in ([part] if isinstance(part, nn.Parameter) else part.parameters())
            if p.requires_grad
        }
        if found:
            buckets.append(Bucket(list(found), mesh))
            for part in group:
                # Hooks run on calls; parameters and containers (ModuleList) are not called.
                called = isinstance(part, nn.Module) and type(part).forward is not nn.Module.forward
                (part if called else model).register_forward_pre_hook(
                    lambda *_, number=len(buckets) - 1: wait_for_parameters(buckets, number)
                )
    for bucket in buckets:
        for parameter in bucket.parameters:
            bucket_of.setdefault(parameter, []).append(bucket)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found = bucket_of.get(parameter, [])
            if len(found) != 1:
                raise SettingError(
                    f"{name} is in {len(found)} of the groups: it must be in one; modules that "
                    f"share a parameter belong into one group"
                )
            shards[name] = found[0].shards[parameter]

    def on_gradient(parameter):
        """Post-accumulate-grad hook: a bucket's last gradient starts its reduce-scatter."""
        (bucket,) = bucket_of[parameter]
        bucket.pending -= 1
        if not bucket.pending and bucket.reduces:
            drain(buckets)  # only one runs, so that only one bucket's gradients exist twice
            bucket.start_reduce_scatter()

    for parameter in bucket_of:
        parameter.register_post_accumulate_grad_hook(on_gradient)
    return buckets, shards


def tensors_to_save(model, shards):
    """The state dict of ``model``, with the shards in place of their parameters, under every name
    that a parameter has."""
    shard_of = {p: shards[name] for name, p in model.named_parameters() if name in shards}
    return {name: shard_of.get(x, x) for name, x in model.state_dict(keep_vars=True).items()}


class Bucket:
    """Parameters whose gradients are reduced, and whose updated rows are gathered, in one piece.

    Each of n ranks owns ceil(rows/n) rows of a parameter; the last ranks may own fewer. Each rank's
    part is padded to the same size before it is sent. ``shards`` maps a parameter to a DTensor of
    the rows that this rank owns: a view, so that updating the shard updates the parameter.
    """

    def __init__(self, parameters, mesh):
        self.parameters, self.mesh, self.n = parameters, mesh, mesh.size()
        self.shards = {p: self.as_shard(self.own_rows(p.detach()), p) for p in parameters}
        self.numel_per_rank = [-(-len(p) // self.n) * p[0].numel() for p in parameters]
        self.reduces = True  # as soon as the backward pass has all gradients
        self.pending = len(parameters)  # gradients that the backward pass has yet to compute
        self.work = None  # the reduce-scatter that is running
        self.stale = False  # True: this rank lacks rows that other ranks have updated
        self.gathering = self.whole = None  # the all-gather that is running, and its output

    def own_rows(self, whole):
        pieces, rank = whole.chunk(self.n), self.mesh.get_local_rank()
        return pieces[rank] if rank < len(pieces) else whole[:0]

    def as_shard(self, rows, parameter):
        return DTensor.from_local(
            rows, self.mesh, [Shard(0)], run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )

    def start_reduce_scatter(self):
        """Start averaging the gradients over the ranks, and free the whole gradients.

        Raises:
            SettingError: a parameter has no gradient, or was used before its rows arrived.
        """
        if self.stale:
            raise SettingError(
                f"parameters of the shapes {[tuple(p.shape) for p in self.parameters]} were used "
                f"without a call of a module of their group: add the module that uses them"
            )
        missing = [tuple(p.shape) for p in self.parameters if p.grad is None]
        if missing:
            raise SettingError(
                f"parameters of the shapes {missing} got no gradient, others of their group did: "
                f"freeze them by requires_grad_(False), or put them into a group of their own"
            )
        whole = torch.cat([
            F.pad(p.grad.flatten(), (0, self.n * numel - p.numel())).view(self.n, numel)
            for p, numel in zip(self.parameters, self.numel_per_rank)
        ], dim=1).flatten()  # one part for each rank, one after another
        for parameter in self.parameters:
            parameter.grad = None
        self.reduced = whole.new_empty(sum(self.numel_per_rank))
        self.work = reduce_scatter_single(
            self.reduced, whole, dist.ReduceOp.AVG, self.mesh.get_group(), async_op=True
        )

    def wait_and_accumulate(self):
        """Wait for this rank's part, and add it to the gradients of the shards."""
        self.work.wait()
        for parameter, part in zip(self.parameters, self.reduced.split(self.numel_per_rank)):
            shard = self.shards[parameter]
            rows = shard.to_local()
            rows = part[: rows.numel()].view_as(rows)
            if shard.grad is None:
                shard.grad = self.as_shard(rows, parameter)
            else:
                shard.grad.to_local().add_(rows)
        self.reduced = self.work = None

    @torch.no_grad()
    def start_all_gather(self):
        """Start to send the rows that this rank has updated, and to receive the others' rows."""
        own = [shard.to_local().flatten() for shard in self.shards.values()]
        own = torch.cat([
            F.pad(rows, (0, numel - len(rows))) for rows, numel in zip(own, self.numel_per_rank)
        ])
        self.whole = own.new_empty(self.n * len(own))
        self.gathering = all_gather_single(
            self.whole, own, self.mesh.get_group(), async_op=True
        )

    @torch.no_grad()
    def wait_and_copy(self):
        """Wait for the rows of the other ranks, and copy them into the parameters."""
        self.gathering.wait()
        parts = self.whole.view(self.n, -1).split(self.numel_per_rank, dim=1)
        for parameter, part in zip(self.parameters, parts):
            parameter.copy_(part.flatten()[: parameter.numel()].view_as(parameter))
        self.gathering = self.whole = None


def drain(buckets):
    """Wait for the reduce-scatter that is running, if there is one."""
    for bucket in buckets:
        if bucket.work:
            bucket.wait_and_accumulate()


def reduce_in_backward(buckets, reduces):
    """Call it before each micro-batch. With ``reduces`` the next backward pass reduces the
    gradients; without it they stay whole, and later backward passes add to them."""
    for bucket in buckets:
        bucket.reduces, bucket.pending = reduces, len(bucket.parameters)


def reduce_gradients(buckets):
    """Reduce the buckets that are still whole, because the last backward pass did not reach all of
    their parameters, and wait for them. Call it after the last backward pass of a step."""
    for bucket in reversed(buckets):
        if any(parameter.grad is not None for parameter in bucket.parameters):
            drain(buckets)
            bucket.start_reduce_scatter()
    drain(buckets)


def start_gathering(buckets):
    """All-gather the rows of every parameter from their owners, during the next forward pass: two
    buckets are on their way while another one is used. Call it after loading a checkpoint and after
    each step of the optimizer. Forward passes of the modules in the groups wait for the rows. All
    other code that reads parameters must call ``wait_for_parameters`` first."""
    wait_for_parameters(buckets)  # of modules that the last forward pass did not use
    for bucket in buckets:
        bucket.stale = True
    for bucket in buckets[:2]:
        bucket.start_all_gather()


def wait_for_parameters(buckets, number=None):
    """Wait until the buckets up to ``number``, by default all, have the rows of all ranks."""
    for i, bucket in enumerate(buckets if number is None else buckets[: number + 1]):
        if bucket.stale:
            bucket.wait_and_copy()
            bucket.stale = False
            for later in buckets[i + 1 : i + 3]:
                if later.stale and not later.gathering:
                    later.start_all_gather()


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
