"""How far one mini-batch over-estimated its own top curvature and under-estimated its bottom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from laplace_debias.storage.export import ExportedResult

__all__ = ["CurvatureBias", "LayerBias", "curvature_bias"]


@dataclass(frozen=True)
class LayerBias:
    """Mean curvature at both ends of one block's spectrum, before and after debiasing.

    Attributes:
        name: Parameter name.
        n_directions: Number of eigenvectors of the block.
        n_end: Number of eigenvectors taken at either end.
        top_biased: Mean curvature along the top directions on the data that chose them.
        top_debiased: The same on the other data.
        bottom_biased: Mean curvature along the bottom directions on the data that chose them.
        bottom_debiased: The same on the other data.
    """

    name: str
    n_directions: int
    n_end: int
    top_biased: float
    top_debiased: float
    bottom_biased: float
    bottom_debiased: float

    @property
    def top_ratio(self) -> float:
        """Over-estimation of the top curvature: biased over debiased, 1 without bias."""
        return _ratio(self.top_biased, self.top_debiased, self.top_biased)

    @property
    def bottom_ratio(self) -> float:
        """Under-estimation of the bottom curvature: biased over debiased, 1 without bias."""
        return _ratio(self.bottom_biased, self.bottom_debiased, self.top_biased)


@dataclass(frozen=True)
class CurvatureBias(ExportedResult):
    """The curvature bias of every block of a fitted Laplace approximation.

    Attributes:
        layers: One entry per trainable parameter.
        fraction: Share of a block's directions that counts as its top, and as its bottom.
    """

    layers: tuple[LayerBias, ...]
    fraction: float

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and one row per layer."""
        names = [field.name for field in fields(LayerBias)] + ["top_ratio", "bottom_ratio"]
        return names, [[getattr(layer, name) for name in names] for layer in self.layers]

    def __str__(self) -> str:
        """A table with one line per layer."""
        width = max([len(layer.name) for layer in self.layers] + [5])
        head = (
            f"{'layer':<{width}} {'directions':>10}  {'top: biased':>11} {'debiased':>10} "
            f"{'ratio':>7}  {'bottom: biased':>14} {'debiased':>10} {'ratio':>7}"
        )
        lines = [
            f"Curvature along the top and bottom {self.fraction:.0%} of each block's directions, "
            "on the data that chose them (biased) and on other data (debiased); below rounding, "
            "ratios count as 1",
            head,
        ]
        for layer in self.layers:
            lines.append(
                f"{layer.name:<{width}} {layer.n_directions:>10}  {layer.top_biased:>11.3g} "
                f"{layer.top_debiased:>10.3g} {layer.top_ratio:>7.3g}  "
                f"{layer.bottom_biased:>14.3g} {layer.bottom_debiased:>10.3g} "
                f"{layer.bottom_ratio:>7.3g}"
            )
        return "\n".join(lines)


def curvature_bias(
    names: Sequence[str],
    lam: Sequence[Sequence[Tensor]],
    lam_tilde: Sequence[Sequence[Tensor]],
    fraction: float = 0.1,
) -> CurvatureBias:
    r"""Compare the eigenvalues of one mini-batch with the curvature that other data show.

    A block's directions are the columns of ``kron(Q_B, Q_A)``, their biased curvatures
    ``lam_B x lam_A``, their debiased ones ``lam~_B x lam~_A``; they are ranked by the biased ones.

    Args:
        names: One name per block.
        lam: Eigenvalues per factor on the data that chose the directions, ``[d]`` each.
        lam_tilde: Curvatures along the same directions on other data, ``[d]`` each.
        fraction: Share of the directions at either end, in (0, 0.5].

    Returns:
        Means over both ends of each block.

    Raises:
        ValueError: If ``fraction`` is outside (0, 0.5].

    Example:
        >>> lam, lam_tilde = [[torch.tensor([0.0, 4.0])]], [[torch.tensor([1.0, 2.0])]]
        >>> bias = curvature_bias(["bias"], lam, lam_tilde, fraction=0.5)
        >>> bias.layers[0].top_ratio, bias.layers[0].bottom_ratio
        (2.0, 0.0)
    """
    if not 0 < fraction <= 0.5:
        raise ValueError(
            f"Expected `fraction` in (0, 0.5], got {fraction}. Remedy: 0.1 compares the top tenth "
            "and the bottom tenth of the directions."
        )
    layers = []
    for name, biased, debiased in zip(names, lam, lam_tilde, strict=True):
        before, after = _products(biased), _products(debiased)
        k = max(1, math.floor(fraction * before.numel()))
        order = before.argsort()
        layers.append(
            LayerBias(
                name=name,
                n_directions=before.numel(),
                n_end=k,
                top_biased=before[order[-k:]].mean().item(),
                top_debiased=after[order[-k:]].mean().item(),
                bottom_biased=before[order[:k]].mean().item(),
                bottom_debiased=after[order[:k]].mean().item(),
            )
        )
    return CurvatureBias(tuple(layers), fraction)


def _products(values: Sequence[Tensor]) -> Tensor:
    """Eigenvalues of a block from those of its factors, flattened."""
    return values[0] if len(values) == 1 else torch.outer(values[0], values[1]).flatten()


def _ratio(numerator: float, denominator: float, scale: float) -> float:
    """A ratio that is 1 for 0 / 0 and infinite for a positive number over 0.

    What lies below the rounding errors of a spectrum of this scale is 0.
    """
    floor = torch.finfo(torch.float32).eps * scale
    if denominator <= floor:
        return 1.0 if numerator <= floor else math.inf
    return numerator / denominator if numerator > floor else 0.0
