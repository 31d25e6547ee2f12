"""Draw the pictures of README.md and docs/ as SVG, from docs/data/.

    python -m tools.pictures                     docs/pictures/*.svg
    python -m tools.pictures --measure           first measure docs/data/, by tools/figures.py:
                                                 half an hour on two cores
    python -m tools.pictures --measure curves    one of the files in docs/data/

Each SVG holds the SHA-256 of its data. Its colours follow the light or dark scheme of the reader.
"""

import hashlib
import html
import itertools
import json
import math
import pathlib

from tools.command import make_parser, run
from tools.plan import gb
from tools.table import SPLIT

ROOT = pathlib.Path(__file__).parent.parent
DATA, PICTURES = ROOT / "docs" / "data", ROOT / "docs" / "pictures"

# Class: property, colour on light, colour on dark. Text of class `on` stands on the coloured areas.
COLOURS = {
    "bg": ("fill", "#ffffff", "#0d1117"), "ink": ("fill", "#1f2328", "#e6edf3"),
    "soft": ("fill", "#57606a", "#9da7b3"), "on": ("fill", "#ffffff", "#0d1117"),
    "ink-line": ("stroke", "#1f2328", "#e6edf3"),
    "axis": ("stroke", "#57606a", "#9da7b3"), "grid": ("stroke", "#d8dee4", "#30363d"),
    "gap": ("stroke", "#ffffff", "#0d1117"), "all": ("fill", "#8c959f", "#6e7681"),
    "past": ("fill", "#d0d7de", "#3d444d"), "none": ("fill", "#f0f2f5", "#1c2128"),
    "c0": ("fill", "#0b6cb3", "#6cb6f5"), "c1": ("fill", "#b85c00", "#f5a742"),
    "c2": ("fill", "#007a57", "#4ccb9f"), "c3": ("fill", "#a13d87", "#e89ad0"),
    "l0": ("stroke", "#0b6cb3", "#6cb6f5"), "l1": ("stroke", "#b85c00", "#f5a742"),
    "l2": ("stroke", "#007a57", "#4ccb9f"), "l3": ("stroke", "#a13d87", "#e89ad0"),
    "l4": ("stroke", "#7a6a00", "#d8c93c"), "l5": ("stroke", "#c4302b", "#ff8a80"),
    "l6": ("stroke", "#4b4fc4", "#a5a8ff"),
}

KINDS = "parameters", "gradients", "optimizer states"
CALLS = {"F": "c0", "B": "c1", "I": "c1", "W": "c2"}  # of a stage


# SVG


def number(x):
    return f"{x:.2f}".rstrip("0").rstrip(".")


def tag(name, content="", **attributes):
    """An element; ``x_y=1`` is the attribute x-y, and numbers have at most two decimals."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="'
        f'{html.escape(value) if isinstance(value, str) else number(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def rect(x, y, width, height, class_, **more):
    return tag("rect", x=x, y=y, width=width, height=height, class_=class_, **more)


def text(x, y, words, class_="ink", **more):
    return tag("text", html.escape(str(words)), x=x, y=y, class_=class_, **more)


def path(d, class_, width=1.5, **more):
    return tag("path", d=d, class_=f"{class_} line", stroke_width=width, **more)


def points(pairs):
    return "M" + " ".join(f"{number(x)},{number(y)}" for x, y in pairs)


def svg(data, width, height, title, description, *parts):
    """The whole file. ``data`` names its file in docs/data/."""
    rules = [[f".{name}{{{kind}:{colours[scheme]}}}"
              for name, (kind, *colours) in COLOURS.items()] for scheme in (0, 1)]
    style = (
        "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        ".h{font-size:15px;font-weight:600}.m{text-anchor:middle}.e{text-anchor:end}"
        ".s{font-size:12px}.line{fill:none}\n" + "".join(rules[0])
        + "\n@media (prefers-color-scheme:dark){" + "".join(rules[1]) + "}"
    )
    digest = hashlib.sha256((DATA / data).read_bytes()).hexdigest()
    body = "\n".join([
        tag("title", html.escape(title)), tag("desc", html.escape(description)),
        f"<!-- docs/data/{data}: sha256 {digest} -->",
        tag("style", style), rect(0, 0, width, height, "bg"), *parts,
    ])
    return tag("svg", f"\n{body}\n", xmlns="http://www.w3.org/2000/svg", role="img",
               viewBox=f"0 0 {width} {height}", width=width, height=height) + "\n"


def read(data):
    return json.loads((DATA / data).read_text())


def legend(x, y, entries):
    """Coloured squares and words, from left to right; ``entries``: class, words, width."""
    for class_, words, width in entries:
        yield rect(x, y - 11, 13, 13, class_)
        yield text(x + 19, y, words, "ink s")
        x += width


# The pictures


def differences():
    """{command: how far the loss of each step is from single.py's}"""
    loss = read("curves.json")["loss"]
    return {name: [abs(a - b) for a, b in zip(losses, loss["single.py"])]
            for name, losses in loss.items() if name != "single.py"}


def curves():
    """All loss curves over each other, and below how far each is from single.py's."""
    found, apart = read("curves.json"), differences()
    names, first = list(found["loss"]), found["loss"]["single.py"]
    left, right, top, middle, low, bottom = 62, 640, 56, 250, 294, 430
    most, floor = math.ceil(max(first)), -17  # 10^floor stands for 0
    ceiling = math.ceil(math.log10(max(map(max, apart.values()))))

    def x(step):
        return left + (right - left) * step / len(first)

    def y(loss):
        return middle - (middle - top) * loss / most

    def log_y(exponent):
        return bottom - (bottom - low) * (exponent - floor) / (ceiling - floor)

    yield text(left, 24, "The loss of all eight scripts: one curve", "ink h")
    yield text(left, 44, "loss, in nats per token", "soft s")
    for loss in range(most + 1):
        yield path(f"M{left},{number(y(loss))}H{right}", "grid", 1)
        yield text(left - 8, y(loss) + 4, loss, "soft s e")
    yield text(left, low - 12, "difference to single.py, in nats", "soft s")
    for exponent in range(floor, ceiling + 1):
        yield path(f"M{left},{number(log_y(exponent))}H{right}", "grid", 1)
        if exponent == floor or exponent % 2 == 0:
            words = "equal" if exponent == floor else f"1e{exponent}"
            yield text(left - 8, log_y(exponent) + 4, words, "soft s e")
    for step in range(0, len(first) + 1, 50):
        yield text(x(step), bottom + 18, step, "soft s m")
    yield text((left + right) / 2, bottom + 36, "optimizer steps", "soft s m")
    yield text(right + 230, 44, "processes", "soft s e")
    for i, words in enumerate(found["options"].split(" --")):
        yield text(right + 16, low + 16 + 20 * i, f"--{words.removeprefix('--')}", "soft s")
    for i, name in enumerate(names):
        class_ = f"l{i - 1}" if i else "axis"
        line = points((x(step), y(loss)) for step, loss in enumerate(found["loss"][name], 1))
        # single.py as a broad line; on it each of the others has its dashes, one after another.
        dashes = {"stroke_dasharray": "9 54", "stroke_dashoffset": -9 * i} if i else {}
        yield path(line, class_, 3 if i else 6, stroke_linejoin="round", **dashes)
        row = 66 + 22 * i
        yield path(f"M{right + 16},{row}h22", class_, 4 if i else 6)
        yield text(right + 46, row + 4, name, "ink s")
        yield text(right + 230, row + 4, found["processes"][name], "soft s e")
        if i:
            exponents = [math.log10(size) if size else floor for size in apart[name]]
            yield path("".join(f"M{number(x(step))},{number(log_y(exponent))}h0"
                               for step, exponent in enumerate(exponents, 1)),
                       class_, 2.4, stroke_linecap="round")


def memory():
    """What a rank holds of an 8B model when its memory is fullest, as stacked bars."""
    rows, left, right, top = read("8b.json"), 268, 780, 84
    scale = (right - left) / 140e9
    bottom = top + 30 * len(rows) + 4
    yield text(20, 26, "GB on each of 8 GPUs: Llama 3 8B, one sequence of 8,192 tokens per GPU",
               "ink h")
    yield from legend(20, 54, [
        ("c0", "parameters", 106), ("c1", "gradients", 98), ("c2", "optimizer states", 136),
        ("c3", "at the peak also: activations, gathered weights", 0),
    ])
    for gigabytes in range(0, 121, 20):
        x = left + gigabytes * 1e9 * scale
        yield path(f"M{number(x)},{top - 8}V{bottom}", "grid", 1)
        yield text(x, bottom + 18, gigabytes, "soft s m")
    for i, (command, row) in enumerate(rows.items()):
        y, x = top + 30 * i, left
        yield text(left - 10, y + 15, command + " (1 GPU)" * (command == "single.py"), "ink e")
        sizes = [row["held"][kind] for kind in KINDS]
        for j, size in enumerate([*sizes, row["peak"]["in all"] - sum(sizes)]):
            yield rect(x, y, size * scale, 21, f"c{j} gap")
            x += size * scale
        yield text(x + 7, y + 15, gb(row["peak"]["in all"]))
    x = left + 80e9 * scale
    yield path(f"M{number(x)},{top - 8}V{bottom}", "ink-line", 2, stroke_dasharray="5 3")
    yield text(x + 6, bottom - 8, "80 GB", "ink s")


def glyph(command, x=6, y=6, unit=6):
    """Parameters, gradients and optimizer states above activations. A row is a layer; in it are 4
    slices of its weights, or 4 sequences of 8 positions. ``command`` is one of shares.json."""
    found = read("shares.json")[command]
    for i, kind in enumerate(KINDS):
        whole = len(found["held"][kind]) > 1 and min(found["held"][kind]) == 1
        for layer, ranks in enumerate(found["weights"]):
            classes = ["all"] * 4 if whole else [f"c{rank}" for rank in ranks]
            yield from stripes(x + 7 * i * unit, y + layer * unit, classes, unit, unit - 1)
    for layer, sequences in enumerate(found["activations"]):
        for i, ranks in enumerate(sequences):
            left, top = x + i * 14 / 3 * unit, y + (5 + layer) * unit
            yield from stripes(left, top, [f"c{rank}" for rank in ranks], unit / 2, unit - 1)


def stripes(x, y, classes, width, height):
    """A row of cells; neighbours of one colour are one."""
    for class_, cells in itertools.groupby(classes):
        n = len(list(cells))
        yield rect(x, y, n * width, height, class_)
        x += n * width


def key():
    """What the parts of a glyph are, for zero.py."""
    yield from glyph("zero.py --stage 2", 92, 56, 18)
    yield text(8, 22, "zero.py on 4 ranks", "ink h")
    for i, words in enumerate(("parameters", "gradients", "optimizer states")):
        yield text(128 + 126 * i, 48, words, "ink s m")
    for i, row in itertools.product(range(4), (0, 1)):
        yield text(82, 69 + 90 * row + 18 * i, f"layer {i}", "soft s e")
    for i in range(4):
        yield text(128 + 84 * i, 236, f"sequence {i}", "ink s m")
        yield from legend(456, 82 + 24 * i, [(f"c{i}", f"on rank {i}", 0)])
    yield from legend(456, 178, [("all", "on every rank", 0)])
    yield text(92, 258, "activations: 4 sequences of 8 positions, from left to right", "ink s")


def waiting(name):
    """The share of a step in which the ranks of a pipeline wait."""
    ranks = read("schedules.json")[name]
    total = max(start + length for cells in ranks for _, start, length in cells)
    return 1 - sum(length for cells in ranks for *_, length in cells) / (len(ranks) * total)


def timeline(name):
    """A pipeline's schedule: the calls of each rank, at the time at which they can start."""
    ranks = read("schedules.json")[name]
    stages = {call[0] for cells in ranks for call, *_ in cells}
    total = max(start + length for cells in ranks for _, start, length in cells)
    two = len(stages) > len(ranks)  # stages on each rank, of half the layers each
    unit, left, top, height = 12 if two else 24, 60, 62, 28
    words, width = {
        "BF": ("backward", 92), "FIW": ("backward: gradient of the input", 220),
        "BFIW": ("backward: gradient of the input; wide: whole", 300),
    }["".join(sorted({call[1] for call, *_ in ranks[0]}))]
    yield text(8, 22, f"{name}: each rank waits for {waiting(name):.1%} of the step", "ink h")
    yield from legend(left, 48, [
        ("c0", "forward", 84), ("c1", words, width),
        *[("c2", "gradients of the weights", 176)] * (words != "backward"), ("past", "waiting", 0),
    ])
    yield rect(left, top, total * unit, height * len(ranks), "past")
    for rank, cells in enumerate(ranks):
        yield text(left - 8, top + rank * height + 19, f"rank {rank}", "ink s e")
        first = min(call[0] for call, *_ in cells)
        for call, start, length in cells:
            x, y = left + start * unit, top + rank * height
            yield rect(x, y, length * unit, height, f"{CALLS[call[1]]} gap")
            yield text(x + length * unit / 2, y + 18, call[2:], "on s m")
            if call[0] != first:
                yield rect(x + 2.5, y + 22, length * unit - 5, 2, "on")
    words = "time; the numbers are micro-batches" + "; underlined: the rank's second stage" * two
    yield text(left, top + height * len(ranks) + 20, words, "soft s")


def ring():
    """The blocks of scores that each rank of cp.py computes at each turn."""
    found = read("ring.json")
    n, size, top, done = len(found["chunks"]), 20, 92, []
    owner = {chunk: rank for rank, own in enumerate(found["chunks"]) for chunk in own}
    bottom = top + 2 * n * size
    yield text(8, 24, "Ring attention on 4 ranks: who computes which scores, and when", "ink h")
    yield from legend(8, 50, [*((f"c{r}", f"rank {r}", 78) for r in range(n)),
                              ("past", "computed before", 0)])
    yield text(52, top - 12, "queries", "ink s e")
    for chunk in range(2 * n):
        yield rect(54, top + chunk * size, 8, size, f"c{owner[chunk]} gap")
        yield text(46, top + chunk * size + 14, chunk, "ink s e")
    for turn in range(n):
        left = 66 + turn * (2 * n * size + 24)
        words = "own keys" if turn == 0 else f"keys of rank r-{turn}"
        yield text(left, top - 12, f"turn {turn + 1}: {words}", "ink s")
        yield rect(left, top, 2 * n * size, 2 * n * size, "none")
        now = [(block, f"c{rank}") for rank in range(n) for block in found["turns"][rank][turn]]
        for (q, k), class_ in [*((block, "past") for block in done), *now]:
            x, y = left + k * size, top + q * size
            if q == k:  # half of it is under the causal mask
                corners = points([(x, y), (x, y + size), (x + size, y + size)])
                yield tag("path", d=corners + "Z", class_=f"{class_} gap")
            else:
                yield rect(x, y, size, size, f"{class_} gap")
        done += [block for block, _ in now]
        for chunk in range(2 * n):
            yield rect(left + chunk * size, bottom + 4, size, 8, f"c{owner[chunk]} gap")
    yield text(66, bottom + 30, "keys; the colour of a row or a column is the rank that holds this "
               "chunk of the sequence", "ink s")


def grid():
    """hybrid_3d.py's ranks on two machines, and what rank 0 sends over each axis."""
    found = read("grid.json")
    ranks = found["ranks"]  # [pp][dp][cp][tp]
    # The axis: a step along it, what travels, and which ranks are in one group with rank 0.
    axes = {
        "tp": ((0, 0, 0, 1), "hidden states in each layer", ranks[0][0][0]),
        "cp": ((0, 0, 1, 0), "keys and values of each layer", [c[0] for c in ranks[0][0]]),
        "dp": ((0, 1, 0, 0), "parameters and gradients (FSDP over dp x cp)",
               [c[0] for d in ranks[0] for c in d]),
        "pp": ((1, 0, 0, 0), "hidden states between stages", [p[0][0][0] for p in ranks]),
    }
    at = {}  # the centre of each rank
    yield text(8, 24, "hybrid_3d.py --pp 2 --cp 2 --tp 2 on two machines of 8 GPUs: dp is 2",
               "ink h")
    for p in range(2):
        left = 16 + p * 404
        yield rect(left, 82, 380, 214, "none", rx=8)
        yield text(left + 190, 186, f"machine {p}", "ink m")
        yield text(left + 190, 204, f"stage {p}", "soft s m")
        for d, c, t in itertools.product(range(2), range(2), range(2)):
            at[p, d, c, t] = left + 50 + c * 186 + t * 94, 138 + d * 102
    for i, (axis, (step, *_)) in enumerate(axes.items()):
        for start, (x0, y0) in at.items():
            if (end := tuple(map(sum, zip(start, step)))) not in at:
                continue
            (x1, y1), side = at[end], 1 if start[1] else -1  # arcs above the first row
            bend = {"cp": 60, "pp": 150}.get(axis, 0) * side
            curve = f"M{x0},{y0}Q{(x0 + x1) / 2:g},{(y0 + y1) / 2 + bend:g} {x1},{y1}"
            yield path(curve, f"l{i}", 1.2 if any(start) else 4)
    for (p, d, c, t), (x, y) in at.items():
        yield tag("circle", cx=x, cy=y, r=18, class_="bg axis", stroke_width=1.5)
        yield text(x, y + 5, ranks[p][d][c][t], "ink m")
    for words, x in (("what rank 0 sends in a step", 90), ("to and from ranks", 410)):
        yield text(x, 346, words, "soft s")
    for words, x in (("GB", 620), ("of it to the other machine", 800)):
        yield text(x, 346, words, "soft s e")
    for i, (axis, (_, words, members)) in enumerate(axes.items()):
        y, group = 368 + 22 * i, "dp_shard_cp" if axis == "dp" else axis
        sent = [sum(part[kind] for part in found["collectives"] if part["group"] == group)
                for kind in ("bytes", "between_machines")]
        yield path(f"M16,{y - 4}h30", f"l{i}", 4)
        yield text(56, y, axis)
        yield text(90, y, words)
        yield text(410, y, " ".join(map(str, members)))
        yield text(620, y, gb(sent[0]), "ink e")
        yield text(800, y, gb(sent[1]), "ink e")


def draw():
    """{name: text} of all files in docs/pictures/."""
    large, options = read("8b.json"), read("curves.json")["options"]
    found = {
        "curves": svg(
            "curves.json", 890, 480, "Loss curves of all eight scripts over each other: one line",
            f"Below is the difference to single.py: at most "
            f"{max(map(max, differences().values())):.1g} nats. Options: {options}", *curves()),
        "memory": svg(
            "8b.json", 830, 424, "GB that a GPU holds at the peak, for an 8B model on 8 GPUs",
            "; ".join(f"{command}: {gb(row['peak']['in all'])}" for command, row in large.items()),
            *memory()),
        "key": svg("shares.json", 590, 272, "How to read the small pictures of the scripts",
                   "Each colour is a rank; grey is on every rank. A row is a layer.", *key()),
        "ring": svg("ring.json", 790, 296, "The zig-zag ring of cp.py on 4 ranks",
                    "Which blocks of scores each rank computes at each of 4 turns.", *ring()),
        "grid": svg("grid.json", 816, 452, "hybrid_3d.py's 16 ranks on two machines of 8 GPUs",
                    "tp, cp and dp stay on a machine; pp goes from one to the other.", *grid()),
    }
    for command in read("shares.json"):
        script = command.split()[0]
        found[script.removesuffix(".py")] = svg(
            "shares.json", 120, 66, f"What {command} splits over 4 ranks", SPLIT[script],
            *glyph(command))
    for name in read("schedules.json"):
        found[name] = svg(
            "schedules.json", 860, 206, f"Pipeline schedule {name}: 4 ranks, 8 micro-batches",
            f"When each rank computes which pass of which micro-batch. Ranks wait for "
            f"{waiting(name):.1%} of the step.", *timeline(name))
    return found


def main(argv=None):
    parser = make_parser("pictures", __doc__)
    parser.add_argument("--measure", nargs="*", metavar="NAME",
                        choices=sorted(path.stem for path in DATA.glob("*.json")),
                        help="first measure docs/data/NAME.json; without names all of them")
    args = parser.parse_args(argv)
    if args.measure is not None:
        from tools import figures

        figures.measure(args.measure or figures.FIGURES, DATA)
    PICTURES.mkdir(exist_ok=True)
    for name, picture in draw().items():
        (PICTURES / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    run(main)
