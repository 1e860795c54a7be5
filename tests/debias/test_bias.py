"""The bias report of a fit, by hand."""

import pytest
import torch

from laplace_debias.debias.bias import curvature_bias


def test_curvature_bias_by_hand():
    lam = [[torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])]]
    lam_tilde = [[torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0])]]
    # products: biased [0, 0, 2, 6], debiased [1, 2, 1, 2]
    bias = curvature_bias(["0.weight"], lam, lam_tilde, fraction=0.25)
    layer = bias.layers[0]
    assert (layer.top_biased, layer.top_debiased, layer.top_ratio) == (6.0, 2.0, 3.0)
    assert layer.bottom_biased == 0.0 and layer.bottom_ratio == 0.0
    assert layer.n_directions == 4 and layer.n_end == 1
    assert "0.weight" in str(bias) and "25%" in str(bias)
    with pytest.raises(ValueError, match="fraction.*got 0.7"):
        curvature_bias(["0.weight"], lam, lam_tilde, fraction=0.7)


def test_ends_of_several_directions_are_means():
    lam, lam_tilde = [[torch.arange(8.0)]], [[torch.arange(8.0) + 2]]
    layer = curvature_bias(["0.bias"], lam, lam_tilde, fraction=0.25).layers[0]
    assert (layer.top_biased, layer.top_debiased) == (6.5, 8.5)
    assert (layer.bottom_biased, layer.bottom_debiased) == (0.5, 2.5)
