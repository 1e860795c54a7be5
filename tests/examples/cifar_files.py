"""Random images in the standard layout of CIFAR's archives."""

import pickle
from pathlib import Path

import numpy as np


def write_batch(path: Path, n: int, seed: int, n_classes: int = 10, key: bytes = b"labels"):
    """Write one file of n images; return their bytes ``[n, 3072]`` and labels."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (n, 3072), dtype=np.uint8)
    labels = rng.integers(0, n_classes, n).tolist()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({b"data": data, key: labels}))
    return data, labels


def write_cifar10(root: Path, n_part: int, n_test: int):
    """Write five training files and the test file; return the content of each."""
    folder = root / "cifar-10-batches-py"
    parts = [write_batch(folder / f"data_batch_{i}", n_part, seed=i) for i in range(1, 6)]
    return parts, write_batch(folder / "test_batch", n_test, seed=6)


def write_cifar100(root: Path, n_train: int, n_test: int):
    """Write the training and the test file; return the content of each."""
    folder, options = root / "cifar-100-python", {"n_classes": 100, "key": b"fine_labels"}
    train = write_batch(folder / "train", n_train, seed=0, **options)
    return train, write_batch(folder / "test", n_test, seed=1, **options)
