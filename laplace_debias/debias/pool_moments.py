"""What forward passes over a pool tell: input factors, outputs, scores, the loss, and probes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from laplace_debias.data.inputs import Inputs, Keys, concatenate, datum_shapes, size_of, take
from laplace_debias.data.processes import processes
from laplace_debias.data.targets import check_unweighted
from laplace_debias.debias.pairs import pair_scores
from laplace_debias.debias.pool_news import News, Sums, added_sums, sums_of
from laplace_debias.debias.shared_eigen import eigh_shared
from laplace_debias.kfac.factors import Factors
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.kfac.sums import factors_of_all

__all__ = ["PoolMoments"]

MOST_PROBES = 16
MOST_PROBE_NUMBERS = 2**24
MOST_MULTIPLICATIONS = 1e12
"""Most multiplications for the input factors of layers with several rows (positions) per datum."""
LEAST_DATA = 2048
"""Data that such layers see at least: on All-CNN-C their input factors cost less than the pass."""


class PoolMoments:
    """Sums over a pool that grows mini-batch by mini-batch; one forward pass per datum.

    Args:
        engine: Makes the passes, and counts them.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> moments = PoolMoments(Engine(torch.nn.Linear(2, 3), "classification"))
        >>> moments.add(torch.randn(5, 2), torch.arange(5) % 3)
        >>> moments.outputs.shape, moments.scores.shape, len(moments.decomposed())
        (torch.Size([5, 3]), torch.Size([5, 3]), 2)
    """

    def __init__(self, engine: EngineInterface) -> None:
        self.engine = engine
        self._parts: list[Factors] = []  # of every other mini-batch, for their difference
        self._outputs: list[Tensor] = []
        self._features: list[Tensor | None] = []
        self._weights: list[Tensor] = []
        self._first: Inputs | None = None
        self._sums: Sums | None = None  # of tensor inputs and of their squares
        self._A: tuple[int, list[tuple[Tensor, Tensor] | None]] | None = None
        self.loss: Tensor = torch.zeros(())
        self.size = 0
        self._per_datum: list[float] = []
        self._sizes = [0, 0]  # data of both parts, with those that are not exchanged yet
        self._group = processes()
        self._news = News()  # of this process, since the last exchange
        self.uneven = False  # whether a layer had no whole number of rows per datum

    def add(self, X: Inputs, y: Tensor) -> None:
        """Pass a mini-batch.

        Layers with several rows per datum cost more for A than for the pass itself, and need fewer
        data: they see as many as ``MOST_MULTIPLICATIONS`` pay for.
        """
        check_unweighted(y, "debias='auto'", "debias=True, 'single' or 'crossfit'")
        self._A = None
        new = self.engine.factors(X, y, inputs=self._wanted(), outputs=False, rows_from=1)
        kept = [rows for rows, last in zip(new.rows, new.at_output, strict=True) if last]
        features = next((rows for rows in kept if rows is not None), None)
        weights = self.engine.datum_weights(y, new.n_outputs)
        outputs, loss = new.kept_outputs, new.summed_loss
        self.uneven |= any(n_rows % new.n for n_rows in new.n_rows)
        new = replace(new, outputs=None, rows=(None,) * len(new.names))
        if self._group is not None:
            half = 0 if self._sizes[0] <= self._sizes[1] else 1
            old = self._parts[half] if len(self._parts) > half else None
            new = self._filled(new, old)
            self._news.add(half, new, X, outputs, features, weights, loss)
            return
        self.loss = self.loss.to(loss) + loss
        self._outputs.append(outputs)
        if weights is not None:
            self._weights.append(weights)
        self._features.append(features)
        # Halves of a mini-batch would need passes of their own: whole mini-batches take turns.
        if len(self._parts) < 2:
            self._parts.append(self._filled(new))
        else:
            less = 0 if self._parts[0].n <= self._parts[1].n else 1
            self._parts[less] = self._parts[less] + self._filled(new, self._parts[less])
        if self._first is None:
            self._first = X
            self._per_datum = [n / new.n for n in new.n_rows]
        self._sums = added_sums(self._sums, sums_of(X))
        self.size += len(y)

    def begin_with(self, X: Inputs) -> None:
        """Note the inputs of the first mini-batch, which probes are taken from."""
        self._first = X

    def counted(self, n: int) -> None:
        """Note that all processes together have passed a mini-batch of n data."""
        self._sizes[0 if self._sizes[0] <= self._sizes[1] else 1] += n
        self.size += n

    def exchange(self, own: Tensor, key: Keys) -> None:
        """Make what all processes have passed since the last time everybody's.

        Args:
            own: Numbers ``[n]`` of this process's new data in the pool.
            key: Key of the inputs in a mapping.
        """
        device = next(self.engine.root.parameters()).device
        halves = [factors_of_all(half, device) for half in self._news.halves]
        all_new = self._news.of_all(halves, own, device, MOST_PROBES, key)
        self._news = News()
        if all_new is None:
            return
        if not self._parts:
            first = all_new.halves[0]
            assert first is not None  # the first mini-batch is in it
            self._per_datum = [n / first.n for n in first.n_rows]
        for half, new in enumerate(all_new.halves):
            if new is not None:
                self._parts[half:] = [self._parts[half] + new if len(self._parts) > half else new]
        self.loss = self.loss.to(all_new.loss) + all_new.loss
        self._outputs += all_new.outputs
        self._features += all_new.features
        self._weights += all_new.weights
        self._first = all_new.first if self._first is None else self._first
        self._sums = added_sums(self._sums, all_new.sums)

    def _wanted(self) -> bool | set[str]:
        """Names of the weights whose A is to see further data, or all."""
        if len(self._parts) < 2:
            return True
        first, work = self._parts[0], 0.0
        many: set[str] = set()
        for name, A, rows in zip(first.names, first.A, first.n_rows, strict=True):
            if A is not None and rows > first.n:
                many.add(name)
                work += len(A) ** 2 * rows / first.n
        if self.size < max(LEAST_DATA, MOST_MULTIPLICATIONS / max(work, 1.0)):
            return True
        return {name for name in first.names if name not in many}

    @staticmethod
    def _filled(new: Factors, old: Factors | None = None) -> Factors:
        """New factors that count for nothing where their A was not computed."""
        if old is None:
            return new
        pairs = list(zip(new.A, old.A, new.n_rows, strict=True))
        A = tuple(o if a is None else a for a, o, _ in pairs)
        n_rows = tuple(0 if a is None and o is not None else n for a, o, n in pairs)
        return replace(new, A=A, n_rows=n_rows)

    @property
    def n_rows(self) -> list[int]:
        """For each parameter, the number of rows behind its A."""
        return [sum(n) for n in zip(*(part.n_rows for part in self._parts), strict=True)]

    @property
    def at_output(self) -> list[bool]:
        """For each parameter, whether its layer's output is the network's."""
        return [all(own) for own in zip(*(part.at_output for part in self._parts), strict=True)]

    @property
    def inputs(self) -> Factors:
        """Input factors of the pool."""
        return self._parts[0] if len(self._parts) == 1 else self._parts[0] + self._parts[1]

    @property
    def outputs(self) -> Tensor:
        """The network's outputs, ``[n, C]``."""
        self._outputs = [torch.cat(self._outputs)]
        return self._outputs[0]

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
        return [n == self.size for n in self.n_rows]

    @property
    def complete(self) -> bool:
        """Whether every A has seen all data of the pool."""
        return self._wanted() is True or all(self.share(i) == 1.0 for i in range(len(self.names)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return self._parts[0].names

    def share(self, i: int) -> float:
        """Part of the pool's data that the A of a parameter has seen."""
        if any(part.A[i] is None for part in self._parts):
            return 1.0
        per_datum = self._per_datum[i]
        return min(1.0, self.n_rows[i] / (per_datum * self.size)) if per_datum else 1.0

    @property
    def dtype(self) -> torch.dtype:
        """Type of the factors."""
        return torch.promote_types(self.outputs.dtype, torch.float32)

    def decomposed(self) -> list[tuple[Tensor, Tensor] | None]:
        """Eigenvectors and eigenvalues of every A, ``None`` for biases; kept till the next pass."""
        if self._A is None or self._A[0] != self.size:
            inputs = self.inputs
            known = [(A, name) for A, name in zip(inputs.A, inputs.names, strict=True)]
            jobs = [(A, name) for A, name in known if A is not None]
            pairs = iter(eigh_shared(*map(list, zip(*jobs, strict=True))) if jobs else ())
            found: list[tuple[Tensor, Tensor] | None] = []
            for A, _ in known:
                pair = None if A is None else next(pairs)
                found.append(None if pair is None else (pair[1], pair[0].clamp(min=0)))
            self._A = (self.size, found)
        return self._A[1]

    def halves(self, n_data: int) -> list[Tensor | None]:
        """What the A of each weight may be off: half its difference between halves of its data.

        Args:
            n_data: Number N of data that the pool stands for, for what drawing without replacement
                saves.

        Returns:
            Matrices like A; ``None`` for biases, and where there is but one mini-batch.
        """
        if len(self._parts) < 2:
            return [None for _ in self.names]
        one, two = self._parts
        found: list[Tensor | None] = []
        for i, (a, b) in enumerate(zip(one.A, two.A, strict=True)):
            n, m = one.n_rows[i], two.n_rows[i]
            rare = 1 - self.share(i) * self.size / n_data
            if a is None or b is None or rare <= 1e-9:
                found.append(None)
            else:
                found.append((n * m * rare) ** 0.5 / (n + m) * (a - b))
        return found

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
