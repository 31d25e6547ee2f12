"""Draw the loss curves of runs in one picture, and how far each is from the first run. The loss on
held-out data, if a run has it, is dashed.

    python -m tools.plot runs/single runs/ddp runs/fsdp --out curves.png

A run is a folder with metrics.jsonl. With several runs a lower panel shows the absolute difference
to the loss of the first run, on a logarithmic axis, at the steps that both have logged. Where its
axis says "equal", both losses are the same float, bit for bit.
"""

import json
import math
import pathlib

from common.errors import printable
from tools.command import make_parser, need, refuse, run


def read_curves(folder):
    """{step: loss} of the run in ``folder``, and the same of the loss on held-out data."""
    path, curve, held_out = pathlib.Path(folder, "metrics.jsonl"), {}, {}
    try:
        lines = path.read_text(errors="replace").splitlines(keepends=True)
    except OSError as error:
        refuse(f"{path} cannot be read ({error.strerror}): give run folders, a script's --out")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if "val_loss" in record:
                held_out[int(record["step"])] = float(record["val_loss"])
            else:
                curve[int(record["step"])] = float(record["loss"])
        except (ValueError, TypeError, KeyError):
            if line.endswith("\n"):  # otherwise the run is still writing it, or was killed
                refuse(f"{path}, line {number}: this must be a JSON object with the numbers 'step' "
                       "and 'loss'; remove the line, or leave this run out")
    if not curve:
        refuse(f"{path} has no step yet: leave this run out")
    return curve, held_out


def differences(curves):
    """{name: {step: absolute difference to the first curve}} of all but the first of ``curves``."""
    (first, reference), *others = curves.items()
    found = {name: {step: abs(loss - reference[step]) for step, loss in curve.items()
                    if step in reference} for name, curve in others}
    for name, values in found.items():
        if not values:
            refuse(f"{name} and {first} have no step in common: give both runs the same "
                   "--log-every, or draw each by itself")
    return found


def plain(name):
    """``name`` with $ escaped: matplotlib would read a formula between two of them."""
    return name.replace("$", r"\$")


def draw(curves, held_out, apart):
    """A matplotlib Figure of ``curves`` and ``held_out``, both {name: {step: loss}}, with a
    lower panel of ``apart`` if it is not empty; see ``differences``."""
    figure = need("matplotlib.figure").Figure((8, 6.5 if apart else 4.5), layout="constrained")
    panels = figure.subplots(2 if apart else 1, sharex=True, squeeze=False,
                             height_ratios=[5, 3] if apart else None)[:, 0]
    sizes = [size for values in apart.values() for size in values.values() if 0 < size < math.inf]
    low = math.floor(math.log10(min(sizes, default=1e-16))) - 1  # 10^low stands for 0
    high = math.ceil(math.log10(max(sizes, default=1e-16)))
    for i, (name, curve) in enumerate(curves.items()):
        style = {"color": f"C{i}", "lw": 1.5, "ls": ("-", "--", ":")[i // 10 % 3],
                 "marker": "." if len(curve) < 50 else ""}
        # Each is thinner than the one below it, so that all of several equal curves can be seen.
        over = {"lw": 1.5 + 5 * (len(curves) - 1 - i) / len(curves)}
        if i == 0 and len(curves) > 1:
            over = {"color": "0.8", "lw": 8}
        panels[0].plot(list(curve), list(curve.values()), label=plain(name), **style | over)
        if held_out[name]:
            panels[0].plot(list(held_out[name]), list(held_out[name].values()), color=f"C{i}",
                           ls="--", lw=1, marker="x", label=f"{plain(name)}, held-out data")
        if name in apart:
            shown = [max(size, 10.0**low) for size in apart[name].values()]
            panels[1].plot(list(apart[name]), shown, **style)
    panels[0].set_ylabel("loss (nats per token)")
    panels[0].legend(frameon=False, ncols=1 + len(curves) // 10)
    panels[-1].set_xlabel("optimizer steps")
    if apart:
        marks = range(low + 1, high + 1, 1 + (high - low) // 6)
        panels[1].set_yscale("log")
        panels[1].set_yticks([10.0**e for e in (low, *marks)],
                             ["equal", *(f"$10^{{{e}}}$" for e in marks)])
        panels[1].minorticks_off()
        panels[1].set_ylabel(f"difference to\n{plain(next(iter(curves)))} (nats)")
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def main(argv=None):
    parser = make_parser("plot", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, with metrics.jsonl")
    parser.add_argument("--out", default="curves.png", metavar="FILE",
                        help="picture to write: .png, .svg, .pdf (default: curves.png)")
    args = parser.parse_args(argv)
    names = [pathlib.Path(folder).resolve().name for folder in args.runs]
    if len(set(names)) < len(names):  # a/ddp and b/ddp
        names = args.runs
    if len(set(names)) < len(names):
        refuse("a run is named twice: give each run once")
    found = dict(zip(names, map(read_curves, args.runs)))
    curves, held_out = ({name: pair[i] for name, pair in found.items()} for i in range(2))
    figure = draw(curves, held_out, differences(curves))
    try:
        figure.savefig(args.out, dpi=150)
    except (OSError, ValueError) as error:
        refuse(f"--out {args.out} cannot be written ({error}): give a file that ends in .png, .svg "
               "or .pdf, in a folder that exists")
    print(printable(f"{args.out}: {', '.join(names)}"))


if __name__ == "__main__":
    run(main)
