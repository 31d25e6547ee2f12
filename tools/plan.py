"""Which script, and which grid, for a model on a cluster? Counted by dry runs, without a GPU.

    bash run.sh plan --model llama3-8b --devices 8 --device-memory 80 --seq-len 8192
    bash run.sh plan --model llama3-70b --devices 64 --device-memory 80 --seq-len 8192 \\
        --batch-size 512 --tflops 312 --link 300 --network 25

Every script is tried, and hybrid_3d.py with every sensible grid: the last lines name those that are
left out, and why. Of pp.py three schedules are tried. For a mixture of experts ep.py is tried with
every --ep, and hybrid_3d.py with the largest --ep that divides the devices of a machine, so that
tokens stay within it; the other scripts train no experts.

A row of the table has the fewest accumulation steps that fit, or in a pipeline micro-batches, from
4 for each rank on. Activation checkpointing is tried if nothing fits without it, since it computes
more: selective, and if that does not fit, full; also for fewer accumulation steps, which may send
more. A row is what ``tools.dry_run`` counts for the rank that holds most; of a pipeline
``ranks_to_count`` says which these may be. What does not fit is counted no further: it holds at
least what its row says. Nothing is counted if a formula says that it is too much: ``least_held`` of
parameters, gradients and states, ``least_at_peak`` with activations; nor a rank of which it says
that another holds more.

Of many layers, accumulation steps or micro-batches a few are counted and extended: see
tools/counting/extended.py. A figure with ~ is an estimate: of memory, since a moment of it was not
linear; of bytes sent, from a proportion. The first row and the simplest that fits are then counted
as often as it takes to be exact, and so is memory within 5 % of the device's. Ctrl-C or SIGTERM
prints the rows that are there.

Time is never predicted. The table has two lower bounds of a step: no computation is faster than all
operations at the peak rate (and the bubble of a pipeline is added to it), and no communication
faster than all bytes at the full rate of the links that they take. A real step takes longer than
either. --tflops, --link and --network are these rates. Rows are sorted by the larger bound. If
these are within 5 %, the smaller sum of both comes first, since not all transfers overlap with
computation; if the sums are too, the simpler script. The last line names the simplest that fits.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import shlex
import signal
import sys

import torch
from tqdm import tqdm

from common.experts import MixtureConfig, use_experts
from common.model import MAX_LOGITS, PRESETS, Transformer, add_model_options
from common.options import SettingError, at_least, option_parser, parse_options
from pp import bubble, cost_of_head, split_layers
from tools import dry_run
from tools.command import ROOT, fail, make_parser, printable, run
from tools.counting import extended
from tools.huggingface.config import add_preset

CACHE = pathlib.Path.home() / ".cache" / "parallel-by-example"
WHOLE = [  # every rank reads samples of its own; the simplest first
    "ddp.py", "fsdp.py", "fsdp.py --no-reshard-after-forward", "zero.py --stage 1",
    "zero.py --stage 2",
]
SPLIT = [  # all ranks read the same samples
    "tp.py", "cp.py --attention ring", "cp.py --attention ulysses", "cp.py --attention allgather",
    "pp.py --schedule 1f1b", "pp.py --schedule interleaved1f1b", "pp.py --schedule zerobubble",
]
KEPT = "parameters", "gradients", "optimizer states"
AGAIN = "--activation-checkpointing"
LEAST_POSITIONS = 4096  # on a context-parallel rank: with fewer, attention is too little work


@dataclasses.dataclass
class Strategy:
    """A script with its grid: ``ranks`` data-parallel ranks, ``stages`` pipeline stages on ``pp``
    ranks."""

    command: str
    ranks: int
    pp: int = 1
    stages: int = 1


def strategies(devices, nproc_per_node, batch_size, seq_len, layers, experts=0):
    """All that could be sensible: a list of Strategy, and a Counter of the reasons for which others
    are left out. ``experts``: how many a layer has."""
    left_out = collections.Counter()
    if devices == 1:
        return [Strategy("ep.py" if experts else "single.py", 1)], left_out
    if experts:
        left_out["all scripts but ep.py and hybrid_3d.py, which train no experts"] += 1
        strategies = [Strategy(f"ep.py --ep {n}", devices)
                      for n in divisors(devices) if experts % n == 0]
    else:
        strategies = one_strategy_each(devices, nproc_per_node)
        for each in [each for each in strategies if each.stages > layers + 2]:
            left_out[f"{each.command}: {layers} layers do not fill {each.stages} stages"] += 1
            strategies.remove(each)
    for tp, cp, pp in grids(devices):
        dp = devices // (tp * cp * pp)
        if tp > nproc_per_node:
            left_out[f"--tp beyond the {nproc_per_node} devices of a machine"] += 1
        elif cp > 1 and seq_len // cp < LEAST_POSITIONS:
            left_out[f"--cp that leaves a rank less than {LEAST_POSITIONS} positions"] += 1
        elif pp > max(1, layers // 2):
            left_out["--pp that leaves a stage less than two layers"] += 1
        elif devices in (tp, pp) and not experts:
            pass  # tp.py and pp.py are tried
        elif batch_size % dp or batch_size // dp < pp:
            left_out[f"grids that cannot share the {batch_size} sequences of --batch-size"] += 1
        else:
            ep = largest_ep(devices // pp, nproc_per_node, experts)
            sizes = {"--tp": tp, "--cp": cp, "--pp": pp, "--ep": ep}
            options = [f"{option} {size}" for option, size in sizes.items() if size > 1]
            strategies.append(Strategy(" ".join(["hybrid_3d.py", *options]), dp, pp, pp))
    return strategies, left_out


def one_strategy_each(devices, nproc_per_node):
    """The scripts of one strategy, for a model without experts."""
    strategies = [Strategy(command, devices) for command in WHOLE]
    if devices > nproc_per_node:
        strategies.append(Strategy(f"fsdp.py --replicate {devices // nproc_per_node}", devices))
    for command in SPLIT:
        stages_per_rank = 2 if "interleaved" in command or "zerobubble" in command else 1
        pp = devices if command.startswith("pp.py") else 1
        strategies.append(Strategy(command, 1, pp, pp * stages_per_rank))
    return strategies


def grids(devices):
    """Yields every (tp, cp, pp) of hybrid_3d.py, but (1, 1, 1), which is fsdp.py."""
    for tp, cp, pp in itertools.product(divisors(devices), repeat=3):
        if tp * cp * pp > 1 and devices % (tp * cp * pp) == 0:
            yield tp, cp, pp


def largest_ep(ranks, nproc_per_node, experts):
    """The largest --ep that divides the experts, the ranks of a stage and the devices of a machine:
    tokens then stay within a machine."""
    return math.gcd(ranks, nproc_per_node, experts) if experts else 1


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def variants(strategy, batch_size):
    """Options that share the batch, the largest micro-batches first: in a pipeline up to 4 of them
    for each rank, or more if these are too large; otherwise accumulation steps."""
    share = max(1, batch_size // strategy.ranks)  # sequences of a data-parallel rank
    few, option = 1, "--grad-accum"
    if strategy.stages > 1:
        few = max(n for n in range(1, share + 1) if share % n == 0 and n <= 4 * strategy.pp)
        option = "--microbatches"
    numbers = [few * 2**i for i in range(20) if share // few % 2**i == 0]
    return [[option, str(n)] if n > 1 else [] for n in numbers]


def evaluate(strategy, options, args, whole=False):
    """What the rank that holds most counts, as ``dry_run.count``; if that is more than the memory
    of a device, what one rank holds at least. With ``whole`` it is no estimate.

    Raises:
        SettingError: the script refuses these options.
    """
    counts, words = [], [*strategy.command.split(), *options]
    for rank in ranks_to_count(strategy, args):
        least = least_at_peak(strategy, words, args, rank * strategy.pp // args.devices)
        # Of a dense model, and one stage on a rank, the formula finds 0.9 of what may be most.
        exact = strategy.stages == strategy.pp and not args.config.num_experts
        if counts and exact and least < 0.9 * counts[0]["peak"]["in all"]:
            continue
        counted = count_rank(strategy, options, args, rank, whole)
        unsure = "memory" in counted.get("estimated", "")
        if unsure and 0.95 < counted["peak"]["in all"] / memory(args) < 1.05:
            counted = count_rank(strategy, options, args, rank, whole=True)
        counts.append(counted)
        if not fits(counted, args):
            break
    return {name: value for name, value in dry_run.most(counts).items() if name != "moments"}


def count_rank(strategy, options, args, rank, whole, in_parallel=map):
    """What ``rank`` counts, extended from fewer layers, accumulation steps and micro-batches;
    with ``whole`` only where that is exact. ``in_parallel``: as map, for two counts."""
    script, *words = [*strategy.command.split(), *options]
    steps, M = accumulated(words)
    layers, per_stage = args.config.num_hidden_layers, args.devices // strategy.pp
    stage, head = rank // per_stage, cost_of_head(one_layer(args))
    in_flight = min(strategy.pp - stage, M)
    few, pp, place = extended.small_pipeline(in_flight, stage, M, args.config.num_experts)

    def on_rank(layers, pp, stage):
        """The layers of each stage of a rank."""
        stages = split_layers(layers, strategy.stages // strategy.pp * pp, head)
        return [len(each) for each in stages[stage::pp]]

    def layers_in_all(size):
        """That give each stage of the rank ``size`` layers; None: no number does."""
        if size == here[0] and pp == strategy.pp:
            return layers
        return next((n for n in range(pp, layers + 1)
                     if on_rank(n, pp, place) == [size] * len(here)), None)

    here = on_rank(layers, strategy.pp, stage)
    if (strategy.stages != strategy.pp or steps > 1 or few + 1 >= M
            or layers_in_all(here[0]) is None):
        few, pp, place = M, strategy.pp, stage

    def count(size, counted_steps, micro_batches):
        """With ``size`` layers on each stage of the rank."""
        less = ["--num-hidden-layers", layers_in_all(size), "--grad-accum", counted_steps]
        if micro_batches < M:
            less += ["--microbatches", micro_batches, *(["--pp", pp] if "--pp" in words else [])]
        batch_size = args.batch_size * counted_steps * micro_batches // (steps * M)
        return cached(str(ROOT / script), [*words, *map(str, [*less, "--batch-size", batch_size])],
                      per_stage * pp, per_stage * place, args.nproc_per_node)

    def count_micro_batches(size, counted_steps):
        counted = count(size, counted_steps, few)
        if few == M:
            return counted
        more = count(size, counted_steps, few + 1) if whole else None
        machines = [i * per_stage // args.nproc_per_node for i in range(strategy.pp)]
        # Tokens and targets of 8 bytes, and on the last stage a loss.
        cp = int(dry_run.value_of("--cp", words) or 1)
        tokens = args.batch_size * args.seq_len // (strategy.ranks * steps * M * cp)
        own = 2 * 8 * tokens + (4 if stage == strategy.pp - 1 else 0)
        counted = extended.over_micro_batches(
            few, pp - place, counted, more, M, in_flight, own, stage, machines)
        share, _ = bubble("1f1b", strategy.pp, 1, M)
        return counted | {"rank": rank, "world_size": args.devices, "bubble": share}

    def count_steps(size):
        if steps <= max(extended.STEPS):
            return count_micro_batches(size, steps)
        return extended.over_steps(
            *(count_micro_batches(size, counted) for counted in extended.STEPS), steps)

    counted = {"estimated": "memory"}
    for sizes in extended.SIZES:
        if (here[0] > sum(sizes) and len(set(here)) == 1 and None not in map(layers_in_all, sizes)
                and "memory" in counted.get("estimated", "")):
            counted = extended.over_layers(*in_parallel(count_steps, sizes), sizes, here[0])
    if "peak" in counted and not (whole and "estimated" in counted):
        return counted
    return count_steps(here[0])


def accumulated(words):
    """The accumulation steps among the options ``words``, and the micro-batches of a pipeline."""
    return [int(dry_run.value_of(name, words) or 1) for name in ("--grad-accum", "--microbatches")]


def memory(args):
    return args.device_memory * 1e9


def one_layer(args):
    """The model with one layer, on the meta device."""
    with torch.device("meta"):
        return use_experts(Transformer(dataclasses.replace(args.config, num_hidden_layers=1)))


def least_held(strategy, args):
    """Bytes that a rank holds at least: parameters, gradients and AdamW's two states."""
    model, layers = one_layer(args), args.config.num_hidden_layers
    numbers = sum(p.numel() for p in model.parameters())
    numbers += (layers - 1) * sum(p.numel() for p in model.model.layers["0"].parameters())
    size = numbers * (8 if args.dtype == "float64" else 4)
    script, *options = strategy.command.split()
    if script in ("single.py", "ddp.py", "cp.py"):
        return 4 * size
    if script == "zero.py":
        return size + 3 * size / args.devices
    return 4 * size * int(dry_run.value_of("--replicate", options) or 1) / args.devices


def least_at_peak(strategy, words, args, stage=0):
    """Bytes that a rank of ``stage`` holds at least, when a backward pass begins: parameters and
    states; what each layer keeps for it; gradients of micro-batches before; and either the gradient
    of the head's weight or a layer that is computed again. In a pipeline also buffers for what
    other stages send, and in hybrid_3d.py all parameters of the stage gathered."""
    (steps, M), config, pp = accumulated(words), args.config, strategy.pp
    size, exact = {"bfloat16": (2, 4), "float32": (4, 4), "float64": (8, 8)}[args.dtype]
    copied = size if size < exact else 0  # a weight, to be multiplied
    tp = args.devices if words[0] == "tp.py" else int(dry_run.value_of("--tp", words) or 1)
    model = one_layer(args)
    stages = split_layers(config.num_hidden_layers, strategy.stages, cost_of_head(model))
    layers, first, last = sum(map(len, stages[stage::pp])), stage == 0, stage == pp - 1
    tokens = args.batch_size * args.seq_len * pp // (steps * M * args.devices)  # of a micro-batch
    of_layer = tokens * size * kept_by_layer(words, config, tp)
    again = tokens * size * kept_by_layer([], config, tp) - of_layer
    kept, head = layers * of_layer, model.lm_head.weight.numel()
    in_chunks = last and tokens * tp * config.vocab_size > MAX_LOGITS
    of_head = head / tp * exact if in_chunks else 0
    if pp == 1:
        held = least_held(strategy, args) * (1 if steps > 1 else 3 / 4)  # without gradients
        return held + kept + max(of_head + head / tp * copied * in_chunks, again)
    layer = {name: p.numel() for name, p in model.model.layers["0"].named_parameters()}
    experts = layers * sum(n for name, n in layer.items() if ".experts." in name)
    others = layers * sum(layer.values()) - experts + head * (first + last)
    held = 3 * exact * (others + experts) * pp / args.devices
    held += M * (2 - first - last) * tokens * config.hidden_size * size
    if strategy.stages > pp:
        return held + kept
    numbers = others / tp + experts / int(dry_run.value_of("--ep", words) or 1)
    gathered = size if words[0] == "hybrid_3d.py" else 0
    if not gathered and AGAIN not in words:  # each micro-batch in flight has copies of its own
        kept += copied * (numbers - head * first)
    in_flight, gradients = min(pp - stage, M), exact * numbers
    later = M > in_flight or steps > 1  # than the first backward pass
    of_embedding = head / tp * (gathered or exact) if first and later else 0
    return held + gathered * numbers + max(
        in_flight * kept + max(of_head, again) + gradients * later,
        (in_flight - 1) * kept + gradients + of_embedding)  # when that backward pass ends


def kept_by_layer(words, config, tp):
    """How many numbers a layer keeps for each token of a rank: its input; with "selective" also
    what products and attention return; without checkpointing, what these, the norms and SwiGLU
    read. Tensor parallelism gathers what a layer's first products read. Experts keep more."""
    D, F = config.hidden_size, config.intermediate_size
    if config.num_experts:
        F = config.expert_size * config.experts_per_token
    Q, KV = (heads * config.head_dim for heads in (
        config.num_attention_heads, config.num_key_value_heads))
    gathered = (tp - 1) * D * (1 if config.num_experts else 2)
    if "selective" in words:
        return 3 * D + 2 * (Q + KV + F) + gathered
    return D if AGAIN in words else 4 * D + 3 * Q + 2 * KV + 4 * F + gathered


def fits(counted, args):
    return counted["peak"]["in all"] <= memory(args)


def ranks_to_count(strategy, args):
    """The ranks of which one holds most. In a pipeline these are the first rank on its axis, which
    keeps the most activations, the last, which has the head, and any that has more layers than all
    before it. Of all ranks with the same stages the first is counted."""
    if strategy.pp == 1:
        return [0]
    n = strategy.pp
    stages = split_layers(args.config.num_hidden_layers, strategy.stages,
                          cost_of_head(one_layer(args)))
    layers = [sum(map(len, stages[rank::n])) for rank in range(n)]
    ranks = [rank for rank in range(n)
             if rank in (0, n - 1) or layers[rank] > max(layers[:rank])]
    return [rank * args.devices // n for rank in ranks]


def cached(script, options, world_size, rank, nproc_per_node):
    """``dry_run.count``, without what only describes. It is kept in a file of ``CACHE``, if this
    can be written; another torch, or a changed script, has another file."""
    job = script, options, world_size, rank, nproc_per_node
    key = hashlib.sha256(json.dumps([sources(), torch.__version__, *job]).encode()).hexdigest()
    path = CACHE / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):  # ValueError: it was not written to its end
        return json.loads(path.read_text())
    counted = {name: value for name, value in dry_run.count_apart(*job).items()
               if name not in ("description", "theory")}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(counted))
    return counted


@functools.cache
def sources():
    """A hash of the scripts and of what counts them."""
    folders = "", "common/", "tools/", "tools/counting/"
    paths = [path for folder in folders for path in ROOT.glob(f"{folder}*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()


def search(strategy, options, args):
    """The rows of a strategy: (command, counted) of the variants that fit into memory; if none
    does, of the last that was counted."""
    def by_formula(command, least):
        return command, {"peak": {"in all": least}, "held": {}, "by_formula": True}

    if (least := least_held(strategy, args)) > memory(args):
        return [by_formula(strategy.command, least)]

    def first_that_fits(tried, checkpointing):
        """Of the variants ``tried`` the one with the largest micro-batches, and its place; if none
        fits, the last that was counted."""
        last = counted_at = None
        for i, variant in enumerate(tried):
            if counted_at is not None and least_peak(last[1], 2 ** (i - counted_at)) > memory(args):
                continue
            chosen = [*variant, *checkpointing]
            command = " ".join([strategy.command, *chosen])
            least = least_at_peak(strategy, command.split(), args)
            if least > memory(args):
                last = by_formula(command, least)
                continue
            counted_at, last = i, (command, evaluate(strategy, [*chosen, *options], args))
            if fits(last[1], args):
                break
        return last, counted_at

    rows, tried = [], variants(strategy, args.batch_size)
    for checkpointing in [], [AGAIN, "selective"], [AGAIN]:
        (command, counted), place = first_that_fits(tried, checkpointing)
        rows.append((command, counted))
        if fits(counted, args):
            tried = tried[:place]  # checkpointing serves to accumulate less
        enough = not tried or (fits(counted, args) and "--grad-accum" not in command)
        too_much = least_peak(counted, math.inf) > memory(args)
        # zerobubble cannot compute layers again
        if enough or too_much or "zerobubble" in command:
            break
    return [row for row in rows if fits(row[1], args)] or rows[-1:]


def least_peak(counted, steps):
    """The peak with ``steps`` times as many accumulation steps is not less: no activation becomes
    smaller than a ``steps``-th."""
    kept = sum(counted["held"].get(kind, 0) for kind in KEPT)
    return kept + (counted["peak"]["in all"] - kept) / steps


def bounds(counted, args):
    """Two lower bounds of a step in seconds: computation, communication."""
    compute = counted["operations"] / (args.tflops * 1e12) / (1 - counted.get("bubble", 0))
    inside = counted["sent"] / (args.link * 1e9)
    return compute, max(inside, counted["between_machines"] / (args.network * 1e9))


def in_order(rows, args):
    """``rows``, of the simplest script first, sorted: what fits first. See the docstring."""
    def sort(rows, key):
        """Within 5 % of the least they stay as they are."""
        least = min(map(key, rows), default=0)
        return sorted(rows, key=lambda row: (key(row) / least - 1) // 0.05)

    fitting = [row for row in rows if fits(row[1], args)]
    fitting = sort(fitting, lambda row: sum(bounds(row[1], args)))
    fitting = sort(fitting, lambda row: max(bounds(row[1], args)))
    others = [row for row in rows if not fits(row[1], args)]
    return fitting + sorted(others, key=lambda row: row[1]["peak"]["in all"])


def table(rows, args):
    """The cells of the table, the first row the names of the columns."""
    several = args.devices > args.nproc_per_node
    head = ["fits", "GB", "parameters", "gradients", "states", "activations", "sent, GB by axis"]
    if several:
        head.append("between machines")
    yield [*head, "10^12 operations", "bubble", "computes >= s", "sends >= s", "command"]
    for command, counted in rows:
        if "by_formula" in counted:
            yield ["no", *[""] * (10 + several), one_line(command, counted)]
            continue
        held, peak = counted["held"], counted["peak"]
        by_axis = collections.Counter()
        for part in counted["collectives"]:
            by_axis[part["group"]] += part["bytes"]
        sent = " + ".join(f"{axis} {gb(size)}" for axis, size in by_axis.items()
                          if size >= sum(by_axis.values()) / 1000)
        marks = ["~" if name in counted.get("estimated", "") else "" for name in ("memory", "sent")]
        cells = ["yes" if fits(counted, args) else "no", marks[0] + gb(peak["in all"])]
        cells += [gb(held.get(kind, 0)) for kind in KEPT]
        cells += [gb(peak["activations"]), marks[1] + (sent or "0")]
        if several:
            cells.append(gb(counted["between_machines"]))
        cells += [f"{counted['operations'] / 1e12:,.3g}"]
        cells += [f"{counted['bubble']:.0%}" if counted.get("bubble") else ""]
        cells += [f"{bound:.3f}" for bound in bounds(counted, args)]
        yield [*cells, command]


def one_line(command, counted):
    least = "by_formula" in counted
    size = ("~" if "memory" in counted.get("estimated", "") else "") + gb(counted["peak"]["in all"])
    return f"{command}: more than {size} GB, by the formula" if least else f"{size} GB: {command}"


def gb(size):
    """10^9 bytes, to three digits."""
    return f"{size / 1e9:,.0f}" if size >= 1e11 else f"{size / 1e9:.3g}"


def lay_out(rows):
    """The lines of a table."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows)][:-1]
    return ["  ".join([*(f"{cell:>{width}}" for cell, width in zip(row, widths)), row[-1]])
            for row in rows]


def model_options(name):
    """The options that choose a model, and its MixtureConfig. The content of a file becomes
    options: it is part of what ``cached`` keeps."""
    by_name = name in PRESETS
    add_preset(name)
    parser = option_parser("")
    add_model_options(parser, MixtureConfig)
    config = parse_options(parser, ["--model", name]).config
    if by_name:
        return ["--model", name], config
    # rope_scaling is no option, and changes no bytes. A dense model has no options of experts.
    options = [(f"--{key.replace('_', '-')}", str(value)) for key, value in vars(config).items()
               if key != "rope_scaling" and value]
    return [word for pair in options for word in pair], config


def more_devices(options, args):
    """If nothing fits: what would, on more devices; "" if that needs more than 64 times as many."""
    for factor in (2, 4, 8, 16, 32, 64):
        devices = args.devices * factor
        batch_size = max(args.batch_size, devices)
        larger = argparse.Namespace(**vars(args) | {"devices": devices, "batch_size": batch_size})
        with contextlib.suppress(SettingError):
            script = "ep.py --ep 1" if args.config.num_experts else "fsdp.py"
            command, counted = search(Strategy(script, devices), options, larger)[0]
            if fits(counted, args):
                return f"; with --devices {devices} --batch-size {batch_size} fits {command}"
    return ""


def parse(argv):
    parser = make_parser("plan", __doc__)
    add, more_than_0 = parser.add_argument, at_least(0, float, above=True)
    add("--model", required=True, help="as in the scripts, or a config.json of Hugging Face, or "
        "its folder")
    add("--devices", type=at_least(1, most=2**17), required=True, metavar="N",
        help="as many as processes")
    add("--device-memory", type=more_than_0, required=True, metavar="GB", help="10^9 bytes that a "
        "device has; leave out what its context and kernels take")
    add("--seq-len", type=at_least(1), required=True, metavar="T", help="tokens in a sequence")
    add("--batch-size", type=at_least(1), metavar="B",
        help="sequences in the global batch (default: one for each device)")
    add("--dtype", choices=("float32", "bfloat16", "float64"), default="bfloat16",
        help="as in the scripts (default: bfloat16)")
    add("--nproc-per-node", type=at_least(1), default=8, metavar="N",
        help="devices on a machine (default: 8)")
    add("--tflops", type=more_than_0, default=989, metavar="X", help="peak of a device, in 10^12 "
        "operations per second (default: 989, of an H100)")
    add("--link", type=more_than_0, default=450, metavar="GB/S", help="what a device can send to "
        "others of its machine, in 10^9 bytes per second (default: 450)")
    add("--network", type=more_than_0, default=50, metavar="GB/S",
        help="a device's share of what its machine can send to others (default: 50)")
    add("--only", nargs="+", metavar="SCRIPT",
        help="these alone: fsdp.py, or with its grid 'hybrid_3d.py --tp 8'")
    add("--json", type=pathlib.Path, metavar="FILE", help="write all rows")
    args = parser.parse_args(argv)
    args.batch_size = args.batch_size or args.devices
    if args.devices > args.nproc_per_node and args.devices % args.nproc_per_node:
        fail(f"--devices {args.devices} is no multiple of --nproc-per-node "
               f"{args.nproc_per_node}: machines are alike")
    return args


def main(argv=None):
    args = parse(argv)
    model, args.config = model_options(args.model)
    shape = ["--seq-len", str(args.seq_len), "--dtype", args.dtype]
    options = [*model, *shape]
    tried, left_out = strategies(args.devices, args.nproc_per_node, args.batch_size, args.seq_len,
                                 args.config.num_hidden_layers, args.config.num_experts)
    scripts = dict.fromkeys(each.command.split()[0] for each in tried)
    for name in args.only or ():
        if name not in [*scripts, *(each.command for each in tried)]:
            fail(f"--only {name}: nothing of that name is tried; there are {', '.join(scripts)}")
    if args.only:
        tried = [each for each in tried
                 if each.command in args.only or each.command.split()[0] in args.only]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both raise KeyboardInterrupt
    rows, change, stopped = [], "", False
    try:
        pool = dry_run.threads()
        count_all(pool, tried, options, args, rows, left_out)
        rows, simplest = settle(rows, tried, options, args, pool.map)
        change = "" if simplest else more_devices(options, args)
    except KeyboardInterrupt:
        stopped = True
        rows, simplest = in_order(rows, args), None
    show(rows, left_out, args)
    sys.stdout.flush()
    if stopped:  # not at once: threads still wait for what they count
        print(f"plan.py: error: stopped: these are not all of {len(tried)} strategies",
              file=sys.stderr, flush=True)
        os._exit(1)
    if not simplest:
        sys.exit(f"plan.py: nothing fits into {args.device_memory:g} GB{change}")
    nodes = args.devices // args.nproc_per_node  # several as a Slurm job, see docs/launching.md
    start = f"sbatch --nodes={nodes} --exclusive" if nodes > 1 else "bash"
    start = f"NPROC={min(args.devices, args.nproc_per_node)} {start} run.sh"
    setting = ["--model", args.model, *shape, "--batch-size", str(args.batch_size)]
    if add_preset(args.model):
        print(f"first: bash run.sh import_hf {shlex.quote(args.model)} FOLDER")
        setting[1] = "FOLDER/model.json"
    for name, command in ("the first row", rows[0][0]), ("the simplest that fits", simplest):
        print(f"{name}: {start} {shlex.join([*command.split(), *setting])}")


def count_all(pool, tried, options, args, rows, left_out):
    """Add the rows of all strategies to ``rows``, as they are counted; in the end the simplest
    script comes first."""
    print(f"strategies to count: {len(tried)}; those of an earlier plan are kept", file=sys.stderr)
    by_world = sorted(tried, key=lambda each: each.pp)  # one after another they share processes
    searches = {pool.submit(search, each, options, args): each.command for each in by_world}
    with tqdm(total=len(tried), desc="strategies", leave=False) as bar:
        for each in concurrent.futures.as_completed(searches):
            try:
                rows += each.result()
                for row in each.result():
                    bar.write(one_line(*row), file=sys.stderr)
            except SettingError as error:
                left_out[f"{searches[each]}: {error}"] += 1
            bar.update()
    if not rows:
        raise SettingError(f"nothing can run on {args.devices} devices: {'; '.join(left_out)}")
    found = {name: each.result() for each, name in searches.items() if not each.exception()}
    rows[:] = [row for each in tried for row in found.get(each.command, [])]


def settle(rows, tried, options, args, in_parallel=map):
    """The rows in their order, and the command of the simplest that fits, or None. Of these two the
    first row and the simplest are counted whole, if they are estimates."""
    while True:
        ordered = in_order(rows, args)
        simplest = next((row for row in rows if fits(row[1], args)), None)
        row = next((row for row in (ordered[0], simplest) if row and "estimated" in row[1]), None)
        if row is None:
            return ordered, simplest and simplest[0]
        command, found = row
        strategy = max((each for each in tried if f"{command} ".startswith(f"{each.command} ")),
                       key=lambda each: len(each.command))
        words = [*command.removeprefix(strategy.command).split(), *options]
        if "memory" in found["estimated"]:  # then another rank may hold most
            counted = evaluate(strategy, words, args, whole=True)
        else:
            counted = count_rank(strategy, words, args, found["rank"], True, in_parallel)
        rows[rows.index(row)] = command, counted


def show(rows, left_out, args):
    """Print the table, and write it to --json."""
    print(f"--tflops {args.tflops:g} --link {args.link:g} --network {args.network:g}")
    for line in lay_out(table(rows, args)):
        print(line)
    if any("estimated" in counted for _, counted in rows):
        print("~ an estimate, from fewer layers or micro-batches")
    for reason, number in left_out.items():
        print(printable(f"left out: {reason}" + (f" ({number} grids)" if number > 1 else "")))
    if args.json:
        args.json.write_text(json.dumps({
            "rows": [{"command": command, "fits": fits(counted, args), **counted}
                     | ({} if "by_formula" in counted else {"bounds": bounds(counted, args)})
                     for command, counted in rows],
            "left_out": list(left_out),
        }, indent=1))


if __name__ == "__main__":
    run(main)
