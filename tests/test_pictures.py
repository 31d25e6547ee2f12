"""The pictures in docs/pictures are what tools/pictures.py draws from docs/data, and docs/data is
what the scripts do. The tables of README.md and docs/ are those of the tools."""

import functools
import hashlib
import itertools
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

import pp
from tests.processes import ROOT
from tests.sample import sampled, thorough
from tools import dry_run, figures, pictures, table

SVG = "{http://www.w3.org/2000/svg}"
FILES = {path.stem: path.read_text() for path in sorted(pictures.PICTURES.glob("*.svg"))}
SCRIPTS = ["single.py", "ddp.py", "zero.py", "fsdp.py", "tp.py", "cp.py", "pp.py", "hybrid_3d.py"]


def data(name):
    return json.loads((pictures.DATA / f"{name}.json").read_text())


def plain(found):
    """As JSON has it."""
    return json.loads(json.dumps(found))


# The pictures


def test_every_picture_is_drawn_from_its_data():
    drawn = pictures.draw()
    assert drawn.keys() == FILES.keys()
    for name, picture in drawn.items():
        assert FILES[name] == picture, f"{name}.svg is older: python -m tools.pictures"


@pytest.mark.parametrize("name", FILES)
def test_a_picture_holds_the_hash_of_its_data(name):
    ((path, digest),) = re.findall(r"<!-- (docs/data/\S+): sha256 (\w+) -->", FILES[name])
    assert digest == hashlib.sha256((ROOT / path).read_bytes()).hexdigest()


@pytest.mark.parametrize("name", FILES)
def test_a_picture_can_be_read(name):
    """By a screen reader, in an <img>, and in both colour schemes."""
    root = ElementTree.fromstring(FILES[name])
    assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text
    assert not set("href src onload".split()) & {key for node in root.iter() for key in node.attrib}
    assert not list(root.iter(f"{SVG}script")) and "@import" not in FILES[name]
    background = root.find(f"{SVG}rect").attrib
    assert [background[key] for key in ("width", "height", "class")] == [
        root.get("width"), root.get("height"), "bg"]
    style = root.find(f"{SVG}style").text
    assert min(int(size) for size in re.findall(r"(\d+)px", style)) >= 12
    light, dark = (set(re.findall(r"\.([\w-]+)\{(?:fill|stroke):#", part))
                   for part in style.split("@media (prefers-color-scheme:dark)"))
    assert light == dark == pictures.COLOURS.keys()
    letters = {"h", "m", "e", "s", "line"}
    used = {word for node in root.iter() for word in node.get("class", "").split()}
    assert used - letters <= light
    for node in root.iter(f"{SVG}text"):
        assert len(set(node.get("class").split()) & {"ink", "soft", "on"}) == 1


def luminance(colour):
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("scheme", [1, 2])
def test_contrast(scheme):
    """At least 4.5 for text and 3 for areas and lines, as the WCAG asks."""

    def contrast(one, other):
        dark, light = sorted(luminance(pictures.COLOURS[x][scheme]) for x in (one, other))
        return (light + 0.05) / (dark + 0.05)

    for words in ("ink", "soft"):
        assert contrast(words, "bg") >= 4.5
    assert contrast("ink", "none") >= 4.5 and contrast("soft", "none") >= 4.5
    for i, area in enumerate(("c0", "c1", "c2", "c3")):
        assert contrast("on", area) >= 4.5
        assert pictures.COLOURS[area][1:] == pictures.COLOURS[f"l{i}"][1:]
    for line in ("all", "axis", *(f"l{i}" for i in range(7))):
        assert contrast(line, "bg") >= 3


# The data


@pytest.mark.parametrize("command", sampled(list(figures.RUNS), ["single.py"]))
def test_the_curves_begin_as_a_run_does(run, command):
    options = figures.CURVES.replace("--data LICENSE", f"--data {ROOT / 'LICENSE'}")
    options = options.replace("--steps 200", "--steps 5")  # the same warm-up
    world = figures.RUNS[command]
    found = run(command, 0 if world == 1 else world, f"{options} --save-every 0")
    losses = [json.loads(line)["loss"]
              for line in (found.out / "metrics.jsonl").read_text().splitlines()]
    assert losses == pytest.approx(data("curves")["loss"][command][:5], abs=1e-10)


def test_the_curves_are_one():
    found = data("curves")
    assert found["options"] == figures.CURVES and found["processes"] == figures.RUNS
    assert list(found["loss"]) == list(figures.RUNS)
    assert {command.split()[0] for command in figures.RUNS} == set(SCRIPTS)
    assert all(len(losses) == 200 for losses in found["loss"].values())
    assert all(max(sizes) < 1e-10 for sizes in pictures.differences().values())


def test_glyphs_have_the_shares_of_the_dry_runs():
    found = data("shares")
    assert list(found) == figures.FOUR_RANKS
    for command, row in found.items():
        script = command.split()[0]
        n = len(row["held"]["parameters"])
        assert plain(figures.owners(script)) == {key: row[key] for key in row if key != "held"}
        slices = list(itertools.chain(*row["weights"]))
        for shares in row["held"].values():
            if n > 1 and min(shares) == 1:  # whole on every rank
                continue
            # Norms, embedding and head, which a glyph does not have, are under 0.2 %.
            expected = [slices.count(rank) / len(slices) for rank in range(n)]
            assert shares == pytest.approx(expected, abs=0.002), command


@pytest.fixture(scope="module")
def pool():
    with dry_run.process_pool() as pool:
        yield pool


@thorough
@pytest.mark.parametrize("command", figures.FOUR_RANKS)
def test_the_shares_are_those_of_dry_runs(pool, command):
    def held(command, n, rank):
        return figures.dry(pool, command, figures.FOUR_LAYERS, n, rank).result()["held"]

    n = 1 if command == "single.py" else 4
    found, whole = held(command, n, n - 1), held("single.py", 1, 0)
    for kind, shares in data("shares")[command]["held"].items():
        assert found[kind] / whole[kind] == shares[n - 1]


def test_the_ring_is_that_of_cp():
    found = data("ring")
    assert found == plain(figures.ring())
    blocks = [tuple(block) for rank in found["turns"] for turn in rank for block in turn]
    assert sorted(blocks) == [(q, k) for q in range(8) for k in range(q + 1)]  # each once
    work = [[sum(0.5 if q == k else 1 for q, k in turn) for turn in rank]
            for rank in found["turns"]]
    assert work == [[2, 2, 2, 2]] * 4


@pytest.mark.parametrize("name", pp.SCHEDULES)
def test_the_timelines_are_complete(name):
    """Each stage computes each micro-batch once, and the ranks wait as the formula says."""
    ranks, v = data("schedules")[name], 1 if name in pp.ONE_STAGE else 2
    for rank, cells in enumerate(ranks):
        calls = [call for call, *_ in cells]
        assert len(set(calls)) == len(calls)
        for stage, m in itertools.product(pp.stages_of(rank, 4, v, name), range(8)):
            kinds = "".join(kind for kind in "FBIW" if f"{stage}{kind}{m}" in calls)
            assert kinds in ("FB", "FIW")
            assert ("B" in kinds or name in pp.SPLIT_BACKWARD)
        ends = [start + length for _, start, length in cells]
        assert all(start >= end for end, (_, start, _) in zip(ends, cells[1:]))
    calls = [[call for call, *_ in cells] for cells in ranks]
    assert plain(figures.simulate(calls)) == ranks
    formula = pp.bubble(name, 4, v, 8)
    assert formula.endswith(f"= {pictures.waiting(name):.1%}"), formula
    assert f"ranks wait for {pictures.waiting(name):.1%}" in FILES[name].lower()


@thorough
@pytest.mark.parametrize("name", pp.SCHEDULES)
def test_the_timelines_are_those_of_torch(pool, name):
    calls = list(pool.map(functools.partial(figures.calls_of_stages, name), range(4)))
    assert plain(figures.simulate(calls)) == data("schedules")[name]


@thorough
def test_the_grid_is_that_of_hybrid_3d(pool):
    """Layers are equal, so that what two depths send gives what 32 layers send."""
    expected, sent = data("grid"), []
    for layers in (4, 6):
        words = f"{figures.GRID} {figures.LARGE} --batch-size 16 --num-hidden-layers {layers}"
        ranks, found = pool.submit(figures.ranks_of_grid, words.split()[1:]).result()
        assert plain(ranks) == expected["ranks"]
        sent.append(found["collectives"])
    assert len(sent[0]) == len(sent[1]) == len(expected["collectives"])
    for few, more, all_layers in zip(*sent, expected["collectives"]):
        for name, value in all_layers.items():
            if name in ("collective", "group"):
                assert few[name] == more[name] == value
            else:
                assert few[name] + (more[name] - few[name]) / 2 * (32 - 4) == value, all_layers


# The tables


def test_added_lines():
    assert table.added(["a", "b", "c"], ["a", "x", "", "c", "y"]) == 2
    counts = {script: table.added(table.main_lines("single.py"), table.main_lines(script))
              for script in SCRIPTS}
    assert counts["single.py"] == 0 < counts["ddp.py"] < counts["hybrid_3d.py"]


def test_the_table_is_complete():
    rows = list(table.rows())[2:]
    assert len(rows) == len(data("8b"))
    for row, (command, found) in zip(rows, data("8b").items()):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        script = command.split()[0]
        assert len(cells) == 7 and all(cells) and f"[`{script}`]({script})" in cells[0]
        (picture,) = re.findall('src="(.*?)"', cells[0])
        assert (ROOT / picture).exists() and f" {script} " in found["command"]
        assert float(cells[3].replace(",", "")) >= float(cells[2].replace(",", ""))


def test_readme_has_the_table():
    readme = (ROOT / "README.md").read_text()
    assert "\n".join(table.rows()) in readme


@pytest.mark.parametrize("page", ["pipelines", "sequence", "hybrid"])
def test_the_pages_show_pictures_that_exist(page):
    words = pathlib.Path(ROOT, "docs", f"{page}.md").read_text()
    shown = re.findall(r"!\[.+?\]\(pictures/([\w-]+)\.svg\)", words)
    assert shown and set(shown) <= FILES.keys()


def test_the_bubbles_of_the_page():
    words = (ROOT / "docs" / "pipelines.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| ([\d.]+%) \|$", words, re.MULTILINE))
    assert rows == {name: f"{pictures.waiting(name):.1%}" for name in pp.SCHEDULES}
