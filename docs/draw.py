"""Draw the pictures of README.md and docs/: docs/pictures/*.svg, from docs/data/*.json, cp.py and
tools/counting/theory.py. One shows no data, and is a file that one edits: docs/pictures/grid.svg.

    python -m docs.draw

The colours follow the light or dark scheme of the reader.
"""

import itertools
import json
import math
import pathlib
import types

import torch

import cp
from common.model import PRESETS
from tools.counting import theory

ROOT = pathlib.Path(__file__).parent.parent
DATA, PICTURES = ROOT / "docs" / "data", ROOT / "docs" / "pictures"
KINDS = "parameters", "gradients", "optimizer states"


def read(name):
    return json.loads((DATA / f"{name}.json").read_text())


# SVG. A class is a colour, such as c0 to c3 and ca for ranks 0 to 3 and all; a letter for a kind of
# text; or an edge, in the colour of the background.

STYLE = """\
text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}
text.h{font-size:15px;font-weight:600}text.s{font-size:12px}
.m{text-anchor:middle}.e{text-anchor:end}
rect{shape-rendering:crispEdges}rect,text{fill:currentColor}
path{fill:none;stroke:currentColor;stroke-linejoin:round}
.edge{fill:currentColor;stroke:#ffffff}
.bg{color:#ffffff}.ink{color:#1f2328}.soft{color:#57606a}.grid{color:#d8dee4}.ca{color:#8c959f}
.past{color:#d0d7de}.none{color:#f0f2f5}.c0{color:#0b6cb3}.c1{color:#b85c00}.c2{color:#007a57}
.c3{color:#a13d87}.c4{color:#7a6a00}.c5{color:#c4302b}.c6{color:#4b4fc4}
@media (prefers-color-scheme:dark){
.edge{stroke:#0d1117}
.bg{color:#0d1117}.ink{color:#e6edf3}.soft{color:#9da7b3}.grid{color:#30363d}.ca{color:#6e7681}
.past{color:#3d444d}.none{color:#1c2128}.c0{color:#6cb6f5}.c1{color:#f5a742}.c2{color:#4ccb9f}
.c3{color:#e89ad0}.c4{color:#d8c93c}.c5{color:#ff8a80}.c6{color:#a5a8ff}
}"""


def rect(x, y, width, height, style):
    return '<rect x="%.5g" y="%.5g" width="%.5g" height="%.5g" class="%s"/>' % (
        x, y, width, height, style)


def text(x, y, words, style="soft s"):
    return '<text x="%.5g" y="%.5g" class="%s">%s</text>' % (x, y, style, words)


def path(d, style, more=""):
    return f'<path d="M{d}" class="{style}" {more}/>'


def points(pairs):
    return ["%.5g,%.5g" % pair for pair in pairs]


def line(pairs, colour, width=1, more=""):
    return path(" ".join(points(pairs)), colour, f'stroke-width="{width}" {more}')


def level(left, right, y, words):
    """A horizontal line of the grid, and on its left what it stands for."""
    yield line([(left, y), (right, y)], "grid")
    yield text(left - 8, y + 4, words, "soft s e")


def tick(x, top, bottom, words):
    """A vertical line of the grid, and below it what it stands for."""
    yield line([(x, top), (x, bottom)], "grid")
    yield text(x, bottom + 18, words, "soft s m")


def legend(x, y, entries):
    """Coloured squares and words, from left to right."""
    for colour, words in entries.items():
        yield rect(x, y - 11, 13, 13, colour)
        yield text(x + 19, y, words, "ink s")
        x += 40 + 6.5 * len(words)


def save(name, width, height, title, parts, heading=True):
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<title>{title}</title>", f"<style>{STYLE}</style>", rect(0, 0, width, height, "bg"),
    ]
    if heading:
        lines.append(text(8, 24, title, "ink h"))
    lines += [*parts, "</svg>\n"]
    (PICTURES / f"{name}.svg").write_text("\n".join(lines))


# The pictures


def curve(left, right, bottom, up, values):
    """The points of a curve. Pixels: ``right`` from one value to the next, ``up`` for 1."""
    return [(left + right * i, bottom - up * value) for i, value in enumerate(values)]


def curves():
    """All loss curves over each other, and below how far each is from single.py's."""
    data = read("curves")
    yield text(62, 44, "loss, in nats per token")
    yield text(62, 284, "difference to single.py, in nats")
    yield text(351, 466, "optimizer steps", "soft s m")
    yield text(870, 44, "processes", "soft s e")
    for loss in range(7):
        yield from level(62, 640, 250 - 32 * loss, loss)
    for i, words in enumerate(("equal", "1e-16", "1e-15", "1e-14", "1e-13", "1e-12", "1e-11")):
        yield from level(62, 640, 430 - 22 * i, words)
    for step in range(0, 201, 50):
        yield text(62 + 2.89 * step, 448, step, "soft s m")
    for i, words in enumerate(data["options"]):
        yield text(656, 310 + 20 * i, words)
    expected = data["loss"]["single.py"]
    for i, (name, losses) in enumerate(data["loss"].items()):
        # single.py is a broad line. On it the others have dashes, one script after another.
        colour, width, dashes = "soft", 6, ""
        if i:
            colour, width = f"c{i - 1}", 3
            dashes = f'stroke-dasharray="9 54" stroke-dashoffset="{-9 * i}"'
        yield line(curve(64.89, 2.89, 250, 32, losses), colour, width, dashes)
        y = 66 + 22 * i
        yield line([(656, y), (678, y)], colour, width + 1)
        yield text(686, y + 4, name, "ink s")
        yield text(870, y + 4, data["processes"][name], "soft s e")
        if i:
            apart = [math.log10(abs(a - b) or 1e-17) for a, b in zip(losses, expected)]
            dots = points(curve(64.89, 2.89, 56, 22, apart))  # lines of length 0 with round ends
            yield path("h0M".join(dots) + "h0", colour, 'stroke-width="2.4" stroke-linecap="round"')


def change_of_loss(run):
    """By a bug, over the last 10 steps of its curve."""
    return sum(run["loss"][-10:]) / sum(run["sound"][-10:]) - 1


def bug(run):
    """The loss with a bug over the loss without it, from 0 on."""
    sound, losses = run["sound"], run["loss"]
    up = 66 / max(sound + losses)
    yield from legend(12, 110, {"ca": "without the bug", "c5": "with it"})
    yield text(412, 110, f"{change_of_loss(run):+z.1%}", "soft s e")
    yield line([(12, 88), (372, 88)], "grid")
    apart = up * abs(sound[-1] - losses[-1])
    for values, colour, width in (sound, "ca", 5), (losses, "c5", 1.6):
        yield line(curve(12, 7.2, 86, up, values), colour, width)
        if values is losses or apart > 14:  # otherwise the two numbers would cover each other
            yield text(380, 90 - up * values[-1], f"{values[-1]:.2f}")


def memory():
    """What a rank holds of an 8B model when its memory is fullest, as stacked bars."""
    left = 268
    yield from legend(8, 54, {
        "c0": "parameters", "c1": "gradients", "c2": "optimizer states",
        "c3": "at the peak also: activations, gathered weights",
    })
    for size in range(0, 121, 20):
        yield from tick(left + 3.65 * size, 76, 388, size)
    for i, (command, row) in enumerate(read("8b").items()):
        y = 84 + 30 * i
        yield text(left - 10, y + 15, command, "ink e")
        sizes = [row["held"][kind] for kind in KINDS]
        peak = row["peak"]["in all"]
        sizes.append(peak - sum(sizes))
        x = left
        for number, size in enumerate(sizes):
            width = 3.65e-9 * size
            yield rect(x, y, width, 21, f"c{number} edge")
            x += width
        yield text(x + 7, y + 15, f"{peak / 1e9:.3g}", "ink")
    yield line([(560, 76), (560, 388)], "ink", 2, 'stroke-dasharray="5 3"')
    yield text(566, 380, "80 GB", "ink s")


def axis(bottom, step):
    """A horizontal axis from 0 to 7 steps, below bars."""
    yield line([(232, bottom), (652, bottom)], "grid")
    for i in range(8):
        yield from tick(232 + 60 * i, bottom - 5, bottom, f"{step * i:,}")


def bar(y, width, height, colour, words):
    """A bar, and words at its end."""
    yield rect(232, y, width, height, f"{colour} edge")
    yield text(239 + width, y + height / 2 + 5, words, "ink s")


def gpu():
    """Two charts: what single.py held beside the dry run, and tokens per second."""
    yield text(8, 56, "memory of single.py, GB", "ink")
    yield from legend(232, 56, {"c0": "predicted by dry_run on a CPU", "c1": "held on the GPU"})
    yield from axis(200, 20)
    for y, run in zip((72, 114, 156), read("gpu_memory")["runs"]):
        yield text(222, y + 12, run["model"], "ink s e")
        if "--activation-checkpointing" in run["command"]:
            yield text(222, y + 27, "activation checkpointing", "soft s e")
        for down, colour, kind in (0, "c0", "dry_run"), (15, "c1", "counted"):
            size = run[kind]
            yield from bar(y + down, 3e-9 * size, 14, colour, f"{size:,} bytes")

    yield text(8, 258, "speed of llama3-1b, tokens/s", "ink")
    yield from legend(232, 258, {"c2": "our scripts", "c3": "another loop"})
    yield from axis(362, 10_000)
    speeds = read("gpu_speed")["tokens_per_second"]
    for y, colour, name in zip((274, 302, 330), ("c2", "c2", "c3"), speeds):
        yield text(222, y + 15, name, "ink s e")
        yield from bar(y, 0.006 * speeds[name], 21, colour, f"{speeds[name]:,}")


def cells(x, y, width, layers):
    """A row of cells for each layer, in the colours of the ranks that hold them."""
    for layer, ranks in enumerate(layers):
        for i, rank in enumerate(ranks):
            yield rect(x + width * i, y + 13 * layer, width, 12, f"c{rank}")


def strategies():
    """What 4 ranks hold with each script, 0 to 3, or a: all. Each row of cells is a layer: 4 slices
    of its weights, or its activations, 4 sequences of 8 positions."""
    yield from legend(8, 52, {
        "c0": "on rank 0", "c1": "on rank 1", "c2": "on rank 2", "c3": "on rank 3",
        "ca": "on every rank",
    })
    corners = itertools.product((96, 280, 464), (8, 293, 578))
    for (top, left), (command, shares) in zip(corners, read("shares").items()):
        yield text(left, top, command, "ink h")
        for i, kind in enumerate(KINDS):
            x = left + 84 * i
            yield text(x, top + 20, kind)
            yield from cells(x, top + 26, 13, shares[kind])
        yield text(left, top + 94, "activations of 4 sequences")
        for i, layers in enumerate(shares["activations"]):
            yield from cells(left + 62 * i, top + 100, 7, layers)


CALLS = {  # of a pipeline, as schedules.json names them
    "F": ("c0", "forward"), "B": ("c1", "backward"), "I": ("c3", "backward: gradient of input"),
    "W": ("c2", "backward: gradients of weights"),
}


def timeline(calls, end):
    """The calls of 4 ranks of a pipeline, at the time at which each can start."""
    kinds = {kind for _, _, kind, *_ in calls}
    used = dict(CALLS[kind] for kind in CALLS if kind in kinds)
    yield from legend(60, 48, used | {"past": "waiting"})
    words, unit = "time; the numbers are micro-batches", 24
    if max(stage for _, stage, *_ in calls) > 3:
        words, unit = f"{words}; underlined: the rank's second stage", 12
    yield text(60, 194, words)
    yield rect(60, 62, end * unit, 112, "past")
    for rank in range(4):
        yield text(52, 81 + 28 * rank, f"rank {rank}", "ink s e")
    for rank, stage, kind, micro_batch, start, length in calls:
        x, y = 60 + start * unit, 62 + 28 * rank
        width, (colour, _) = length * unit, CALLS[kind]
        yield rect(x, y, width, 28, f"{colour} edge")
        yield text(x + width / 2, y + 18, micro_batch, "bg s m")
        if stage > 3:
            yield rect(x + 2.5, y + 22, width - 5, 2, "bg")


def blocks(chunks, turn, rank):
    """The blocks of scores that a rank computes in a turn, by functions of cp.py: chunks of the
    queries and of the keys."""
    source = (rank - turn) % 4  # the rank whose keys have come
    group = types.SimpleNamespace(rank=lambda: rank)
    queries, keys, _ = cp.block_mask(source, group, 2, is_causal=True)
    for q, k in itertools.product(chunks[rank][queries], chunks[source][keys]):
        if q >= k:  # the causal mask hides the others
            yield q, k


def ring():
    """The blocks of scores that each rank computes, turn by turn."""
    chunks = cp.shard_positions(8, 4).tolist()  # of the sequence, by rank
    yield from legend(8, 50, {
        "c0": "rank 0", "c1": "rank 1", "c2": "rank 2", "c3": "rank 3", "past": "computed before",
    })
    yield text(52, 80, "queries", "ink s e")
    yield text(66, 282, "keys; the colour of a row or a column is the rank that holds this part of "
               "the sequence", "ink s")
    keys_of_turns = "own keys", "keys of rank r-1", "keys of rank r-2", "keys of rank r-3"
    for now, whose in enumerate(keys_of_turns):
        left = 66 + 184 * now
        yield text(left, 80, f"turn {now + 1}: {whose}", "ink s")
        yield rect(left, 92, 160, 160, "none")
        for turn, rank in itertools.product(range(now + 1), range(4)):
            colour = f"c{rank}" if turn == now else "past"
            for q, k in blocks(chunks, turn, rank):
                # The causal mask hides half of a block on the diagonal.
                edges = "v20h20Z" if q == k else "v20h20v-20Z"
                yield path(f"{left + 20 * k},{92 + 20 * q}{edges}", f"{colour} edge")
    for rank, own in enumerate(chunks):
        for chunk in own:
            yield rect(54, 92 + 20 * chunk, 8, 20, f"c{rank} edge")
            yield text(46, 106 + 20 * chunk, chunk, "ink s e")
            for left in 66, 250, 434, 618:
                yield rect(left + 20 * chunk, 256, 20, 8, f"c{rank} edge")


def sent():
    """The bytes that a rank sends in a step of llama3-8b by the formulas of theory.py, against the
    number of ranks, with one sequence of 8,192 tokens for each rank."""
    yield text(70, 48, "GB in a step")
    yield text(249.67, 368, "number of ranks n", "soft s m")
    for i, words in enumerate(("0.1", "1", "10", "100", "1,000", "10,000")):
        yield from level(70, 430, 330 - 54 * i, words)
    sizes = [2**i for i in range(1, 11)]
    for i, n in enumerate(sizes):
        yield text(70 + 40 * i, 350, f"{n:,}", "soft s m")
    args = types.SimpleNamespace(
        config=PRESETS["llama3-8b"], seq_len=8192, grad_accum=1, param_dtype=torch.float32,
        compute_dtype=torch.bfloat16, activation_checkpointing="full", stage=2, replicate=1,
        reshard_after_forward=True, sequence_parallel=True, schedule="1f1b", stages_per_rank=1,
    )
    for script, attention, most, colour, width, right, down, words in (  # most: 2**most ranks
        ("ddp.py", "", 10, "past", 8, 8, -18, "ddp.py: {} GB"),  # the second is on the first
        ("fsdp.py", "", 10, "c0", 2.5, 8, -3, "fsdp.py: {} GB"),
        ("zero.py", "", 10, "c4", 2.5, 8, 13, "zero.py: {} GB"),
        ("cp.py", "ring", 10, "c1", 2.5, 8, 4, "cp.py, ring or allgather: {} GB"),
        ("cp.py", "ulysses", 5, "c2", 2.5, 4, -8, "cp.py, ulysses: {} GB (32 heads)"),
        ("tp.py", "", 3, "c3", 2.5, -72, -28, "tp.py: {} GB (8 key/value heads)"),
        ("pp.py", "", 5, "c5", 2.5, 8, 4, "pp.py: {} GB (32 layers)"),
    ):
        args.attention, logs = attention, []
        for n in sizes[:most]:
            args.batch_size = n
            _, size = theory.of(script, args, n, n // 2, [])["sent"]  # a rank in the middle
            logs.append(math.log10(size))
        found = curve(70, 40, 762, 54, logs)
        yield line(found, colour, width)
        x, y = found[-1]
        yield text(x + right, y + down, words.format(f"{size / 1e9:,.0f}"), "ink s")


def draw():
    save("curves", 890, 480, "The loss of eight scripts: one curve", curves())
    for number, run in enumerate(read("bugs"), 1):
        title = f"The loss with and without bug {number}, over 50 steps"
        save(f"bugs/{number:02}", 420, 120, title, bug(run), heading=False)
    save("memory", 830, 424, "GB on each of 8 GPUs: Llama 3 8B, one sequence of 8,192 tokens per "
         "GPU", memory())
    save("gpu", 800, 392, "One H200: bytes of three runs, and speed with --compile", gpu())
    save("sent", 656, 384, "GB that a rank sends: Llama 3 8B, 8,192 tokens for each rank", sent())
    save("strategies", 850, 624, "What 4 ranks hold: each row is a layer, each sequence has 8 "
         "positions", strategies())
    save("ring", 790, 296, "Ring attention on 4 ranks: who computes which scores, and when", ring())
    for name, calls in read("schedules").items():
        end = max(start + length for *_, start, length in calls)
        busy = sum(length for *_, length in calls) / (4 * end)
        title = f"{name}: each rank waits for {1 - busy:.1%} of the step"
        save(name, 860, 206, title, timeline(calls, end))


if __name__ == "__main__":
    draw()
