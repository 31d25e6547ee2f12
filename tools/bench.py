"""Time every script against a PyTorch training loop (tools/timing/tutorial.py).

    bash run.sh bench
    bash run.sh bench --model small --dtype bfloat16 --compile --rounds 3
    bash run.sh bench --only fsdp.py --trace trace.json     where the time of a step goes

A script whose strategy has a tutorial of PyTorch stands beside the loop of that tutorial: ddp.py,
fsdp.py, tp.py. single.py stands beside a plain loop. The others stand beside the loop with DDP, of
the same batch; hybrid_3d.py, with tensor parallelism only, beside that of tp.py. With --compile
fsdp.py stands beside a loop in torchtitan's style.

Both of a pair train the same model on the same samples. They take the options that all scripts
share, such as those of the model; an option that a loop does not have is refused. A model with a
smaller vocabulary than 32,000 tokens gets one of 32,000, unless --vocab-size is given: head and
loss are then a part of what is measured, as they are for a model that people train.

The two run one after the other on this machine, in turn one of them first, or with --together at
the same time. Steps are timed after the warm-up, so that start-up does not count. Machines are
noisy: the table has the median, minimum and maximum over the rounds of the ratios of such pairs. A
row is printed when its rounds are done; Ctrl-C leaves the rows that were printed. CPU seconds are
summed over all processes; on a GPU look at tokens/s and MFU.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import torch
from tqdm import tqdm

from common.options import at_least
from tools.command import ROOT, fail, make_parser, run
from tools.timing import tutorial
from tools.timing.mfu import flops_per_token, peak_tflops

LOOPS = "tools/timing/tutorial.py"
VOCABULARY = 32_000
EXPERTS = "--num-experts 8 --expert-size 256"
PAIRS = [  # the loop, and a script
    ("single", "single.py"), ("ddp", "ddp.py"), ("fsdp", "fsdp.py"), ("tp", "tp.py"),
    ("ddp", "zero.py --stage 1"), ("ddp", "zero.py --stage 2"), ("ddp", "cp.py"),
    ("ddp", "cp.py --attention ulysses"), ("ddp", "cp.py --attention allgather"), ("ddp", "pp.py"),
    (f"ddp {EXPERTS}", f"ep.py {EXPERTS}"), ("tp", "hybrid_3d.py --tp {n}"),
]


def measure(commands, args, options):
    """Run commands at the same time. Returns for each the seconds of a step, and its CPU seconds in
    all processes."""
    measured = []
    with contextlib.ExitStack() as stack:
        running = []
        for command in commands:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            process = stack.enter_context(started(command, args, options, folder, folder))
            running.append((command, process, pathlib.Path(folder)))
        for command, process, folder in running:
            wait(command, process, folder)
            costs = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
            seconds, cpu_seconds = zip(*costs)
            measured.append((max(seconds), sum(cpu_seconds)))
    return measured


@contextlib.contextmanager
def started(command, args, options, folder, result):
    """Start a command on its processes, which write their costs, or a trace, to ``result``. Yields
    the process of torchrun, whose output is in ``folder``. At the end it is gone."""
    script, *given = command.split()
    last = args.warm_up + args.timed
    environment = {  # as run.sh sets them
        "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    } | os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{environment.get('PYTHONPATH', '')}"
    words = [*given, *options, "--steps", str(last)]
    words += [] if script == LOOPS else ["--log-every", "1000000"]
    environment["TMPDIR"] = folder  # torchrun leaves a folder of its own behind if it is stopped
    with open(pathlib.Path(folder, "output"), "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone",
             "--local-addr=127.0.0.1", f"--nproc-per-node={processes(command, args)}",
             ROOT / "tools/timing/timed.py", str(args.warm_up), str(last), result,
             ROOT / script, *words],
            env=environment, stdout=output, stderr=output,
        )
    try:
        yield process
    finally:
        process.terminate()  # torchrun ends its processes
        process.wait()


def wait(command, process, folder):
    if process.wait():
        lines = (folder / "output").read_text().splitlines() or ["it said nothing"]
        said = [line for line in lines if "error: " in line] or lines[-1:]
        fail(f"{command} failed: {said[0]}")


def processes(command, args):
    return 1 if "single" in command else args.nproc


def parse(argv):
    parser, whole = make_parser("bench", __doc__), at_least(1)
    parser.usage = "%(prog)s [options] [options that all scripts share]"
    parser.add_argument("--nproc", type=whole, default=torch.cuda.device_count() or 2, metavar="N",
                        help="processes of each command (default: one per GPU, or 2 without GPUs)")
    parser.add_argument("--rounds", type=whole, default=5, metavar="N",
                        help="rounds (default: 5)")
    parser.add_argument("--warm-up", type=whole, default=5, metavar="STEPS",
                        help="steps before the timed ones; the first compiles (default: 5)")
    parser.add_argument("--timed", type=whole, default=20, metavar="STEPS",
                        help="steps that are timed (default: 20)")
    parser.add_argument("--together", action="store_true", help="run the two of a pair at the same "
                        "time, on a machine that is busy with other work: both then meet the same "
                        "load, and the ratio of their CPU seconds is the one figure that counts")
    parser.add_argument("--only", nargs="+", action="extend", metavar="SCRIPT",
                        help="time these scripts only")
    parser.add_argument("--trace", type=pathlib.Path, metavar="FILE", help="instead of timing, run "
                        "the first of --only, and write a trace of its timed steps on rank 0 by "
                        "torch.profiler: for chrome://tracing or https://ui.perfetto.dev")
    args, options = parser.parse_known_args(argv)
    scripts = dict.fromkeys(script.split()[0] for _, script in PAIRS)
    for name in args.only or ():
        if name not in scripts:
            fail(f"--only {name}: no such script is timed; there are {', '.join(scripts)}")
    if any(word.partition("=")[0] == "--steps" for word in options):
        fail("--steps is the sum of --warm-up and --timed here: give these")
    if args.trace and (args.trace.suffix != ".json" or not args.only):
        fail(f"--trace {args.trace}: give a name that ends in .json, and --only SCRIPT")
    if args.trace:
        args.trace.touch()  # torch.profiler does not say that it cannot write
    return args, options


def main(argv=None):
    args, options = parse(argv)
    settings = tutorial.read(["single", *options])
    if "vocab_size" not in settings and settings.config.vocab_size < VOCABULARY:
        options += ["--vocab-size", str(VOCABULARY)]
    pairs = [(loop, script.format(n=args.nproc)) for loop, script in PAIRS
             if not args.only or script.split()[0] in args.only]
    if args.trace:
        args.timed = min(args.timed, 3)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder, \
                started(pairs[0][1], args, options, folder, args.trace.resolve()) as process:
            wait(pairs[0][1], process, pathlib.Path(folder))
        print(f"{args.trace}: {args.timed} steps of rank 0 of {pairs[0][1]}")
        return

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {args.nproc} process{'es' * (args.nproc > 1)} on {device}, "
          f"{os.cpu_count()} cores; {args.rounds} round{'s' * (args.rounds > 1)} of {args.timed} "
          f"timed steps; {' '.join(options)}\n", flush=True)
    with tqdm(total=2 * args.rounds * len(pairs), unit=" runs", dynamic_ncols=True) as bar:
        for number, (loop, script) in enumerate(pairs):
            bar.set_description(script)
            if loop == "fsdp" and settings.compile:
                loop = "torchtitan"
            settings = tutorial.read([*loop.split(), *options])
            cells = row((f"{LOOPS} {loop}", script), args, options, settings, bar)
            if number == 0:
                tqdm.write(f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|")
            tqdm.write(f"| {' | '.join(cells.values())} |")
            sys.stdout.flush()


def row(pair, args, options, settings, bar):
    """Run a pair, a loop and a script. Returns the cells of a row by the heads of their columns."""
    rounds = []  # in each what ``measure`` has found of the loop and of the script
    for number in range(args.rounds):
        order, costs = pair if number % 2 == 0 else pair[::-1], {}
        for commands in [order] if args.together else [order[:1], order[1:]]:
            costs |= zip(commands, measure(commands, args, options))
            bar.update(len(commands))
        rounds.append([costs[command] for command in pair])
    (loop_seconds, _), (seconds, cpu_seconds) = (zip(*costs) for costs in zip(*rounds))
    tokens = settings.batch_size * settings.seq_len
    rate = tokens / statistics.median(seconds)
    cells = {"command": f"`{pair[1]}`", "tokens/s": f"{rate:,.0f}"}
    peak = peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else 0
    if peak:
        operations = rate * flops_per_token(settings.config, settings.seq_len)
        cells["MFU"] = f"{operations / (peak * 1e12 * processes(pair[1], args)):.1%}"
    cells |= {
        "CPU seconds per step": f"{statistics.median(cpu_seconds):.3f}", "beside": f"`{pair[0]}`",
        "its tokens/s": f"{tokens / statistics.median(loop_seconds):,.0f}",
    }
    for kind, name in enumerate(("time", "CPU time")):
        ratios = sorted(theirs[kind] / ours[kind] for theirs, ours in rounds)
        cells[f"its {name} / script's {name}"] = (
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return cells


if __name__ == "__main__":
    run(main)
