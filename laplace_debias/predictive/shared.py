"""Linearised predictives of several posteriors around one model, from the same passes through it.

Layer inputs and output gradients depend on the model and the data alone, so posteriors that differ
in their curvature (another mini-batch, another method) can share the one backward pass per output.
"""

from __future__ import annotations

from collections.abc import Sequence

from laplace_debias.network.capture import Inputs, prediction_mode
from laplace_debias.predictive.eigenblocks import is_last_layer
from laplace_debias.predictive.predictor import LinearizedPredictive, StructuredPredictor

__all__ = ["SharedPredictor"]


class SharedPredictor:
    """Exact linearised predictives of several posteriors, one after the other from shared passes.

    Args:
        predictors: One per posterior, around the same model and the same parameters. The first
            one's memory budget holds; no graph is kept.

    Raises:
        ValueError: If there is no predictor, or their parameters differ.

    Example:
        >>> import torch
        >>> from laplace_debias import Laplace
        >>> net = torch.nn.Linear(2, 3)
        >>> batch = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> predictors = []
        >>> for n in (4, 8):
        ...     la = Laplace(net, "classification", "all", "kron", debias="single")
        ...     la.fit((batch[0][:n], batch[1][:n]), n_data=100)
        ...     predictors.append(StructuredPredictor(la, [1.0, 10.0]))
        >>> [tuple(result.covariance.shape) for result in SharedPredictor(predictors)(batch[0])]
        [(2, 8, 3, 3), (2, 8, 3, 3)]
    """

    def __init__(self, predictors: Sequence[StructuredPredictor]) -> None:
        """Check that the passes can be shared."""
        if not predictors:
            raise ValueError("Expected at least one predictor, got none. Remedy: pass some.")
        self.predictors = tuple(predictors)
        params = [[id(p) for p in predictor.params] for predictor in predictors]
        if not is_last_layer(predictors[0].la) and any(ids != params[0] for ids in params):
            raise ValueError(
                "Expected posteriors over the same parameters of one model, got others. Remedy: "
                "build every Laplace approximation around the same model object, with the same "
                "parameters frozen."
            )

    def __call__(self, x: Inputs, diagonal_output: bool = False) -> list[LinearizedPredictive]:
        """Return the predictive of each posterior at ``x``.

        Args:
            x: Inputs ``[n, ...]``, or a mapping of tensors.
            diagonal_output: Return the diagonals of the covariances only, which is cheaper.
        """
        first = self.predictors[0]
        if is_last_layer(first.la):  # a closed form without backward passes
            return [predictor(x, diagonal_output) for predictor in self.predictors]
        x = first._inputs(x)
        mode = "variance" if diagonal_output else "covariance"
        with prediction_mode(first.la.model, first.params):
            f, moments = first._all_layers(x, mode, [p.blocks for p in self.predictors])
        f = f.detach()
        return [
            predictor._result(f, part.detach(), "exact")
            for predictor, part in zip(self.predictors, moments, strict=True)
        ]
