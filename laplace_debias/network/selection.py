"""Which parameters are Bayesian, in one word, without freezing anything for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["Parameters", "select_parameters", "selected"]

Parameters = str | Sequence[str] | None
"""``"lora"``, ``"head"``, a name or pattern, several of them, or all that require a gradient."""


def select_parameters(model: nn.Module, parameters: Parameters) -> list[str]:
    """Names of the parameters that a word, a pattern or a list means.

    Args:
        model: The network.
        parameters: ``"lora"``: adapters, whose names have ``lora_`` in them (peft). ``"head"``: the
            layer with parameters that the model holds last. Otherwise the name of a parameter or
            of a module, or a pattern with ``*`` and ``?``; or a list of these. ``None``: all that
            require a gradient.

    Returns:
        The names, in the order of ``model.named_parameters()``.

    Raises:
        ValueError: If a word, name or pattern means no parameter.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> select_parameters(net, "head")
        ['2.weight', '2.bias']
        >>> select_parameters(net, ["0", "*.bias"])
        ['0.weight', '0.bias', '2.bias']
    """
    known = dict(model.named_parameters())
    if parameters is None:
        return [name for name, p in known.items() if p.requires_grad]
    chosen: set[str] = set()
    for word in [parameters] if isinstance(parameters, str) else parameters:
        found = set(_meant(model, list(known), word))
        if not found:
            near = get_close_matches(str(word), known, n=3, cutoff=0.3) or list(known)[-3:]
            raise ValueError(
                f"Expected `parameters` to be 'lora', 'head', or names and patterns of parameters, "
                f"got {word!r}, which means none of the model's {len(known)}. Remedy: e.g. one of "
                f"{near}, or '*.{near[0].rpartition('.')[2]}'."
            )
        chosen |= found
    return [name for name in known if name in chosen]


def _meant(model: nn.Module, known: list[str], word: str) -> Iterable[str]:
    """Names that one word means."""
    if word == "lora":
        return [name for name in known if "lora_" in name]
    if word == "head":
        owners = [name.rpartition(".")[0] for name in known]
        modules = [name for name, _ in model.named_modules() if name in owners]
        word = modules[-1] if modules else word
    inside = f"{word}."
    return [n for n in known if n == word or n.startswith(inside) or fnmatchcase(n, word)]


@contextmanager
def selected(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Let some parameters require a gradient, and no others, inside a block.

    Args:
        model: The network.
        names: Names of the parameters.

    Yields:
        Nothing; ``requires_grad`` of every parameter is put back afterwards.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> with selected(net, ["bias"]):
        ...     net.weight.requires_grad
        False
        >>> net.weight.requires_grad
        True
    """
    wanted = set(names)
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for name, p in model.named_parameters():
            p.requires_grad_(name in wanted)
        yield
    finally:
        for p, required in before:
            p.requires_grad_(required)
