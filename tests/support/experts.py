"""On several ranks, ep.py and hybrid_3d.py with each fault that is common in this field, one after
the other in the same processes: experts.py --out FOLDER, and options of ep.py. It prints the faults
and the curves that they lead to, as JSON."""

import json
import sys
from unittest import mock

import torch
import torch.distributed as dist

import ep
import hybrid_3d
from common.experts import balance_experts, mixtures
from common.launch import launch

NAMES = "loss", "grad_norm", "busiest_expert"
clip, dispatch, forward = ep.clip_over_meshes, ep.to_experts_and_back, ep.Transformer.forward


def gradients_of_experts_times(factor):
    """A missing or a second division."""
    def scale_and_clip(parameters, max_norm):
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.ndim == 3:
                parameter.grad.mul_(factor)
        return clip(parameters, max_norm)

    return "clip_over_meshes", scale_and_clip


def norm_without_experts(parameters, max_norm):
    return clip([parameter for parameter in parameters if parameter.ndim < 3], max_norm)


def balance_each_micro_batch(model, *args):
    if torch.is_tensor(mixtures(model)[0].counts):
        balance_experts(model, 0.01, dist.group.WORLD)
    return forward(model, *args)


def drop_above_capacity(rows, counts, experts, group):
    """An expert takes from each rank no more than the mean."""
    places = torch.arange(len(rows)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    kept = places < len(rows) / len(counts)
    return dispatch(rows * kept[:, None], counts, experts, group)


def swap_ranks(rows, counts, experts, group):
    """What is for the experts of the first rank goes to the last one, and so on."""
    leaving = counts.view(group.size(), -1)
    sizes = leaving.sum(1).tolist()
    rows = torch.cat(rows.split(sizes)[::-1])
    out = dispatch(rows, leaving.flip(0).flatten(), experts, group)
    return torch.cat(out.split(sizes[::-1])[::-1])


def shard_experts_of_one_replica(experts, ep_mesh, shard_mesh, *args, **options):
    ep.shard_experts(experts, ep_mesh, shard_mesh["expert_dp"], *args, **options)


FAULTS = {
    "none": ("clip_over_meshes", clip),
    "gradients averaged": ("add_gradients_up", lambda model: None),
    "gradients of experts times ep": gradients_of_experts_times(2),
    "gradients of experts divided by ep": gradients_of_experts_times(1 / 2),
    "norm without experts": ("clip_over_meshes", norm_without_experts),
    "balance for each micro-batch": ("Transformer.forward", balance_each_micro_batch),
    "tokens dropped by capacity": ("to_experts_and_back", drop_above_capacity),
    "experts of two ranks swapped": ("to_experts_and_back", swap_ranks),
}
IN_THE_GRID = {  # with the options of the grid
    "none": ("balance_experts", balance_experts, "--replicate 2"),
    "gradients averaged": ("add_gradients_up", lambda model: None, "--cp 2 --ep 2"),
    "experts of one replica": ("shard_experts", shard_experts_of_one_replica, "--replicate 2"),
    "balance for the tokens of one rank": (
        "balance_experts", lambda model, rate, group: balance_experts(model, rate), "--tp 2",
    ),
}


def main():
    *options, folder = sys.argv[1:]
    curves = {}
    for script, faults in ((ep, FAULTS), (hybrid_3d, IN_THE_GRID)):
        for fault, (name, replacement, *grid) in faults.items():
            label = f"{script.__name__}: {fault}"
            with mock.patch(f"{script.__name__}.{name}", replacement):
                out = f"{folder}/{len(curves)}"
                history = script.main([*options, out, *" ".join(grid).split()])
            curves[label] = [[line[name] for name in NAMES] for line in history if "loss" in line]
    if dist.get_rank() == 0:
        print("\ncurves", json.dumps(curves), flush=True)


launch(main)
