"""Copies of scripts that somebody has edited."""

from tests.support.processes import ROOT


def edited(folder, script, *edits):
    """Write a copy of ``script`` into ``folder``, beside a link to common/, with ``edits``, pairs
    (text that stands in it once, new text). Returns its path, as ProcessServer.run takes it."""
    text = (ROOT / script).read_text()
    for before, after in edits:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    folder.mkdir(exist_ok=True)
    for link in ("common", *(path.name for path in ROOT.glob("*.py") if path.name != script)):
        if not (folder / link).exists():
            (folder / link).symlink_to(ROOT / link)
    copy = folder / script
    copy.unlink(missing_ok=True)  # it may be the link of an earlier call, to the script itself
    copy.write_text(text)
    return str(copy)
