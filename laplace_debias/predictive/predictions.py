"""Predictions of the linearised network, from any method and through any link."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor

from laplace_debias.data.inputs import Inputs
from laplace_debias.network.preserve import no_autocast
from laplace_debias.predictive.links import (
    check_link,
    label_log_probabilities,
    mean_label_log_probabilities,
    mean_log_probabilities,
    needs_diagonal_only,
    position_log_probabilities,
)
from laplace_debias.predictive.sample_nodes import FEWEST_NODES

DEFAULT_MEMORY_BUDGET = 2**30

METHODS = ("exact", "top", "samples", "auto")
N_TOP = 20
"""Most classes whose variances the way ``"top"`` makes exact."""
DATA_AT_ONCE, _OUTPUTS_AT_ONCE = 16, 8
Prediction = tuple[Tensor, ...]
"""``(log-probabilities,)`` for classification, ``(mean, covariance)`` for regression."""


class Moments(Protocol):
    """Means and (co)variances of outputs."""

    @property
    def mean(self) -> Tensor: ...  # noqa: D102
    @property
    def covariance(self) -> Tensor: ...  # noqa: D102


class Predictor(Protocol):
    """What makes the moments: the linearised predictive, for one or many prior precisions."""

    many: bool

    def __call__(self, x: Inputs, diagonal_output: bool = False) -> Moments:
        """Exact moments."""
        ...

    def sampled(
        self,
        x: Inputs,
        n_samples: int,
        generator: torch.Generator | None,
        diagonal_output: bool,
    ) -> Moments:
        """Moments of samples."""
        ...

    def samples(
        self, x: Inputs, n_samples: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs, and samples of them."""
        ...

    def top(self, x: Inputs, diagonal_output: bool = True) -> Moments:
        """Variances, exact for the classes that carry the probability."""
        ...

    def chosen_method(self, x: Inputs, n_samples: int, diagonal_output: bool) -> str:
        """Which way ``method="auto"`` takes."""
        ...


class GridPredictor(Predictor, Protocol):
    """The linearised predictive of many prior precisions, also block by block.

    Attributes:
        deltas: Prior precisions ``[k, n_blocks]``.
    """

    deltas: Tensor

    def apart(self, x: Inputs, diagonal_output: bool = False) -> tuple[Tensor, Tensor]:
        """Outputs, and what each block adds to their (co)variances."""
        ...


class PredictorOf(Protocol):
    """What makes predictors of a posterior: ``StructuredPredictor``."""

    def __call__(
        self, la: KronLaplace, prior_precisions: Any, *, keep_graph: bool | None
    ) -> GridPredictor:
        """The predictor of a posterior at some prior precisions."""
        ...


def logit_temperature_of(la: Any) -> float:
    """What a Laplace approximation's logits are divided by; 1 for laplace-torch's own.

    Args:
        la: A Laplace approximation, ours or laplace-torch's.

    Example:
        >>> logit_temperature_of(object())
        1.0
    """
    return float(getattr(la, "logit_temperature", 1.0))


def chunk_sizes(
    n: int, C: int, mode: str, budget: int, held: int, per_output: int, *, apart: bool = False
) -> tuple[int, int | None]:
    """How many data, and how many outputs of them, to contract at once.

    All outputs of as many data as fit, and some outputs of one datum that does not fit. Variances
    take fewer outputs of at least 16 data, if 8 outputs of so many fit: backward passes of fewer
    data cost up to twice as much per datum (PyTorch's 1 x 1 convolutions on one thread).

    Args:
        n: Number of data.
        C: Number of outputs of a datum.
        mode: ``"variance"``, ``"covariance"`` or ``"joint"``, which takes all data at once;
            ``"top"`` for variances of data sorted by need, of which up to 8 chunks pay.
        budget: Bytes to stay within.
        held: Bytes of a datum.
        per_output: Bytes of each of its outputs.
        apart: Whether blocks are left apart.

    Returns:
        Number of data, and of outputs, or ``None`` for all of these.

    Example:
        >>> chunk_sizes(32, 20, "variance", 2**30, 2**24, 2**22)
        (16, 10)
        >>> chunk_sizes(32, 20, "covariance", 2**30, 2**24, 2**22)
        (10, None)
    """
    if mode == "joint":
        return n, None
    size = max(1, budget // (held + C * per_output))
    if mode == "top":
        size = min(size, -(-n // max(1, min(8, n // DATA_AT_ONCE))))
    few = (budget // DATA_AT_ONCE - held) // per_output
    if (
        mode in ("variance", "top")
        and size < min(n, DATA_AT_ONCE)
        and few >= min(C, _OUTPUTS_AT_ONCE)
    ):
        return DATA_AT_ONCE, -(-C // -(-C // few))
    if size > 1 or (mode == "covariance" and apart):
        return size, None
    return size, max(1, min(C, (budget - held) // per_output))


def cheapest_method(
    n_outputs: int, n_priors: int, n_samples: int, *, diagonal: bool, top: bool, shared: bool = True
) -> str:
    """The exact way, unless it costs more than five times another.

    Counted in forward passes, as measured on EfficientNet-Lite0: one backward pass costs about one,
    the contraction of its output two to three, a product of the Jacobian with a step of the weights
    four to five. The exact way takes a backward pass and a contraction per output (of all
    positions), and, unless only diagonals are needed, C products per output and prior precision;
    ``"top"`` does so for at most 20 outputs; S samples take a product each at every prior
    precision, or at three that give the others.

    Args:
        n_outputs: Number C of a datum's outputs.
        n_priors: Number k of prior precisions.
        n_samples: Number S of samples.
        diagonal: Whether variances are enough.
        top: Whether ``"top"`` can be taken.
        shared: Whether prior precisions are numbers, which a few nodes give.

    Returns:
        ``"exact"``, ``"top"`` or ``"samples"``.

    Example:
        >>> cheapest_method(10, 14, 100, diagonal=True, top=True)
        'exact'
        >>> cheapest_method(1000, 1, 100, diagonal=True, top=True)
        'top'
        >>> cheapest_method(1000, 1, 100, diagonal=False, top=False)
        'samples'
    """
    nodes = min(n_priors, FEWEST_NODES) if shared else n_priors
    costs = {"samples": 4 * max(n_samples, 20) * nodes}
    exact = 4 * n_outputs + (0 if diagonal else n_outputs * n_priors)
    if top and diagonal:
        costs["top"] = 4 * N_TOP
    best = min(costs, key=lambda name: costs[name])
    return "exact" if 5 * costs[best] >= exact else best


def check_method(method: str) -> None:
    """Raise a ``ValueError`` for an unknown method."""
    if method not in METHODS:
        raise ValueError(
            f"Expected method to be one of {METHODS}, got {method!r}. Remedy: pass one of them."
        )


def moments_by(
    predictor: Predictor,
    x: Inputs,
    method: str,
    n_samples: int,
    generator: torch.Generator | None,
    diagonal: bool,
) -> Moments:
    """Means and (co)variances of outputs by any method.

    Args:
        predictor: The linearised predictive.
        x: The data.
        method: ``"exact"``, ``"top"``, ``"samples"`` or ``"auto"``.
        n_samples: Number of samples, if any.
        generator: Random number generator for samples.
        diagonal: Whether variances are enough.

    Raises:
        ValueError: For an unknown method.
    """
    check_method(method)
    if method == "auto":
        method = predictor.chosen_method(x, n_samples, diagonal)
    if method == "samples":
        return predictor.sampled(x, n_samples, generator, diagonal)
    return predictor.top(x, diagonal) if method == "top" else predictor(x, diagonal)


@no_autocast()
def glm_predictions(
    predictor: Predictor,
    x: Inputs,
    *,
    regression: bool,
    link_approx: str = "probit",
    n_samples: int = 100,
    method: str = "exact",
    generator: torch.Generator | None = None,
    diagonal_output: bool = False,
    labels: bool = False,
    logit_temperature: float = 1.0,
) -> Iterator[Prediction]:
    """Yield one prediction per prior precision of the predictor.

    Args:
        predictor: The linearised predictive.
        x: The data.
        regression: Whether the outputs are the predictions themselves.
        link_approx: Link approximation for classification.
        n_samples: Number of samples for ``link_approx="mc"`` or ``method="samples"``.
        method: ``"exact"``, ``"top"``, ``"samples"`` or ``"auto"``. With samples and
            ``link_approx="mc"`` no covariance is formed: the samples go through the softmax.
        generator: Random number generator for samples, shared by all prior precisions.
        diagonal_output: Leave out covariances between outputs.
        labels: Whether every output is a yes-or-no label of its own (Bernoulli).
        logit_temperature: T, by which logits are divided: their means by T, their (co)variances by
            its square. Regression knows none.

    Yields:
        ``(log-probabilities [n, *positions, C],)`` for classification, of no and yes for labels
        (``[n, C, 2]``), ``(mean [n, C], covariance)`` for regression, with covariances
        ``[n, C, C]`` or, with ``diagonal_output``, ``[n, C]``.

    Raises:
        ValueError: For an unknown link or method.
    """
    check_link(link_approx)
    check_method(method)
    diagonal = diagonal_output if regression else needs_diagonal_only(link_approx, diagonal_output)
    diagonal |= labels
    method = predictor.chosen_method(x, n_samples, diagonal) if method == "auto" else method
    if method == "samples" and link_approx == "mc" and not regression and (labels or not diagonal):
        _, samples = predictor.samples(x, n_samples, generator)
        for drawn in samples:
            link = mean_label_log_probabilities if labels else mean_log_probabilities
            yield (link(drawn / logit_temperature),)
        return
    result = moments_by(predictor, x, method, n_samples, generator, diagonal)
    covariance = result.covariance if predictor.many else result.covariance.unsqueeze(0)
    if regression:
        for one in covariance:
            yield result.mean, one
        return
    mean, covariance = result.mean / logit_temperature, covariance / logit_temperature**2
    options: dict[str, Any] = {"n_samples": n_samples, "generator": generator}
    if labels:
        log_probs = label_log_probabilities(mean, covariance, link_approx, **options)
    else:
        options["diagonal"] = diagonal
        log_probs = position_log_probabilities(mean, covariance, link_approx, **options)
    for one in log_probs:
        yield (one,)
