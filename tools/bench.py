"""Time every script against PyTorch's own training loop (tools/support/tutorial.py).

    bash run.sh bench
    bash run.sh bench --model small --dtype bfloat16 --compile --rounds 3

A script whose strategy has a tutorial stands beside the loop of that tutorial: single.py, ddp.py,
fsdp.py, tp.py. The others stand beside the loop with DDP, of the same batch; hybrid_3d.py, with
tensor parallelism only, beside that of tp.py.

The two run one after the other on this machine, in turn one of them first, or with --together at
the same time. Steps are timed after the warm-up, so that start-up does not count. Machines are
noisy: the table has the median, minimum and maximum over the rounds of the ratios of such pairs.
CPU seconds are summed over all processes; on a GPU look at tokens/s and MFU.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch

from common.files import read_text
from common.options import at_least
from tools.support.command import make_parser, refuse, run

ROOT = pathlib.Path(__file__).parent.parent
EXPERTS = "--num-experts 8 --expert-size 256"
PAIRS = [  # the strategy of PyTorch's loop, and a script
    ("single", "single.py"), ("ddp", "ddp.py"), ("fsdp", "fsdp.py"), ("tp", "tp.py"),
    ("ddp", "zero.py --stage 1"), ("ddp", "zero.py --stage 2"), ("ddp", "cp.py"),
    ("ddp", "cp.py --attention ulysses"), ("ddp", "cp.py --attention allgather"), ("ddp", "pp.py"),
    (f"ddp {EXPERTS}", f"ep.py {EXPERTS}"), ("tp", "hybrid_3d.py --tp {n}"),
]


def measure(command, args, options):
    """Seconds of a step, its CPU seconds in all processes, and the summary of the run, if it writes
    one."""
    script, *given = command.split()
    n = 1 if "single" in command else args.nproc
    last = args.warm_up + args.timed
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [*launcher, f"--nproc-per-node={n}", ROOT / "tools/support/timed.py",
             str(args.warm_up), str(last), folder, ROOT / script, *given, "--steps", str(last),
             *options, "--out", folder, "--save-every", "0",
             "--log-every", "1000000"],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        if process.returncode:
            output = process.stdout
            said = [line for line in output.splitlines() if ".py: error: " in line] or [output]
            refuse(f"{command} failed: {said[0]}")
        folder = pathlib.Path(folder)
        costs = [json.loads(read_text(folder / f"rank-{rank}.json")) for rank in range(n)]
        summary = folder / "summary.json"
        summary = json.loads(read_text(summary)) if summary.exists() else {}
    seconds, cpu_seconds = zip(*costs)
    return max(seconds), sum(cpu_seconds), summary


def main(argv=None):
    parser, whole = make_parser("bench", __doc__), at_least(1)
    parser.usage = "%(prog)s [options] [options of the scripts]"
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
    parser.add_argument("--only", nargs="+", metavar="SCRIPT", help="time these scripts only")
    parser.add_argument("--batch-size", type=whole, default=16, metavar="B",
                        help="sequences in the global batch (default: 16)")
    parser.add_argument("--seq-len", type=whole, default=128, metavar="T",
                        help="tokens in a sequence (default: 128)")
    args, options = parser.parse_known_args(argv)
    options += ["--batch-size", str(args.batch_size), "--seq-len", str(args.seq_len)]
    scripts = dict.fromkeys(script.split()[0] for _, script in PAIRS)
    for name in args.only or ():
        if name not in scripts:
            refuse(f"--only {name}: no such script is timed; there are {', '.join(scripts)}")
    pairs = [(f"tools/support/tutorial.py {loop}", script.format(n=args.nproc))
             for loop, script in PAIRS if not args.only or script.split()[0] in args.only]

    found = {pair: [] for pair in pairs}
    for number in range(args.rounds):
        for pair, rounds in found.items():
            order = pair if number % 2 == 0 else pair[::-1]
            with ThreadPoolExecutor(2 if args.together else 1) as pool:
                costs = dict(zip(order, pool.map(lambda each: measure(each, args, options), order)))
            rounds.append([costs[command] for command in pair])
            print(f"round {number + 1} of {args.rounds}: {pair[1]}", file=sys.stderr)

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {args.nproc} processes on {device}, {os.cpu_count()} cores; "
          f"{args.rounds} rounds of {args.timed} timed steps; {' '.join(options)}\n")
    with_mfu = any(script[2].get("mfu") for rounds in found.values() for _, script in rounds)
    heads = ["command", "beside", "tokens/s", "CPU seconds per step", "its time / script's time",
             "its CPU time / script's CPU time", *["MFU"] * with_mfu]
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for (loop, command), rounds in found.items():
        seconds, cpu_seconds, summaries = zip(*(script for _, script in rounds))
        rate = args.batch_size * args.seq_len / statistics.median(seconds)
        cells = [f"`{command}`", f"`{loop}`", f"{rate:,.0f}",
                 f"{statistics.median(cpu_seconds):.3f}"]
        for kind in (0, 1):
            ratios = sorted(theirs[kind] / ours[kind] for theirs, ours in rounds)
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        if with_mfu:
            cells.append(f"{summaries[-1].get('mfu') or 0:.1%}")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    run(main)
