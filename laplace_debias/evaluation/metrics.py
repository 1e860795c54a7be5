r"""Metrics of class predictions, from log-probabilities.

Conventions: log-probabilities ``[n, C]`` with :math:`\sum_c \exp(\ell_c) = 1`, labels ``[n]`` from
0 to C - 1, entropies in nats. Nothing is clamped: the NLL is infinite where the log-probability of
a label is minus infinity, and only there. A NaN in a prediction makes every metric NaN: it has no
most probable class, so it is neither right nor wrong.

All are torchmetrics, so that they can be collected over processes by torchmetrics' own means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torchmetrics import Metric
from torchmetrics.classification import BinaryCalibrationError
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_specificity_at_sensitivity,
)
from torchmetrics.utilities import dim_zero_cat

__all__ = [
    "ECE",
    "NLL",
    "Accuracy",
    "Brier",
    "MeanEntropy",
    "MeanOverData",
    "entropy_auroc",
    "entropy_fpr95",
    "predictive_entropy",
]


def predictive_entropy(log_probs: Tensor) -> Tensor:
    r"""Entropy :math:`-\sum_c e^{\ell_c} \ell_c` of class predictions.

    Args:
        log_probs: ``[..., C]``.

    Returns:
        Entropies in nats, ``[...]``.

    Example:
        >>> predictive_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log())
        tensor([0.6931, 0.0000])
    """
    finite = log_probs.masked_fill(log_probs == -math.inf, 0.0)  # 0 log 0 = 0
    return (log_probs.exp() * -finite).sum(-1)


def entropy_auroc(id_entropies: Tensor, ood_entropies: Tensor) -> float:
    """Area under the ROC curve of telling OOD from in-distribution inputs by their entropies.

    The probability that a random OOD input has the larger entropy, ties counting one half.

    Args:
        id_entropies: Predictive entropies of in-distribution inputs, ``[N]``.
        ood_entropies: Predictive entropies of out-of-distribution inputs, ``[M]``.

    Returns:
        A number between 0 and 1.

    Example:
        >>> entropy_auroc(torch.tensor([0.1, 0.4]), torch.tensor([0.3, 2.0]))
        0.75
    """
    scores, is_ood = _scores(id_entropies, ood_entropies)
    return binary_auroc(scores, is_ood, thresholds=None, validate_args=False).item()


def entropy_fpr95(id_entropies: Tensor, ood_entropies: Tensor) -> float:
    """Share of OOD inputs taken for in-distribution ones when 95 % of the latter are recognised.

    An input is taken for in-distribution if its entropy is at most the smallest threshold that
    lets at least 95 % of the in-distribution inputs pass.

    Args:
        id_entropies: Predictive entropies of in-distribution inputs, ``[N]``.
        ood_entropies: Predictive entropies of out-of-distribution inputs, ``[M]``.

    Returns:
        A number between 0 and 1; small is good.

    Example:
        >>> entropy_fpr95(torch.linspace(0, 1, 20), torch.tensor([0.5, 2.0]))
        0.5
    """
    scores, is_ood = _scores(id_entropies, ood_entropies)
    specificity, _ = binary_specificity_at_sensitivity(
        1 - scores.double(), 1 - is_ood, min_sensitivity=0.95, thresholds=None, validate_args=False
    )
    return 1 - specificity.item()


def _scores(id_entropies: Tensor, ood_entropies: Tensor) -> tuple[Tensor, Tensor]:
    """Entropies brought to [0, 1], and which of them are of OOD inputs."""
    entropies = torch.cat([id_entropies, ood_entropies])
    is_ood = torch.zeros(len(entropies), dtype=torch.long, device=entropies.device)
    is_ood[len(id_entropies) :] = 1
    # torchmetrics squashes scores outside [0, 1] by a sigmoid, in which small ones become ties
    return (entropies / entropies.max().clamp_min(1)).clamp_min(0), is_ood


class MeanOverData(Metric):
    """A mean over data, summed in double precision; NaN where a prediction holds one.

    A subclass says in ``update`` what it sums, and hands it to ``add``.
    """

    full_state_update = False
    is_differentiable = False

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        """Start from no data."""
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def add(self, values: Tensor, prediction: Sequence[Tensor]) -> None:
        """Add one value per datum.

        Args:
            values: ``[n]``.
            prediction: What they were computed from, tensors ``[n, ...]``.
        """
        for part in prediction:
            values = values.masked_fill(part.isnan().flatten(1).any(-1), math.nan)
        self.total += values.double().sum()
        self.count += len(values)

    def compute(self) -> Tensor:
        """Return the mean over all data added so far."""
        return self.total / self.count

    @property
    def n_data(self) -> int:
        """Number of data added so far, of all processes."""
        with self.sync_context():
            return int(self.count)


def most_probable(labels: Tensor) -> Tensor:
    """The class of each label: itself, or the most probable one of a soft label.

    Args:
        labels: Class indices ``[n]``, or class probabilities ``[n, C]``.

    Returns:
        Class indices ``[n]``.

    Example:
        >>> most_probable(torch.tensor([[0.2, 0.8], [0.6, 0.4]]))
        tensor([1, 0])
    """
    return labels.argmax(-1) if labels.is_floating_point() else labels


class NLL(MeanOverData):
    r"""Mean of :math:`-\ell_y`, in nats; of :math:`-\sum_c y_c \ell_c` for soft labels.

    Example:
        >>> metric = NLL()
        >>> metric.update(torch.tensor([[0.0, -2000.0]]), torch.tensor([1]))
        >>> metric.compute().item()  # the probability itself is zero in any dtype
        2000.0
    """

    higher_is_better = False

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add data: ``log_probs [n, C]``, ``labels [n]`` or ``[n, C]``."""
        if labels.is_floating_point():
            soft = labels.to(log_probs)
            terms = torch.where(soft > 0, soft * log_probs, 0)  # a class of no weight may be -inf
            of_label = terms.sum(-1)
        else:
            of_label = log_probs.gather(-1, labels[:, None]).squeeze(-1)  # [n]
        self.add(-of_label, [log_probs])


class Accuracy(MeanOverData):
    """Share of data whose most probable class is the label, or the most probable of a soft one.

    Example:
        >>> metric = Accuracy()
        >>> metric.update(torch.tensor([[0.75, 0.25], [0.4, 0.6]]).log(), torch.tensor([0, 0]))
        >>> metric.compute().item()
        0.5
    """

    higher_is_better = True

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add data: ``log_probs [n, C]``, ``labels [n]`` or ``[n, C]``."""
        self.add((log_probs.argmax(-1) == most_probable(labels)).double(), [log_probs])


class Brier(MeanOverData):
    r"""Mean of :math:`\sum_c (e^{\ell_c} - 1[c = y])^2`, between 0 and 2.

    A soft label takes the place of :math:`1[c = y]`.

    Example:
        >>> metric = Brier()
        >>> metric.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 0]))
        >>> round(metric.compute().item(), 4)
        0.3125
    """

    higher_is_better = False

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add data: ``log_probs [n, C]``, ``labels [n]`` or ``[n, C]``."""
        soft = labels.is_floating_point()
        target = labels if soft else one_hot(labels, log_probs.shape[-1])  # [n, C]
        self.add((log_probs.exp() - target).square().sum(-1), [log_probs])


class MeanEntropy(MeanOverData):
    """Mean predictive entropy, in nats; neither large nor small values are better.

    Example:
        >>> metric = MeanEntropy()
        >>> metric.update(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0]))
        >>> round(metric.compute().item(), 4)
        0.6931
    """

    higher_is_better = None

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add data: ``log_probs [n, C]``, ``labels``, which do not matter."""
        self.add(predictive_entropy(log_probs), [log_probs])


class ECE(BinaryCalibrationError):
    r"""Expected calibration error of the most probable class: torchmetrics', with the L1 norm.

    :math:`\sum_b \frac{n_b}{n} |\mathrm{acc}_b - \mathrm{conf}_b|` over bins of equal width in the
    confidence :math:`\max_c e^{\ell_c}`; equal to ``MulticlassCalibrationError``.

    Args:
        n_bins: Number of bins.

    Raises:
        ValueError: If it is not positive.

    Example:
        >>> metric = ECE()
        >>> metric.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 0]))
        >>> round(metric.compute().item(), 4)
        0.375
    """

    def __init__(self, n_bins: int = 15) -> None:
        """Start from no data."""
        if n_bins < 1:
            raise ValueError(f"Expected n_bins >= 1, got {n_bins}. Remedy: the paper's is 15.")
        super().__init__(n_bins=n_bins, norm="l1")

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add data: ``log_probs [n, C]``, ``labels [n]`` or ``[n, C]``."""
        log_confidences, classes = log_probs.max(-1)  # NaN if there is one
        # single precision, as in MulticlassCalibrationError: it decides which confidences are 1
        self.confidences.append(log_confidences.exp().clamp(max=1).float())
        self.accuracies.append((classes == most_probable(labels)).float())

    def compute(self) -> Tensor:
        """Return the calibration error of all data added so far."""
        error = super().compute()
        # torchmetrics replaces NaN by zero
        return error.masked_fill(dim_zero_cat(self.confidences).isnan().any(), math.nan)

    def top_label(self) -> tuple[Tensor, Tensor]:
        """Confidences ``[n]`` and whether each prediction is right ``[n]``, of all processes."""
        fresh = not self._is_synced  # within `compute` they are there already
        with self.sync_context(should_sync=fresh, should_unsync=fresh):
            return dim_zero_cat(self.confidences), dim_zero_cat(self.accuracies)
