"""Where the numbers of a cross-fitted posterior come from: its Fisher, and its rows of a stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace_debias import Laplace
from tests.cases import MLP_REGRESSION, loader, seeded


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("as_stream", [True, False])
def test_the_empirical_fisher_never_takes_the_exact_hessian(subset, as_stream):
    """Targets that the network meets have no gradient, so no empirical Fisher, in any layer."""
    model, X = MLP_REGRESSION.model(), MLP_REGRESSION.data(40)[0]
    y = model(X).detach()
    for fisher, at_end in (("empirical", 0.0), ("exact", 40.0)):
        la = Laplace(
            MLP_REGRESSION.model(), "regression", subset, "kron", debias="crossfit", fisher=fisher,
            sampling="curvature", n_curvature=12, generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        la.fit(
            zip(X.split(8), y.split(8), strict=True) if as_stream else loader(X, y, 8), n_data=40
        )
        B = la.H.eigenvalues[-1][0]  # of the last layer's bias: N times the identity, if exact
        torch.testing.assert_close(B, torch.full_like(B, at_end))


class WithTable(nn.Module):
    """A network whose mapping holds a table of as many rows as a mini-batch has data."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Map ``{"x": [n, 3], "table": [8, 3]}`` to ``[n, 3]``."""
        near = torch.softmax(batch["x"] @ batch["table"].T, -1) @ batch["table"]
        return self.head(torch.tanh(self.body(near)))


class Bare(nn.Module):
    """The same network with its table inside."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.net, self.table = seeded(WithTable), table

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, 3]`` to ``[n, 3]``."""
        return self.net({"x": x, "table": self.table})


@pytest.mark.parametrize("sampling", ["uniform", "curvature"])
def test_rows_of_a_stream_leave_tables_whole(sampling):
    gen = torch.Generator().manual_seed(3)
    X, table = torch.randn(48, 3, generator=gen).double(), torch.randn(8, 3, generator=gen).double()
    y = torch.arange(48) % 3
    pairs = list(zip(X.split(8), y.split(8), strict=True))

    def fitted(model: nn.Module, data: list, **options: object):
        la = Laplace(
            model.double(), "classification", "all", "kron", debias="crossfit", sampling=sampling,
            n_curvature=12, generator=torch.Generator().manual_seed(0), **options,
        )  # fmt: skip
        la.fit(iter(data), n_data=48)
        return la.H.to_matrix()

    mappings = [{"x": a, "table": table, "y": b} for a, b in pairs]
    keys = {"dict_key_x": "x", "dict_key_y": "y", "data_keys": ("x",)}
    found = fitted(seeded(WithTable), mappings, **keys)
    torch.testing.assert_close(found, fitted(Bare(table), pairs), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("sampling", ["uniform", "curvature"])
def test_more_data_than_there_are_is_an_error(sampling):
    X, y = MLP_REGRESSION.data(40)
    la = Laplace(
        MLP_REGRESSION.model(), "regression", "all", "kron", debias="crossfit", sampling=sampling,
        n_curvature=32,
    )  # fmt: skip
    batches = list(zip(X.split(8), y.split(8), strict=True))
    with pytest.raises(ValueError, match=r"Expected `n_data` of at least \d+.*got 31. Remedy"):
        la.fit(batches, n_data=31)
    la.fit(batches, n_data=40)


class Tokens(nn.Module):
    """Sums over tokens: sequences of any length, where zeros change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, T, 3]`` to ``[n, 3]``."""
        return self.head(torch.tanh(self.body(x)).sum(1))


def test_rows_of_a_stream_may_be_padded_to_different_lengths():
    """The output layer sees one row per datum: padding must not matter to it."""
    gen = torch.Generator().manual_seed(3)
    X, y = torch.randn(32, 2, 3, generator=gen).double(), torch.arange(32) % 3
    found = []
    for lengths in ((2, 2, 2, 2), (2, 5, 3, 5)):
        padded = [
            F.pad(part, (0, 0, 0, n - 2)) for part, n in zip(X.split(8), lengths, strict=True)
        ]
        la = Laplace(
            seeded(Tokens).double(), "classification", "all", "kron", debias="crossfit",
            sampling="curvature", n_curvature=12, generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        la.fit(zip(padded, y.split(8), strict=True), n_data=32)
        found.append([la.H.eigenvalues[1], la.H.eigenvalues[2]])
    for one, two in zip(*found, strict=True):
        for lam, other in zip(one, two, strict=True):
            torch.testing.assert_close(lam, other)
