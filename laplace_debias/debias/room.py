r"""What a fit in rounds may keep within a budget of memory.

Besides its passes such a fit holds, in bytes, with factors of w bytes per number, :math:`a = \sum
d_{in}^2` over weights and :math:`b = \sum d_{out}^2` over all layers but the network's output:

- input factors of two halves and their sum, and bases in double precision,
  :math:`3 a w + 8 a`; of convolutions with k pixels per patch, covariances of pixels and a second
  kind of noise, :math:`(1 + 3 / k^2) a w`;
- four groups of output factors and the sum of what is known, :math:`40 b`, as much for the present
  round, and three sets of matrices while bases are compared, :math:`24 b`;
- rows of some draws per layer, and copies of one layer's in double precision;
- gradients at the probes, and these along the directions of A;
- for each datum of the pool its outputs, features and scores.

The first two are what they are. Of rows, probes and pool as much is kept as fits: a quarter of
what is left each, the rest is for passes. What passes take is measured, see
:mod:`laplace_debias.kfac.budget`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from laplace_debias.data.inputs import Inputs, Keys, size_of, take, tensors_of
from laplace_debias.data.pool import Pool
from laplace_debias.data.processes import processes, together
from laplace_debias.debias.drawn import MOST_NUMBERS, DrawnFactor
from laplace_debias.debias.drawn_rows import N_GROUPS, RUN, Room
from laplace_debias.debias.leverages import MOST_DIMENSIONS_PER_ROW
from laplace_debias.debias.pairs import pair_vectors
from laplace_debias.debias.pool_moments import MOST_PROBES
from laplace_debias.kfac.budget import peak_of
from laplace_debias.kfac.factors import Factors
from laplace_debias.kfac.gradient_rows import gradient_rows
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.network.ownership import rows_key

__all__ = ["room_for", "room_within"]

LEAST_POOL = 64
LEAST_DRAWS = 2 * RUN
"""Draws whose rows are kept in any case, of those before and of the present round."""


def room_for(engine: EngineInterface, pool: Pool) -> Room:
    """What the engine's budget has room for, as the first mini-batch shows.

    Args:
        engine: The engine; it is told how many data a forward pass may take.
        pool: The data, of which nothing was read yet.

    Returns:
        The room, the same for all processes but for their passes.

    Raises:
        ValueError: See :func:`room_within`.

    Example:
        >>> from laplace_debias.data.roles import TrainingData
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(torch.nn.Linear(3, 2), "classification")
        >>> data = TrainingData((torch.ones(8, 3), torch.zeros(8).long()), None, 8, "cpu")
        >>> room_for(engine, Pool(data)) == Room()
        True
    """
    if engine.budget is None:
        return Room()
    data, group, own = pool.data, processes(), Room()
    with together("finding out how much memory it needs"):
        first = pool.first()
        if first is not None:
            there = pool.map is not None or isinstance(data.loader, list | tuple)
            own = room_within(
                engine, first[0], engine.budget, data.n_data, data.key_x, keeps_data=not there
            )
            engine.chunk = own.n_forward
    return own if group is None else own.with_all(group.gather(own))


def room_within(
    engine: EngineInterface,
    X: Inputs,
    budget: int,
    n_data: int,
    key: Keys = "input_ids",
    *,
    keeps_data: bool = False,
) -> Room:
    """What a fit in rounds may keep, so that it stays within a budget.

    Args:
        engine: The engine; neither its counts nor its generator are touched.
        X: Inputs of the first mini-batch.
        budget: Bytes that the fit may add to what is there.
        n_data: Number N of training data.
        key: Which entries of inputs that are mappings run over the data.
        keeps_data: Whether the pool keeps its data, as those of a stream.

    Returns:
        The room.

    Raises:
        ValueError: If the least that it takes is more.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> room = room_within(Engine(net, "classification"), torch.ones(8, 3), 10**6, 100)
        >>> room.n_probes, room.n_pool, room.n_forward
        (16, 100, 8)
    """
    n = size_of(X, key)
    one = _Trial.of(engine, X, 1, key)
    two = _Trial.of(engine, X, 2, key) if n > 1 else one
    need = _Need(engine, one, sum(t[:1].nbytes for t in tensors_of(X)), keeps_data)
    least_pool = min(n_data, max(n, LEAST_POOL))
    at_once = n * need.datum  # a mini-batch that is read again
    least = need.total(0, 1, least_pool) + at_once
    if least > budget:
        raise ValueError(
            f"Expected a `memory_budget` of at least {least:,} bytes for debias='auto', got "
            f"{budget:,}: {need.told()}. Remedy: a larger budget, freeze '{need.largest}', "
            'debias=True, which keeps less, or subset_of_weights="last_layer".'
        )
    share = (budget - least) // 4
    n_probes = min(MOST_PROBES, 1 + share // need.per_probe)
    n_pool = min(n_data, least_pool + share // need.per_datum)
    numbers = MOST_NUMBERS
    while numbers > 1 and need.rows(numbers) - need.rows(0) > share:
        numbers //= 2
    free = budget - at_once - need.steady - need.kept(numbers)
    free -= n_probes * need.per_probe + n_pool * need.per_datum
    forward, backward = (
        int(min(n, 1 + max(free - p, 0) // max(q - p, 1)))
        for p, q in ((one.forward, two.forward), (one.backward, two.backward))
    )
    return Room(numbers, n_probes, n_pool, forward, backward)


class _Layer(NamedTuple):
    """Rows ``[r, d]`` of a layer per draw, in numbers of ``itemsize`` bytes."""

    r: int
    d: int
    itemsize: int

    @property
    def least(self) -> int:
        """Numbers that are kept in any case."""
        return LEAST_DRAWS * min(self.r, self.d) * self.d

    def kept(self, numbers: int) -> int:
        """Bytes of kept rows, of earlier rounds and of the present one."""
        return 2 * self.itemsize * max(numbers, self.least)

    def copies(self, numbers: int) -> int:
        """Bytes of their copies while the correction for the inverse is computed."""
        blocks = 1 < self.r < self.d <= MOST_DIMENSIONS_PER_ROW * self.r  # formed for a while
        return 8 * max(numbers, self.least) * (7 + (4 * self.d // self.r if blocks else 0))


class _Trial(NamedTuple):
    """What passes of a few data take, and the sizes that they show."""

    forward: int
    backward: int
    layers: dict[str, _Layer]
    A: dict[str, int]
    n_features: int
    C: int

    @classmethod
    def of(cls, engine: EngineInterface, X: Inputs, n: int, key: Keys) -> _Trial:
        """Pass n data, by engines whose counts nobody reads."""
        few, layers, found = take(X, slice(0, n), key), dict[str, _Layer](), list[Factors]()

        def forward(trial: EngineInterface) -> None:
            found.append(trial.factors(few, outputs=False, rows_from=1))

        def backward(trial: EngineInterface) -> None:
            at = torch.arange(n)
            pairs = zip(trial.owned, found[0].at_output, strict=True)
            inner = {rows_key(p): p.name for p, last in pairs if not last}
            factors = [DrawnFactor(key) for key in inner]
            # of two vectors per datum, the first keeps the graph
            for rows in gradient_rows(trial, few, partial(_two_vectors, trial), key):
                for factor in factors:
                    own = rows[factor.key]
                    sizes = own.shape[1], own.shape[2]
                    factor.add(own, torch.ones(n), at % N_GROUPS, at, 0, n)
                    layers[inner[factor.key]] = _Layer(*sizes, own.element_size())

        sizes = peak_of(engine, forward), peak_of(engine, backward)
        new = found[0]
        A = {name: len(M) for name, M in zip(new.names, new.A, strict=True) if M is not None}
        kept = [rows for rows, last in zip(new.rows, new.at_output, strict=True) if last]
        n_features = next((rows.shape[1] for rows in kept if rows is not None), new.n_outputs)
        return cls(*sizes, layers, A, n_features, new.n_outputs)


def _two_vectors(engine: EngineInterface, f: Tensor) -> Tensor:
    """Two backward vectors per datum, ``[2, n, C]``."""
    classes = torch.zeros(len(f), dtype=torch.long, device=f.device)
    V = pair_vectors(f, classes, engine.likelihood)
    return torch.stack([V, V])


class _Need:
    """Bytes that a fit takes for what it keeps, see the module."""

    def __init__(self, engine: EngineInterface, one: _Trial, datum: int, keeps: bool) -> None:
        self.layers, self.datum = one.layers, datum
        w = max((torch.promote_types(p.tensor.dtype, torch.float32).itemsize) for p in engine.owned)
        sizes = [p.tensor.numel() for p in engine.owned]
        B = {name: x.d for name, x in one.layers.items()}
        a, b = (sum(d**2 for d in side.values()) for side in (one.A, B))
        wide = max([*one.A.values(), *B.values()], default=0)
        self.inputs, self.outputs = (3 * w + 8) * a, 40 * b
        k = {name: k for name, k in engine.pixels_per_patch.items() if name in one.A}
        self.inputs += int(sum((1 + 3 / k[name] ** 2) * w * one.A[name] ** 2 for name in k))
        self.steady = self.inputs + self.outputs
        self.bases, self.decomposing = 24 * b, 24 * wide**2
        self.largest_alone = max(72 * one.C**2, 28 * max(sizes))
        self.passing = max(one.forward, one.backward, 104 * max(B.values(), default=0) ** 2)
        # an input of the pool and a far one, and copies of their largest layer's gradients
        self.per_probe = 2 * (2 * w * sum(sizes) + (4 * w + 24) * max(sizes) + 4 * datum)
        self.per_datum = one.C * (2 * w + 112) + one.n_features * (2 * w + 24)
        self.per_datum += datum if keeps else 0
        by_layer = {name: (3 * w + 8) * d**2 for name, d in one.A.items()}
        for name, x in one.layers.items():
            by_layer[name] = by_layer.get(name, 0) + 64 * x.d**2 + x.kept(0)
        self.largest = max(by_layer, key=lambda name: by_layer[name])
        self.of_largest = by_layer[self.largest]

    def kept(self, numbers: int) -> int:
        """Bytes of kept rows."""
        return sum(x.kept(numbers) for x in self.layers.values())

    def rows(self, numbers: int) -> int:
        """Bytes for rows, with what is there for a while: passes, or copies of one layer."""
        copies = max((x.copies(numbers) for x in self.layers.values()), default=0)
        comparing = self.bases + max(self.decomposing, self.largest_alone, copies)
        return self.kept(numbers) + max(self.passing, comparing)

    def total(self, numbers: int, n_probes: int, n_pool: int) -> int:
        """Bytes of a fit whose passes take one datum."""
        kept = self.steady + n_probes * self.per_probe + n_pool * self.per_datum
        return kept + self.rows(numbers)

    def told(self) -> str:
        """In words."""
        return (
            f"input factors and their bases take {self.inputs:,}, output factors in four groups "
            f"{self.outputs:,}, kept rows at least {self.kept(0):,}, two probes {self.per_probe:,} "
            f"and passes and comparisons {self.rows(0) - self.kept(0):,}; most of it is for "
            f"'{self.largest}' ({self.of_largest:,})"
        )
