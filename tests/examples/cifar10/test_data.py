"""The reader of CIFAR's archives, on tiny made files."""

import numpy as np
import pytest
import torch

from examples.cifar10 import data
from tests.examples.cifar_files import write_batch, write_cifar100


def test_reader_splits_and_normalises(tiny_cifar10):
    root, parts, test = tiny_cifar10
    cifar = data.load_cifar(root, validation_size=7)
    assert (len(cifar.train), len(cifar.validation), len(cifar.test)) == (23, 7, 4)
    pixels = np.concatenate([part[0] for part in parts]).reshape(-1, 3, 32, 32)
    labels = sum((part[1] for part in parts), [])
    assert cifar.validation.labels.tolist() == labels[23:]
    assert cifar.test.labels.tolist() == test[1]
    X, y = cifar.train.to_dataset()[5]
    assert y == labels[5]
    expected = (pixels[5, 1] / 255 - 0.4822) / 0.2435  # the green channel
    np.testing.assert_allclose(X[1].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_reader_of_cifar100(tmp_path):
    _, (_, labels) = write_cifar100(tmp_path, 9, 3)
    cifar = data.load_cifar(tmp_path, "cifar100", validation_size=4)
    assert (len(cifar.train), len(cifar.validation), cifar.n_classes) == (5, 4, 100)
    assert cifar.test.labels.tolist() == labels


def test_reader_says_what_is_wrong(tiny_cifar10):
    load = data.load_cifar
    root, *_ = tiny_cifar10
    with pytest.raises(ValueError, match="got 'mnist'"):
        load(root, "mnist")
    with pytest.raises(ValueError, match="below the number 30 of training images, got 30"):
        load(root, validation_size=30)
    with pytest.raises(FileNotFoundError, match="cifar-100-python"):
        load(root, "cifar100")
    write_batch(root / "cifar-10-batches-py" / "test_batch", 4, 0, n_classes=100)
    with pytest.raises(ValueError, match="Expected labels of 0 to 9"):
        load(root, validation_size=7)


def test_batches_shuffle_and_flip_by_generator(tiny_cifar10):
    root, *_ = tiny_cifar10
    split = data.load_cifar(root, validation_size=7).train

    def pixels(seed, flip):
        generator = torch.Generator().manual_seed(seed)
        return torch.cat([X for X, _ in split.batches(8, generator, flip)])

    assert torch.equal(pixels(0, True), pixels(0, True))
    assert not torch.equal(pixels(0, False), pixels(1, False))
    before = split.images.clone()
    for image in pixels(0, True):
        known = data.normalise(split.images)
        assert (known == image).flatten(1).all(1).any() or (known.flip(-1) == image).flatten(1).all(
            1
        ).any()
    assert torch.equal(split.images, before)
    with pytest.raises(ValueError, match="pass a torch.Generator"):
        next(split.batches(8, flip=True))
