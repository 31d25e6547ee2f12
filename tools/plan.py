"""Which script, and which grid, for a model on a cluster? Counted by dry runs, without a GPU.

    bash run.sh plan --model llama3-8b --devices 8 --device-memory 80 --seq-len 8192
    bash run.sh plan --model llama3-70b --devices 64 --device-memory 80 --seq-len 8192 \\
        --batch-size 512 --tflops 312 --link 300 --network 25

Every script is tried, and hybrid_3d.py with every sensible grid: the last lines name those that are
left out, and why. Of pp.py's schedules 1F1B is tried. For a mixture of experts ep.py is tried with
every --ep, and hybrid_3d.py with the largest --ep that divides the devices of a machine, so that
tokens stay within it; the other scripts train no experts.

A row of the table has the fewest accumulation steps that fit, or in a pipeline micro-batches, from
4 for each rank on. Activation checkpointing is tried if nothing fits without it, since it computes
more: selective, and if that does not fit, full; also for fewer accumulation steps, which may send
more. A row is what ``tools.dry_run`` counts for the rank that holds most; of a pipeline
``Pipeline.places`` says which these may be. What does not fit is counted no further: it holds at
least what its row says. The formulas of tools/counting/pipeline.py say what a rank holds at least:
what is too much by them is not counted, nor is a rank that holds less than another by them.

Of many layers, accumulation steps or micro-batches a few are counted and extended, memory to the
byte: tools/counting/extended.py. What many micro-batches send and compute is extended in
proportion, to 0.1 %.

Time is never predicted. The table has two lower bounds of a step: no computation is faster than all
operations at the peak rate (and the bubble of a pipeline is added to it), and no communication
faster than all bytes at the full rate of the links that they take. A real step takes longer than
either. --tflops, --link and --network are these rates. Rows are sorted by the larger bound. If
these are in the same band of 5 %, counted from the least, the smaller sum of both comes first,
since not all transfers overlap with computation; if the sums are too, the simpler script. The last
line names the simplest that fits.
"""

import collections
import concurrent.futures
import itertools
import json
import math
import pathlib
import shlex
import sys

from common.experts import MixtureConfig
from common.model import add_model_options, model_config
from common.options import SettingError, at_least, option_parser, parse_options
from tools.command import fail, make_parser, printable, run_and_exit
from tools.counting.extended import Rank
from tools.counting.one_rank import most, threads
from tools.counting.pipeline import AGAIN, Pipeline, Strategy, accumulated
from tools.huggingface.config import add_preset

KEPT = "parameters", "gradients", "optimizer states"
LEAST_POSITIONS = 4096  # on a context-parallel rank: with fewer, attention is too little work


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
        if devices > layers + 2:
            left_out[f"pp.py: {layers} layers do not fill its stages"] += 1
            strategies.pop()
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
            # The largest that divides the ranks of a stage and the devices of a machine.
            ep = math.gcd(devices // pp, nproc_per_node, experts) if experts else 1
            sizes = {"--tp": tp, "--cp": cp, "--pp": pp, "--ep": ep}
            options = [f"{option} {size}" for option, size in sizes.items() if size > 1]
            strategies.append(Strategy(" ".join(["hybrid_3d.py", *options]), dp, pp))
    return strategies, left_out


def one_strategy_each(devices, nproc_per_node):
    """The scripts of one strategy, for a model without experts; first the simplest."""
    whole = ["ddp.py", "zero.py --stage 1", "zero.py --stage 2", "fsdp.py"]
    if devices > nproc_per_node:
        whole.append(f"fsdp.py --replicate {devices // nproc_per_node}")
    split = [  # all ranks read the same samples
        "tp.py", "cp.py --attention ring", "cp.py --attention ulysses",
        "cp.py --attention allgather",
    ]
    return [*(Strategy(command, devices) for command in whole),
            *(Strategy(command, 1) for command in split),
            Strategy("pp.py --schedule 1f1b", 1, devices)]


def grids(devices):
    """Yields every (tp, cp, pp) of hybrid_3d.py, but (1, 1, 1), which is fsdp.py."""
    for tp, cp, pp in itertools.product(divisors(devices), repeat=3):
        if tp * cp * pp > 1 and devices % (tp * cp * pp) == 0:
            yield tp, cp, pp


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def variants(strategy, batch_size):
    """Options that share the batch, the largest micro-batches first: accumulation steps, or in a
    pipeline micro-batches, up to 4 of them for each rank, or more if these are too large. 1F1B
    needs one for each rank."""
    share = max(1, batch_size // strategy.ranks)  # sequences of a data-parallel rank
    numbers = [n for n in divisors(share) if n >= min(strategy.pp, share)]
    option = "--grad-accum"
    if strategy.pp > 1:
        fewest = max([n for n in numbers if n <= 4 * strategy.pp] or numbers[:1])
        numbers = [n for n in numbers if n >= fewest]
        option = "--microbatches"
    choices = []
    for n in numbers:
        choices.append([option, str(n)] if n > 1 else [])
    return choices


def search(strategy, options, args):
    """The rows of a strategy: of the variants that fit into memory; if none does, of the last that
    was counted.

    Raises:
        SettingError: the script refuses these options, or by a formula none can fit.
    """
    pipeline, rows = Pipeline(strategy, args), []
    least, tried = pipeline.least_held(), variants(strategy, args.batch_size)
    kinds = [[], [AGAIN, "selective"], [AGAIN]]
    if least > memory(args):
        kinds = []
    for again in kinds:
        commands = [[*strategy.command.split(), *variant, *again] for variant in tried]
        place, counted = first_that_fits(pipeline, commands, options, args)
        if counted is None:
            least = pipeline.least_at_peak(commands[-1])
            continue
        rows.append(row_of(" ".join(commands[place]), counted, args))
        if rows[-1]["fits"]:
            tried = tried[:place]  # checkpointing serves to accumulate less
            if place == 0 or strategy.pp > 1:
                break
        elif least_peak(counted, math.inf) > memory(args):
            break
    if not rows:
        raise SettingError(f"more than {gb(least)} GB, by a formula")
    return [row for row in rows if row["fits"]] or rows[-1:]


def row_of(command, counted, args):
    return {"command": command, "fits": fits(counted, args), "bounds": bounds(counted, args),
            **counted}


def first_that_fits(pipeline, commands, options, args):
    """Of commands, each of which accumulates more often than the one before, the first that fits:
    its place, and what it counts. If none does, the last that was counted; (None, None): by a
    formula none can fit."""
    place = counted = None
    numbers = [math.prod(accumulated(words)) for words in commands]
    for i, words in enumerate(commands):
        least = pipeline.least_at_peak(words)
        if counted:
            least = max(least, least_peak(counted, numbers[i] / numbers[place]))
        if least > memory(args):
            continue
        place, counted = i, evaluate(pipeline, [*words, *options], args)
        if fits(counted, args):
            break
    return place, counted


def least_peak(counted, steps):
    """The peak with ``steps`` times as many accumulation steps is not less: no activation becomes
    smaller than a ``steps``-th."""
    kept = sum(counted["held"].get(kind, 0) for kind in KEPT)
    return kept + (counted["peak"]["in all"] - kept) / steps


def evaluate(pipeline, words, args):
    """What the rank that holds most counts, as ``one_rank.count``; if that is more than the memory
    of a device, what one rank holds at least. Raises SettingError: the script refuses ``words``."""
    counts = []
    for place in pipeline.places():
        # Of a dense model the formula finds 0.9 of what may be most.
        if counts and not args.config.num_experts:
            least = pipeline.least_at_peak(words, place)
            if least < 0.9 * counts[0]["peak"]["in all"]:
                continue
        counts.append(Rank(pipeline, place, words, args).count())
        if not fits(counts[-1], args):
            break
    counted = most(counts)
    for name in "moments", "description", "theory":  # the last two are of a small model
        counted.pop(name, None)
    return counted


def memory(args):
    return args.device_memory * 1e9


def fits(counted, args):
    return counted["peak"]["in all"] <= memory(args)


def bounds(counted, args):
    """Two lower bounds of a step in seconds: computation, communication."""
    compute = counted["operations"] / (args.tflops * 1e12) / (1 - counted.get("bubble", 0))
    inside = counted["sent"] / (args.link * 1e9)
    return compute, max(inside, counted["between_machines"] / (args.network * 1e9))


def in_order(rows):
    """``rows``, of the simplest script first, sorted: what fits first. See the docstring."""
    fitting = [row for row in rows if row["fits"]]
    others = [row for row in rows if not row["fits"]]
    larger = min((max(row["bounds"]) for row in fitting), default=0)
    both = min((sum(row["bounds"]) for row in fitting), default=0)

    def key(row):
        """The bands of 5 %, counted from the least, in which its bounds are."""
        return band(max(row["bounds"]), larger), band(sum(row["bounds"]), both)

    def band(bound, least):
        return (bound / least - 1) // 0.05

    return sorted(fitting, key=key) + sorted(others, key=lambda row: row["peak"]["in all"])


def cells(row):
    """The cells of a row of the table, by the heads of their columns."""
    peak, held, by_axis = row["peak"], row["held"], collections.Counter()
    for part in row["collectives"]:
        by_axis[part["group"]] += part["bytes"]
    sent = [f"{axis} {gb(size)}" for axis, size in by_axis.items() if size > 1e6]
    computes, sends = row["bounds"]
    return {
        "fits": "yes" if row["fits"] else "no", "GB": gb(peak["in all"]),
        "parameters": gb(held.get("parameters", 0)), "gradients": gb(held.get("gradients", 0)),
        "states": gb(held.get("optimizer states", 0)), "activations": gb(peak["activations"]),
        "sent, GB by axis": " + ".join(sent) or "0",
        "between machines": gb(row["between_machines"]),
        "10^12 operations": f"{row['operations'] / 1e12:,.3g}",
        "bubble": f"{row.get('bubble', 0):.0%}",
        "computes >= s": f"{computes:.3f}", "sends >= s": f"{sends:.3f}",
        "command": row["command"],
    }


def gb(size):
    """10^9 bytes, to three digits."""
    return f"{size / 1e9:,.0f}" if size >= 1e11 else f"{size / 1e9:.3g}"


def lay_out(rows):
    """The lines of a table of dicts."""
    heads = [list(row) for row in rows[:1]]
    table = [*heads, *(row.values() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        *padded, command = [f"{cell:>{width}}" for cell, width in zip(row, widths)]
        yield "  ".join([*padded, command.lstrip()])


def config_of(name):
    """The dimensions of --model."""
    add_preset(name)
    parser = option_parser("")
    add_model_options(parser, MixtureConfig)
    return model_config(parse_options(parser, ["--model", name]), MixtureConfig)


def parse(argv):
    parser = make_parser("plan", __doc__)
    add, more_than_0 = parser.add_argument, at_least(0, float, above=True)
    add("--model", required=True, help="as in the scripts, or a config.json of Hugging Face, or "
        "its folder: a script needs the model.json that import_hf makes of it")
    add("--devices", type=at_least(1, below=2**17), required=True, metavar="N",
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
        fail(f"--devices {args.devices} is no multiple of --nproc-per-node {args.nproc_per_node}: "
             f"machines are alike")
    return args


def main(argv=None):
    args = parse(argv)
    args.config = config_of(args.model)
    options = ["--model", args.model, "--seq-len", str(args.seq_len), "--dtype", args.dtype]
    tried, left_out = strategies(args.devices, args.nproc_per_node, args.batch_size, args.seq_len,
                                 args.config.num_hidden_layers, args.config.num_experts)
    if args.only:
        tried = only(tried, args.only)
    simplest_first = count_all(tried, options, args, left_out)
    rows = in_order(simplest_first)
    show(rows, left_out, args)
    fitting = [row for row in simplest_first if row["fits"]]
    if not fitting:
        fail(f"nothing fits into {args.device_memory:g} GB of {args.devices} devices: take more, "
             f"or a smaller --batch-size")
    nodes = args.devices // args.nproc_per_node  # several as a Slurm job, see docs/launching.md
    start = f"sbatch --nodes={nodes} --exclusive" if nodes > 1 else "bash"
    start = f"NPROC={min(args.devices, args.nproc_per_node)} {start} run.sh"
    setting = [*options, "--batch-size", str(args.batch_size)]
    for name, row in ("the first row", rows[0]), ("the simplest that fits", fitting[0]):
        print(f"{name}: {start} {shlex.join([*row['command'].split(), *setting])}")


def only(tried, names):
    """Those of the strategies ``tried`` that ``names`` name: by their command, or the script."""
    scripts = dict.fromkeys(each.command.split()[0] for each in tried)
    for name in names:
        if name not in [*scripts, *(each.command for each in tried)]:
            fail(f"--only {name}: nothing of that name is tried; there are {', '.join(scripts)}")
    return [each for each in tried
            if each.command in names or each.command.split()[0] in names]


def count_all(tried, options, args, left_out):
    """The rows of all strategies, in the order of ``tried``. What they refuse comes to
    ``left_out``."""
    print(f"strategies to count: {len(tried)}", file=sys.stderr)
    pool, rows = threads(), {}
    by_world = sorted(tried, key=lambda each: each.pp)  # one after another they share processes
    searches = {pool.submit(search, each, options, args): each.command for each in by_world}
    for each in concurrent.futures.as_completed(searches):
        command = searches[each]
        try:
            rows[command] = each.result()
        except SettingError as error:
            left_out[f"{command}: {error}"] += 1
            rows[command] = []
        for row in rows[command]:
            print(f"{gb(row['peak']['in all'])} GB: {row['command']}", file=sys.stderr, flush=True)
    return [row for each in tried for row in rows[each.command]]


def show(rows, left_out, args):
    """Print the table, and write it to --json."""
    print(f"--tflops {args.tflops:g} --link {args.link:g} --network {args.network:g}")
    for line in lay_out([cells(row) for row in rows]):
        print(line)
    for reason, number in sorted(left_out.items()):
        grids = f" ({number} grids)" if number > 1 else ""
        print(printable(f"left out: {reason}{grids}"))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "left_out": sorted(left_out)}, indent=1))


if __name__ == "__main__":
    run_and_exit(main)
