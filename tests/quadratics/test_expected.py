"""The bridge from a model, a loss and data to what a mini-batch's rows foretell."""

import pytest
import torch
from torch import nn

from laplace_debias.quadratics import CurvatureBiasReport, curvature_bias_report
from laplace_debias.quadratics.expected import expected_by_size, likelihood_of


def rows_by_hand(R):
    """Over-estimation of the share of top curvature of single rows ``[n, d]``, pair by pair."""
    own = others = 0.0
    own_norms = other_norms = 0.0
    for i, r in enumerate(R):
        for j, s in enumerate(R):
            product, norms = float(r @ s) ** 2, float(r @ r) * float(s @ s)
            own, own_norms = own + product, own_norms + norms
            if i != j:
                others, other_norms = others + product, other_norms + norms
    return (own / own_norms) / (others / other_norms)


def make_data(n=40):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    X = X * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.2])  # equal ones would be at the floor of 1 / d
    return X, X[:, :2].clone()


def test_input_factors_equal_a_sum_over_pairs():
    X, y = make_data()
    model = nn.Linear(5, 2, bias=False).double()
    (bias,) = expected_by_size(model, nn.MSELoss(), (X, y), (40,), seed=3)
    B, A = bias.factors
    assert (A.name, A.factor, A.n_rows, A.dimension, bias.n_data) == ("weight", "A", 40, 5, 40)
    assert A.overestimation == pytest.approx(rows_by_hand(X), rel=1e-9)
    assert B.overestimation == pytest.approx(1.0)  # the Hessian of every datum is the same


@pytest.mark.parametrize(
    ("loss", "likelihood"),
    [
        (nn.CrossEntropyLoss(), "classification"),
        (nn.MSELoss(), "regression"),
        (nn.BCEWithLogitsLoss(), "bernoulli"),
    ],
)
def test_losses_have_likelihoods(loss, likelihood):
    assert likelihood_of(loss) == likelihood


@pytest.mark.parametrize(
    "loss",
    [
        nn.L1Loss(),
        nn.CrossEntropyLoss(weight=torch.ones(2)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)),
    ],
)
def test_other_losses_are_refused(loss):
    with pytest.raises(ValueError, match=r"(?s)Expected CrossEntropyLoss.*got.*Remedy.*per_layer"):
        likelihood_of(loss)


def test_the_report_says_it_if_asked(tmp_path):
    X, y = make_data()
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    options = {"batch_sizes": (4, 16), "k": 2, "draws": 1}
    plain = curvature_bias_report(model, nn.MSELoss(), (X, y), **options)
    report = curvature_bias_report(model, nn.MSELoss(), (X, y), per_layer=True, **options)
    assert plain.expected == () and torch.equal(plain.same, report.same)
    assert [bias.n_data for bias in report.expected] == [4, 16]
    assert report.expected == expected_by_size(model, nn.MSELoss(), (X, y), (4, 16))
    assert report.table().startswith(plain.table())
    text = report.table().removeprefix(plain.table())
    for word in ("4 data", "16 data", "0.weight", "2.bias", "rows", "dimension", "over-estimation"):
        assert word in text
    assert CurvatureBiasReport.load(report.save(tmp_path / "r.npz")).expected == report.expected
