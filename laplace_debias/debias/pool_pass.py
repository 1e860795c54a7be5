"""One forward pass over a pool of data: input factors, outputs for the scores, and the loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laplace_debias.data.inputs import Inputs, Keys, take
from laplace_debias.data.map_style import MapStyle
from laplace_debias.data.targets import check_unweighted
from laplace_debias.debias.few_rows import few_rows_from, most_few_rows
from laplace_debias.debias.options import ResolvedOptions
from laplace_debias.debias.sampling import curvature_order
from laplace_debias.kfac.factors import Factors
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.network.loss import curvature_scores

__all__ = ["PoolPass"]


@dataclass
class PoolPass:
    """What one forward pass over a pool yields; mini-batches are added one by one.

    Attributes:
        engine: The engine, which counts its passes.
        options: Folds and numbers of data.
        key: Key of the inputs in a mapping.
        A: Input factors of each fold.
        more_rows: Input rows of wide layers beyond ``n_input`` data, of each mini-batch.
        outputs: Outputs ``[n, C]`` of each mini-batch.
        loss: Sum of the losses.
    """

    engine: EngineInterface
    options: ResolvedOptions
    key: Keys
    A: dict[int, Factors] = field(default_factory=dict)
    more_rows: list[tuple[Tensor | None, ...]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    loss: Tensor | float = 0.0

    def add(self, X: Inputs, y: Tensor) -> Tensor:
        """Pass a mini-batch; the first ``n_input`` data serve the input factors, in all folds.

        Layers of so many inputs that ``n_input`` rows are few for them take rows of further data as
        well, as long as they are few: the pass that scores these data yields them anyway.
        """
        check_unweighted(y, "sampling='curvature'", "sampling='uniform', or debias=True")
        K, seen = self.options.n_folds, sum(map(len, self.outputs))
        stop = max(0, min(len(y), self.options.n_input - seen))
        parts: list[tuple[slice, Tensor]] = []
        for k in range(K):  # every K-th datum of the pool
            rows = slice((k - seen) % K, stop, K)
            if rows.start < stop:
                least = few_rows_from(self.options.n_input)
                new = self._forward(X, y, rows, inputs=True, rows_from=least)
                parts.append((rows, new.kept_outputs))
                new = replace(new, outputs=None)
                self.A[k] = self.A[k] + new if k in self.A else new
        if stop < len(y):
            rows = slice(stop, len(y))
            least = few_rows_from(max(seen + stop + 1, self.options.n_input))
            new = self._forward(X, y, rows, inputs=False, rows_from=least)
            self.more_rows.append(new.rows)
            parts.append((rows, new.kept_outputs))
        f = parts[0][1].new_empty(len(y), *parts[0][1].shape[1:])
        for rows, part in parts:
            f[rows] = part
        self.outputs.append(f)
        return f

    def found(self) -> dict[str, Any]:
        """What was found so far: arguments of another one that goes on from here."""
        return {name: getattr(self, name) for name in ("A", "more_rows", "outputs", "loss")}

    def _forward(
        self, X: Inputs, y: Tensor, rows: slice, *, inputs: bool, rows_from: float
    ) -> Factors:
        """Input factors, rows and outputs of some data of a mini-batch; adds up their loss."""
        new = self.engine.factors(
            take(X, rows, self.key), y[rows], inputs=inputs, outputs=False, rows_from=rows_from
        )
        self.loss = self.loss + new.summed_loss
        return new

    def scored(self, pool: MapStyle, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores of the pool's data, and the order to draw them in.

        Args:
            pool: The pool, after all of its data were passed.
            given: Scores from training of the whole dataset, if there are any.

        Returns:
            Scores ``[n]`` and a permutation.

        Raises:
            ValueError: If given scores do not fit the dataset.
        """
        if given is None:
            f = torch.cat(self.outputs)
            scores = curvature_scores(f, self.engine.likelihood)
            classes = self.engine.likelihood == "classification"
            return scores, curvature_order(f) if classes else torch.arange(len(f), device=f.device)
        dataset: Any = pool.loader.dataset
        if len(given) != len(dataset):
            raise ValueError(
                f"Expected one score for each of the {len(dataset)} data of the dataset, got "
                f"{len(given)}. Remedy: keep the scores in the order of the dataset."
            )
        scores = given[torch.tensor(pool.positions)]
        return scores, scores.argsort()

    def rows(self) -> list[Tensor | None]:
        """For each parameter the rows ``[n, d_in]`` of a wide layer, no more than few, or None."""
        found: list[Tensor | None] = []
        for i, own in enumerate(zip(*(fold.rows for fold in self.A.values()), strict=True)):
            first = [part for part in own if part is not None]
            if len(first) < len(own):
                found.append(None)
                continue
            more = [part for batch in self.more_rows if (part := batch[i]) is not None]
            rows = torch.cat([*first, *more])
            found.append(rows[: most_few_rows(rows.shape[1])])
        return found
