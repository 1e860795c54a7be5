"""What to do, in a sentence with a line of code, from a comparison with validation data."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev

from laplace_debias.comparison.result import ComparisonResult
from laplace_debias.comparison.rows import (
    AUTO,
    CROSSFIT,
    DIAGONAL,
    FULL,
    LARGE,
    LAST_LAYER,
    LINES,
    PLAIN,
    PRIOR_ONLY,
    SINGLE,
    TEMPERATURE,
    TWO_BATCH,
    ComparisonRow,
)

__all__ = ["Candidate", "Recommendation", "candidates", "recommend"]


@dataclass(frozen=True)
class Candidate:
    """A method at a budget, with its prior precision chosen on validation data.

    Attributes:
        method: Its name.
        budget: Number of data behind the curvature.
        validation: NLL on the validation data, mean over draws.
        spread: Its standard deviation over draws, 0 for one.
        rows: The chosen row of every draw.
    """

    method: str
    budget: int
    validation: float
    spread: float
    rows: tuple[ComparisonRow, ...]

    def mean(self, metric: str) -> float:
        """A metric's mean over draws."""
        return fmean(row.metrics[metric] for row in self.rows)

    def cost(self, kind: str) -> float | None:
        """What a fit took, mean over draws; ``None`` if unknown."""
        costs = [row.cost[kind] for row in self.rows if row.cost]
        return fmean(costs) if costs else None

    @property
    def prior_precision(self) -> float | None:
        """The prior precision of the first draw."""
        return self.rows[0].prior_precision


@dataclass(frozen=True)
class Recommendation:
    """What to do.

    Attributes:
        method: The recommended method.
        budget: Number of data behind its curvature.
        prior_precision: Its prior precision, ``None`` if it has none.
        sentence: The recommendation and the numbers behind it.
        code: The lines of code.
    """

    method: str
    budget: int
    prior_precision: float | None
    sentence: str
    code: str


def candidates(result: ComparisonResult) -> tuple[Candidate, ...]:
    """Return every method and budget at its validated prior precision.

    Args:
        result: A comparison with a ``val_loader``.
    """
    groups: dict[tuple[str, int], list[ComparisonRow]] = {}
    for row in result.tuned():
        groups.setdefault((row.method, row.budget), []).append(row)
    found = []
    for (method, budget), rows in groups.items():
        values = [row.metrics["val_nll"] for row in rows]
        spread = stdev(values) if len(values) > 1 else 0.0
        found.append(Candidate(method, budget, fmean(values), spread, tuple(rows)))
    return tuple(found)


def recommend(
    result: ComparisonResult,
    likelihood: str = "classification",
    temperature: float | None = None,
    sigma_noise: float | None = None,
) -> Recommendation:
    """Choose by the NLL on validation data; among the equally good, the cheapest.

    Equally good is what lies within a standard deviation over draws of the best. The sentence
    quotes the test data, which chose nothing.

    Args:
        result: A comparison with a ``val_loader`` and the method ``"plain"``.
        likelihood: ``"classification"`` or ``"regression"``.
        temperature: What the baseline ``"temperature"`` divides logits by, for the code.
        sigma_noise: A regression's noise, for the code.

    Example:
        >>> def row(method, delta, val, test):
        ...     return ComparisonRow(method, 8, 8, 0, delta, {"val_nll": val, "nll": test})
        >>> rows = (row("plain", None, 0.5, 0.6), row("two-batch", 2.0, 0.3, 0.4))
        >>> print(recommend(ComparisonResult(rows, 100, {})).sentence)
        Take the two-batch posterior of 8 data at prior precision 2: NLL 0.4000 on ...
    """
    found = candidates(result)
    best = min(found, key=lambda c: c.validation)
    near = [c for c in found if c.validation <= best.validation + max(best.spread, c.spread)]
    chosen = min(near, key=lambda c: (c.cost("backward") or 0.0, c.validation))
    plain = next((c for c in found if c.method == PLAIN), None)
    if plain in near:
        chosen = plain
    others = {c.method: c for c in found if c.method in LINES and c.method != chosen.method}
    against = [f"{c.mean('nll'):.4f} for {_article(c)}" for c in others.values()]
    sentence = f"{_order(chosen, temperature)}: NLL {chosen.mean('nll'):.4f} on the test data"
    sentence += f", against {' and '.join(against)}" if against else ""
    sentence += _seconds(chosen, found)
    tried = {row.prior_precision or 0.0 for row in result.select(chosen.method)}
    if len(tried) > 1 and chosen.prior_precision in (min(tried), max(tried)):
        sentence += "; that prior precision lies on the edge of the grid"
    sentence += _shifted(chosen, found)
    return Recommendation(
        chosen.method,
        chosen.budget,
        chosen.prior_precision,
        sentence + ".",
        _code(chosen, likelihood, temperature, sigma_noise),
    )


def _article(candidate: Candidate) -> str:
    """How a sentence names a method."""
    if candidate.method == PLAIN:
        return "the plain network"
    if candidate.method == TEMPERATURE:
        return "the network with a temperature"
    data = "" if candidate.method in (FULL, PRIOR_ONLY) else f" of {candidate.budget} data"
    name = "full-batch" if candidate.method == FULL else candidate.method
    return f"the {name} posterior{data}"


def _order(candidate: Candidate, temperature: float | None) -> str:
    """What to do with a method."""
    if candidate.method == PLAIN:
        return "Keep the plain network; no posterior is better by more than its spread over draws"
    if candidate.method == TEMPERATURE:
        T = "a temperature" if temperature is None else f"{temperature:.3g}"
        return f"Divide the logits by {T}; no posterior is better by more than its spread"
    return f"Take {_article(candidate)} at prior precision {candidate.prior_precision:.3g}"


def _seconds(chosen: Candidate, found: tuple[Candidate, ...]) -> str:
    """What the fit takes beside that of the whole training set."""
    full = next((c for c in found if c.method in (FULL, LARGE)), None)
    own = chosen.cost("backward")
    if full is None or chosen is full or not own or not full.cost("backward"):
        return ""
    passes = (full.cost("backward") or 0.0) / own
    return f"; its fit takes 1/{passes:.0f} of the full batch's backward passes" * (passes >= 2)


def _shifted(chosen: Candidate, found: tuple[Candidate, ...]) -> str:
    """A posterior that tells shifted data better than what is recommended, if there is one."""
    metric = "ood_auroc"
    if chosen.method not in LINES or metric not in chosen.rows[0].metrics:
        return ""
    best = max(found, key=lambda c: c.mean(metric))
    if best.method in LINES or best.mean(metric) < chosen.mean(metric) + 0.01:
        return ""
    return (
        f"; to tell data out of distribution, {_article(best)} is better "
        f"(AUROC {best.mean(metric):.3f} against {chosen.mean(metric):.3f})"
    )


def _code(
    candidate: Candidate, likelihood: str, temperature: float | None, sigma_noise: float | None
) -> str:
    """The lines of code."""
    if candidate.method == PLAIN:
        return "model(x).softmax(-1)" if likelihood == "classification" else "model(x)"
    if candidate.method == TEMPERATURE:
        T = "T" if temperature is None else f"{temperature:.3g}"
        return f"probs = (model(x) / {T}).softmax(-1)"
    words = {
        TWO_BATCH: "True",
        CROSSFIT: f'"crossfit", n_curvature={candidate.budget}',
        AUTO: f'"auto", tolerance=None, n_passes={candidate.cost("backward") or 8:.0f}',
    }
    known = (*words, SINGLE, FULL, LARGE, LAST_LAYER, PRIOR_ONLY, DIAGONAL)
    if candidate.method not in known:
        return f"la = ...  # your own method {candidate.method!r} with {candidate.budget} data"
    debias = words.get(candidate.method, '"single"')
    subset = "last_layer" if candidate.method == LAST_LAYER else "all"
    noise = "" if sigma_noise is None else f", sigma_noise={sigma_noise:.6g}"
    make = f'la = Laplace(model, "{likelihood}", "{subset}", "kron", debias={debias}{noise})'
    fit = "la.fit(train_loader)"
    if candidate.method == SINGLE:
        fit = "la.fit(next(iter(train_loader)), n_data=len(train_loader.dataset))"
    if candidate.method in (SINGLE, TWO_BATCH):
        fit += f"  # with batch_size={candidate.rows[0].batch_size}"
    if candidate.method in (PRIOR_ONLY, DIAGONAL):
        fit = "prior_only(la, n_data, n_outputs)  # laplace_debias.comparison.baselines"
    first = "from laplace_debias import Laplace\n"
    lines = [first + make, fit, f"la.prior_precision = {candidate.prior_precision:.6g}"]
    if candidate.method == DIAGONAL:
        lines[2] = (
            "predictor = DiagonalPredictor(la, diagonal_ggn(model, la.parameter_names, "
            f'train_loader, "{likelihood}"), [{candidate.prior_precision:.6g}])'
        )
    return "\n".join(lines)
