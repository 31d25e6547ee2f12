"""Time the steps of every script, or of your own beside them.

    bash run.sh bench
    bash run.sh bench --model small --dtype bfloat16 --compile --rounds 3
    bash run.sh bench --only fsdp.py my_fsdp.py
    bash run.sh bench --only fsdp.py --trace trace.json     where the time of a step goes

All scripts train the same model on the same samples, with the options that all of them share, such
as those of the model. A model with a smaller vocabulary than 32,000 tokens gets one of 32,000,
unless --vocab-size is given: head and loss are then a part of what is measured, as they are for a
model that people train.

Steps are timed after the warm-up, so that start-up does not count. Machines are noisy: the table
has the median, minimum and maximum of several rounds. A row is printed when its rounds are done.
CPU seconds are summed over all processes; on a GPU look at tokens/s and MFU.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import torch
from tqdm import tqdm

from common.data import add_text_options
from common.experts import MixtureConfig
from common.model import add_model_options, model_config
from common.options import at_least, option_parser, parse_options
from tools.command import ROOT, fail, find, make_parser, run
from tools.timing.mfu import flops_per_token, peak_tflops

VOCABULARY = 32_000
COMMANDS = [
    "single.py", "ddp.py", "zero.py --stage 1", "zero.py --stage 2", "fsdp.py", "tp.py", "cp.py",
    "cp.py --attention ulysses", "cp.py --attention allgather", "pp.py",
    "ep.py --num-experts 8 --expert-size 256", "hybrid_3d.py --tp {n}",
]


def measure(command, args, options):
    """Run a command. Returns the seconds of a step, and its CPU seconds in all processes."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run_timed(command, args, options, folder, folder)
        costs = [json.loads(path.read_text()) for path in pathlib.Path(folder).glob("rank-*.json")]
    seconds, cpu_seconds = zip(*costs)
    return max(seconds), sum(cpu_seconds)


def run_timed(command, args, options, folder, result):
    """Run a command on its processes, which write their costs, or a trace, to ``result``. The
    output of torchrun comes to ``folder``. Raises SettingError: it has failed."""
    script, *given = command.split()
    last = args.warm_up + args.timed
    environment = {  # as run.sh sets them
        "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        **os.environ, "OMP_NUM_THREADS": "1",
        "TMPDIR": folder,  # torchrun leaves a folder of its own behind if it is stopped
    }
    environment["PYTHONPATH"] = f"{ROOT}:{environment.get('PYTHONPATH', '')}"
    words = [
        "-P", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc-per-node={processes(command, args)}", ROOT / "tools/timing/timed.py",
        str(args.warm_up), str(last), result, find(script).resolve(), *given, *options,
        "--steps", str(last), "--log-every", "1000000",
    ]
    with open(pathlib.Path(folder, "output"), "w+") as output:
        process = subprocess.Popen(
            [sys.executable, *words], env=environment, stdout=output, stderr=output)
        try:
            status = process.wait()
        finally:
            process.terminate()  # torchrun ends its processes
            process.wait()
        output.seek(0)
        lines = output.read().splitlines() or ["it said nothing"]
    if status:
        said = [line for line in lines if "error: " in line] or lines[-1:]
        fail(f"{command} failed: {said[0]}")


def processes(command, args):
    return 1 if "single" in command else args.nproc


def parse(argv):
    """The parsed options of the tool; those of the scripts, in words and parsed."""
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
    parser.add_argument("--only", nargs="+", action="extend", metavar="SCRIPT",
                        help="time these scripts only, ours or paths of your own")
    parser.add_argument("--trace", type=pathlib.Path, metavar="FILE", help="instead of timing, run "
                        "the first of --only, and write a trace of its timed steps on rank 0 by "
                        "torch.profiler: for chrome://tracing or https://ui.perfetto.dev")
    args, options = parser.parse_known_args(argv)
    if any(word.partition("=")[0] == "--steps" for word in options):
        fail("--steps is the sum of --warm-up and --timed here: give these")
    if args.trace and (args.trace.suffix != ".json" or not args.only):
        fail(f"--trace {args.trace}: give a name that ends in .json, and --only SCRIPT")
    shared = option_parser("")
    add_model_options(shared, MixtureConfig)
    add_text_options(shared)
    settings = parse_options(shared, options)
    settings.config = model_config(settings, MixtureConfig)
    if "vocab_size" not in settings and settings.config.vocab_size < VOCABULARY:
        options += ["--vocab-size", str(VOCABULARY)]
        settings.vocab_size = VOCABULARY
        settings.config = model_config(settings, MixtureConfig)
    return args, options, settings


def commands_of(args):
    """The commands to time. Raises SettingError: --only names no script."""
    commands = []
    for script in args.only or [None]:
        ours = [command.format(n=args.nproc) for command in COMMANDS
                if script in (None, command.split()[0])]
        commands += ours or [str(find(script))]
    return commands


def main(argv=None):
    args, options, settings = parse(argv)
    commands = commands_of(args)
    if args.trace:
        args.trace.touch()  # torch.profiler does not say that it cannot write
        args.timed = min(args.timed, 3)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            run_timed(commands[0], args, options, folder, args.trace.resolve())
        print(f"{args.trace}: {args.timed} steps of rank 0 of {commands[0]}")
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, --nproc {args.nproc} on {device}, {os.cpu_count()} cores; "
          f"--rounds {args.rounds} of {args.timed} timed steps; {' '.join(options)}", flush=True)
    with tqdm(total=args.rounds * len(commands), unit=" runs", dynamic_ncols=True) as bar:
        for command in commands:
            bar.set_description(command)
            costs = []
            for _ in range(args.rounds):
                costs.append(measure(command, args, options))
                bar.update()
            cells = row(command, costs, args, settings)
            if command == commands[0]:
                tqdm.write(f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|")
            tqdm.write(f"| {' | '.join(cells.values())} |")
            sys.stdout.flush()


def row(command, costs, args, settings):
    """The cells of a row, by the heads of their columns. ``costs``: of each round, as of
    ``measure``."""
    seconds, cpu_seconds = zip(*costs)
    median = statistics.median(seconds)
    rate = settings.batch_size * settings.seq_len / median
    cells = {"command": f"`{command}`", "tokens/s": f"{rate:,.0f}"}
    peak = peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else 0
    if peak:
        operations = rate * flops_per_token(settings.config, settings.seq_len)
        cells["MFU"] = f"{operations / (peak * 1e12 * processes(command, args)):.1%}"
    cells["seconds per step"] = f"{median:.4g} ({min(seconds):.4g} to {max(seconds):.4g})"
    cells["CPU seconds per step"] = f"{statistics.median(cpu_seconds):.4g}"
    return cells


if __name__ == "__main__":
    run(main)
