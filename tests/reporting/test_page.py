"""Markup: escaped, self-contained, figures closed."""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402

from laplace_debias.reporting.page import figure, page, section, table  # noqa: E402


def test_everything_from_outside_is_escaped():
    whole = page("<t>", "<a>", "<c>", [section("<s>", "<p>", table(["<h>"], [["<v>"]]))])
    for letter in "tachv":
        assert f"<{letter}>" not in whole and f"&lt;{letter}&gt;" in whole
    assert "&lt;s&gt;" in whole and "&lt;p&gt;" in whole
    assert "http" not in whole and "<script" not in whole


def test_figures_are_images_with_a_caption_and_stand_together():
    drawn = plt.subplots(figsize=(3, 2))[0]
    image = figure(drawn, "what it shows")
    assert not plt.fignum_exists(drawn.number)
    assert 'alt="what it shows"' in image and 'width="288" height="192"' in image
    assert "data:image/svg+xml;base64," in image
    both = section("s", "text", image, image)
    assert both.count('<div class="figures">') == 1 and both.count("<figure>") == 2


def test_table_marks_a_row_and_shows_what_is_missing():
    text = table(["a", "b"], [["x", None], ["y", 0.123456]], chosen=1)
    assert "<td>–</td>" in text and '<tr class="chosen"><td>y</td><td>0.1235</td></tr>' in text
