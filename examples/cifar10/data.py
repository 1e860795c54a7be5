"""CIFAR-10 and CIFAR-100 from their standard Python archives, split and normalised as in the paper.

The folder given to ``load_cifar`` holds ``cifar-10-batches-py`` or ``cifar-100-python`` as the data
sets' own archives unpack. The 50,000 training images are split into the first 40,000 for training
and the last 10,000 for validation; the 10,000 test images stay as they are.
"""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
_LAYOUT = {
    "cifar10": ("cifar-10-batches-py", [f"data_batch_{i}" for i in range(1, 6)], "test_batch"),
    "cifar100": ("cifar-100-python", ["train"], "test"),
}
N_CLASSES = {"cifar10": 10, "cifar100": 100}


def normalise(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Map bytes ``[N, 3, 32, 32]`` to (pixel / 255 - mean) / std, channel by channel."""
    mean = torch.tensor(MEAN, dtype=dtype, device=images.device).view(3, 1, 1)
    std = torch.tensor(STD, dtype=dtype, device=images.device).view(3, 1, 1)
    return (images.to(dtype) / 255 - mean) / std


@dataclass(frozen=True)
class Split:
    """Images as bytes and their labels; normalised only when they are used.

    Attributes:
        images: ``[N, 3, 32, 32]``, ``uint8``.
        labels: ``[N]``, ``int64``.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """Return the number N of images."""
        return len(self.labels)

    def first(self, n: int) -> "Split":
        """Return the first n images (all of them if there are fewer)."""
        return Split(self.images[:n], self.labels[:n])

    def to_dataset(self, dtype: torch.dtype = torch.float32) -> TensorDataset:
        """Return the normalised images and labels for a ``DataLoader``."""
        return TensorDataset(normalise(self.images, dtype), self.labels)

    def batches(
        self, batch_size: int, generator: torch.Generator | None = None, flip: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised mini-batches.

        Args:
            batch_size: Images per mini-batch; the last one may be smaller.
            generator: Shuffles (and flips) if given; without it the order is the file's.
            flip: Mirror each image with probability one half. Needs the generator.
        """
        if flip and generator is None:
            raise ValueError(
                "Expected a generator with flip=True, which draws at random, got None. Remedy: "
                "pass a torch.Generator."
            )
        order = (
            torch.arange(len(self))
            if generator is None
            else torch.randperm(len(self), generator=generator)
        )
        for index in order.split(batch_size):
            images = self.images[index]
            if flip:
                mirrored = torch.rand(len(index), generator=generator) < 0.5
                images[mirrored] = images[mirrored].flip(-1)
            yield normalise(images), self.labels[index]


@dataclass(frozen=True)
class Cifar:
    """The three splits of one data set."""

    train: Split
    validation: Split
    test: Split
    n_classes: int


def _read(path: Path, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read one pickled batch: bytes ``[n, 3, 32, 32]`` and labels ``[n]``."""
    if not path.is_file():
        raise FileNotFoundError(
            f"Expected the file {path}, got none. Remedy: unpack the data set's Python archive "
            f"({path.parent.name}) into {path.parent.parent}."
        )
    with path.open("rb") as file:
        batch = pickle.load(file, encoding="bytes")
    labels = np.asarray(batch.get(b"labels", batch.get(b"fine_labels")), dtype=np.int64)
    data = np.asarray(batch[b"data"])
    if data.dtype != np.uint8 or data.shape != (len(labels), 3072):
        raise ValueError(
            f"Expected {path} to hold uint8 of shape ({len(labels)}, 3072) for its {len(labels)} "
            f"labels, got {data.dtype} of shape {data.shape}. Remedy: unpack the archive again."
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < n_classes:
        raise ValueError(
            f"Expected labels of 0 to {n_classes - 1} in {path}, got {labels.min()} to "
            f"{labels.max()}. Remedy: take the right data set, or unpack the archive again."
        )
    return data.reshape(-1, 3, 32, 32), labels


def load_cifar(root: str | Path, name: str = "cifar10", validation_size: int = 10_000) -> Cifar:
    """Load CIFAR-10 or CIFAR-100 from its standard folder.

    Args:
        root: The folder that holds ``cifar-10-batches-py`` or ``cifar-100-python``.
        name: ``"cifar10"`` or ``"cifar100"``.
        validation_size: How many of the last training images are kept for validation.

    Returns:
        Training, validation and test split; 40,000, 10,000 and 10,000 images by default.
    """
    if name not in _LAYOUT:
        raise ValueError(
            f"Expected one of the data sets {sorted(_LAYOUT)}, got {name!r}. Remedy: name one of "
            "these."
        )
    folder, train_files, test_file = _LAYOUT[name]
    n_classes = N_CLASSES[name]

    def split(files: list[str]) -> Split:
        parts = [_read(Path(root) / folder / file, n_classes) for file in files]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Split(torch.from_numpy(images), torch.from_numpy(labels))

    train, test = split(train_files), split([test_file])
    size = len(train) - validation_size
    if size < 1:
        raise ValueError(
            f"Expected a validation_size below the number {len(train)} of training images, got "
            f"{validation_size}, which leaves none. Remedy: choose a smaller one."
        )
    validation = Split(train.images[size:], train.labels[size:])
    return Cifar(train.first(size), validation, test, n_classes)
