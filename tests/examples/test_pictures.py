"""Every plot of the gallery is drawn, and the gallery shows every picture."""

import re
from pathlib import Path

from examples import pictures

ROOT = Path(__file__).parents[2]


def test_every_picture_of_the_gallery_is_made(tmp_path):
    pictures.main(["--small", "--out", str(tmp_path)])
    shown = set(re.findall(r"gallery/(plot_\w+\.png)", (ROOT / "docs/gallery.md").read_text()))
    assert {path.name for path in tmp_path.iterdir()} == shown
