"""Draw the pictures of README.md and docs/: docs/pictures/*.svg, from docs/data/*.json, cp.py and
tools/counting/theory.py.

    python -m docs.draw

The colours follow the light or dark scheme of the reader.
"""

import html
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


def gb(size):
    return f"{size / 1e9:.3g}"


# SVG. A class is a colour, as a fill or, with -line, as a stroke; or a letter for a kind of text.

COLOURS = {  # on a light background, on a dark one; c0 to c3 and ca are also ranks 0 to 3 and all
    "bg": ("#ffffff", "#0d1117"), "ink": ("#1f2328", "#e6edf3"), "soft": ("#57606a", "#9da7b3"),
    "grid": ("#d8dee4", "#30363d"), "ca": ("#8c959f", "#6e7681"), "past": ("#d0d7de", "#3d444d"),
    "none": ("#f0f2f5", "#1c2128"), "c0": ("#0b6cb3", "#6cb6f5"), "c1": ("#b85c00", "#f5a742"),
    "c2": ("#007a57", "#4ccb9f"), "c3": ("#a13d87", "#e89ad0"), "c4": ("#7a6a00", "#d8c93c"),
    "c5": ("#c4302b", "#ff8a80"), "c6": ("#4b4fc4", "#a5a8ff"),
}
LIGHT, DARK = (
    "".join(f".{name}{{fill:{pair[i]}}}.{name}-line{{stroke:{pair[i]}}}"
            for name, pair in COLOURS.items())
    for i in (0, 1)
)
STYLE = f"""text{{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}}
text.h{{font-size:15px;font-weight:600}}text.s{{font-size:12px}}
.m{{text-anchor:middle}}rect{{shape-rendering:crispEdges}}.e{{text-anchor:end}}path{{fill:none}}
{LIGHT}
@media (prefers-color-scheme:dark){{{DARK}}}"""


def rect(x, y, width, height, style):
    return (f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" '
            f'class="{style}"/>')


def text(x, y, words, style="ink"):
    return f'<text x="{x:.5g}" y="{y:.5g}" class="{style}">{html.escape(str(words))}</text>'


def points(pairs):
    return " ".join(f"{x:.5g},{y:.5g}" for x, y in pairs)


def path(d, style, more=""):
    return f'<path d="M{d}" class="{style}" {more}/>'


def line(pairs, colour, width=1, more=""):
    return path(points(pairs), f"{colour}-line", f'stroke-width="{width}" {more}')


def legend(x, y, entries):
    """Coloured squares and words, from left to right."""
    for colour, words in entries:
        yield rect(x, y - 11, 13, 13, colour)
        yield text(x + 19, y, words, "ink s")
        x += 40 + 6.5 * len(words)


def save(name, width, height, title, parts, heading=True):
    title_line = [text(8, 24, title, "ink h")] if heading else []
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<title>{html.escape(title)}</title>", f"<style>{STYLE}</style>",
        rect(0, 0, width, height, "bg"), *title_line, *parts, "</svg>",
    ]
    (PICTURES / f"{name}.svg").write_text("\n".join(lines) + "\n")


# The pictures


def curves():
    """All loss curves over each other, and below how far each is from single.py's."""
    data = read("curves")
    first = data["loss"]["single.py"]

    def x(step):
        return 62 + 2.89 * step

    def y(loss):
        return 250 - 32 * loss

    def low_y(difference):
        exponent = math.log10(difference) if difference else -17
        return 430 - 22 * (exponent + 17)

    yield text(62, 44, "loss, in nats per token", "soft s")
    yield text(62, 284, "difference to single.py, in nats", "soft s")
    for i in range(7):
        for height, words in (y(i), i), (low_y(10.0**i / 1e17), f"1e{i - 17}" if i else "equal"):
            yield line([(62, height), (640, height)], "grid")
            yield text(54, height + 4, words, "soft s e")
    for step in range(0, len(first) + 1, 50):
        yield text(x(step), 448, step, "soft s m")
    yield text(x(100), 466, "optimizer steps", "soft s m")
    yield text(870, 44, "processes", "soft s e")
    for i, words in enumerate(data["options"].removeprefix("--").split(" --")):
        yield text(656, 310 + 20 * i, f"--{words}", "soft s")
    for i, (name, losses) in enumerate(data["loss"].items()):
        # single.py as a broad line; on it each of the others has its dashes, one after another.
        colour, width = (f"c{i - 1}", 3) if i else ("soft", 6)
        dashes = f'stroke-dasharray="9 54" stroke-dashoffset="{-9 * i}"' if i else ""
        curve = [(x(step), y(loss)) for step, loss in enumerate(losses, 1)]
        yield line(curve, colour, width, f'stroke-linejoin="round" {dashes}')
        yield line([(656, 66 + 22 * i), (678, 66 + 22 * i)], colour, width + 1)
        yield text(686, 70 + 22 * i, name, "ink s")
        yield text(870, 70 + 22 * i, data["processes"][name], "soft s e")
        if i:
            apart = [(x(step), low_y(abs(a - b)))
                     for step, (a, b) in enumerate(zip(losses, first), 1)]
            dots = points(apart).replace(" ", "h0M") + "h0"  # lines of length 0, with round ends
            yield path(dots, f"{colour}-line", 'stroke-width="2.4" stroke-linecap="round"')


def change_of_loss(run):
    """By a bug, over the last 10 steps of its curve."""
    return sum(run["loss"][-10:]) / sum(run["sound"][-10:]) - 1


def bug(run, width=420, height=120):
    """The loss with a bug over the loss without it, from 0 on."""
    sound, losses = run["sound"], run["loss"]
    right, up = (width - 60) / len(sound), (height - 54) / max(sound + losses)

    def curve(values):
        return [(12 + right * step, height - 34 - up * value) for step, value in enumerate(values)]

    change = round(change_of_loss(run), 3) + 0.0  # no -0.0
    yield from legend(12, height - 10, [("ca", "without the bug"), ("c5", "with it")])
    yield text(width - 8, height - 10, f"{change:+.1%}", "soft s e")
    yield line([(12, height - 32), (width - 48, height - 32)], "grid")
    for values, colour, stroke in ((sound, "ca", 5), (losses, "c5", 1.6)):
        yield line(curve(values), colour, stroke, 'stroke-linejoin="round"')
    # One number beside curves that end together, since two would cover each other.
    apart = up * abs(sound[-1] - losses[-1]) > 14
    for values in [losses, sound][:1 + apart]:
        yield text(width - 40, curve(values)[-1][1] + 4, f"{values[-1]:.2f}", "soft s")


def memory():
    """What a rank holds of an 8B model when its memory is fullest, as stacked bars."""
    left, top = 268, 84
    rows = {name: row for name, row in read("8b").items() if "experts" not in name}  # 25 B
    bottom = top + 30 * len(rows) + 4
    more = "at the peak also: activations, gathered weights"
    yield from legend(8, 54, zip(["c0", "c1", "c2", "c3"], [*KINDS, more]))
    for size in range(0, 121, 20):
        x = left + 3.65 * size
        yield line([(x, top - 8), (x, bottom)], "grid")
        yield text(x, bottom + 18, size, "soft s m")
    for i, (command, row) in enumerate(rows.items()):
        x, y = left, top + 30 * i
        words = f"{command} (1 GPU)" if command == "single.py" else command
        yield text(x - 10, y + 15, words, "ink e")
        sizes = [row["held"][kind] for kind in KINDS]
        for j, size in enumerate([*sizes, row["peak"]["in all"] - sum(sizes)]):
            yield rect(x, y, 3.65 * size / 1e9, 21, f"c{j} bg-line")
            x += 3.65 * size / 1e9
        yield text(x + 7, y + 15, gb(row["peak"]["in all"]))
    x = left + 3.65 * 80
    yield line([(x, top - 8), (x, bottom)], "ink", 2, 'stroke-dasharray="5 3"')
    yield text(x + 6, bottom - 8, "80 GB", "ink s")


def gpu():
    """What an H200 held beside the dry run, and its tokens per second beside those of other
    loops."""
    left, y = 232, 88
    runs = [run for run in read("gpu_memory")["runs"] if run["dry_run"]]
    yield from legend(8, 54, [("c0", "predicted by dry_run on a CPU"), ("c1", "held on the GPU"),
                              ("c2", "tokens/s of our scripts"), ("c3", "of other loops")])
    for run in runs:
        words = run["command"].split()
        batch, length = (words[words.index(name) + 1] for name in ("--batch-size", "--seq-len"))
        again = "activation checkpointing" if "--activation-checkpointing" in words else ""
        yield text(left - 10, y + (11 if again else 19), f"{words[2]}, {batch} x {int(length):,}",
                   "ink e")
        yield text(left - 10, y + 27, again, "soft s e")
        for i, (name, size) in enumerate([("c0", run["dry_run"]), ("c1", run["counted"])]):
            yield rect(left, y + 15 * i, 3 * size / 1e9, 14, f"{name} bg-line")
            yield text(left + 3 * size / 1e9 + 7, y + 12 + 15 * i, f"{size:,} bytes", "ink s")
        y += 44
    y += 8
    for i, (name, rate) in enumerate(read("gpu_speed")["tokens_per_second"].items()):
        yield text(left - 10, y + 15, name, "ink e")
        yield rect(left, y, rate / 172, 21, f"c{3 if i % 2 else 2} bg-line")
        yield text(left + rate / 172 + 7, y + 15, f"{rate:,} tokens/s")
        y += 26 + 8 * (i % 2)


def glyph(command, x=6, y=6, unit=6):
    """Parameters, gradients and optimizer states above activations. A row is a layer; in it are 4
    slices of its weights, or 4 sequences of 8 positions. Ranks 0 to 3 hold them, or a: all."""
    data = read("shares")[command]
    for i, kind in enumerate(KINDS):
        for layer, ranks in enumerate(data[kind]):
            for part, rank in enumerate(ranks):
                yield rect(x + (7 * i + part) * unit, y + layer * unit, unit, unit - 1, f"c{rank}")
    for layer, sequences in enumerate(data["activations"]):
        for i, ranks in enumerate(sequences.split()):
            for position, rank in enumerate(ranks):
                yield rect(x + (14 / 3 * i + position / 2) * unit, y + (5 + layer) * unit,
                           unit / 2, unit - 1, f"c{rank}")


def key():
    """What the parts of a glyph are, for zero.py."""
    yield from glyph("zero.py --stage 2", 92, 56, 18)
    for i, words in enumerate(KINDS):
        yield text(128 + 126 * i, 48, words, "ink s m")
    for i in range(4):
        yield text(82, 69 + 18 * i, f"layer {i}", "soft s e")
        yield text(82, 159 + 18 * i, f"layer {i}", "soft s e")
        yield text(128 + 84 * i, 236, f"sequence {i}", "ink s m")
        yield from legend(456, 82 + 24 * i, [(f"c{i}", f"on rank {i}")])
    yield from legend(456, 178, [("ca", "on every rank")])
    yield text(92, 258, "activations: 4 sequences of 8 positions, from left to right", "ink s")


def waiting(ranks):
    """The share of a step in which the ranks of a pipeline wait. ``ranks``: of schedules.json."""
    calls = list(itertools.chain(*ranks))
    total = max(start + length for _, start, length in calls)
    return 1 - sum(length for *_, length in calls) / (len(ranks) * total)


def timeline(ranks):
    """The calls of each rank, at the time at which they can start. "1F0" is the forward pass of
    stage 1 for micro-batch 0, B the backward pass, I and W its parts for inputs and weights."""
    stages, kinds = ({call[i] for own in ranks for call, *_ in own} for i in (0, 1))
    two = len(stages) > len(ranks)  # stages on a rank
    colours = {
        "F": ("c0", "forward"), "B": ("c1", "backward"), "I": ("c3", "backward: gradient of input"),
        "W": ("c2", "backward: gradients of weights"),
    }
    unit, left, top, height = 12 if two else 24, 60, 62, 28
    shown = [entry for kind, entry in colours.items() if kind in kinds]
    yield from legend(left, 48, [*shown, ("past", "waiting")])
    end = max(start + length for own in ranks for _, start, length in own)
    yield rect(left, top, end * unit, height * len(ranks), "past")
    for rank, own in enumerate(ranks):
        y = top + rank * height
        yield text(left - 8, y + 19, f"rank {rank}", "ink s e")
        for call, start, length in own:
            x, width = left + start * unit, length * unit
            yield rect(x, y, width, height, f"{colours[call[1]][0]} bg-line")
            yield text(x + width / 2, y + 18, call[2:], "bg s m")
            if call[0] != own[0][0][0]:  # not the stage that this rank calls first
                yield rect(x + 2.5, y + 22, width - 5, 2, "bg")
    words = "time; the numbers are micro-batches"
    if two:
        words += "; underlined: the rank's second stage"
    yield text(left, top + height * len(ranks) + 20, words, "soft s")


def ring_blocks(n=4):
    """By functions of cp.py: the chunks of the sequence on each rank, and turns[turn][rank], the
    blocks of scores (chunk of queries, chunk of keys) that it computes."""
    chunks = cp.shard_positions(2 * n, n).tolist()

    def blocks(rank, source):
        own = chunks[rank]
        group = types.SimpleNamespace(rank=lambda: rank)
        queries, keys, _ = cp.in_sight(source, group, 2, is_causal=True)
        pairs = itertools.product(own[queries], chunks[source][keys])
        return [(q, k) for q, k in pairs if source != rank or q >= k]

    turns = [[blocks(rank, (rank - turn) % n) for rank in range(n)] for turn in range(n)]
    return chunks, turns


def ring():
    """The blocks of scores that each rank computes, turn by turn."""
    chunks, turns = ring_blocks()
    size, top, done = 20, 92, []
    owner = {chunk: f"c{rank} bg-line" for rank, own in enumerate(chunks) for chunk in own}
    ranks = [(f"c{rank}", f"rank {rank}") for rank in range(len(chunks))]
    yield from legend(8, 50, [*ranks, ("past", "computed before")])
    yield text(52, top - 12, "queries", "ink s e")
    for chunk, style in owner.items():
        yield rect(54, top + chunk * size, 8, size, style)
        yield text(46, top + chunk * size + 14, chunk, "ink s e")
    for turn, blocks_of in enumerate(turns):
        left, bottom = 66 + turn * 184, top + 160
        words = f"keys of rank r-{turn}" if turn else "own keys"
        yield text(left, top - 12, f"turn {turn + 1}: {words}", "ink s")
        yield rect(left, top, 160, 160, "none")
        now = [(q, k, f"c{rank}") for rank, blocks in enumerate(blocks_of) for q, k in blocks]
        for q, k, colour in [*done, *now]:
            x, y = left + k * size, top + q * size
            corners = [(x, y), (x, y + size), (x + size, y + size), (x + size, y)]
            below = 3 if q == k else 4  # the causal mask hides half of a block on the diagonal
            yield path(points(corners[:below]) + "Z", f"{colour} bg-line")
        done += [(q, k, "past") for q, k, _ in now]
        for chunk, style in owner.items():
            yield rect(left + chunk * size, bottom + 4, size, 8, style)
    yield text(66, 282, "keys; the colour of a row or a column is the rank that holds this part of "
               "the sequence", "ink s")


def grid():
    """hybrid_3d.py's ranks on two machines. Arcs join the ranks of a group."""
    axes = [  # a step in (pp, dp, cp, tp), the bend of the arc, what travels
        ((0, 0, 0, 1), 0, "tp: hidden states"), ((0, 0, 1, 0), 60, "cp: keys and values"),
        ((0, 1, 0, 0), 0, "dp: parameters and gradients"),
        ((1, 0, 0, 0), 150, "pp: hidden states between stages"),
    ]
    at = {  # the centre of each rank, in the order of the ranks
        (p, d, c, t): (66 + p * 404 + c * 186 + t * 94, 168 + d * 102)
        for p, d, c, t in itertools.product(range(2), repeat=4)
    }
    yield from legend(16, 50, [(f"c{i}", words) for i, (*_, words) in enumerate(axes)])
    for stage in range(2):
        yield rect(16 + stage * 404, 112, 380, 214, "none")
        for i, words in enumerate(("machine", "stage")):
            yield text(206 + stage * 404, 216 + 18 * i, f"{words} {stage}", "ink m")
    for i, (step, bend, _) in enumerate(axes):
        for start, (x, y) in at.items():
            end = at.get(tuple(map(sum, zip(start, step))))
            if end:
                middle = (x + end[0]) / 2, (y + end[1]) / 2 + (bend if start[1] else -bend)
                arc = f"{points([(x, y)])}Q{points([middle, end])}"
                yield path(arc, f"c{i}-line", f'stroke-width="{1.2 if any(start) else 4}"')
    for rank, (x, y) in enumerate(at.values()):
        yield f'<circle cx="{x}" cy="{y}" r="18" class="bg soft-line" stroke-width="1.5"/>'
        yield text(x, y + 5, rank, "ink m")


def sent_by_scripts(n):
    """By the formulas of theory.py, the bytes that a rank of ``n`` sends in a step of llama3-8b,
    with one sequence of 8,192 tokens for each rank: by script, if n ranks can run it."""
    config = PRESETS["llama3-8b"]
    args = types.SimpleNamespace(
        config=config, batch_size=n, seq_len=8192, grad_accum=1, param_dtype=torch.float32,
        compute_dtype=torch.bfloat16, activation_checkpointing="full", attention="ring", stage=2,
        replicate=1, reshard_after_forward=True, sequence_parallel=True, cpu_offload=False,
    )
    ulysses = types.SimpleNamespace(**vars(args) | {"attention": "ulysses"})
    costs = {
        "ddp.py": theory.ddp(args, n), "zero.py": theory.zero(args, n),
        "fsdp.py": theory.fsdp(args, n), "cp.py": theory.cp(args, n),
    }
    if n <= config.num_attention_heads:
        costs["cp.py --attention ulysses"] = theory.cp(ulysses, n)
    if n <= config.num_key_value_heads:
        costs["tp.py"] = theory.tp(args, n)
    if n <= config.num_hidden_layers:  # a rank in the middle
        costs["pp.py"] = theory.pp(args, [], [n // 2], n)
    return {script: parts["sent"][1] for script, parts in costs.items()}


def sent():
    """What a rank sends against the number of ranks n. A curve ends where n becomes too large for
    the script."""
    sizes = [2**i for i in range(1, 11)]  # up to 1,024
    sent_on = {n: sent_by_scripts(n) for n in sizes}

    def x(n):
        return 30 + 40 * math.log2(n)

    def y(size):
        return 330 - 54 * math.log10(size / 1e8)

    yield text(70, 48, "GB in a step", "soft s")
    for i, words in enumerate(("0.1", "1", "10", "100", "1,000", "10,000")):
        height = y(10**i * 1e8)
        yield line([(70, height), (x(1024), height)], "grid")
        yield text(62, height + 4, words, "soft s e")
    for n in sizes:
        yield text(x(n), 350, f"{n:,}", "soft s m")
    yield text(x(45), 368, "number of ranks n", "soft s m")
    for script, colour, width, right, down, words in (  # the second is on the first
        ("ddp.py", "past", 8, 8, 14, "ddp.py, zero.py: {} GB"),
        ("fsdp.py", "c0", 2.5, 8, -4, "fsdp.py: {} GB"),
        ("cp.py", "c1", 2.5, 8, 4, "cp.py, ring or allgather: {} GB"),
        ("cp.py --attention ulysses", "c2", 2.5, 4, -8, "cp.py, ulysses: {} GB (32 heads)"),
        ("tp.py", "c3", 2.5, -72, -28, "tp.py: {} GB (8 key/value heads)"),
        ("pp.py", "c5", 2.5, 8, 4, "pp.py: {} GB (32 layers)"),
    ):
        curve = [(x(n), y(row[script])) for n, row in sent_on.items() if script in row]
        last = [row[script] for row in sent_on.values() if script in row][-1]
        yield line(curve, colour, width, 'stroke-linejoin="round"')
        left, height = curve[-1]
        yield text(left + right, height + down, words.format(f"{last / 1e9:,.0f}"), "ink s")


def draw():
    save("curves", 890, 480, "The loss of eight scripts: one curve", curves())
    for number, run in enumerate(read("bugs"), 1):
        title = f"The loss with and without bug {number}, over 50 steps"
        save(f"bugs/{number:02}", 420, 120, title, bug(run), heading=False)
    save("memory", 830, 424, "GB on each of 8 GPUs: Llama 3 8B, one sequence of 8,192 tokens per "
         "GPU", memory())
    save("gpu", 800, 348, "One H200: memory of single.py, and speed of llama3-1b with --compile",
         gpu())
    save("sent", 656, 384, "GB that a rank sends: Llama 3 8B, 8,192 tokens for each rank", sent())
    save("key", 590, 272, "zero.py on 4 ranks", key())
    save("ring", 790, 296, "Ring attention on 4 ranks: who computes which scores, and when", ring())
    save("grid", 816, 370, "hybrid_3d.py --pp 2 --cp 2 --tp 2 on two machines of 8 GPUs: dp is 2",
         grid())
    for command in read("shares"):
        name = command.partition(".py")[0]
        save(name, 120, 66, f"What {command} splits over 4 ranks", glyph(command), heading=False)
    for name, ranks in read("schedules").items():
        title = f"{name}: each rank waits for {waiting(ranks):.1%} of the step"
        save(name, 860, 206, title, timeline(ranks))


if __name__ == "__main__":
    draw()
