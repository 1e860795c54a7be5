"""Many classes at a small size: variances are the exact ones where the probability is."""

from PIL import Image

from examples.benchmarks import many_classes


def test_many_classes_example(capsys):
    found = many_classes.main(
        ["--small", "--classes", "200", "--size", "16", "--check", "--ways", "top,samples"]
        + ["--sweep", "--n", "4"]
    )
    assert found["off, top"] < 0.05 < 0.25 > found["off, samples"]
    assert {"top", "samples", "sweep over one"} < found.keys()
    assert "forward passes" in capsys.readouterr().out


def test_a_model_and_pictures_by_flags(tmp_path, capsys):
    for i in range(20):
        Image.new("RGB", (20, 20), (12 * i, 99, 250 - 12 * i)).save(tmp_path / f"n{i % 6}_{i}.png")
    model = ["--model", "tests.examples.test_imagenet:tiny", "--name", "tiny", "--size", "16"]
    found = many_classes.main(["--images", str(tmp_path), *model, "--n", "4"])
    assert "auto" in found and "fit on 2 x 8" in capsys.readouterr().out
