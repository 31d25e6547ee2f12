"""Draw the pictures of README.md and docs/: docs/pictures/*.svg, from docs/data/*.json.

    python -m docs.draw              every picture
    python -m docs.draw --measure    first repeat the runs that docs/data names

The colours follow the light or dark scheme of the reader.
"""

import html
import itertools
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import types

import torch
from tqdm import tqdm

import cp

ROOT = pathlib.Path(__file__).parent.parent
DATA, PICTURES = ROOT / "docs" / "data", ROOT / "docs" / "pictures"

# On a light background, on a dark one. c0 to c3 are also the ranks 0 to 3.
COLOURS = {
    "bg": ("#ffffff", "#0d1117"), "ink": ("#1f2328", "#e6edf3"), "soft": ("#57606a", "#9da7b3"),
    "grid": ("#d8dee4", "#30363d"), "all": ("#8c959f", "#6e7681"), "past": ("#d0d7de", "#3d444d"),
    "none": ("#f0f2f5", "#1c2128"), "c0": ("#0b6cb3", "#6cb6f5"), "c1": ("#b85c00", "#f5a742"),
    "c2": ("#007a57", "#4ccb9f"), "c3": ("#a13d87", "#e89ad0"), "c4": ("#7a6a00", "#d8c93c"),
    "c5": ("#c4302b", "#ff8a80"), "c6": ("#4b4fc4", "#a5a8ff"),
}
KINDS = "parameters", "gradients", "optimizer states"


def read(name):
    return json.loads((DATA / f"{name}.json").read_text())


def gb(size):
    return f"{size / 1e9:.3g}"


# SVG


def number(x):
    return x if isinstance(x, str) else f"{x:.2f}".rstrip("0").rstrip(".")


def tag(name, content="", **attributes):
    """An element; ``x_y=1`` is the attribute x-y."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(number(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{words}>{content}</{name}>"


def rect(x, y, width, height, class_, **more):
    return tag("rect", x=x, y=y, width=width, height=height, class_=class_, **more)


def text(x, y, words, class_="ink", **more):
    return tag("text", html.escape(str(words)), x=x, y=y, class_=class_, **more)


def path(d, colour, width, **more):
    return tag("path", d=d, class_=f"{colour}-line line", stroke_width=width, **more)


def points(pairs):
    return "M" + " ".join(f"{number(x)},{number(y)}" for x, y in pairs)


def line(start, end, colour, width=1, **more):
    return path(points([start, end]), colour, width, **more)


def legend(x, y, entries):
    """Coloured squares and words, from left to right; ``entries``: colour, words, width."""
    for colour, words, width in entries:
        yield rect(x, y - 11, 13, 13, colour)
        yield text(x + 19, y, words, "ink s")
        x += width


def save(name, width, height, title, parts):
    light, dark = (
        "".join(f".{name}{{fill:{colours[i]}}}.{name}-line{{stroke:{colours[i]}}}"
                for name, colours in COLOURS.items())
        for i in (0, 1)
    )
    style = (
        "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        ".h{font-size:15px;font-weight:600}.m{text-anchor:middle}.e{text-anchor:end}"
        f".s{{font-size:12px}}\n{light}\n@media (prefers-color-scheme:dark){{{dark}}}\n"
        ".line{fill:none}"
    )
    body = [tag("title", html.escape(title)), tag("style", style),
            rect(0, 0, width, height, "bg"), *parts]
    (PICTURES / f"{name}.svg").write_text(tag(
        "svg", "\n".join(["", *body, ""]), xmlns="http://www.w3.org/2000/svg", role="img",
        viewBox=f"0 0 {width} {height}", width=width, height=height,
    ) + "\n")


# The pictures


def curves():
    """All loss curves over each other, and below how far each is from single.py's."""
    found = read("curves")
    first = found["loss"]["single.py"]
    apart = {name: [abs(a - b) for a, b in zip(losses, first)]
             for name, losses in found["loss"].items()}
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
        yield line((left, y(loss)), (right, y(loss)), "grid")
        yield text(left - 8, y(loss) + 4, loss, "soft s e")
    yield text(left, low - 12, "difference to single.py, in nats", "soft s")
    for exponent in range(floor, ceiling + 1):
        yield line((left, log_y(exponent)), (right, log_y(exponent)), "grid")
        if exponent == floor or exponent % 2 == 0:
            words = "equal" if exponent == floor else f"1e{exponent}"
            yield text(left - 8, log_y(exponent) + 4, words, "soft s e")
    for step in range(0, len(first) + 1, 50):
        yield text(x(step), bottom + 18, step, "soft s m")
    yield text((left + right) / 2, bottom + 36, "optimizer steps", "soft s m")
    yield text(right + 230, 44, "processes", "soft s e")
    for i, words in enumerate(found["options"].removeprefix("--").split(" --")):
        yield text(right + 16, low + 16 + 20 * i, f"--{words}", "soft s")
    for i, (name, losses) in enumerate(found["loss"].items()):
        colour = f"c{i - 1}" if i else "soft"
        # single.py as a broad line; on it each of the others has its dashes, one after another.
        dashes = {"stroke_dasharray": "9 54", "stroke_dashoffset": -9 * i} if i else {}
        curve = points((x(step), y(loss)) for step, loss in enumerate(losses, 1))
        yield path(curve, colour, 3 if i else 6, stroke_linejoin="round", **dashes)
        row = 66 + 22 * i
        yield line((right + 16, row), (right + 38, row), colour, 4 if i else 6)
        yield text(right + 46, row + 4, name, "ink s")
        yield text(right + 230, row + 4, found["processes"][name], "soft s e")
        if i:
            exponents = [math.log10(size) if size else floor for size in apart[name]]
            dots = "".join(f"{points([(x(step), log_y(exponent))])}h0"
                           for step, exponent in enumerate(exponents, 1))
            yield path(dots, colour, 2.4, stroke_linecap="round")


def memory():
    """What a rank holds of an 8B model when its memory is fullest, as stacked bars."""
    rows, left, right, top = read("8b"), 268, 780, 84
    scale = (right - left) / 140  # pixels per GB
    bottom = top + 30 * len(rows) + 4
    yield text(20, 26, "GB on each of 8 GPUs: Llama 3 8B, one sequence of 8,192 tokens per GPU",
               "ink h")
    yield from legend(20, 54, [
        ("c0", "parameters", 106), ("c1", "gradients", 98), ("c2", "optimizer states", 136),
        ("c3", "at the peak also: activations, gathered weights", 0),
    ])
    for size in range(0, 121, 20):
        x = left + size * scale
        yield line((x, top - 8), (x, bottom), "grid")
        yield text(x, bottom + 18, size, "soft s m")
    for i, (command, row) in enumerate(rows.items()):
        y, x = top + 30 * i, left
        yield text(left - 10, y + 15, command + " (1 GPU)" * (command == "single.py"), "ink e")
        sizes = [row["held"][kind] for kind in KINDS]
        for j, size in enumerate([*sizes, row["peak"]["in all"] - sum(sizes)]):
            yield rect(x, y, size / 1e9 * scale, 21, f"c{j} bg-line")
            x += size / 1e9 * scale
        yield text(x + 7, y + 15, gb(row["peak"]["in all"]))
    x = left + 80 * scale
    yield line((x, top - 8), (x, bottom), "ink", 2, stroke_dasharray="5 3")
    yield text(x + 6, bottom - 8, "80 GB", "ink s")


def glyph(command, x=6, y=6, unit=6):
    """Parameters, gradients and optimizer states above activations. A row is a layer; in it are 4
    slices of its weights, or 4 sequences of 8 positions."""
    found = read("shares")[command]
    for i, kind in enumerate(KINDS):
        shares = found["held"][kind]
        for layer, ranks in enumerate(found["weights"]):
            copied = len(shares) > 1 and min(shares) == 1
            colours = ["all"] * 4 if copied else [f"c{rank}" for rank in ranks]
            yield from stripes(x + 7 * i * unit, y + layer * unit, colours, unit, unit - 1)
    for layer, sequences in enumerate(found["activations"]):
        for i, ranks in enumerate(sequences):
            yield from stripes(x + i * 14 / 3 * unit, y + (5 + layer) * unit,
                               [f"c{rank}" for rank in ranks], unit / 2, unit - 1)


def stripes(x, y, colours, width, height):
    """A row of cells; neighbours of one colour are one."""
    for colour, cells in itertools.groupby(colours):
        n = len(list(cells))
        yield rect(x, y, n * width, height, colour)
        x += n * width


def key():
    """What the parts of a glyph are, for zero.py."""
    yield from glyph("zero.py --stage 2", 92, 56, 18)
    yield text(8, 22, "zero.py on 4 ranks", "ink h")
    for i, words in enumerate(KINDS):
        yield text(128 + 126 * i, 48, words, "ink s m")
    for i in range(4):
        for top in (69, 159):
            yield text(82, top + 18 * i, f"layer {i}", "soft s e")
        yield text(128 + 84 * i, 236, f"sequence {i}", "ink s m")
        yield from legend(456, 82 + 24 * i, [(f"c{i}", f"on rank {i}", 0)])
    yield from legend(456, 178, [("all", "on every rank", 0)])
    yield text(92, 258, "activations: 4 sequences of 8 positions, from left to right", "ink s")


def waiting(ranks):
    """The share of a step in which the ranks of a pipeline wait. ``ranks``: of schedules.json."""
    cells = list(itertools.chain(*ranks))
    total = max(start + length for _, start, length in cells)
    return 1 - sum(length for *_, length in cells) / (len(ranks) * total)


def timeline(name):
    """The calls of each rank, at the time at which they can start. "1F0" is the forward pass of
    stage 1 for micro-batch 0, B the backward pass, I and W its parts for inputs and weights."""
    ranks = read("schedules")[name]
    cells = list(itertools.chain(*ranks))
    total = max(start + length for _, start, length in cells)
    two = len({call[0] for call, *_ in cells}) > len(ranks)  # stages on a rank
    unit, left, top, height = 12 if two else 24, 60, 62, 28
    words, width = {
        "BF": ("backward", 92), "FIW": ("backward: gradient of the input", 220),
        "BFIW": ("backward: gradient of the input; wide: whole", 300),
    }["".join(sorted({call[1] for call, *_ in cells}))]
    yield text(8, 22, f"{name}: each rank waits for {waiting(ranks):.1%} of the step", "ink h")
    yield from legend(left, 48, [
        ("c0", "forward", 84), ("c1", words, width),
        *[("c2", "gradients of the weights", 176)] * (words != "backward"), ("past", "waiting", 0),
    ])
    yield rect(left, top, total * unit, height * len(ranks), "past")
    for rank, own in enumerate(ranks):
        y = top + rank * height
        yield text(left - 8, y + 19, f"rank {rank}", "ink s e")
        for call, start, length in own:
            x, colour = left + start * unit, {"F": "c0", "W": "c2"}.get(call[1], "c1")
            yield rect(x, y, length * unit, height, f"{colour} bg-line")
            yield text(x + length * unit / 2, y + 18, call[2:], "bg s m")
            if call[0] != own[0][0][0]:  # not the stage that this rank calls first
                yield rect(x + 2.5, y + 22, length * unit - 5, 2, "bg")
    words = "time; the numbers are micro-batches" + "; underlined: the rank's second stage" * two
    yield text(left, top + height * len(ranks) + 20, words, "soft s")


def ring_blocks(n=4):
    """By functions of cp.py: the chunks of the sequence on each rank, and turns[turn][rank], the
    blocks of scores (chunk of queries, chunk of keys) that it computes."""
    chunks, turns = cp.shard_positions(2 * n, n).tolist(), []
    for turn in range(n):
        turns.append([])
        for rank, own in enumerate(chunks):
            source = (rank - turn) % n
            queries, keys = cp.in_sight(source, types.SimpleNamespace(rank=lambda: rank), 2)
            blocks = itertools.product(own[queries], chunks[source][keys])
            turns[-1].append([(q, k) for q, k in blocks if source != rank or q >= k])
    return chunks, turns


def ring():
    chunks, turns = ring_blocks()
    n, size, top, done = len(chunks), 20, 92, []
    owner = {chunk: rank for rank, own in enumerate(chunks) for chunk in own}
    bottom = top + 2 * n * size
    yield text(8, 24, "Ring attention on 4 ranks: who computes which scores, and when", "ink h")
    yield from legend(8, 50, [*((f"c{r}", f"rank {r}", 78) for r in range(n)),
                              ("past", "computed before", 0)])
    yield text(52, top - 12, "queries", "ink s e")
    for chunk in range(2 * n):
        yield rect(54, top + chunk * size, 8, size, f"c{owner[chunk]} bg-line")
        yield text(46, top + chunk * size + 14, chunk, "ink s e")
    for turn, ranks in enumerate(turns):
        left = 66 + turn * (2 * n * size + 24)
        words = f"keys of rank r-{turn}" if turn else "own keys"
        yield text(left, top - 12, f"turn {turn + 1}: {words}", "ink s")
        yield rect(left, top, 2 * n * size, 2 * n * size, "none")
        now = [(block, f"c{rank}") for rank, blocks in enumerate(ranks) for block in blocks]
        for (q, k), colour in [*((block, "past") for block in done), *now]:
            x, y = left + k * size, top + q * size
            corners = [(x, y), (x, y + size), (x + size, y + size), (x + size, y)]
            below = 3 if q == k else 4  # the causal mask hides half of a block on the diagonal
            yield tag("path", d=points(corners[:below]) + "Z", class_=f"{colour} bg-line")
        done += [block for block, _ in now]
        for chunk in range(2 * n):
            yield rect(left + chunk * size, bottom + 4, size, 8, f"c{owner[chunk]} bg-line")
    yield text(66, bottom + 30, "keys; the colour of a row or a column is the rank that holds this "
               "chunk of the sequence", "ink s")


def grid():
    """hybrid_3d.py's ranks on two machines, and what rank 0 sends over each axis."""
    # A step along the axis, in (pp, dp, cp, tp); what travels; the group of rank 0, its ranks
    axes = {
        "tp": ((0, 0, 0, 1), "hidden states in each layer", "tp", "0 1"),
        "cp": ((0, 0, 1, 0), "keys and values of each layer", "cp", "0 2"),
        "dp": ((0, 1, 0, 0), "parameters and gradients (FSDP over dp x cp)", "dp_shard_cp",
               "0 2 4 6"),
        "pp": ((1, 0, 0, 0), "hidden states between stages", "pp", "0 8"),
    }
    yield text(8, 24, "hybrid_3d.py --pp 2 --cp 2 --tp 2 on two machines of 8 GPUs: dp is 2",
               "ink h")
    for stage in range(2):
        left = 16 + stage * 404
        yield rect(left, 82, 380, 214, "none", rx=8)
        yield text(left + 190, 186, f"machine {stage}", "ink m")
        yield text(left + 190, 204, f"stage {stage}", "soft s m")
    at = {  # the centre of each rank, in the order of the ranks
        (p, d, c, t): (66 + p * 404 + c * 186 + t * 94, 138 + d * 102)
        for p, d, c, t in itertools.product(range(2), repeat=4)
    }
    for i, (axis, (step, *_)) in enumerate(axes.items()):
        for start, (x0, y0) in at.items():
            if (end := tuple(map(sum, zip(start, step)))) in at:
                (x1, y1), side = at[end], 1 if start[1] else -1  # arcs above the first row
                bend = {"cp": 60, "pp": 150}.get(axis, 0) * side
                middle = points([((x0 + x1) / 2, (y0 + y1) / 2 + bend), (x1, y1)])
                arc = points([(x0, y0)]) + middle.replace("M", "Q")
                yield path(arc, f"c{i}", 1.2 if any(start) else 4)
    for rank, (x, y) in enumerate(at.values()):
        yield tag("circle", cx=x, cy=y, r=18, class_="bg soft-line", stroke_width=1.5)
        yield text(x, y + 5, rank, "ink m")
    yield text(90, 346, "what rank 0 sends in a step", "soft s")
    yield text(410, 346, "to and from ranks", "soft s")
    yield text(620, 346, "GB", "soft s e")
    yield text(800, 346, "of it to the other machine", "soft s e")
    for i, (axis, (_, words, group, ranks)) in enumerate(axes.items()):
        y = 368 + 22 * i
        yield line((16, y - 4), (46, y - 4), f"c{i}", 4)
        for x, cell in ((56, axis), (90, words), (410, ranks)):
            yield text(x, y, cell)
        for x, kind in ((620, "bytes"), (800, "between_machines")):
            sent = sum(part[kind] for part in read("grid")["collectives"] if part["group"] == group)
            yield text(x, y, gb(sent), "ink e")


def draw():
    save("curves", 890, 480, "Loss curves of all eight scripts: one line", curves())
    save("memory", 830, 424, "GB that a GPU holds at the peak, for an 8B model on 8 GPUs", memory())
    save("key", 590, 272, "How to read the small pictures of the scripts", key())
    save("ring", 790, 296, "The zig-zag ring of cp.py on 4 ranks", ring())
    save("grid", 816, 452, "hybrid_3d.py's 16 ranks on two machines of 8 GPUs", grid())
    for command in read("shares"):
        name = command.partition(".py")[0]
        save(name, 120, 66, f"What {command} splits over 4 ranks", glyph(command))
    for name in read("schedules"):
        save(name, 860, 206, f"Pipeline schedule {name}: 4 ranks, 8 micro-batches", timeline(name))


# The data


def measure():
    """Repeat the dry runs of 8b.json and grid.json, and the real runs of curves.json."""
    large, grid, curves = read("8b"), read("grid"), read("curves")
    with tempfile.TemporaryDirectory() as folder:
        for row in tqdm([*large.values(), grid], "dry runs"):
            counts = pathlib.Path(folder, "counts.json")
            python(row["command"].replace("dry_run", f"dry_run --json {counts}"))
            found = json.loads(counts.read_text())
            row |= {kind: found[kind] for kind in row if kind != "command"}
        for script, n in tqdm(curves["processes"].items(), "curves"):
            out = pathlib.Path(folder, script.replace(" ", ""))
            python(f"python -m torch.distributed.run --standalone --nproc-per-node={n} {script} "
                   f"{curves['options']} --device cpu --save-every 0 --out {out}")
            lines = (out / "metrics.jsonl").read_text().splitlines()
            curves["loss"][script] = [json.loads(line)["loss"] for line in lines]
    curves["torch"] = torch.__version__
    for name, found in (("8b", large), ("grid", grid), ("curves", curves)):
        (DATA / f"{name}.json").write_text(json.dumps(found).replace("}, ", "},\n") + "\n")


def python(command):
    """Run a command that begins with ``python``, in the repository's folder."""
    words = [sys.executable, *command.split()[1:]]
    subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure()
    draw()
