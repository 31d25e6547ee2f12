"""The data of tools/pictures.py: real runs, dry runs, and what the scripts' own functions say.

    python -m tools.pictures --measure                 all of it: half an hour on two cores
    python -m tools.pictures --measure curves ring     these alone

Each function below returns what becomes docs/data/NAME.json.
"""

import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
from unittest import mock

import torch
from torch.distributed.pipelining import PipelineStage
from tqdm import tqdm

import cp
import pp
from tools import dry_run
from tools.command import refuse

ROOT = pathlib.Path(__file__).parent.parent

# A text that is the same on every machine, and short steps. With the default --lr, 2e-3, training
# itself makes any difference larger: rounding, 1e-15 at first, is 1e-9 after 200 steps.
CURVES = ("--data LICENSE --dtype float64 --batch-size 8 --seq-len 64 --lr 5e-4 --steps 200 "
          "--log-every 1")
RUNS = {  # script and its options: processes
    "single.py": 1, "ddp.py": 4, "zero.py --stage 2": 4, "fsdp.py": 4, "tp.py": 4, "cp.py": 4,
    "pp.py": 4, "hybrid_3d.py --tp 2 --pp 2": 4,
}

# One sequence for each GPU
LARGE = "--model llama3-8b --seq-len 8192 --dtype bfloat16 --activation-checkpointing"
LARGE_RUNS = [
    "single.py", "ddp.py", "zero.py --stage 1", "zero.py --stage 2", "fsdp.py",
    "fsdp.py --no-reshard-after-forward", "tp.py", "cp.py", "pp.py --microbatches 8",
    "hybrid_3d.py --tp 2",
]

# Four equal layers, and next to nothing besides
FOUR_LAYERS = "--vocab-size 4 --num-hidden-layers 4 --hidden-size 256"
FOUR_RANKS = ["single.py", "ddp.py", "zero.py --stage 2", "fsdp.py", "tp.py", "cp.py", "pp.py",
              "hybrid_3d.py --tp 2 --pp 2"]

RANKS, MICRO_BATCHES = 4, 8  # of a pipeline

GRID = "hybrid_3d.py --pp 2 --cp 2 --tp 2 --microbatches 8"


def curves():
    """The loss of each step, of every script."""
    with tempfile.TemporaryDirectory() as folder:
        losses = {command: train(command, n, CURVES, pathlib.Path(folder, str(i)))
                  for i, (command, n) in enumerate(tqdm(RUNS.items(), "curves"))}
    return {"options": CURVES, "processes": RUNS, "torch": torch.__version__, "loss": losses}


def train(command, processes, options, folder):
    """The losses of a real run, started by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    result = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), *command.split(), *options.split(),
         "--device", "cpu", "--save-every", "0", "--out", str(folder)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    if result.returncode:
        refuse(f"{command} failed:\n{result.stdout}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def dry(pool, command, options, n, rank=0):
    """Starts a dry run; a future of what ``tools.dry_run`` counts."""
    script, *words = command.split() + options.split()
    return pool.submit(dry_run.count, str(ROOT / script), words, n, rank, 8)


def large():
    """What rank 0 of an 8B model on 8 GPUs holds and sends, in bytes; single.py: on one GPU."""
    sizes = {command: 1 if command == "single.py" else 8 for command in LARGE_RUNS}
    with dry_run.process_pool() as pool:
        runs = {command: dry(pool, command, f"{LARGE} --batch-size {n}", n)
                for command, n in sizes.items()}
        found = {command: run.result() for command, run in tqdm(runs.items(), "8b")}
    return {
        command: {
            "command": f"python -m tools.dry_run --rank 0 {n} {command} {LARGE} --batch-size {n}",
            **{kind: found[command][kind] for kind in ("held", "peak", "sent")},
        }
        for command, n in sizes.items()
    }


def shares():
    """Who has what of 4 layers, of 4 slices of each layer's weights, and of 4 sequences of 8
    positions. ``held``: the shares of what single.py holds on each of 4 ranks, in dry runs.
    ``weights[layer][slice]`` and ``activations[layer][sequence][position]`` are ranks."""
    with dry_run.process_pool() as pool:
        sizes = {command: 1 if command == "single.py" else RANKS for command in FOUR_RANKS}
        runs = {command: [dry(pool, command, FOUR_LAYERS, n, rank) for rank in range(n)]
                for command, n in sizes.items()}
        held = {command: [run.result()["held"] for run in ranks]
                for command, ranks in tqdm(runs.items(), "shares")}
    (whole,) = held["single.py"]
    kinds = "parameters", "gradients", "optimizer states"
    return {
        command: {
            "held": {kind: [rank[kind] / whole[kind] for rank in ranks] for kind in kinds},
            **owners(command.split()[0]),
        }
        for command, ranks in held.items()
    }


def owners(script):
    chunks = {chunk: rank for rank, own in enumerate(ring()["chunks"]) for chunk in own}
    weights = {
        "single.py": lambda layer, part: 0,
        "pp.py": lambda layer, part: layer,
        "hybrid_3d.py": lambda layer, part: layer // 2 * 2 + part // 2,
    }.get(script, lambda layer, part: part)
    tokens = {
        "single.py": lambda layer, sequence, position: 0,
        "tp.py": lambda layer, sequence, position: position // 2,
        "cp.py": lambda layer, sequence, position: chunks[position],
        "pp.py": lambda layer, sequence, position: layer,
        "hybrid_3d.py": lambda layer, sequence, position: layer // 2 * 2 + position // 4,
    }.get(script, lambda layer, sequence, position: sequence)
    return {
        "weights": [[weights(layer, part) for part in range(4)] for layer in range(4)],
        "activations": [[[tokens(layer, sequence, position) for position in range(8)]
                         for sequence in range(4)] for layer in range(4)],
    }


def schedules():
    """What each rank of a pipeline calls, and when, by schedule: "1F0" is the forward pass of stage
    1 for micro-batch 0, B the backward pass, I its part for the input, W its part for the weights.
    """
    with dry_run.process_pool() as pool:
        found = {
            name: simulate(list(pool.map(functools.partial(calls_of_stages, name), range(RANKS))))
            for name in tqdm(pp.SCHEDULES, "schedules")
        }
    return found


def calls_of_stages(schedule, rank):
    """One rank's calls in a step, in a dry run of pp.py. Call it once in a process."""
    calls = []

    def note(name, letter):
        method = getattr(PipelineStage, name)

        def noted(stage, microbatch, *args, **kwargs):
            whole = letter != "B" or kwargs.get("full_backward", True)
            calls.append(f"{stage.stage_index}{letter if whole else 'I'}{microbatch}")
            return method(stage, microbatch, *args, **kwargs)

        setattr(PipelineStage, name, noted)

    note("forward_one_chunk", "F")
    note("backward_one_chunk", "B")
    note("backward_weight_one_chunk", "W")
    options = ["--schedule", schedule, "--microbatches", str(MICRO_BATCHES), "--num-hidden-layers",
               "8", "--hidden-size", "8", "--num-attention-heads", "2", "--num-key-value-heads",
               "2", "--intermediate-size", "8", "--vocab-size", "8", "--seq-len", "8"]
    dry_run.count(str(ROOT / "pp.py"), options, RANKS, rank, RANKS)
    return calls[len(calls) // 2:]  # of two equal steps


def simulate(calls):
    """When each call starts, if a rank calls in its order and waits for what it needs; for each
    rank [(call, start, length)]. A whole backward pass takes 2, everything else 1."""
    ends, free, cells = {}, [0] * len(calls), [[] for _ in calls]
    last = max(int(call[0]) for rank in calls for call in rank)
    while sum(map(len, cells)) < sum(map(len, calls)):
        before = len(ends)
        for rank, order in enumerate(calls):
            if len(cells[rank]) == len(order):
                continue
            call = order[len(cells[rank])]
            stage, kind, m = int(call[0]), call[1], call[2:]
            needs = {"F": [(stage - 1, "F", m)] if stage else [], "W": [(stage, "B", m)]}.get(
                kind, [(stage, "F", m)] + [(stage + 1, "B", m)] * (stage < last))
            if all(need in ends for need in needs):
                start = max([free[rank], *(ends[need] for need in needs)])
                length = 2 if kind == "B" else 1
                free[rank] = ends[stage, kind.replace("I", "B"), m] = start + length
                cells[rank].append((call, start, length))
        if len(ends) == before:
            refuse(f"these ranks wait for each other: {calls}")
    return cells


def ring():
    """The chunks of the sequence on each of 4 ranks, and the blocks of scores, (query, key), that
    it computes at each turn of the ring: by functions of cp.py."""
    chunks, turns = cp.shard_positions(2 * RANKS, RANKS).tolist(), []
    for rank, own in enumerate(chunks):
        group = types.SimpleNamespace(size=lambda: RANKS, rank=lambda rank=rank: rank)
        turns.append([])
        with mock.patch.object(cp, "pass_on", lambda block, group: lambda: block):  # to no one
            for source, _ in cp.around_the_ring(None, group):
                queries, keys = cp.in_sight(source, group, len(own))
                blocks = itertools.product(own[queries], chunks[source][keys])
                turns[-1].append([(q, k) for q, k in blocks if q >= k or source != rank])
    return {"chunks": chunks, "turns": turns}


def grid():
    """Where hybrid_3d.py puts 16 ranks, and what rank 0 sends to which group in a step."""
    options = f"{LARGE} --batch-size 16"
    with dry_run.process_pool() as pool:
        ranks, found = pool.submit(ranks_of_grid, [*GRID.split()[1:], *options.split()]).result()
    return {
        "command": f"python -m tools.dry_run --rank 0 16 {GRID} {options}", "ranks": ranks,
        "collectives": found["collectives"],
    }


def ranks_of_grid(options):
    """``grid[pp][dp][cp][tp]`` as hybrid_3d.py describes it, and what rank 0 counts. Call it once
    in a process."""
    described, load = [], dry_run.load

    def load_and_note(script):
        module = load(script)
        describe = module.describe_grid
        module.describe_grid = lambda grid, layers: described.append(grid) or describe(grid, layers)
        return module

    dry_run.load = load_and_note
    found = dry_run.count(str(ROOT / "hybrid_3d.py"), options, 16, 0, 8)
    return described[0], found


FIGURES = {"curves": curves, "8b": large, "shares": shares, "schedules": schedules, "ring": ring,
           "grid": grid}


def measure(names, folder):
    for name in names:
        text = json.dumps(FIGURES[name]())
        (folder / f"{name}.json").write_text(text.replace('], "', '],\n"') + "\n")
