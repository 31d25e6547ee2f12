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


def css(scheme):
    """The classes of all colours: in the light scheme 0, in the dark one 1."""
    rules = []
    for name, colours in COLOURS.items():
        colour = colours[scheme]
        rules.append(f".{name}{{fill:{colour}}}.{name}-line{{stroke:{colour}}}")
    return "".join(rules)


STYLE = f"""text{{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}}
text.h{{font-size:15px;font-weight:600}}text.s{{font-size:12px}}
.m{{text-anchor:middle}}rect{{shape-rendering:crispEdges}}.e{{text-anchor:end}}path{{fill:none}}
{css(0)}
@media (prefers-color-scheme:dark){{{css(1)}}}"""


def rect(x, y, width, height, style):
    return '<rect x="%.5g" y="%.5g" width="%.5g" height="%.5g" class="%s"/>' % (
        x, y, width, height, style)


def text(x, y, words, style="ink"):
    return '<text x="%.5g" y="%.5g" class="%s">%s</text>' % (x, y, style, html.escape(str(words)))


def points(pairs):
    return " ".join("%.5g,%.5g" % pair for pair in pairs)


def path(d, style, more=""):
    return f'<path d="M{d}" class="{style}" {more}/>'


def line(pairs, colour, width=1, more=""):
    return path(points(pairs), f"{colour}-line", f'stroke-width="{width}" {more}')


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
    for loss in range(7):
        yield from level(62, 640, y(loss), loss)
    yield from level(62, 640, low_y(0), "equal")
    for power in range(-16, -10):
        yield from level(62, 640, low_y(10.0**power), f"1e{power}")
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
            apart = [abs(a - b) for a, b in zip(losses, first)]
            dots = points((x(step), low_y(value)) for step, value in enumerate(apart, 1))
            dots = dots.replace(" ", "h0M") + "h0"  # lines of length 0, with round ends
            yield path(dots, f"{colour}-line", 'stroke-width="2.4" stroke-linecap="round"')


def change_of_loss(run):
    """By a bug, over the last 10 steps of its curve."""
    return sum(run["loss"][-10:]) / sum(run["sound"][-10:]) - 1


def bug(run):
    """The loss with a bug over the loss without it, from 0 on."""
    sound, losses = run["sound"], run["loss"]
    right, up = 360 / len(sound), 66 / max(sound + losses)

    def curve(values):
        return [(12 + right * step, 86 - up * value) for step, value in enumerate(values)]

    def last_value(values):
        return text(380, 90 - up * values[-1], f"{values[-1]:.2f}", "soft s")

    change = round(change_of_loss(run), 3) + 0.0  # no -0.0
    yield from legend(12, 110, [("ca", "without the bug"), ("c5", "with it")])
    yield text(412, 110, f"{change:+.1%}", "soft s e")
    yield line([(12, 88), (372, 88)], "grid")
    yield line(curve(sound), "ca", 5, 'stroke-linejoin="round"')
    yield line(curve(losses), "c5", 1.6, 'stroke-linejoin="round"')
    yield last_value(losses)
    if up * abs(sound[-1] - losses[-1]) > 14:  # otherwise the two numbers would cover each other
        yield last_value(sound)


def memory():
    """What a rank holds of an 8B model when its memory is fullest, as stacked bars."""
    left, top, GB = 268, 84, 3.65e-9  # the last: pixels for a byte
    rows = {name: row for name, row in read("8b").items() if "experts" not in name}  # 25 B
    bottom = top + 30 * len(rows) + 4
    more = "at the peak also: activations, gathered weights"
    yield from legend(8, 54, zip(["c0", "c1", "c2", "c3"], [*KINDS, more]))
    for size in range(0, 121, 20):
        yield from tick(left + 3.65 * size, top - 8, bottom, size)
    for y, (command, row) in zip(itertools.count(top, 30), rows.items()):
        words = f"{command} (1 GPU)" if command == "single.py" else command
        yield text(left - 10, y + 15, words, "ink e")
        peak = row["peak"]["in all"]
        sizes = [row["held"][kind] for kind in KINDS]
        x = left
        for colour, size in zip(("c0", "c1", "c2", "c3"), [*sizes, peak - sum(sizes)]):
            yield rect(x, y, GB * size, 21, f"{colour} bg-line")
            x += GB * size
        yield text(x + 7, y + 15, gb(peak))
    x = left + 3.65 * 80
    yield line([(x, top - 8), (x, bottom)], "ink", 2, 'stroke-dasharray="5 3"')
    yield text(x + 6, bottom - 8, "80 GB", "ink s")


def bar(x, y, width, height, colour, words):
    """A bar, and words at its end."""
    yield rect(x, y, width, height, f"{colour} bg-line")
    yield text(x + width + 7, y + height / 2 + 5, words, "ink s")


def axis(left, bottom, unit, values):
    """A horizontal axis from 0 on; ``unit``: pixels for 1."""
    yield line([(left, bottom), (left + unit * values[-1], bottom)], "grid")
    for value in values:
        yield from tick(left + unit * value, bottom - 5, bottom, f"{value:,}")


def gpu():
    """Two charts: what single.py held beside the dry run, and tokens per second."""
    left, GB, rate = 232, 3e-9, 0.006  # pixels for a byte, for a token/s
    yield text(8, 56, "memory of single.py, GB")
    compared = [("c0", "predicted by dry_run on a CPU"), ("c1", "held on the GPU")]
    yield from legend(left, 56, compared)
    yield from axis(left, 200, 3, range(0, 141, 20))
    runs = [run for run in read("gpu_memory")["runs"] if run["dry_run"]]
    for y, run in zip((72, 114, 156), runs):
        yield text(left - 10, y + 12, run["model"], "ink s e")
        if "--activation-checkpointing" in run["command"]:
            yield text(left - 10, y + 27, "activation checkpointing", "soft s e")
        yield from bar(left, y, GB * run["dry_run"], 14, "c0", f"{run['dry_run']:,} bytes")
        yield from bar(left, y + 15, GB * run["counted"], 14, "c1", f"{run['counted']:,} bytes")

    yield text(8, 258, "speed of llama3-1b, tokens/s")
    yield from legend(left, 258, [("c2", "our scripts"), ("c3", "another loop")])
    yield from axis(left, 362, rate, range(0, 70_001, 10_000))
    speed = read("gpu_speed")["tokens_per_second"]
    for y, colour, name in (
        (274, "c2", "single.py"), (302, "c2", "fsdp.py, one rank"),
        (330, "c3", "a loop in torchtitan's style"),
    ):
        yield text(left - 10, y + 15, name, "ink s e")
        yield from bar(left, y, rate * speed[name], 21, colour, f"{speed[name]:,}")


def cells(x, y, width, ranks):
    """A row of cells, in the colours of the ranks that hold them."""
    for i, rank in enumerate(ranks):
        yield rect(x + i * width, y, width, 12, f"c{rank}")


def strategies():
    """What 4 ranks hold with each script, 0 to 3, or a: all. Each row of cells is a layer: 4 slices
    of its weights, or its activations, 4 sequences of 8 positions."""
    owners = [(f"c{rank}", f"on rank {rank}") for rank in range(4)]
    yield from legend(8, 52, [*owners, ("ca", "on every rank")])
    for i, (command, shares) in enumerate(read("shares").items()):
        left, top = 8 + 285 * (i % 3), 96 + 184 * (i // 3)
        yield text(left, top, command, "ink h")
        for column, kind in enumerate(KINDS):
            x = left + 84 * column
            yield text(x, top + 20, kind, "soft s")
            for layer, ranks in enumerate(shares[kind]):
                yield from cells(x, top + 26 + 13 * layer, 13, ranks)
        yield text(left, top + 94, "activations of 4 sequences", "soft s")
        for layer, sequences in enumerate(shares["activations"]):
            for column, ranks in enumerate(sequences.split()):
                yield from cells(left + 62 * column, top + 100 + 13 * layer, 7, ranks)


def waiting(ranks):
    """The share of a step in which the ranks of a pipeline wait. ``ranks``: of schedules.json."""
    calls = list(itertools.chain(*ranks))
    total = max(start + length for _, start, length in calls)
    return 1 - sum(length for *_, length in calls) / (len(ranks) * total)


def timeline(ranks):
    """The calls of each rank, at the time at which they can start. "1F0" is the forward pass of
    stage 1 for micro-batch 0, B the backward pass, I and W its parts for inputs and weights."""
    calls = [call for own in ranks for call, _, _ in own]
    two = len({call[0] for call in calls}) > len(ranks)  # stages on a rank
    kinds = {call[1] for call in calls}
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


def ring_blocks(chunks):
    """The blocks of scores that 4 ranks compute, by functions of cp.py. Yields (turn, rank, chunk
    of the queries, chunk of the keys)."""
    for turn, rank in itertools.product(range(4), repeat=2):
        source = (rank - turn) % 4  # the rank whose keys have come
        group = types.SimpleNamespace(rank=lambda: rank)
        queries, keys, _ = cp.in_sight(source, group, 2, is_causal=True)
        for q, k in itertools.product(chunks[rank][queries], chunks[source][keys]):
            if turn or q >= k:
                yield turn, rank, q, k


def ring():
    """The blocks of scores that each rank computes, turn by turn."""
    chunks = cp.shard_positions(8, 4).tolist()  # of the sequence, by rank
    size, top, lefts = 20, 92, [66, 250, 434, 618]
    ranks = [(f"c{rank}", f"rank {rank}") for rank in range(4)]
    yield from legend(8, 50, [*ranks, ("past", "computed before")])
    yield text(52, top - 12, "queries", "ink s e")
    for turn, left in enumerate(lefts):
        words = f"keys of rank r-{turn}" if turn else "own keys"
        yield text(left, top - 12, f"turn {turn + 1}: {words}", "ink s")
        yield rect(left, top, 160, 160, "none")
    for turn, rank, q, k in ring_blocks(chunks):
        for now, left in enumerate(lefts[turn:], turn):
            colour = f"c{rank}" if now == turn else "past"
            block = f"{left + k * size},{top + q * size}v{size}h{size}"
            if q != k:  # the causal mask hides half of a block on the diagonal
                block += f"v-{size}"
            yield path(f"{block}Z", f"{colour} bg-line")
    for rank, own in enumerate(chunks):
        for chunk in own:
            yield rect(54, top + chunk * size, 8, size, f"c{rank} bg-line")
            yield text(46, top + chunk * size + 14, chunk, "ink s e")
            for left in lefts:
                yield rect(left + chunk * size, 256, size, 8, f"c{rank} bg-line")
    yield text(66, 282, "keys; the colour of a row or a column is the rank that holds this part of "
               "the sequence", "ink s")


def grid():
    """hybrid_3d.py's ranks on two machines. Arcs join the ranks of a group."""
    axes = [  # from a rank to the next in its group; the bend of the arc; what travels
        (1, 0, "tp: hidden states"), (2, 60, "cp: keys and values"),
        (4, 0, "dp: parameters and gradients"), (8, 150, "pp: hidden states between stages"),
    ]

    def centre(rank):
        pp, dp, cp, tp = rank // 8, rank // 4 % 2, rank // 2 % 2, rank % 2
        return 66 + 404 * pp + 186 * cp + 94 * tp, 168 + 102 * dp

    yield from legend(16, 50, [(f"c{i}", words) for i, (_, _, words) in enumerate(axes)])
    for stage in range(2):
        yield rect(16 + stage * 404, 112, 380, 214, "none")
        yield text(206 + stage * 404, 216, f"machine {stage}", "ink m")
        yield text(206 + stage * 404, 234, f"stage {stage}", "ink m")
    for i, (step, bend, _) in enumerate(axes):
        for rank in range(16):
            if rank // step % 2 == 0:
                (x, y), (end_x, end_y) = centre(rank), centre(rank + step)
                away = bend if y > 168 else -bend
                middle = points([((x + end_x) / 2, (y + end_y) / 2 + away), (end_x, end_y)])
                width = 1.2 if rank else 4
                yield path(f"{x},{y}Q{middle}", f"c{i}-line", f'stroke-width="{width}"')
    for rank in range(16):
        x, y = centre(rank)
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
        yield from level(70, x(1024), y(10**i * 1e8), words)
    for n in sizes:
        yield text(x(n), 350, f"{n:,}", "soft s m")
    yield text(x(45), 368, "number of ranks n", "soft s m")
    for script, colour, width, right, down, words in (  # the second is on the first
        ("ddp.py", "past", 8, 8, -18, "ddp.py: {} GB"),
        ("fsdp.py", "c0", 2.5, 8, -3, "fsdp.py: {} GB"),
        ("zero.py", "c4", 2.5, 8, 13, "zero.py: {} GB"),
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
    save("gpu", 800, 392, "One H200: bytes of three runs, and speed with --compile", gpu())
    save("sent", 656, 384, "GB that a rank sends: Llama 3 8B, 8,192 tokens for each rank", sent())
    save("strategies", 850, 624, "What 4 ranks hold: each row is a layer, each sequence has 8 "
         "positions", strategies())
    save("ring", 790, 296, "Ring attention on 4 ranks: who computes which scores, and when", ring())
    save("grid", 816, 370, "hybrid_3d.py --pp 2 --cp 2 --tp 2 on two machines of 8 GPUs: dp is 2",
         grid())
    for name, ranks in read("schedules").items():
        title = f"{name}: each rank waits for {waiting(ranks):.1%} of the step"
        save(name, 860, 206, title, timeline(ranks))


if __name__ == "__main__":
    draw()
