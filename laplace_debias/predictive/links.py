r"""From Gaussian outputs to log-probabilities of classes, for one or many covariances at once.

With output mean :math:`\mu` and covariance :math:`\Sigma` of one datum and K classes:

- ``probit``: softmax of :math:`\mu_c / \sqrt{1 + \pi \Sigma_{cc} / 8}`; needs diagonals only.
- ``mc``: mean of softmax over samples of the Gaussian.
- ``bridge``: the Laplace bridge to a Dirichlet. With the zero-sum correction
  :math:`\mu' = \mu - \Sigma 1 \, (1^\top \mu) / (1^\top \Sigma 1)` and
  :math:`\Sigma' = \Sigma - \Sigma 1 1^\top \Sigma / (1^\top \Sigma 1)`, the concentrations are
  :math:`\alpha_c = (1 - 2 / K + e^{\mu'_c} \sum_d e^{-\mu'_d} / K^2) / \Sigma'_{cc}`, and the
  probabilities their shares.
- ``bridge_norm``: the same after dividing :math:`\Sigma'` by
  :math:`t = \mathrm{mean}_c \Sigma'_{cc} / \sqrt{K / 2}` and :math:`\mu'` by its root.

These are laplace-torch's formulas, without its replacement of NaN by one, and in log space from
the outputs to the end: a probability that is too small for its dtype has a logarithm all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LINKS = ("probit", "mc", "bridge", "bridge_norm")


def check_link(link_approx: str) -> None:
    """Raise a ``ValueError`` for an unknown link approximation."""
    if link_approx not in LINKS:
        raise ValueError(
            f"Expected link_approx to be one of {LINKS}, got {link_approx!r}. "
            "Remedy: pass one of them."
        )


def needs_diagonal_only(link_approx: str, diagonal_output: bool = False) -> bool:
    """Say whether the link needs no more than the variances of the outputs."""
    return link_approx == "probit" or (link_approx == "mc" and diagonal_output)


def class_log_probabilities(
    mean: Tensor,
    covariance: Tensor,
    link_approx: str = "probit",
    *,
    diagonal: bool = False,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Apply a link approximation.

    Every link is the log-softmax of scores: :math:`\mu_c / \sqrt{1 + \pi \Sigma_{cc} / 8}`
    (``"probit"``), :math:`\log \sum_s \mathrm{softmax}(f_s)_c` over samples (``"mc"``), and
    :math:`\log \alpha_c` (``"bridge"``). A log-probability is minus infinity only where the scores
    differ by more than the dtype's largest number, and NaN where a mean or covariance is.

    Args:
        mean: Output means ``[n, C]``.
        covariance: Covariances ``[..., n, C, C]``, or variances ``[..., n, C]`` with ``diagonal``;
            leading dimensions run over prior precisions.
        link_approx: One of ``LINKS``.
        diagonal: Whether ``covariance`` holds variances.
        n_samples: Number of samples for ``"mc"``, the same for all leading dimensions.
        generator: Random number generator for ``"mc"``.

    Returns:
        Log-probabilities ``[..., n, C]``, whose exponentials sum to one.

    Raises:
        ValueError: For an unknown link, or no samples where there must be some.

    Example:
        >>> class_log_probabilities(torch.zeros(1, 2), torch.eye(2).expand(3, 1, 2, 2))[0].exp()
        tensor([[0.5000, 0.5000]])
    """
    check_link(link_approx)
    dtype = mean.dtype  # LAPACK knows no half precision, and squares of it overflow
    mean, covariance = (
        part.to(torch.promote_types(dtype, torch.float32)) for part in (mean, covariance)
    )
    return _wide_log_probabilities(
        mean, covariance, link_approx, diagonal, n_samples, generator
    ).to(dtype)


def position_log_probabilities(
    mean: Tensor, covariance: Tensor, link_approx: str = "probit", **options: Any
) -> Tensor:
    """The same for each of several positions of a datum (tokens, pixels), if there are any.

    Args:
        mean: Output means ``[n, *positions, C]``.
        covariance: ``[k, n, *positions, C, C]``, or variances ``[k, n, *positions, C]``.
        link_approx: One of ``LINKS``.
        **options: Of :func:`class_log_probabilities`.

    Returns:
        Log-probabilities ``[k, n, *positions, C]``.

    Example:
        >>> mean, variance = torch.zeros(4, 5, 2), torch.ones(3, 4, 5, 2)
        >>> position_log_probabilities(mean, variance, diagonal=True).shape
        torch.Size([3, 4, 5, 2])
    """
    rows = mean.flatten(0, -2)
    found: Tensor = class_log_probabilities(
        rows, covariance.flatten(1, mean.ndim - 1), link_approx, **options
    )
    log_probs: Tensor = found.unflatten(1, mean.shape[:-1])
    return log_probs


def label_log_probabilities(
    mean: Tensor,
    variance: Tensor,
    link_approx: str = "probit",
    *,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""The link of independent labels: log-probabilities of no and of yes for each output.

    ``"probit"``: :math:`\sigma(\mu / \sqrt{1 + \pi \sigma^2 / 8})`. ``"mc"``: the mean of
    :math:`\sigma(f_s)` over samples. A label depends on its own output alone, so that variances are
    all it takes.

    Args:
        mean: Output means ``[n, C]``.
        variance: Output variances ``[..., n, C]``; leading dimensions run over prior precisions.
        link_approx: ``"probit"`` or ``"mc"``.
        n_samples: Number of samples for ``"mc"``.
        generator: Random number generator for ``"mc"``.

    Returns:
        Log-probabilities ``[..., n, C, 2]``.

    Raises:
        ValueError: For another link.

    Example:
        >>> label_log_probabilities(torch.zeros(1, 1), torch.ones(1, 1)).exp()
        tensor([[[0.5000, 0.5000]]])
    """
    dtype = mean.dtype
    mean, variance = (t.to(torch.promote_types(dtype, torch.float32)) for t in (mean, variance))
    if link_approx == "probit":
        f = mean / torch.sqrt(1 + math.pi / 8 * variance)
        return logsigmoid(torch.stack([-f, f], dim=-1)).to(dtype)
    if link_approx != "mc":
        raise ValueError(
            f"Expected link_approx 'probit' or 'mc' with likelihood='bernoulli', got "
            f"{link_approx!r}. Remedy: pass one of them."
        )
    check_n_samples(n_samples)
    shape = (n_samples, *[1] * (variance.ndim - mean.ndim), *mean.shape)
    eps = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
    return mean_label_log_probabilities(mean + variance.clamp(min=0).sqrt() * eps).to(dtype)


def mean_label_log_probabilities(samples: Tensor) -> Tensor:
    r"""Logarithms of the means of :math:`\sigma(-f_s)` and :math:`\sigma(f_s)` over samples.

    Args:
        samples: Outputs ``[S, ..., C]``.

    Returns:
        Log-probabilities ``[..., C, 2]``.

    Example:
        >>> mean_label_log_probabilities(torch.tensor([[200.0], [0.0]])).exp()
        tensor([[0.2500, 0.7500]])
    """
    both = logsigmoid(torch.stack([-samples, samples], dim=-1)).logsumexp(0)
    return torch.log_softmax(both, dim=-1)


def check_n_samples(n_samples: int) -> None:
    """Raise unless a number of samples is a positive whole number.

    Args:
        n_samples: The number.

    Raises:
        ValueError: If it is not.

    Example:
        >>> check_n_samples(100)
    """
    if isinstance(n_samples, bool) or int(n_samples) != n_samples or n_samples < 1:
        raise ValueError(
            f"Expected n_samples of at least 1, got {n_samples}. Remedy: pass e.g. 100."
        )


def _wide_log_probabilities(
    mean: Tensor,
    covariance: Tensor,
    link_approx: str,
    diagonal: bool,
    n_samples: int,
    generator: torch.Generator | None,
) -> Tensor:
    """See :func:`class_log_probabilities`; in at least single precision."""
    if link_approx == "probit":
        variance = covariance if diagonal else covariance.diagonal(dim1=-2, dim2=-1)
        return torch.log_softmax(mean / torch.sqrt(1 + math.pi / 8 * variance), dim=-1)
    if link_approx == "mc":
        check_n_samples(n_samples)
        shape = (n_samples, *mean.shape)
        eps = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
        grid = covariance if covariance.ndim == mean.ndim + 2 - diagonal else covariance[None]
        log_probs = [mean_log_probabilities(_draw(mean, S, eps, diagonal)) for S in grid]
        lead = covariance.shape[: -2 if diagonal else -3]
        return torch.stack(log_probs).reshape(*lead, *mean.shape)
    scores = _log_concentrations(mean, covariance, normalise=link_approx == "bridge_norm")
    return torch.log_softmax(scores, dim=-1)


def mean_log_probabilities(samples: Iterable[Tensor]) -> Tensor:
    r"""Logarithm of the mean of :math:`\mathrm{softmax}(f_s)` over samples :math:`f_s`.

    Args:
        samples: Outputs ``[S, n, C]``, or an iterable of outputs ``[n, C]``, of which only one at a
            time is kept.

    Returns:
        Log-probabilities ``[n, C]``.

    Example:
        >>> samples = torch.tensor([[[0.0, 200.0]], [[0.0, 0.0]]])
        >>> mean_log_probabilities(samples).exp()
        tensor([[0.2500, 0.7500]])
    """
    if isinstance(samples, Tensor):
        total = torch.log_softmax(samples, dim=-1).logsumexp(0)
    else:
        total = reduce(torch.logaddexp, (torch.log_softmax(f, dim=-1) for f in samples))
    # the normalisation divides by S, and takes rounding errors with it
    return torch.log_softmax(total, dim=-1)


def _draw(mean: Tensor, covariance: Tensor, eps: Tensor, diagonal: bool) -> Tensor:
    """Samples ``[S, n, C]`` of a Gaussian from standard normal numbers."""
    if diagonal:
        return mean + covariance.clamp(min=0).sqrt() * eps
    return mean + torch.einsum("ncd,snd->snc", root(covariance), eps)


def root(covariance: Tensor) -> Tensor:
    r"""Return L with :math:`L L^\top = \Sigma`, also for singular covariances.

    Cholesky where it succeeds; the eigendecomposition with eigenvalues clamped at zero elsewhere.
    NaN stays NaN.

    Args:
        covariance: Symmetric positive semi-definite matrices ``[..., C, C]``.

    Example:
        >>> L = root(torch.ones(2, 2))
        >>> torch.allclose(L @ L.T, torch.ones(2, 2), atol=1e-6)
        True
    """
    L: Tensor
    L, info = torch.linalg.cholesky_ex(covariance)
    failed = (info > 0) & torch.isfinite(covariance).all(-1).all(-1)
    if failed.any():
        lam, Q = torch.linalg.eigh(covariance[failed])
        L = L.masked_scatter(failed[..., None, None], Q * lam.clamp(min=0).sqrt().unsqueeze(-2))
    return L


def _log_concentrations(mean: Tensor, covariance: Tensor, normalise: bool) -> Tensor:
    """Logarithms of the Laplace bridge's concentrations; see the module's docstring."""
    K = mean.shape[-1]
    row = covariance.sum(-1)  # [..., n, C]
    total = row.sum(-1, keepdim=True)
    mu = mean - row * mean.sum(-1, keepdim=True) / total
    variance = covariance.diagonal(dim1=-2, dim2=-1) - row.square() / total
    if normalise:
        scale = variance.mean(-1, keepdim=True) / math.sqrt(K / 2)
        mu, variance = mu / scale.sqrt(), variance / scale
    log_spread = mu + torch.logsumexp(-mu, dim=-1, keepdim=True) - 2 * math.log(K)
    if K > 2:  # 1 - 2 / K is zero for two classes
        log_spread = torch.logaddexp(log_spread, log_spread.new_tensor(math.log(1 - 2 / K)))
    return log_spread - variance.log()
