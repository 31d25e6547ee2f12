"""Time every script against PyTorch's own training loop (tools/support/tutorial.py).

    bash run.sh bench
    bash run.sh bench --model small --dtype bfloat16 --compile --rounds 3

A script whose strategy has a tutorial stands beside the loop of that tutorial: single.py, ddp.py,
fsdp.py, tp.py. The others stand beside the loop with DDP, of the same batch; hybrid_3d.py, with
tensor parallelism only, beside that of tp.py. With --compile fsdp.py stands beside a loop in
torchtitan's style.

Both of a pair train the same model on the same samples. They take the options that all scripts
share, such as those of the model; an option that a loop does not have is refused. A model with a
smaller vocabulary than 32,000 tokens gets one of 32,000, unless --vocab-size is given: head and
loss are then a part of what is measured, as they are for a model that people train.

The two run one after the other on this machine, in turn one of them first, or with --together at
the same time. Steps are timed after the warm-up, so that start-up does not count. Machines are
noisy: the table has the median, minimum and maximum over the rounds of the ratios of such pairs. A
row is printed when its rounds are done; Ctrl-C and SIGTERM leave the rows that were printed.
CPU seconds are summed over all processes; on a GPU look at tokens/s and MFU.
"""

import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile

import torch
from tqdm import tqdm

from common.errors import SettingError
from common.files import read_text
from common.options import at_least
from tools.support import tutorial
from tools.support.command import make_parser, refuse, run

ROOT = pathlib.Path(__file__).parent.parent
LOOPS = "tools/support/tutorial.py"
VOCABULARY = 32_000
STOP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
EXPERTS = "--num-experts 8 --expert-size 256"
PAIRS = [  # the strategy of PyTorch's loop, and a script
    ("single", "single.py"), ("ddp", "ddp.py"), ("fsdp", "fsdp.py"), ("tp", "tp.py"),
    ("ddp", "zero.py --stage 1"), ("ddp", "zero.py --stage 2"), ("ddp", "cp.py"),
    ("ddp", "cp.py --attention ulysses"), ("ddp", "cp.py --attention allgather"), ("ddp", "pp.py"),
    (f"ddp {EXPERTS}", f"ep.py {EXPERTS}"), ("tp", "hybrid_3d.py --tp {n}"),
]


def measure(commands, args, options):
    """Run commands at the same time. Returns for each the seconds of a step, its CPU seconds in all
    processes, and the summary of the run, if it writes one."""
    measured = []
    with contextlib.ExitStack() as stack:
        for command, process, folder in [
            (command, *stack.enter_context(started(command, args, options))) for command in commands
        ]:
            if process.wait() or not (costs := list(folder.glob("rank-*.json"))):
                lines = read_text(folder / "output").splitlines()
                said = [line for line in lines if ": error: " in line] or lines[-1:]
                refuse(f"{command} failed: {(said or ['it said nothing'])[0]}")
            seconds, cpu_seconds = zip(*(json.loads(read_text(path)) for path in costs))
            summary = folder / "run" / "summary.json"
            summary = json.loads(read_text(summary)) if summary.exists() else {}
            measured.append((max(seconds), sum(cpu_seconds), summary))
    return measured


@contextlib.contextmanager
def started(command, args, options):
    """Start a command on its processes. Yields the process of torchrun and the folder of the run.
    At the end both are gone."""
    script, *given = command.split()
    last = args.warm_up + args.timed
    environment = {  # as run.sh sets them
        "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    } | os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        words = [*given, *options, "--steps", str(last)]
        if script != LOOPS:
            words += ["--out", f"{folder}/run", "--save-every", "0", "--log-every", "1000000"]
        with open(pathlib.Path(folder, "output"), "w") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", ROOT / "tools/support/torchrun.py",
                 f"--nproc-per-node={processes(command, args)}", f"--log-dir={folder}",
                 ROOT / "tools/support/timed.py", str(args.warm_up), str(last), folder,
                 ROOT / script, *words],
                env=environment, stdout=output, stderr=output, start_new_session=True,
            )
        try:
            yield process, pathlib.Path(folder)
        finally:
            # At the first signal the script finishes its step; the second one ends all processes.
            while process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.5)


def processes(command, args):
    return 1 if "single" in command else args.nproc


def main(argv=None):
    parser, whole = make_parser("bench", __doc__), at_least(1)
    parser.usage = "%(prog)s [options] [options that all scripts share]"
    parser.add_argument("--nproc", type=whole, default=torch.cuda.device_count() or 2, metavar="N",
                        help="processes of each command (default: one per GPU, or 2 without GPUs)")
    parser.add_argument("--rounds", type=whole, default=5, metavar="N",
                        help="rounds (default: 5)")
    parser.add_argument("--warm-up", type=whole, default=5, metavar="STEPS",
                        help="steps before the timed ones; the third is counted, the first "
                        "compiles (default: 5)")
    parser.add_argument("--timed", type=whole, default=20, metavar="STEPS",
                        help="steps that are timed (default: 20)")
    parser.add_argument("--together", action="store_true", help="run the two of a pair at the same "
                        "time, on a machine that is busy with other work: both then meet the same "
                        "load, and the ratio of their CPU seconds is the one figure that counts")
    parser.add_argument("--only", nargs="+", action="extend", metavar="SCRIPT",
                        help="time these scripts only")
    args, options = parser.parse_known_args(argv)
    scripts = dict.fromkeys(script.split()[0] for _, script in PAIRS)
    for name in args.only or ():
        if name not in scripts:
            refuse(f"--only {name}: no such script is timed; there are {', '.join(scripts)}")
    if any(word.partition("=")[0] == "--steps" for word in options):
        refuse("--steps is the sum of --warm-up and --timed here: give these")
    settings, *_ = tutorial.read(["single", *options], 0, 1)
    if "vocab_size" not in settings and settings.config.vocab_size < VOCABULARY:
        options += ["--vocab-size", str(VOCABULARY)]

    pairs = []
    for loop, script in PAIRS:
        script = script.format(n=args.nproc)
        if args.only and script.split()[0] not in args.only:
            continue
        if loop == "fsdp" and settings.compile:
            loop = "torchtitan"
        try:
            tutorial.read([*loop.split(), *options], 0, processes(loop, args))
        except SettingError as error:
            refuse(f"{script} is timed beside PyTorch's loop {loop}: {error}")
        pairs.append((f"{LOOPS} {loop}", script))

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {args.nproc} process{'es' * (args.nproc > 1)} on {device}, "
          f"{os.cpu_count()} cores; {args.rounds} round{'s' * (args.rounds > 1)} of {args.timed} "
          f"timed steps; {' '.join(options)}\n", flush=True)
    tokens = settings.batch_size * settings.seq_len
    with tqdm(total=2 * args.rounds * len(pairs), unit=" runs", dynamic_ncols=True) as bar:
        for pair in pairs:
            bar.set_description(pair[1])
            rounds = []
            for number in range(args.rounds):
                order, costs = pair if number % 2 == 0 else pair[::-1], {}
                for commands in [order] if args.together else [order[:1], order[1:]]:
                    costs |= zip(commands, measure(commands, args, options))
                    bar.update(len(commands))
                rounds.append([costs[command] for command in pair])
            cells = row(pair, rounds, tokens)
            if pair is pairs[0]:
                tqdm.write(f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|")
            tqdm.write(f"| {' | '.join(cells.values())} |")
            sys.stdout.flush()


def row(pair, rounds, tokens):
    """The cells of a row by the heads of their columns. ``rounds``: in each round what ``measure``
    has found of the loop and the script. ``tokens``: in the global batch."""
    loop, script = zip(*rounds)
    (loop_seconds, *_), (seconds, cpu_seconds, summaries) = zip(*loop), zip(*script)
    rate = tokens / statistics.median(seconds)
    cells = {"command": f"`{pair[1]}`", "tokens/s": f"{rate:,.0f}"}
    if mfu := summaries[0].get("mfu"):  # on GPUs whose peak rate is known
        cells["MFU"] = f"{rate * mfu / summaries[0]['tokens_per_second']:.1%}"
    cells |= {
        "CPU seconds per step": f"{statistics.median(cpu_seconds):.3f}", "beside": f"`{pair[0]}`",
        "its tokens/s": f"{tokens / statistics.median(loop_seconds):,.0f}",
    }
    for kind, name in enumerate(("time", "CPU time")):
        ratios = sorted(theirs[kind] / ours[kind] for theirs, ours in rounds)
        cells[f"its {name} / script's {name}"] = (
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    return cells


def stop(*_):
    """End once, whatever else is sent: what was started is ended too."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in STOP:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, stop)
    run(main)
