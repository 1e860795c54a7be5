"""What forward passes over a pool tell: input factors, outputs, scores, the loss, and probes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from laplace_debias.data.inputs import Inputs, Keys, concatenate, datum_shapes, size_of, take
from laplace_debias.data.processes import processes
from laplace_debias.data.targets import check_unweighted
from laplace_debias.debias.pairs import pair_scores
from laplace_debias.debias.pool_inputs import PoolInputs
from laplace_debias.debias.pool_news import News, Sums, added_sums, sums_of
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.kfac.sums import factors_of_all

__all__ = ["PoolMoments"]

MOST_PROBES = 16
MOST_PROBE_NUMBERS = 2**24


class PoolMoments:
    """Sums over a pool that grows mini-batch by mini-batch; one forward pass per datum.

    Args:
        engine: Makes the passes, and counts them.
        n_patches: See :class:`laplace_debias.debias.pool_inputs.PoolInputs`.

    Attributes:
        inputs: Input factors of the pool.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> moments = PoolMoments(Engine(torch.nn.Linear(2, 3), "classification"))
        >>> moments.add(torch.randn(5, 2), torch.arange(5) % 3)
        >>> moments.outputs.shape, moments.scores.shape, len(moments.inputs.A)
        (torch.Size([5, 3]), torch.Size([5, 3]), 2)
    """

    def __init__(self, engine: EngineInterface, n_patches: float = math.inf) -> None:
        self.engine = engine
        self.inputs = PoolInputs(n_patches, engine.pixels_per_patch)
        self._outputs: list[Tensor] = []
        self._features: list[Tensor | None] = []
        self._weights: list[Tensor] = []
        self._first: Inputs | None = None
        self._sums: Sums | None = None  # of tensor inputs and of their squares
        self.loss: Tensor = torch.zeros(())
        self.size = self._last_at = 0  # data, and those before the last mini-batch
        self._sizes = [0, 0]  # data of both parts, with those that are not exchanged yet
        self._group = processes()
        self._news = News()  # of this process, since the last exchange
        self.uneven = False  # whether a layer had no whole number of rows per datum

    def add(self, X: Inputs, y: Tensor) -> None:
        """Pass a mini-batch."""
        check_unweighted(y, "debias='auto'", "debias=True, 'single' or 'crossfit'")
        wanted, pixels = self.inputs.wanted(self.size)
        new = self.engine.factors(X, y, inputs=wanted, outputs=False, rows_from=1, pixels=pixels)
        kept = [rows for rows, last in zip(new.rows, new.at_output, strict=True) if last]
        features = next((rows for rows in kept if rows is not None), None)
        weights = self.engine.datum_weights(y, new.n_outputs)
        outputs, loss = new.kept_outputs, new.summed_loss
        self.uneven |= any(n_rows % new.n for n_rows in new.n_rows)
        new = replace(new, outputs=None, rows=(None,) * len(new.names))
        if self._group is not None:
            half = 0 if self._sizes[0] <= self._sizes[1] else 1
            own, covariances = self.inputs.parted(new, pixels)
            own = self.inputs.filled(own, half)
            self._news.add(half, own, covariances, X, outputs, features, weights, loss)
            return
        self.loss = self.loss.to(loss) + loss
        self._outputs.append(outputs)
        if weights is not None:
            self._weights.append(weights)
        self._features.append(features)
        # Halves of a mini-batch would need passes of their own: whole mini-batches take turns.
        self.inputs.add(new, pixels)
        self._first = X if self._first is None else self._first
        self._sums = added_sums(self._sums, sums_of(X))
        self._last_at, self.size = self.size, self.size + len(y)

    def begin_with(self, X: Inputs) -> None:
        """Note the inputs of the first mini-batch, which probes are taken from."""
        self._first = X

    def counted(self, n: int) -> None:
        """Note that all processes together have passed a mini-batch of n data."""
        self._sizes[0 if self._sizes[0] <= self._sizes[1] else 1] += n
        self._last_at, self.size = self.size, self.size + n

    def exchange(self, own: Tensor, key: Keys) -> None:
        """Make what all processes have passed since the last time everybody's.

        Args:
            own: Numbers ``[n]`` of this process's new data in the pool.
            key: Key of the inputs in a mapping.
        """
        device = next(self.engine.root.parameters()).device
        halves = [factors_of_all(half, device) for half in self._news.halves]
        pixels = factors_of_all(self._news.pixels, device)
        all_new = self._news.of_all(halves, own, device, MOST_PROBES, key)
        self._news = News()
        if all_new is None:
            return
        self.inputs.add_halves(all_new.halves, pixels)
        self.loss = self.loss.to(all_new.loss) + all_new.loss
        self._outputs += all_new.outputs
        self._features += all_new.features
        self._weights += all_new.weights
        self._first = all_new.first if self._first is None else self._first
        self._sums = added_sums(self._sums, all_new.sums)

    @property
    def at_output(self) -> list[bool]:
        """For each parameter, whether its layer's output is the network's."""
        return [
            all(own) for own in zip(*(part.at_output for part in self.inputs.parts), strict=True)
        ]

    @property
    def outputs(self) -> Tensor:
        """The network's outputs, ``[n, C]``."""
        self._outputs = [torch.cat(self._outputs)]
        return self._outputs[0]

    def hessian_halves(self) -> list[Tensor]:
        """Mean Hessians of the loss at the outputs, ``[C, C]``, of every second datum each."""
        f, w = self.outputs, self.weights
        parts = ((f[i::2], None if w is None else w[i::2]) for i in (0, 1))
        return [self.engine.mean_hessian(*part) for part in parts]

    @property
    def weights(self) -> Tensor | None:
        """How much each datum counts in the loss, ``[n]``; ``None`` if all count one."""
        return torch.cat(self._weights) if self._weights else None

    @property
    def scores(self) -> Tensor:
        """Scores of all pairs, ``[n, C]``."""
        scores, weights = pair_scores(self.outputs, self.engine.likelihood), self.weights
        whitened = self.engine.objective.whitened
        scores = whitened(whitened(scores))  # a squared length, of a vector that is whitened once
        return scores if weights is None else scores * weights.to(scores)[:, None]

    @property
    def features(self) -> Tensor:
        """What tells similar data: the output layer's inputs, or the outputs, ``[n, d]``."""
        kept = [part for part in self._features if part is not None]
        if len(kept) < len(self._features):
            return self.outputs
        self._features = [torch.cat(kept)]
        return torch.cat(kept)

    @property
    def one_row(self) -> list[bool]:
        """For each parameter, whether its A has one row per datum."""
        pairs = zip(self.inputs.n_rows, self.inputs.per_datum, strict=True)
        return [n == self.size and per_datum == 1 for n, per_datum in pairs]

    @property
    def complete(self) -> bool:
        """Whether every A has seen all data: the last mini-batch was passed for all of them."""
        return self.inputs.wanted(self._last_at)[0] is True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return self.inputs.parts[0].names

    @property
    def dtype(self) -> torch.dtype:
        """Type of the factors."""
        return torch.promote_types(self.outputs.dtype, torch.float32)

    def probes(self, key: Keys = "input_ids", limit: float = MOST_PROBES) -> tuple[Inputs, Tensor]:
        """A few inputs of the pool, as many far ones, and a random output of the network for each.

        Far inputs are Gaussian, with the pool's mean and twice its standard deviation per feature;
        there are none for mappings and for inputs that are not floating point numbers.

        Args:
            key: Key of the inputs in a mapping.
            limit: Most inputs of the pool.

        Returns:
            Inputs and directions ``[n, C]``, one output each and all equally often, from a seed of
            their own.
        """
        assert self._first is not None  # a mini-batch was added
        n_params = sum(p.numel() for p in self.engine.root.parameters() if p.requires_grad)
        most = max(4, min(MOST_PROBES, MOST_PROBE_NUMBERS // (2 * max(n_params, 1))))
        n = int(min(size_of(self._first, key), most, limit))
        X = take(self._first, slice(0, n), key)
        generator = torch.Generator().manual_seed(0)
        if (
            isinstance(X, Tensor)
            and self._sums is not None
            and datum_shapes(X)[0] == self._sums[0].shape
        ):
            mean = self._sums[0] / self.size
            deviation = (self._sums[1] / self.size - mean.square()).clamp(min=0).sqrt()
            noise = torch.randn(X.shape, generator=generator, dtype=torch.float64).to(X.device)
            X = concatenate([X, (mean + 2 * deviation * noise).to(X)], key)
        n, C = size_of(X, key), self.outputs.shape[1]
        turns = [torch.randperm(C, generator=generator) for _ in range(-(-n // C))]
        return X, torch.nn.functional.one_hot(torch.cat(turns)[:n], C).to(self.outputs)
