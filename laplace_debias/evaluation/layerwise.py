r"""A prior precision per layer, by gradient on validation data.

With :math:`v_b(\delta) = \sum_i \tilde J_{bi}^2 / (\lambda_{bi} + \delta)` what block b adds to an
output's variance, a layer-wise prior gives :math:`\Sigma = \sum_b v_b(\delta_b)`. One pass measures
:math:`\delta v_b(\delta)` at Chebyshev nodes of :math:`\log \delta`; it is bounded and smooth, so
the polynomial through 16 nodes is it, to 7e-5 of its largest value over four decades. From there
on gradients with respect to all :math:`\log \delta_b` need no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor

from laplace_debias.data.inputs import size_of, take
from laplace_debias.data.processes import processes, together
from laplace_debias.data.reading import read
from laplace_debias.evaluation.regression import gaussian_nll, with_noise
from laplace_debias.evaluation.tuning_result import LayerwiseTrial
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.upstream import device_of, noise_of, row_keys
from laplace_debias.predictive.links import class_log_probabilities
from laplace_debias.predictive.predictions import DEFAULT_MEMORY_BUDGET, GridPredictor, PredictorOf

__all__ = ["lagrange", "layerwise_trial"]

N_NODES = 16
DECADES = 2.0  # either side of the scalar prior precision


def chebyshev(n: int, like: Tensor) -> Tensor:
    """Chebyshev points of the second kind in [-1, 1], ends included, ``[n]``."""
    return -torch.cos(math.pi * torch.arange(n).to(like) / (n - 1))


def lagrange(t: Tensor, nodes: Tensor) -> Tensor:
    r"""Coefficients :math:`c_j(t) = \prod_{i \ne j} (t - t_i) / (t_j - t_i)` of interpolation.

    Args:
        t: Where, ``[b]``; may require a gradient.
        nodes: ``[r]``.

    Returns:
        ``[b, r]``; rows sum to one.

    Example:
        >>> lagrange(torch.tensor([0.5]), torch.tensor([0.0, 1.0]))
        tensor([[0.5000, 0.5000]])
    """
    r = len(nodes)
    others = [[i for i in range(r) if i != j] for j in range(r)]
    rest = nodes[torch.tensor(others, device=nodes.device)]  # [r, r - 1]
    return ((t[:, None, None] - rest) / (nodes[:, None] - rest)).prod(-1)


def layerwise_trial(
    la: KronLaplace,
    loader: Iterable[Any],
    prior_precision: float,
    logit_temperature: float = 1.0,
    *,
    predictor_of: PredictorOf,
    noise_scale: float = 1.0,
    bounds: tuple[float, float] = (0.0, math.inf),
    n_steps: int = 150,
    lr: float = 0.05,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    progress_bar: bool | None = None,
) -> LayerwiseTrial:
    """Improve a scalar prior precision per parameter tensor, within two decades of it.

    Data with even numbers choose, those with odd numbers judge. Classification has the probit link.

    Args:
        la: A fitted ``KronLaplace`` or ``KronLLLaplace``; it is left as it is.
        loader: Mini-batches ``(x, y)`` or mappings, or one such mini-batch.
        prior_precision: The scalar prior precision to start from, at the present ``sigma_noise``.
        logit_temperature: T, which stays.
        predictor_of: Makes the linearised predictive of ``la`` at given prior precisions:
            :class:`~laplace_debias.predictive.predictor.StructuredPredictor`.
        noise_scale: By which a regression's ``sigma_noise`` is to be multiplied; what is found
            belongs to that noise.
        bounds: Smallest and largest prior precision to try, at the present ``sigma_noise``.
        n_steps: Steps of Adam.
        lr: Their learning rate; positions are between -1 and 1.
        memory_budget: Bytes for what every block adds to every variance; of more data only as many
            as fit are read.
        progress_bar: Show a progress bar; by default on a terminal.

    Returns:
        The trial.
    """
    regression = likelihood_name(la.likelihood) == "regression"
    like = torch.empty(0, dtype=torch.float64, device=device_of(la))
    nodes = chebyshev(N_NODES, like)
    sigma = noise_of(la)
    low, high = (
        math.log10(max(end, 1e-300) / prior_precision) / DECADES if end < math.inf else 1.0
        for end in bounds
    )
    ends = max(-1.0, min(0.0, low)), min(1.0, max(0.0, high))
    deltas = prior_precision * 10 ** (DECADES * nodes)
    predictor = predictor_of(la, deltas, keep_graph=False)
    means, moments, targets = _moments(
        la, predictor, loader, not regression, memory_budget, progress_bar
    )

    def losses(t: Tensor, half: slice) -> Tensor:
        """One loss per datum of a half, ``[n]``."""
        c = lagrange(t, nodes) / (prior_precision * 10 ** (DECADES * t))[:, None]  # [b, r]
        part = moments[:, half].double()
        variance = torch.einsum("b...r,br->...", part, c)
        f, y = means[half].double(), targets[half]
        if regression:
            return gaussian_nll(f, noise_scale**2 * with_noise(variance, sigma), y.to(f))
        T = logit_temperature
        log_probs = class_log_probabilities(f / T, variance / T**2, "probit", diagonal=True)
        if y.is_floating_point():
            return -(y.to(f) * log_probs).sum(-1)
        return -log_probs.gather(-1, y[:, None]).squeeze(-1)

    first, second = slice(0, None, 2), slice(1, None, 2)
    start = torch.zeros(len(moments)).to(like)
    t = _descend(lambda t: losses(t, first).mean(), start, ends, n_steps, lr)
    with torch.no_grad():
        zero = torch.zeros_like(t)
        seen = [float(losses(at, first).mean()) for at in (zero, t)]
        before, after = (losses(at, second) for at in (zero, t))
        gain = before - after
        error = float(gain.std() / math.sqrt(len(gain))) if len(gain) > 1 else math.inf
    chosen = prior_precision * 10 ** (DECADES * t) / noise_scale**2
    return LayerwiseTrial(
        tuple(chosen.tolist()),
        (seen[0], seen[1]),
        (float(before.mean()), float(after.mean())),
        error,
        len(means),
    )


def _descend(
    loss: Callable[[Tensor], Tensor],
    t: Tensor,
    ends: tuple[float, float],
    n_steps: int,
    lr: float,
) -> Tensor:
    """The best place that projected steps of Adam found between two ends."""
    with torch.inference_mode(False), torch.enable_grad():
        t = t.clone().requires_grad_(True)
        optimiser = torch.optim.Adam([t], lr)
        best, lowest = t.detach().clone(), math.inf
        for _ in range(n_steps):
            optimiser.zero_grad()
            value = loss(t)
            if value.item() < lowest:
                best, lowest = t.detach().clone(), value.item()
            value.backward()
            optimiser.step()
            with torch.no_grad():
                t.clamp_(*ends)
    return best


def _moments(
    la: KronLaplace,
    predictor: GridPredictor,
    loader: Iterable[Any],
    diagonal: bool,
    memory_budget: int,
    progress_bar: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Means ``[n, C]``, ``delta v_b(delta)`` ``[b, n, ..., r]`` and targets of what fits."""
    deltas = predictor.deltas[:, 0]
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    used, key = 0, row_keys(la)
    shown: dict[str, Any] = {"progress": "layer-wise", "progress_bar": progress_bar}
    with together("its share of the validation data"):
        for x, y in read(loader, device_of(la), la.dict_key_y, name="val_loader", **shown):
            C = la.n_outputs
            per_datum = deltas.element_size() * predictor.deltas.shape[1] * len(deltas) * C
            per_datum *= 1 if diagonal else C
            room = max(2 if not kept else 0, (memory_budget - used) // per_datum)
            if room == 0:
                break
            n = min(room, size_of(x, key))
            f, moments = predictor.apart(take(x, slice(0, n), key), diagonal)
            if f.ndim > 2 or likelihood_name(la.likelihood) == "bernoulli":
                raise ValueError(
                    "Expected one class per datum, or a regression, for a prior precision per "
                    f"layer, got outputs of shape {list(f.shape)} with "
                    f"likelihood={la.likelihood!r}. Remedy: a scalar prior precision."
                )
            kept.append((f, moments * deltas, y[:n]))
            used += n * per_datum
    group = processes()
    if group is not None:  # few numbers per datum: every process has all of them, and the same
        moved = [tuple(part.cpu() for part in each) for each in kept]
        kept = [each for share in group.gather(moved) for each in share]
    means, parts, targets = zip(*kept, strict=True)
    device = deltas.device
    return (
        torch.cat(means).to(device),
        torch.cat(parts, dim=1).to(device),
        torch.cat(targets).to(device),
    )
