"""What ep.py and hybrid_3d.py hold and send, in formulas. Tests compare these with what is counted;
the scripts print the counted bytes alone, since sums of so many terms teach nothing. The symbols
are those of docs/planning.md; E is the number of experts, W the bytes of all of their weights."""

import types

import torch

from common.experts import use_experts
from common.model import Transformer
from pp import cost_of_head, keep_stage, split_layers
from tools.counting.theory import bytes_of, held

ABSENT = {  # options that ep.py does not have
    "dp": None, "cp": 1, "tp": 1, "pp": 1, "replicate": 1, "microbatches": None,
    "sequence_parallel": True, "reshard_after_forward": True,
}


def of(args, n):
    """As tools/counting/theory.py: for one of ``n`` ranks, in a pipeline of its first stage."""
    size, sent = held_and_sent(types.SimpleNamespace(**ABSENT | vars(args)), n)
    return held(size) | {"sent": ("", sent)}


def held_and_sent(args, n):
    """The bytes of the parameters, and the bytes that are sent: by hybrid_3d.py, and by ep.py,
    which is the same with data-parallel ranks alone."""
    cp, tp, pp, R, config = args.cp, args.tp, args.pp, args.replicate, args.config
    dp, a, M = args.dp or n // (cp * tp * pp), args.grad_accum, args.microbatches or pp
    with torch.device("meta"):
        model = use_experts(Transformer(args.config)).to(args.param_dtype)
    stages = split_layers(config.num_hidden_layers, pp, cost_of_head(model))
    layers = list(keep_stage(model, stages, 0).model.layers.values())
    E, ep, ranks = config.num_experts, args.ep or n, dp * cp * tp  # of a stage
    size, matrix_size = args.param_dtype.itemsize, args.compute_dtype.itemsize
    again, half = bool(args.activation_checkpointing), matrix_size / size
    last = pp == 1  # this stage, the first one, is also the last
    # TP splits no experts, of W bytes, and replicates norms and routers, of N bytes
    W = bytes_of(*(layer.mlp.experts for layer in layers if E))
    N = sum(p.nbytes for name, p in model.named_parameters() if p.ndim == 1 or "router" in name)

    # FSDP: it shards U bytes, and the experts of this rank over expert_dp ranks
    U, s, expert_dp = (bytes_of(model) - W - N) / tp + N, dp * cp // R, ranks // R // ep
    if not args.reshard_after_forward:  # once for all micro-batches
        gathered, experts = (half + a) * U, (half + a) * W / ep
    elif pp == 1:  # for each micro-batch, as in fsdp.py; the last unit, of F bytes, stays gathered
        F = bytes_of(model.lm_head) / tp + bytes_of(model.model.norm)
        gathered, experts = a * M * ((2 * U - F) * half + U), a * M * (2 * half + 1) * W / ep
    else:  # once for all micro-batches of the pipeline
        gathered, experts = a * (U * half + U), a * (half + 1) * W / ep
    held = U / s + W / ep / expert_dp
    sent = gathered * (s - 1) / s + experts * (1 - 1 / expert_dp)
    sent += (1 if pp == 1 else a) * 2 * held * (R - 1) / R + 16 * (dp - 1) / dp

    # TP: hidden states x, in each layer, in embedding and head; a number per token t, in the loss
    tokens = args.batch_size // dp * (args.seq_len // cp)  # of this rank
    t, x = tokens * size, tokens * config.hidden_size * matrix_size
    in_layer = 8 + (3 if args.sequence_parallel else 2) * again
    terms = len(layers) * (4 + 2 * again if E else in_layer) * x
    terms += 2 * x * (1 + last)
    terms += 6 * t * last
    terms += 2 * N * (a * M * half if pp == 1 else a) * args.sequence_parallel
    sent += terms * (tp - 1) / tp

    # CP: keys and values, gathered in each pass, and their gradients. PP: hidden states
    kv = 2 * tokens * (config.num_key_value_heads // tp) * config.head_dim
    sent += len(layers) * kv * ((2 + again) * matrix_size + size) * (cp - 1)
    sent += (not last) * x / (tp if args.sequence_parallel else 1)

    # EP: tokens and their numbers; balance, over all ranks of the stage
    rows = (6 if again else 4) * (config.experts_per_token or 0) * x / tp
    sent += len(layers) * (rows + (1 + again) * a * M * 8 * E) * (ep - 1) / ep
    sent += len(layers) * 16 * E * (ranks - 1) / ranks
    return held, sent
