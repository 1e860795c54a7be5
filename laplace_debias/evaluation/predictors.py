"""Predictions of anything that can be evaluated, in one form.

A prediction is ``(log-probabilities [n, C],)`` for classification, with positions
``[n, *positions, C]``, and ``(mean [n, D], (co)variance)``, without observation noise, for
regression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast, runtime_checkable

import torch
from laplace.baselaplace import BaseLaplace
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from laplace_debias.data.inputs import Inputs
from laplace_debias.data.processes import counted, together
from laplace_debias.data.reading import read
from laplace_debias.data.targets import IGNORED, check_targets
from laplace_debias.network.calling import call_model, classes_last
from laplace_debias.network.loss import Likelihood, binary_labels, likelihood_name
from laplace_debias.network.upstream import device_of
from laplace_debias.predictive.links import check_link
from laplace_debias.predictive.predictions import (
    Prediction,
    Predictor,
    check_method,
    glm_predictions,
    logit_temperature_of,
)

__all__ = [
    "LogProbabilities",
    "Predict",
    "Update",
    "counted_rows",
    "for_metrics",
    "ignore_index_of",
    "laplace_predictor",
    "model_predictor",
    "run_sweep",
]

Predict = Callable[[Inputs], Prediction]
Update = Callable[[int, Prediction, Tensor], None]
"""What to do with the prediction of the i-th prior precision and its targets."""


@runtime_checkable
class LogProbabilities(Protocol):
    """A posterior that knows its log-probabilities, not just their exponentials."""

    def log_probabilities(self, x: Inputs, **options: Any) -> Tensor:
        """Return log-probabilities ``[n, C]``; options as those of ``la(x)``."""
        ...


def model_predictor(model: nn.Module, likelihood: Likelihood) -> Predict:
    """Predictions of a plain network, without any uncertainty about its weights.

    Args:
        model: The network; its outputs are logits, or means.
        likelihood: ``"classification"`` or ``"regression"``.

    Returns:
        A function of inputs.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> (log_probs,) = model_predictor(model, "classification")(torch.zeros(4, 3))
        >>> log_probs.shape
        torch.Size([4, 2])
    """

    @torch.no_grad()
    def predict(X: Inputs) -> Prediction:
        output = call_model(model, X)
        if likelihood == "classification":
            return (classes_last(output).log_softmax(-1),)
        if likelihood == "bernoulli":
            return (logsigmoid(torch.stack([-output, output], dim=-1)),)
        return output, torch.zeros_like(output)

    return predict


def laplace_predictor(
    la: BaseLaplace,
    pred_type: str | None = None,
    link_approx: str = "probit",
    n_samples: int = 100,
    generator: torch.Generator | None = None,
) -> Predict:
    """Predictions of a Laplace approximation, ours or laplace-torch's.

    laplace-torch's own return probabilities: their logarithm is minus infinity where one underflows
    to 0.

    Args:
        la: A fitted approximation.
        pred_type: ``"glm"`` or ``"nn"``; its own default if not given.
        link_approx: The link, for classification; ``"nn"`` knows ``"mc"`` only, and takes it.
        n_samples: Number of samples, if any.
        generator: Source of random numbers; the global one by default.

    Returns:
        A function of inputs.

    Example:
        >>> from laplace import Laplace
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> data = TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))
        >>> la = Laplace(nn.Linear(3, 2), "classification", "all", "kron")
        >>> la.fit(DataLoader(data, batch_size=8))
        >>> (log_probs,) = laplace_predictor(la)(torch.zeros(4, 3))
        >>> log_probs.shape
        torch.Size([4, 2])
    """
    options: dict[str, Any] = {"n_samples": n_samples}
    if pred_type is not None:
        options["pred_type"] = pred_type
    if generator is not None:
        options["generator"] = generator
    regression = likelihood_name(la.likelihood) == "regression"
    classes = likelihood_name(la.likelihood) == "classification"
    options["link_approx"] = "mc" if pred_type == "nn" else link_approx
    # preferences between pairs, not rewards of single inputs
    preferences: dict[str, Any] = {"fitting": True} if la.likelihood == "reward_modeling" else {}

    def predict(X: Inputs) -> Prediction:
        if isinstance(la, LogProbabilities) and not regression:
            log_probs = la.log_probabilities(X, **options)
            return (classes_last(log_probs) if classes else log_probs,)
        output: Any = la(cast(Any, X), **options, **preferences)
        if regression:
            mean, variance = output
            return mean, variance
        return (output.log(),)

    return predict


def for_metrics(
    prediction: Prediction, y: Tensor, likelihood: Likelihood, ignore_index: int = IGNORED
) -> tuple[Prediction, Tensor]:
    """A prediction and its targets as metrics take them, once they fit each other.

    Args:
        prediction: What a predictor returned.
        y: The targets.
        likelihood: Of the outputs.
        ignore_index: The label of positions that do not count.

    Returns:
        The same; of positions (tokens, pixels) those that count, one after the other; of labels
        (Bernoulli), every one as a datum of two classes.

    Raises:
        ValueError: If the targets do not fit.

    Example:
        >>> log_probs = torch.full((4, 3, 2), 0.5).log()
        >>> (flat,), labels = for_metrics((log_probs,), torch.ones(4, 3), "bernoulli")
        >>> flat.shape, labels.shape
        (torch.Size([12, 2]), torch.Size([12]))
    """
    if likelihood != "bernoulli":
        check_targets(y, prediction[0].shape, likelihood, ignore_index)
        if likelihood == "regression":
            return prediction, y
        rows, labels = counted_rows(prediction[0], y, ignore_index)
        return (rows,), labels
    (log_probs,) = prediction
    check_targets(y, log_probs.shape[:-1], likelihood)
    return (log_probs.flatten(0, -2),), binary_labels(y.flatten())


def run_sweep(
    la: BaseLaplace,
    predictor: Predictor,
    loader: Iterable[Any],
    update: Update,
    *,
    link_approx: str,
    n_samples: int,
    method: str | None = None,
    generator: torch.Generator | None = None,
    progress_bar: bool | None = None,
) -> int:
    """Predict for every batch and grid point; hand each prediction to ``update(i, prediction, y)``.

    A prediction is ``(log-probabilities,)`` for classification and ``(mean, covariance)`` for
    regression.

    Args:
        la: The Laplace approximation.
        predictor: Its linearised predictive over a grid.
        loader: Mini-batches ``(x, y)`` or mappings, or one such mini-batch.
        update: What to do with a prediction.
        link_approx: Link approximation, for classification.
        n_samples: Number of samples, if any.
        method: ``"exact"``, ``"top"``, ``"samples"`` or ``"auto"``; by default what the posterior
            says (``la.predictive_method``), for laplace-torch's own classes ``"auto"``.
        generator: Random number generator for samples.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.

    Returns:
        The number of data, or of positions that count.

    Raises:
        ValueError: For an unknown link or method, or data that :func:`~laplace_debias.data.reading.
            read` refuses or that do not fit the model's outputs.
    """
    check_link(link_approx)
    way = str(method or getattr(la, "predictive_method", "auto"))
    check_method(way)
    n_data, likelihood = 0, likelihood_name(la.likelihood)
    with torch.no_grad(), together("its share of the sweep"):
        for x, y in read(
            loader, device_of(la), la.dict_key_y, progress="[Sweep]", progress_bar=progress_bar
        ):
            predictions = glm_predictions(
                predictor,
                x,
                regression=likelihood == "regression",
                labels=likelihood == "bernoulli",
                link_approx=link_approx,
                n_samples=n_samples,
                method=way,
                generator=generator,
                logit_temperature=logit_temperature_of(la),
            )
            n_rows = len(y)
            for i, prediction in enumerate(predictions):
                rows, labels = for_metrics(prediction, y, likelihood, ignore_index_of(la))
                n_rows = n_rows if likelihood == "bernoulli" else len(labels)
                if len(labels):
                    update(i, rows, labels)
            n_data += n_rows
    return counted(n_data)


def ignore_index_of(la: Any) -> int:
    """The label of positions that do not count, for a Laplace approximation of any kind.

    Args:
        la: A Laplace approximation, ours or laplace-torch's.

    Example:
        >>> ignore_index_of(object())
        -100
    """
    return int(getattr(getattr(la, "objective", None), "ignore_index", IGNORED))


def counted_rows(
    values: Tensor, labels: Tensor, ignore_index: int = IGNORED, leading: int = 0
) -> tuple[Tensor, Tensor]:
    """One row for each datum, or for each position that counts.

    Args:
        values: ``[n, C]`` or ``[n, *positions, C]``, with further dimensions before.
        labels: Class indices ``[n, *positions]``, or class probabilities ``[n, *positions, C]``,
            which all count.
        ignore_index: The label of positions that do not count; every datum of ``[n, C]`` does.
        leading: How many dimensions ``values`` has before the data.

    Returns:
        Rows ``[..., m, C]``, and their labels ``[m]`` or ``[m, C]``.

    Example:
        >>> import torch
        >>> rows, labels = counted_rows(torch.zeros(1, 3, 2), torch.tensor([[0, -100, 1]]))
        >>> rows.shape, labels
        (torch.Size([2, 2]), tensor([0, 1]))
    """
    soft = labels.is_floating_point()
    labels = labels.to(values.device) if soft else labels.to(values.device).long()
    if values.ndim - leading == 2:
        return values, labels
    rows = values.flatten(leading, -2)
    if soft:
        return rows, labels.flatten(0, -2)
    flat = labels.flatten()
    keep = flat != ignore_index
    return rows.movedim(leading, 0)[keep].movedim(0, leading), flat[keep]
