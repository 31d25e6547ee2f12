"""The pictures show docs/data and what the scripts do, and a page links each of them."""

import itertools
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

import pp
from docs import draw
from tests.support.processes import ROOT

PICTURES = {path.stem: path for path in sorted(draw.PICTURES.glob("*.svg"))}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def words(name):
    """The texts of a picture, which must be well-formed."""
    root = ElementTree.parse(PICTURES[name]).getroot()
    assert root.find("{*}title").text and root.find("{*}rect").get("class") == "bg"
    return [node.text for node in root.findall(".//{*}text")]


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_links_it(name):
    assert words(name) or name in {command.partition(".py")[0] for command in draw.read("shares")}
    assert any(f"pictures/{name}.svg" in page.read_text() for page in PAGES)


def test_curves_are_one():
    found = draw.read("curves")
    assert set(found["loss"]) < set(words("curves"))
    for losses in found["loss"].values():
        assert losses == pytest.approx(found["loss"]["single.py"], abs=1e-10) and len(losses) == 200


def test_bytes_of_the_8b_model():
    """In the picture, and in the table of README.md."""
    rows, readme = draw.read("8b"), (ROOT / "README.md").read_text()
    dense = [row for name, row in rows.items() if "experts" not in name]
    assert {draw.gb(row["peak"]["in all"]) for row in dense} < set(words("memory"))
    table = re.findall(
        r"`([\w.]+)`\]\(\S+\)(?: `(.*?)`)? \|[^|]*\| (\S+) \| (\S+) \| (\S+) ", readme
    )
    assert len(table) == 10
    for script, options, *shown in table:
        row = rows[{"zero.py": "zero.py --stage 2"}.get(script, f"{script} {options}".strip())]
        held = sum(row["held"][kind] for kind in draw.KINDS)
        assert shown == [draw.gb(size) for size in (held, row["peak"]["in all"], row["sent"])]
    (between,) = [row["between_machines"] for row in rows.values() if "between_machines" in row]
    assert f"{draw.gb(between)} GB cross them in one of 500 steps" in readme


def test_the_grid():
    shown = words("grid")
    assert set(map(str, range(16))) < set(shown)
    page, parts = (ROOT / "docs" / "hybrid.md").read_text(), draw.read("grid")["collectives"]
    for axis, group in ("tp", "tp"), ("cp", "cp"), ("dp x cp .FSDP.", "dp_shard_cp"), ("pp", "pp"):
        sent, crossing = (draw.gb(sum(part[kind] for part in parts if part["group"] == group))
                          for kind in ("bytes", "between_machines"))
        assert re.search(rf"\| {axis} \|.*\| {sent} \| {crossing} \|", page)


def test_each_block_of_the_ring_is_computed_once():
    chunks, turns = draw.ring_blocks()
    blocks = [block for turn in turns for ranks in turn for block in ranks]
    assert sorted(blocks) == [(q, k) for q in range(8) for k in range(q + 1)]
    for blocks in itertools.chain(*turns):  # as much as two whole blocks, in every turn
        assert sum(0.5 if q == k else 1 for q, k in blocks) == 2


@pytest.mark.parametrize("name", pp.SCHEDULES)
def test_timelines(name):
    """Each stage computes each micro-batch once; the ranks wait as the formula of pp.py says."""
    ranks, v = draw.read("schedules")[name], 1 if name in pp.ONE_STAGE else 2
    for rank, cells in enumerate(ranks):
        calls = {call for call, *_ in cells}
        for stage, m in itertools.product(pp.stages_of(rank, 4, v, name), range(8)):
            kinds = "".join(kind for kind in "FBIW" if f"{stage}{kind}{m}" in calls)
            assert kinds in (("FB", "FIW") if name in pp.SPLIT_BACKWARD else ("FB",))
        assert all(a + length <= b for (_, a, length), (_, b, _) in zip(cells, cells[1:]))
    waiting = f"{draw.waiting(ranks):.1%}"
    assert pp.bubble(name, 4, v, 8)[1].endswith(f"= {waiting}")
    assert words(name)[0] == f"{name}: each rank waits for {waiting} of the step"
    assert len(words(name)) > sum(map(len, ranks))
    page = pathlib.Path(ROOT, "docs", "pipelines.md").read_text()
    assert re.search(rf"\| `{name}` \| .* \| {waiting} \|", page)
