"""Many classes: a stand-in by default, a model and a folder of pictures by flags."""

import pytest
import torch
from PIL import Image
from torch import nn

from examples import imagenet

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def tiny(name):
    """What a package of models would build."""
    assert name == "tiny"
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6))


def test_the_stand_in(tmp_path, capsys):
    result = imagenet.main(["--small", "--out", str(tmp_path)])  # asserts its claims
    assert "off by" in capsys.readouterr().out
    assert result.laplace.n_data == 120 and result.share == 1
    assert (tmp_path / "imagenet.png").stat().st_size > 0


def test_a_folder_of_pictures_and_a_model_by_name(tmp_path, capsys):
    folder = tmp_path / "pictures"
    for c in range(6):  # one folder per class, and names that begin with it
        for i in range(4):
            place = folder / f"n{c}" if i < 2 else folder
            place.mkdir(parents=True, exist_ok=True)
            picture = Image.new("RGB", (30 + i, 24), (40 * c, 250 - 40 * c, 60 * i))
            picture.save(place / f"n{c}_{i}.png")
    torch.save(tiny("tiny").state_dict(), tmp_path / "weights.pt")
    arguments = ["--images", str(folder), "--out", str(tmp_path), "--size", "16"]
    arguments += ["--batch-size", "6", "--validation", "6", "--test", "6", "--n-data", "24"]
    arguments += ["--name", "tiny", "--weights", str(tmp_path / "weights.pt")]
    result = imagenet.main([*arguments, "--model", "tests.examples.test_imagenet:tiny"])
    assert result.laplace.n_data == 6 and result.shown[0][0].shape == (3, 16, 16)
    data = imagenet.Pictures(folder, 16, 0.5, 0.25)
    assert data.classes == [f"n{c}" for c in range(6)] and len(data) == 24
    assert data[0][1] == 0 and data[23][1] == 5 and data.words == data.classes
    flat = tmp_path / "flat"
    flat.mkdir()
    Image.new("RGB", (20, 20)).save(flat / "n01440764_great_white_shark.png")
    assert imagenet.Pictures(flat, 16, 0.5, 0.25).words == ["great white shark"]
    colour = (torch.tensor([40.0 * 5, 50.0, 0.0]) / 255 - 0.5) / 0.25
    first = next(x for x, y in data if y == 5)
    torch.testing.assert_close(first[:, 8, 8], colour)
    with pytest.raises(SystemExit):
        imagenet.main(arguments)
    assert "--images needs --model" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="Expected pictures"):
        imagenet.Pictures(tmp_path / "empty", 16, 0.5, 0.25)
