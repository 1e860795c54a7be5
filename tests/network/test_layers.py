"""Kinds of layers: ``Conv1D`` as a linear layer, normalisations and their layouts."""

import warnings

import pytest
import torch
from torch import nn

from laplace_debias import Laplace, check_model, linearized_predictive
from laplace_debias.kfac.backend import HookGGN
from laplace_debias.network.layers import (
    has_rows_last,
    is_kfac_layer,
    is_norm,
    is_transposed,
    n_in,
    n_out,
)
from tests.cases_layers import Conv1D
from tests.oracles_predictive import dense_jacobian, dense_precision


class Words(nn.Module):
    """A little attention with ``Conv1D``, or the same with ``nn.Linear``."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.packed, self.out, self.head = kind(12, 4), kind(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        """``[n, T, 4]`` to ``[n, 3]``."""
        q, k, v = self.packed(x).split(4, -1)
        return self.head(torch.tanh(self.out((q @ k.mT).softmax(-1) @ v)).mean(1))


def twins():
    torch.manual_seed(0)
    words = Words(Conv1D).double()
    linear = Words(lambda nf, nx: nn.Linear(nx, nf)).double()
    state = words.state_dict()
    linear.load_state_dict(
        {k: v.T if k in ("packed.weight", "out.weight") else v for k, v in state.items()}
    )
    return words, linear


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(15, 5, 4, generator=g, dtype=torch.float64)
    return x, torch.randint(3, (15,), generator=g)


@pytest.mark.parametrize("approx", ["expand", "reduce", "backpack"])
@pytest.mark.parametrize("debias", ["two-batch", "crossfit", "single"])
def test_conv1d_is_a_linear_layer_with_a_transposed_weight(debias, approx):
    las = []
    for model in twins():
        la = Laplace(model, "classification", "all", "kron", debias=debias, kfac_approx=approx)
        if debias == "crossfit":
            la.fit([batch(1), batch(2)], n_data=100)
        elif debias == "single":
            la.fit(batch(1), n_data=100)
        else:
            la.fit(batch(1), curvature_loader=batch(2), n_data=100)
        las.append(la)
    x = batch(3)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the fast way for both
        one, two = (linearized_predictive(la, x, [0.5, 5.0]).covariance for la in las)
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    joint = [linearized_predictive(la, x[:3], joint=True).covariance for la in las]
    torch.testing.assert_close(*joint, rtol=1e-9, atol=1e-12)


def test_laplace_torchs_own_parts_see_the_flattened_weight():
    """Samples, the dense precision and a state belong to the weight as the model holds it."""
    words, _ = twins()
    la = Laplace(words, "classification", "all", "kron", debias=True)
    la.fit(batch(1), curvature_loader=batch(2), n_data=100)
    params, x = list(words.parameters()), batch(3)[0][:4]
    J = dense_jacobian(words, x, params)
    P = dense_precision(la, params, 2.0)
    expected = J @ torch.linalg.solve(P, J.mT)
    torch.testing.assert_close(
        linearized_predictive(la, x, 2.0).covariance, expected, rtol=1e-9, atol=1e-12
    )
    la.prior_precision = 2.0
    draws = la.sample(20_000, torch.Generator().manual_seed(0)) - la.mean
    spread = (draws @ J.flatten(0, 1).T).square().mean(0).view(4, 3)
    assert float((spread / expected.diagonal(dim1=1, dim2=2) - 1).abs().max()) < 0.05
    sampled = linearized_predictive(
        la, x, 2.0, method="samples", n_samples=4000, generator=torch.Generator().manual_seed(0)
    ).covariance
    ratio = sampled.diagonal(dim1=1, dim2=2) / expected.diagonal(dim1=1, dim2=2)
    assert float((ratio - 1).abs().max()) < 0.1
    twin = Laplace(words, "classification", "all", "kron", debias=True)
    twin.load_state_dict(la.state_dict())
    torch.testing.assert_close(twin(x), la(x))


def test_the_backend_for_laplace_torch_turns_its_blocks():
    words, linear = twins()
    X, y = batch(1)
    ours, theirs = (
        HookGGN(model, "classification").kron(X, y, N=15)[1].kfacs for model in (words, linear)
    )
    for name, one, two in zip(dict(words.named_parameters()), ours, theirs, strict=True):
        turned = name in ("packed.weight", "out.weight")
        torch.testing.assert_close(one, two[::-1] if turned else two)


def test_the_model_check_knows_conv1d():
    words, _ = twins()
    check = check_model(words, batch(1)[0], "classification")
    assert check.supported and check.layers[0].kind == "Conv1D"


def test_kinds():
    conv, norm = nn.Conv2d(2, 4, 3), nn.LayerNorm(3)
    assert is_transposed(Conv1D(2, 3)) and not is_transposed(nn.Conv1d(2, 3, 1))
    assert has_rows_last(Conv1D(2, 3)) and has_rows_last(nn.Linear(1, 1))
    assert is_kfac_layer(conv) and not is_kfac_layer(norm) and not has_rows_last(conv)
    assert (n_in(Conv1D(2, 3)), n_out(Conv1D(2, 3))) == (3, 2)
    assert (n_in(conv), n_out(conv)) == (18, 4)

    class Other(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    assert is_norm(norm) and not is_norm(Other(3)) and not is_norm(nn.InstanceNorm1d(3))
