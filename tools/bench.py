"""Time every script against the training loop of PyTorch's tutorials (tools/tutorial.py).

    bash run.sh bench
    bash run.sh bench --model small --dtype bfloat16 --compile --rounds 3

In each round all commands run one after the other on this machine. Each command runs twice, for
few steps and for many: the difference gives the time of a step without start-up. Machines are
noisy, so the table compares each script with the tutorial's loop of the same round: it has the
median, minimum and maximum of these ratios over the rounds. CPU seconds are summed over all
processes; on a GPU look at tokens/s and MFU.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).parent.parent
COMMANDS = [
    "tools/tutorial.py", "ddp.py", "zero.py --stage 1", "zero.py --stage 2", "fsdp.py", "tp.py",
    "cp.py", "cp.py --attention ulysses", "cp.py --attention allgather", "pp.py",
    "hybrid_3d.py --tp {n}",
]


def measure(command, n, steps, options, folder):
    """Wall-clock seconds and CPU seconds of a whole run, and its summary, if it writes one."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher.append(f"--nproc-per-node={n}")
    arguments = [*command.split(), "--steps", str(steps), *options, "--out", folder]
    arguments[0] = str(ROOT / arguments[0])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    process = subprocess.Popen(
        [*launcher, *arguments, "--no-resume", "--save-every", "0", "--log-every", "1000000"],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"bench.py: error: {command} failed:\n{output}")
    summary = pathlib.Path(folder, "summary.json")
    summary = json.loads(summary.read_text()) if summary.exists() else {}
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, summary


def main():
    parser = argparse.ArgumentParser(
        usage="bash run.sh bench [options] [options of the scripts]", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nproc", type=int, default=torch.cuda.device_count() or 2, metavar="N",
                        help="processes of each command (default: one per GPU, or 2 without GPUs)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N",
                        help="rounds (default: 5)")
    parser.add_argument("--least", type=int, default=5, metavar="STEPS",
                        help="steps of the short runs, also those that compile (default: 5)")
    parser.add_argument("--most", type=int, default=45, metavar="STEPS",
                        help="steps of the long runs (default: 45)")
    parser.add_argument("--only", nargs="+", metavar="SCRIPT", help="time these scripts only")
    parser.add_argument("--batch-size", type=int, default=16, metavar="B",
                        help="sequences in the global batch (default: 16)")
    parser.add_argument("--seq-len", type=int, default=128, metavar="T",
                        help="tokens in a sequence (default: 128)")
    args, options = parser.parse_known_args()
    options += ["--batch-size", str(args.batch_size), "--seq-len", str(args.seq_len)]
    tutorial, *scripts = [command.format(n=args.nproc) for command in COMMANDS]
    scripts = [command for command in scripts if not args.only or command.split()[0] in args.only]

    times = {command: [] for command in (tutorial, *scripts)}
    mfu = {}
    for number in range(args.rounds):
        for command, found in times.items():
            with tempfile.TemporaryDirectory() as folder:
                short = measure(command, args.nproc, args.least, options, folder)
                long = measure(command, args.nproc, args.most, options, folder)
            steps = args.most - args.least
            found.append([(b - a) / steps for a, b in zip(short[:2], long[:2])])
            mfu[command] = long[2].get("mfu")
            print(f"round {number + 1} of {args.rounds}: {command}", file=sys.stderr)

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {args.nproc} processes on {device}, {os.cpu_count()} cores; "
          f"{args.rounds} rounds of {args.least} and {args.most} steps; {' '.join(options)}\n")
    heads = ["command", "tokens/s", "CPU seconds per step", "tutorial's time / script's time",
             "tutorial's CPU / script's CPU"]
    if any(mfu.values()):
        heads.append("MFU")
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for command, found in times.items():
        wall, cpu = (statistics.median(values) for values in zip(*found))
        cells = [f"`{command}`", f"{args.batch_size * args.seq_len / wall:,.0f}", f"{cpu:.4f}"]
        for kind in (0, 1):
            ratios = sorted(a[kind] / b[kind] for a, b in zip(times[tutorial], found))
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        if any(mfu.values()):
            cells.append(f"{mfu[command]:.1%}" if mfu[command] else "")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
