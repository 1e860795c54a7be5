"""What a Kron posterior has to beat: nothing, a temperature, a last layer, a prior, a diagonal.

All are fitted on the whole training set (if on anything at all), once: what is compared is the
kind of posterior, not the data behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import nn

from laplace_debias.comparison.rows import DIAGONAL, LAST_LAYER, PLAIN, PRIOR_ONLY, TEMPERATURE
from laplace_debias.data.processes import processes, together
from laplace_debias.data.reading import read
from laplace_debias.data.targets import IGNORED
from laplace_debias.evaluation.metrics import most_probable
from laplace_debias.evaluation.predictors import counted_rows
from laplace_debias.network.calling import call_model, classes_last
from laplace_debias.network.preserve import evaluation_mode

__all__ = ["BASELINES", "best_temperature", "check_baselines"]

BASELINES = (PLAIN, TEMPERATURE, LAST_LAYER, PRIOR_ONLY, DIAGONAL)


def check_baselines(
    baselines: Sequence[str], likelihood: str, val_loader: Iterable[Any] | None
) -> None:
    """Raise unless all baselines are known and can be made.

    Args:
        baselines: Their names.
        likelihood: ``"classification"`` or ``"regression"``.
        val_loader: Validation data, if any.

    Raises:
        ValueError: If one is unknown, or a temperature has no logits or no validation data.

    Example:
        >>> check_baselines(["plain", "diagonal"], "regression", None)
    """
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown:
        raise ValueError(
            f"Expected baselines among {list(BASELINES)}, got {unknown}. Remedy: correct the name."
        )
    if TEMPERATURE in baselines and (likelihood == "regression" or val_loader is None):
        raise ValueError(
            f"Expected the baseline {TEMPERATURE!r} for a classification and with a `val_loader`, "
            f"which chooses it; got {likelihood} with val_loader={val_loader}. Remedy: pass "
            "`val_loader=...`, or leave the baseline out."
        )


def best_temperature(
    model: nn.Module,
    loader: Iterable[Any],
    key_y: str = "labels",
    ignore_index: int = IGNORED,
) -> float:
    r"""The T that minimises the NLL of a network whose logits are divided by it.

    :math:`\min_T -\frac1n \sum_i \log \mathrm{softmax}(f(x_i) / T)_{y_i}`, between 1/20 and 20.

    Args:
        model: A classifier; it is left as it is.
        loader: Validation data.
        key_y: Key of the labels in mini-batches that are mappings.
        ignore_index: The label of positions (tokens, pixels) that do not count.

    Example:
        >>> net = nn.Linear(2, 2, bias=False)
        >>> net.weight.data = torch.tensor([[9.0, 0.0], [0.0, 0.0]])
        >>> X = torch.tensor([[1.0, 0.0]] * 4)
        >>> round(best_temperature(net, (X, torch.tensor([0, 0, 0, 1]))), 3)  # 9 / log 3
        8.192
    """
    device = next(model.parameters()).device
    work = "its share of the validation data"
    with torch.no_grad(), evaluation_mode(model), together(work):
        batches = [
            counted_rows(classes_last(call_model(model, X)).double(), y, ignore_index)
            for X, y in read(loader, device, key_y, name="val_loader")
        ]
    group = processes()
    if group is not None:
        shares = group.gather([(f.cpu(), y.cpu()) for f, y in batches])
        batches = [(f.to(device), y.to(device)) for share in shares for f, y in share]
    logits = torch.cat([f for f, _ in batches])
    labels = most_probable(torch.cat([y for _, y in batches]))

    def nll(log_T: float) -> float:
        return float(nn.functional.cross_entropy(logits / math.exp(log_T), labels))

    found = minimize_scalar(nll, bounds=(-math.log(20), math.log(20)), method="bounded")
    return math.exp(float(found.x))
