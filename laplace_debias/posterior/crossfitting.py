"""The part of the debiased classes that fits with ``debias="crossfit"``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from laplace.utils import FeatureExtractor
from torch import Tensor

from laplace_debias.data.pool import is_map_style
from laplace_debias.data.reading import as_batches, warn_if_sequential
from laplace_debias.debias.crossfit import fit_crossfit
from laplace_debias.debias.options import CrossfitOptions
from laplace_debias.kfac.counted import FitCost, Network
from laplace_debias.kfac.upstream import computing_model

__all__ = ["CrossFitting"]


class CrossFitting:
    """Mix-in before laplace-torch's class; what it reads is said by ``crossfit``."""

    crossfit: CrossfitOptions | None = None
    """What ``debias="crossfit"`` fits on."""
    fit_cost: FitCost | None = None
    """Passes through the network of the last ``debias="crossfit"`` fit."""

    def _fit_crossfit(
        self, loader: Iterable[Any], N: int, override: bool, progress_bar: bool
    ) -> None:
        """Fit with folds; see :mod:`laplace_debias.debias.crossfit`."""
        if not override:
            raise ValueError(
                "Expected `override=True` with debias='crossfit', whose folds are gone after a "
                "fit; got False. Remedy: fit on all data at once, or use debias=True."
            )
        warn_if_sequential(loader)
        if self._last_layer and self.model.last_layer is None:
            batches = iter(as_batches(loader))
            first = next(batches, None)
            if first is not None:
                self._prepare(first, override)
            if not is_map_style(loader):
                loader = itertools.chain([] if first is None else [first], batches)
        engine = self._backend_cls(self.model, self._likelihood, **self._backend_kwargs)
        with computing_model(self.model, self._last_layer) as (model, cast):
            if self._last_layer:
                model.last_layer.requires_grad_(True)
            network = Network(
                model.last_layer if self._last_layer else model,
                (lambda X: _features(model, cast(X))) if self._last_layer else cast,
                self._likelihood,
                engine.fisher,
                self.crossfit.generator,
            )
            result = fit_crossfit(
                network,
                loader,
                self.crossfit,
                N,
                device=self._device,
                dict_key_x=self.dict_key_x,
                dict_key_y=self.dict_key_y,
                progress_bar=progress_bar,
            )
        if result.n_seen > N:
            raise ValueError(
                f"Expected `n_data` of at least {result.n_seen}, the number of data seen, got {N}. "
                "Remedy: pass the number of data in the whole training set as `n_data`."
            )
        self._finish(result.fitted, result.loss * N, N, result.n_outputs)
        self.fit_cost = result.cost


@torch.no_grad()
def _features(model: FeatureExtractor, X: Any) -> Tensor:
    """Inputs of the last layer, ``[n, d]``."""
    return model.forward_with_features(X)[1]
