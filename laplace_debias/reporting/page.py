"""A self-contained HTML page from headings, paragraphs, tables and figures; light and dark."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

__all__ = ["figure", "page", "section", "table"]

_CSS = """
:root { color-scheme: light dark; --ink: #1c1c1e; --soft: #5f6368; --line: #d9d9de;
  --paper: #ffffff; --card: #f5f5f7; --mark: #fff3d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --soft: #a4a4aa; --line: #3a3a3e;
  --paper: #17171a; --card: #222226; --mark: #3a3120; }
  figure img { filter: invert(0.91) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.2rem 1rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.6rem; margin: 0.2rem 0 0.6rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.5rem; padding-top: 0.8rem;
  border-top: 1px solid var(--line); }
p { margin: 0.5rem 0; max-width: 46rem; }
.soft, figcaption { color: var(--soft); font-size: 0.9rem; }
.advice { background: var(--mark); border-radius: 0.5rem; padding: 0.8rem 1rem; }
.advice p { max-width: none; }
pre { overflow-x: auto; background: var(--card); border-radius: 0.4rem; padding: 0.6rem 0.8rem;
  font-size: 0.85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.7rem 0.25rem 0; text-align: right; white-space: nowrap; }
th { border-bottom: 1px solid var(--line); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
tr.chosen td { background: var(--mark); font-weight: 600; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
figure { margin: 0.6rem 0; max-width: 100%; }
figure img { max-width: 100%; height: auto; border-radius: 0.3rem; display: block; }
figcaption { max-width: 24rem; margin-top: 0.3rem; }
"""


def figure(drawn: Figure, caption: str) -> str:
    """A figure as an image of its own, crisp at every size; the figure is closed.

    Args:
        drawn: The figure.
        caption: What it shows, also for those who cannot see it.

    Example:
        >>> figure(plt.figure(), "nothing & more")[:34]
        '<figure><img alt="nothing &amp; mo'
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "report"}):
        drawn.savefig(buffer, format="svg", metadata={"Date": None})
    inches = drawn.get_size_inches()
    plt.close(drawn)
    data = base64.b64encode(buffer.getvalue().encode()).decode()
    width, height = (round(96 * float(side)) for side in inches)
    return (
        f'<figure><img alt="{escape(caption)}" width="{width}" height="{height}" '
        f'src="data:image/svg+xml;base64,{data}"><figcaption>{escape(caption)}</figcaption></figure>'
    )


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], chosen: int | None = None) -> str:
    """A table that scrolls by itself where it is too wide.

    Args:
        header: Names of columns.
        rows: Values; numbers below 10 are shown with four decimals.
        chosen: The row to emphasise.

    Example:
        >>> table(["a"], [[0.123456]])
        '<div class="wide"><table><tr><th>a</th></tr><tr><td>0.1235</td></tr></table></div>'
    """
    lines = ["".join(f"<th>{escape(name)}</th>" for name in header)]
    lines = [f"<tr>{lines[0]}</tr>"]
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{escape(_text(value))}</td>" for value in row)
        mark = ' class="chosen"' if number == chosen else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _text(value: Any) -> str:
    """A value in a cell."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"


def section(title: str, *parts: str) -> str:
    """A heading with what stands under it: text becomes paragraphs, markup stays; figures group.

    Args:
        title: The heading.
        parts: Paragraphs, or markup of :func:`figure` and :func:`table`.

    Example:
        >>> section("Costs", "They are <small>.")
        '<section><h2>Costs</h2><p>They are &lt;small&gt;.</p></section>'
    """
    inner, figures = [], [part for part in parts if part.startswith("<figure>")]
    for part in parts:
        if part.startswith("<figure>"):
            if figures:
                inner.append(f'<div class="figures">{"".join(figures)}</div>')
                figures = []
        elif part.startswith("<div"):
            inner.append(part)
        elif part:
            inner.append(f"<p>{escape(part)}</p>")
    return f"<section><h2>{escape(title)}</h2>{''.join(inner)}</section>"


def page(title: str, advice: str, code: str, sections: Sequence[str]) -> str:
    """The whole page.

    Args:
        title: Its title.
        advice: The recommendation.
        code: Its line of code.
        sections: What :func:`section` returned.

    Example:
        >>> page("A & B", "Do.", "x = 1", []).splitlines()[0]
        '<!doctype html>'
    """
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_CSS}</style></head>
<body><h1>{escape(title)}</h1>
<div class="advice"><p><strong>{escape(advice)}</strong></p><pre>{escape(code)}</pre></div>
{"".join(sections)}
</body></html>
"""
