"""Training loops as users of PyTorch write them. tools/bench.py compares the scripts with them.

    python -m tools.timing.tutorial single
    torchrun --nproc_per_node=2 -m tools.timing.tutorial ddp      or fsdp, tp or torchtitan

- single: a plain loop, of no tutorial. --compile compiles the whole model.
- ddp: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
- fsdp: https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html, FSDP2
- tp: https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html, with sequence and loss
  parallelism
- torchtitan: FSDP2 as torchtitan uses it. Each layer is compiled as one graph, and so is the loss.
  Head and loss go forward and backward in 8 chunks of the tokens. On GPUs cuDNN's attention comes
  first. (https://github.com/pytorch/torchtitan)

Each loop takes the options that all scripts share, and trains what they train: the model of
common/model.py from the same initial weights, on the same samples, with the same learning rates. It
reads, draws and schedules by the functions of the scripts, and AdamW is fused, as there, so that a
comparison is of training alone.
"""

import functools
import json
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common.data import BatchSampler, add_text_options, load_steps, open_dataset
from common.experts import MixtureConfig, use_experts
from common.launch import launch, start_process, start_process_group
from common.materialise import materialise
from common.model import (
    Transformer, add_model_options, keep_products, model_config, next_token_loss
)
from common.options import SettingError, option_parser, parse_options
from common.step import decay_groups, set_learning_rate

FSDP = "fsdp", "torchtitan"
CHUNKS = 8
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
             SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def read(argv):
    """The parsed options of a loop. Raises SettingError: there is no such option, or the loop
    cannot do what it asks for."""
    parser = option_parser(__doc__)
    parser.add_argument("strategy", choices=("single", "ddp", "tp", *FSDP), help="the loop")
    add_model_options(parser, MixtureConfig)
    add_text_options(parser)
    args = parse_options(parser, argv)
    args.config = model_config(args, MixtureConfig)
    if args.config.num_experts and args.strategy in ("tp", "torchtitan"):
        raise SettingError(f"--num-experts {args.config.num_experts}: the loop {args.strategy} has "
                           f"no experts; single, ddp and fsdp have")
    if args.compile and args.activation_checkpointing == "full" and args.strategy == "tp":
        raise SettingError("--compile with --activation-checkpointing full: torch cannot compile "
                           "the loop tp so; leave one out, or use selective")
    return args


def main(argv=None):
    args = read(argv)
    strategy = args.strategy
    device = start_process(args) if strategy == "single" else start_process_group(args)
    mesh = None
    if dist.is_initialized():
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=None if strategy == "tp" else mesh,
    )
    with torch.device("meta"):
        model = use_experts(Transformer(args.config)).to(args.param_dtype)
    size = sum(parameter.numel() for parameter in model.parameters())
    wrap(model, args)
    if strategy == "tp":
        split(model, mesh)
    elif strategy in FSDP:
        more = [model.model.embed_tokens, model.lm_head] if strategy == "torchtitan" else []
        layers = model.model.layers.values()
        shard(model, [*layers, *more], mesh, torch.bfloat16 if args.bfloat16 else None)
    materialise(model, device, args.seed)
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )
    parameters, head = list(model.parameters()), model.lm_head
    if strategy == "torchtitan":
        model.lm_head = nn.Identity()  # ``backward_in_chunks`` calls the head
        loss_fn = torch.compile(next_token_loss) if args.compile else next_token_loss
    elif strategy == "ddp":
        model = DistributedDataParallel(model)
    autocast = torch.autocast(
        device.type, torch.bfloat16, enabled=args.bfloat16 and strategy not in FSDP
    )

    losses = []
    with loss_parallel() if strategy == "tp" else attention_of(args, device):
        for step, batch in load_steps(dataset, sampler, device, args.workers):
            set_learning_rate(optimizer, step, args)
            loss = 0.0  # mean over the samples of this rank
            for i, (inputs, targets) in enumerate(batch):
                if strategy == "torchtitan":
                    loss += backward_in_chunks(model, head, loss_fn, inputs, targets, len(batch))
                    continue
                last = i == len(batch) - 1
                if strategy == "fsdp":
                    model.set_requires_gradient_sync(last)
                with model.no_sync() if strategy == "ddp" and not last else nullcontext():
                    with autocast:
                        logits = model(inputs).flatten(0, 1)
                        wide = torch.promote_types(logits.dtype, torch.float32)
                        part = F.cross_entropy(logits.to(wide), targets.flatten())
                    (part / len(batch)).backward()
                loss += part.detach() / len(batch)
            nn.utils.clip_grad_norm_(parameters, args.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)

    losses = torch.tensor([float(x) for x in losses], dtype=torch.float64, device=device)
    if mesh:
        dist.all_reduce(losses)
    if not mesh or mesh.get_rank() == 0:
        n = mesh.size() if mesh else 1
        print(json.dumps({"parameters": size, "losses": (losses / n).tolist()}))


def wrap(model, args):
    """Activation checkpointing of each layer, and torch.compile: with FSDP of each layer, otherwise
    of the whole model."""
    contexts = {}
    if args.activation_checkpointing == "selective":
        contexts["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, keep_products
        )
    for layer in model.model.layers.values():
        if args.activation_checkpointing:
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, **contexts
            )
        if args.compile and args.strategy in FSDP:
            layer.forward = torch.compile(layer.forward, fullgraph=True)
    if args.compile and args.strategy not in FSDP:
        model.compile()


def shard(model, units, mesh, dtype):
    """FSDP2: each of ``units``, and the rest of the model. Rotary angles stay in float32."""
    policy = MixedPrecisionPolicy(dtype, dtype and torch.float32, cast_forward_inputs=False)
    for module in (*units, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def attention_of(args, device):
    """The context in which torchtitan's attention takes cuDNN's kernel first."""
    # cuDNN's backward pass is not deterministic.
    if args.strategy != "torchtitan" or device.type == "cpu" or args.deterministic:
        return nullcontext()
    return sdpa_kernel(ATTENTION, set_priority=True)


def backward_in_chunks(model, head, loss_fn, inputs, targets, micro_batches):
    """Forward and backward pass of a micro-batch. The logits of one chunk of the tokens are there
    at a time. Returns this rank's mean loss / ``micro_batches``."""
    hidden, targets = model(inputs).flatten(0, 1), targets.flatten()  # (B T, D), (B T,)
    parts = [part.detach().requires_grad_() for part in hidden.chunk(CHUNKS)]
    total = 0.0
    for part, labels in zip(parts, targets.chunk(CHUNKS)):
        last = part is parts[-1]
        head.set_requires_gradient_sync(last)
        head.set_reshard_after_backward(last)
        loss = loss_fn(head(part), labels) / (len(targets) * micro_batches)
        loss.backward()
        total += loss.detach()
    hidden.backward(torch.cat([part.grad for part in parts]))
    return total


def split(model, mesh):
    """Tensor and sequence parallelism."""
    parallelize_module(model, mesh, {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    })
    for layer in model.model.layers.values():
        parallelize_module(layer, mesh, {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_layouts=(Shard(1), None, None),
                desired_input_layouts=(Replicate(), None, None),
            ),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        })


if __name__ == "__main__":
    launch(main)
