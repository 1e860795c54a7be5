r"""What the pages need beside Markdown: the gallery's figures, and formulas without JavaScript.

Formulas in ``$...$`` and ``$$...$$``, and those of docstrings (``:math:``, ``.. math::``), become
MathML, which browsers show by themselves. The docstrings' cross-references become plain code.
"""

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

GALLERY = Path(__file__).parent.parent / "examples" / "gallery"
# fenced blocks and code spans, which no formula is looked for in
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_DISPLAY = re.compile(r"^\.\. math::[ \t]*(.*?)(?=\n\S|\Z)", re.MULTILINE | re.DOTALL)


def formula(latex: str, display: bool = False) -> str:
    """MathML of a formula, on one line."""
    latex = " ".join(latex.split()).replace(r"\lVert", r"\|").replace(r"\rVert", r"\|")
    mathml: str = convert(latex, display="block" if display else "inline").replace("\n", "")
    return mathml if display else f"<span>{mathml}</span>"  # at a line's beginning: no block


def with_formulas(markdown: str) -> str:
    """Markdown with its formulas as MathML; code is left alone."""
    parts = _CODE.split(markdown)
    for i in range(0, len(parts), 2):
        text = re.sub(r"\$\$(.+?)\$\$", lambda m: formula(m[1], True), parts[i], flags=re.DOTALL)
        parts[i] = re.sub(r"\$([^$\n]+?)\$", lambda m: formula(m[1]), text)
    return "".join(parts)


def without_roles(docstring: str) -> str:
    """A docstring's formulas as MathML, and its references as code."""
    text = _DISPLAY.sub(lambda m: f"\n{formula(m[1], True)}\n", docstring)
    text = re.sub(r":math:`([^`]+)`", lambda m: formula(m[1]), text)
    text = re.sub(r":(?:func|class|meth|mod|attr):`~?(?:[\w.]+\.)?([\w]+)`", r"`\1`", text)
    return re.sub(r"::\n", ":\n", text)


def on_files(files: Files, config: dict[str, Any]) -> Files:
    """Add every figure of the gallery as ``gallery/NAME.png``."""
    for path in sorted(GALLERY.glob("*.png")):
        files.append(File.generated(config, f"gallery/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn a page's formulas into MathML."""
    return with_formulas(markdown)


class Docstrings(Extension):
    """Rewrites docstrings before they are parsed."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of any object."""
        if obj.docstring:
            obj.docstring.value = without_roles(obj.docstring.value)
