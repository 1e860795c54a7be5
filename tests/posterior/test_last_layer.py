"""Finding the last layer changes nothing else and draws nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from tests import cases


def normalised() -> nn.Module:
    """A network with statistics of its own, in train mode."""
    net = nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 4)
    )
    return net.double().train()


@pytest.mark.parametrize("as_loader", [True, False])
def test_statistics_of_a_model_in_train_mode_stay(as_loader):
    la = Laplace(cases.seeded(normalised), "classification", "last_layer", "kron", debias="single")
    before = {name: b.clone() for name, b in la.model.named_buffers()}
    X, y = cases.MLP.data(12)
    la.fit(cases.loader(X, y, 4) if as_loader else (X, y), n_data=12)
    assert len(before) == 3
    for name, buffer in la.model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert all(m.training for m in la.model.model.modules())


@pytest.mark.parametrize("debias", ["two-batch", "crossfit"])
def test_the_first_fit_draws_the_same_data_as_later_ones(debias):
    la = Laplace(cases.MLP.model(), "classification", "last_layer", "kron", debias=debias)
    probabilities = []
    for _ in range(2):
        X, y = cases.MLP.data(40)
        gen = torch.Generator().manual_seed(5)
        la.fit(DataLoader(TensorDataset(X, y), batch_size=8, shuffle=True, generator=gen))
        probabilities.append((la(X[:3]), gen.get_state()))
    (first, after_first), (second, after_second) = probabilities
    assert torch.equal(first, second)
    assert torch.equal(after_first, after_second)


def test_a_stream_is_read_once():
    X, y = cases.MLP.data(16)
    batches = list(zip(X.split(4), y.split(4), strict=True))
    la = Laplace(cases.MLP.model(), "classification", "last_layer", "kron", debias=True)
    known = Laplace(
        cases.MLP.model(), "classification", "last_layer", "kron", debias=True, last_layer_name="2"
    )
    la.fit(iter(batches), n_data=16)
    known.fit(iter(batches), n_data=16)
    assert torch.equal(la(X), known(X))


def test_a_failing_fit_forgets_what_it_found():
    la = Laplace(cases.MLP.model(), "classification", "last_layer", "kron", debias=True)
    X, y = cases.MLP.data(8)
    with pytest.raises(ValueError, match="class indices"):
        la.fit((X, y + 9), curvature_loader=(X, y), n_data=8)
    assert la.model.last_layer is None and la.n_params is None
    with pytest.raises(ValueError, match="Expected a network whose last layer is an nn.Linear"):
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
        Laplace(net, "classification", "last_layer", "kron", debias=True).fit((X, y), n_data=8)


def test_hooks_do_not_stay_when_the_search_raises():
    class Moody(nn.Module):
        """Has layers and fails before it calls them."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            """Fail."""
            raise RuntimeError("no")

    la = Laplace(Moody().double(), "classification", "last_layer", "kron", debias=True)
    data = DataLoader(TensorDataset(*cases.MLP.data(8)), batch_size=4, shuffle=True)
    with pytest.raises(RuntimeError, match="no"):
        la.fit(data)
    assert not any(m._forward_hooks for m in la.model.modules())


def test_the_prior_of_each_parameter_from_one_of_each_tensor():
    la = Laplace(cases.MLP.model(), "classification", "last_layer", "kron", debias="single")
    la.fit(cases.MLP.data(12), n_data=12)
    la.prior_precision = 3.0
    assert la.prior_precision_diag.tolist() == [3.0] * 24
    la.prior_precision = torch.tensor([2.0, 5.0], dtype=torch.float64)
    assert la.prior_precision_diag.tolist() == [2.0] * 20 + [5.0] * 4
    (W, b), H = la.model.last_layer.parameters(), la.H.to_matrix()
    scatter = 2.0 * W.square().sum() + 5.0 * b.square().sum()
    logdet = torch.logdet(H + torch.diag(la.prior_precision_diag))
    ratio = logdet - torch.tensor(2.0).log() * 20 - torch.tensor(5.0).log() * 4
    torch.testing.assert_close(
        la.log_marginal_likelihood(), -la.loss - 0.5 * (ratio + scatter), rtol=1e-6, atol=0
    )
