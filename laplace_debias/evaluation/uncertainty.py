r"""What a posterior is uncertain about: the data, or the model.

For classification, with samples :math:`p_s` of the class probabilities, the entropy of their mean
splits into the mean entropy (aleatoric: the data) and the mutual information between prediction
and weights (epistemic: the model),

.. math:: H[\bar p] = \frac1S \sum_s H[p_s] + I, \qquad 0 \le I \le H[\bar p].

For regression the predictive variance is that of the functions (epistemic) plus that of the
observation noise (aleatoric).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor

from laplace_debias.data.reading import read
from laplace_debias.evaluation.metrics import predictive_entropy
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.upstream import device_of
from laplace_debias.predictive.links import mean_log_probabilities, root
from laplace_debias.predictive.predictions import logit_temperature_of, moments_by
from laplace_debias.predictive.predictor import StructuredPredictor

__all__ = ["Uncertainty", "mutual_information", "uncertainty"]

MOST_NUMBERS = 2**24
"""Most sampled logits that are held at once."""


@dataclass(frozen=True)
class Uncertainty:
    """Predictive uncertainty of every datum, in nats (classification) or as variances.

    Attributes:
        total: Entropy of the mean prediction, or predictive variance (mean over outputs), ``[n]``;
            with positions (tokens, pixels) of each, ``[n, *positions]``.
        epistemic: What more training data would remove: mutual information, or the variance of the
            functions, in the same shape.
    """

    total: Tensor
    epistemic: Tensor

    @property
    def aleatoric(self) -> Tensor:
        """What would be left with the weights known, ``[n]``."""
        return self.total - self.epistemic

    @property
    def epistemic_share(self) -> float:
        """Mean epistemic over mean total uncertainty, between 0 and 1.

        Example:
            >>> Uncertainty(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.0])).epistemic_share
            0.25
        """
        total = self.total.double().mean()
        return (self.epistemic.double().mean() / total).item() if total > 0 else 0.0


def mutual_information(samples: Tensor) -> tuple[Tensor, Tensor]:
    r"""Entropy of the mean prediction, and the mutual information with the weights.

    Args:
        samples: Logits ``[S, n, C]``.

    Returns:
        Both ``[n]``, in nats.

    Example:
        >>> total, epistemic = mutual_information(torch.tensor([[[0.0, 90.0]], [[90.0, 0.0]]]))
        >>> round(total.item(), 4), round(epistemic.item(), 4)
        (0.6931, 0.6931)
    """
    total = predictive_entropy(mean_log_probabilities(samples))
    aleatoric = predictive_entropy(samples.log_softmax(-1)).mean(0)
    return total, (total - aleatoric).clamp_min(0)  # rounding


def uncertainty(
    la: KronLaplace,
    loader: Iterable[Any],
    *,
    n_samples: int = 200,
    seed: int = 0,
    progress_bar: bool | None = None,
) -> Uncertainty:
    """Split the uncertainty of the linearised predictive, datum by datum.

    Args:
        la: A fitted ``KronLaplace`` or ``KronLLLaplace``; it is left as it is.
        loader: Mini-batches ``(x, y)``, whose ``y`` does not matter, or ``x``; or one of them.
        n_samples: Number of samples of the logits.
        seed: Decides them.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.

    Returns:
        Total and epistemic uncertainty of every datum, or of each of its positions, whose number
        has to be the same in all mini-batches then.

    Raises:
        ValueError: For labels (``likelihood="bernoulli"``).

    Example:
        >>> from laplace_debias import Laplace
        >>> la = Laplace(torch.nn.Linear(2, 2), "classification", "all", "kron", debias="single")
        >>> batch = (torch.randn(8, 2), torch.arange(8) % 2)
        >>> la.fit(batch, n_data=8)
        >>> uncertainty(la, batch).total.shape
        torch.Size([8])
    """
    if likelihood_name(la.likelihood) == "bernoulli":
        raise ValueError(
            "Expected a classification or a regression, got likelihood='bernoulli'. Remedy: the "
            "entropy of each label follows from `la(x)`."
        )
    predictor = StructuredPredictor(la, keep_graph=False)
    regression = likelihood_name(la.likelihood) == "regression"
    generator = torch.Generator(device_of(la)).manual_seed(seed)
    T, found = logit_temperature_of(la), []
    way = str(getattr(la, "predictive_method", "auto"))
    batches = read(
        loader, device_of(la), la.dict_key_y, labelled=False,
        progress="uncertainty", progress_bar=progress_bar,
    )  # fmt: skip
    with torch.no_grad():
        for x, _ in batches:
            result = moments_by(predictor, x, way, n_samples, generator, regression)
            mean, covariance = result.mean, result.covariance
            if regression:
                noise = torch.as_tensor(la.sigma_noise).to(mean).square().expand(mean.shape[-1])
                found.append(((covariance + noise).mean(-1), covariance.mean(-1)))
                continue
            rows, blocks = mean.flatten(0, -2), covariance.flatten(0, -3)  # data or positions
            size = max(1, MOST_NUMBERS // (n_samples * rows.shape[-1]))
            parts = []
            for at in range(0, len(rows), size):
                few, L = rows[at : at + size], root(blocks[at : at + size])
                shape = (n_samples, *few.shape)
                eps = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
                drawn = few + torch.einsum("ncd,snd->snc", L, eps)
                parts.append(mutual_information(drawn / T))
            total, epistemic = (
                torch.cat(p).view(mean.shape[:-1]) for p in zip(*parts, strict=True)
            )
            found.append((total, epistemic))
    totals, epistemics = zip(*found, strict=True)
    return Uncertainty(torch.cat(totals), torch.cat(epistemics))
