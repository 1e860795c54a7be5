"""The examples on quadratics run at a small size, draw, resume, and know CIFAR's folders."""

import importlib
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


def run(name, *flags):
    importlib.import_module(name).main(list(flags))


def test_quadratic_bias(tmp_path, capsys):
    run(
        "quadratic_bias",
        "--out",
        str(tmp_path),
        "--k",
        "4",
        "--draws",
        "1",
        "--epochs",
        "50",
        "--width",
        "96",
        "--batch-size",
        "128",
        "--report-sizes",
        "32",
        "--kfac-sizes",
        "4",
        "16",
        "--widths",
        "16",
    )
    printed = capsys.readouterr().out
    assert "9 pictures" in printed and "Top curvature is over-estimated" in printed
    folder = tmp_path / "quadratic_bias-digits-with-50-random-labels-ggn"
    assert len(list(folder.glob("*.png"))) == 9
    assert all(picture.stat().st_size > 10_000 for picture in folder.glob("*.png"))


def test_debiased_cg(tmp_path, capsys):
    flags = (
        "--out",
        str(tmp_path),
        "--batch-sizes",
        "128",
        "--draws",
        "2",
        "--iterations",
        "30",
        "--epochs",
        "60",
        "--width",
        "128",
    )
    run("debiased_cg", *flags)
    first = capsys.readouterr().out
    assert "debiased lower in 2 of 2" in first
    assert (tmp_path / "debiased_cg-digits-with-0-random-labels" / "cg.png").stat().st_size > 10_000
    run("debiased_cg", *flags)  # from the file
    assert capsys.readouterr().out == first


def write_cifar100(root):
    """Write CIFAR-100's folder with a handful of random images."""
    generator = np.random.default_rng(0)
    folder = root / "cifar-100-python"
    folder.mkdir()
    for name, n in (("train", 10_016), ("test", 8)):
        content = {
            b"data": generator.integers(0, 256, (n, 3072), dtype=np.uint8),
            b"fine_labels": generator.integers(0, 100, n).tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(content))


def test_cifar_problem_reads_standard_folders(tmp_path):
    setup = importlib.import_module("quadratics_setup")
    write_cifar100(tmp_path)
    sys.path.insert(0, str(EXAMPLES / "cifar10"))
    models = importlib.import_module("models")
    for name, l2 in (("convnet-1-4", 0.0), ("allcnnc", 5e-4)):
        torch.save(models.make_model(name, 100).state_dict(), tmp_path / "state.pt")
        problem = setup.cifar_problem("cifar100", tmp_path, name, tmp_path / "state.pt", 12)
        assert problem.train[0].shape == (12, 3, 32, 32) and len(problem.test[1]) == 8
        assert problem.model(problem.test[0]).shape == (8, 100) and problem.l2 == l2


def test_cifar_needs_its_flags():
    with pytest.raises(SystemExit, match="--root and --checkpoint"):
        run("debiased_cg", "--data", "cifar10")


def test_bench_runs_quickly(tmp_path, capsys):
    bench = importlib.import_module("bench_quadratics")
    rows = bench.main(["--quick", "--K", "5", "--out", str(tmp_path)])
    assert (tmp_path / "bench_quadratics.json").exists() and len(rows) == 2
    assert all(row["a"] > 0 and row["b"] > 0 for row in rows)
