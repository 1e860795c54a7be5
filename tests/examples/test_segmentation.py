"""A map of a segmentation's uncertainty, whose claims the example asserts itself."""

import pytest
import torch

from examples import segmentation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_made_shapes(tmp_path, capsys):
    result = segmentation.main(["--small", "--out", str(tmp_path)])  # asserts its claims
    assert "NLL" in capsys.readouterr().out
    assert result.laplace.n_data == 20 * 22 * 22  # every pixel but those of the border
    assert result.shown["unsure"].shape == (4, 24, 24)
    assert (tmp_path / "segmentation.png").stat().st_size > 0


def test_auroc_is_the_share_of_ordered_pairs():
    g = torch.Generator().manual_seed(0)
    scores, positive = torch.rand(30, generator=g), torch.rand(30, generator=g) < 0.4
    pairs = scores[positive][:, None] > scores[~positive]
    assert segmentation.auroc(scores, positive) == pytest.approx(float(pairs.float().mean()))
