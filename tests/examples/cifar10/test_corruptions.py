"""Corrupted images: drawn one by one, reproducible, and read from the published files."""

import sys

import numpy as np
import pytest
import torch

from examples.cifar10 import corruptions, data


def test_corruptions_are_drawn_per_image_and_reproducible(files, library):
    test = data.load_cifar(files, validation_size=8).test
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    first = corruptions.make_corrupted(test, 3, seed=5)
    assert (np.random.get_state()[1] == before).all()
    assert first.images.shape == (10, 3, 32, 32) and first.images.dtype == torch.uint8
    assert torch.equal(first.labels, test.labels)
    assert [name for name, _ in library] == corruptions.draw_names(10, 3, 5)
    assert {severity for _, severity in library} == {3}
    np.random.seed(2)  # must not matter
    assert torch.equal(corruptions.make_corrupted(test, 3, seed=5).images, first.images)
    assert not torch.equal(corruptions.make_corrupted(test, 3, seed=6).images, first.images)
    drawn = corruptions.draw_names(3000, 1, 0)
    assert set(drawn) == set(corruptions.NAMES) and len(corruptions.NAMES) == 15
    assert drawn != corruptions.draw_names(3000, 2, 0)


def test_a_missing_library_is_explained(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    test = data.load_cifar(files, validation_size=8).test
    with pytest.raises(ImportError, match="pip install imagecorruptions-imaug"):
        corruptions.make_corrupted(test, 1)
    with pytest.raises(ValueError, match=r"severity in \(1, 2, 3, 4, 5\), got 6"):
        corruptions.make_corrupted(test, 6)


def test_published_files_are_read_at_the_right_rows(tmp_path):
    for number, name in enumerate(corruptions.NAMES):
        pixels = np.arange(40, dtype=np.uint8)[:, None, None, None] + np.uint8(40 * (number % 5))
        np.save(tmp_path / f"{name}.npy", np.broadcast_to(pixels, (40, 32, 32, 3)))
    np.save(tmp_path / "labels.npy", np.arange(40) % 10)
    split = corruptions.read_published(tmp_path, 7, severity=4, seed=2, per_severity=8)
    names = corruptions.draw_names(7, 4, 2)
    for i, name in enumerate(names):
        row = 3 * 8 + i  # three severities of eight images come before
        assert (split.images[i] == row + 40 * (corruptions.NAMES.index(name) % 5)).all()
        assert split.labels[i] == row % 10
    with pytest.raises(ValueError, match="at most 8 images, got n = 9"):
        corruptions.read_published(tmp_path, 9, 1, per_severity=8)
    with pytest.raises(ValueError, match=r"shape \(45, 32, 32, 3\), got \(40, 32, 32, 3\)"):
        corruptions.read_published(tmp_path, 7, 1, per_severity=9)
    (tmp_path / "labels.npy").unlink()
    with pytest.raises(FileNotFoundError, match="labels.npy of CIFAR-10-C"):
        corruptions.read_published(tmp_path, 7, 1, per_severity=8)
