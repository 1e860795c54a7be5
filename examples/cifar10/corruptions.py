"""A corrupted test set in the style of CIFAR-10-C: one of 15 corruptions per image, 5 severities.

Either the published files are read (``gaussian_noise.npy``, ..., ``labels.npy``: 10,000 images for
each severity in turn), or the corruptions are made with the library ``imagecorruptions``, in its
maintained release ``imagecorruptions-imaug``. The library's severities are those of ImageNet-C,
which are stronger on 32 x 32 images than CIFAR-10-C's own: numbers are comparable between methods,
not with results on the published files.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from examples.cifar10.data import Split

NAMES = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
SEVERITIES = (1, 2, 3, 4, 5)
_OWN_SEED = ("impulse_noise", "glass_blur")  # the others draw from numpy's global state

# corrupt(image [32, 32, 3], severity, name, seed) -> image
Corrupt = Callable[[np.ndarray, int, str, int], np.ndarray]


def draw_names(n: int, severity: int, seed: int) -> list[str]:
    """Draw one of the 15 corruptions for each of n images."""
    rng = np.random.default_rng([seed, severity])
    return [NAMES[i] for i in rng.integers(len(NAMES), size=n)]


def library_corrupt() -> Corrupt:
    """Return the library's corruptions, made reproducible.

    Raises:
        ImportError: If the library is not installed.
    """
    try:
        from imagecorruptions import corrupt
    except ImportError as error:
        raise ImportError(
            "Expected the library `imagecorruptions`, to make corrupted images, got none that "
            f"loads ({error}). Remedy: `pip install imagecorruptions-imaug` (on a machine without "
            "a display: `pip install --no-deps imagecorruptions-imaug`, then scikit-image, numba "
            "and opencv-python-headless); or give the folder of the published CIFAR-10-C files; "
            "or leave the corrupted images out."
        ) from error

    def one(image: np.ndarray, severity: int, name: str, seed: int) -> np.ndarray:
        own = {"seed": seed} if name in _OWN_SEED else {}
        with _numpy_seed(seed):
            return corrupt(image, severity=severity, corruption_name=name, **own)

    return one


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seed numpy's global state, and put it back."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def make_corrupted(
    split: Split, severity: int, seed: int = 0, corrupt: Corrupt | None = None
) -> Split:
    """Corrupt every image of a split, each by a corruption of its own.

    Args:
        split: Images ``[n, 3, 32, 32]`` as bytes, and their labels.
        severity: 1 to 5.
        seed: Decides which corruption each image gets, and the corruptions' own randomness.
        corrupt: Makes one corrupted image; by default the library.

    Returns:
        The corrupted images with the same labels.
    """
    _check_severity(severity)
    corrupt = corrupt or library_corrupt()
    corrupted = np.empty((len(split), 32, 32, 3), dtype=np.uint8)
    for i, name in enumerate(draw_names(len(split), severity, seed)):
        image = np.ascontiguousarray(split.images[i].permute(1, 2, 0).numpy())
        own_seed = zlib.crc32(f"{seed} {severity} {i}".encode())  # 32 bits, as numpy wants
        corrupted[i] = corrupt(image, severity, name, own_seed)
    return Split(torch.from_numpy(corrupted).permute(0, 3, 1, 2).contiguous(), split.labels)


def read_published(
    folder: str | Path, n: int, severity: int, seed: int = 0, per_severity: int = 10_000
) -> Split:
    """Read one corruption per image from the published CIFAR-10-C files.

    Args:
        folder: Holds one ``.npy`` file per corruption, ``[5 * per_severity, 32, 32, 3]``, and
            ``labels.npy``.
        n: How many of the first test images.
        severity: 1 to 5.
        seed: Decides which corruption each image gets.
        per_severity: Number of images per severity in each file.

    Returns:
        The corrupted images and their labels.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file has another shape, or there are fewer than n images.
    """
    _check_severity(severity)
    if n > per_severity:
        raise ValueError(f"Expected at most {per_severity} images, got n = {n}. Remedy: ask less.")
    rows = (severity - 1) * per_severity + np.arange(n)
    names = np.array(draw_names(n, severity, seed))
    images = np.empty((n, 32, 32, 3), dtype=np.uint8)
    for name in np.unique(names):
        published = _load(Path(folder) / f"{name}.npy", (5 * per_severity, 32, 32, 3))
        images[names == name] = published[rows[names == name]]
    labels = _load(Path(folder) / "labels.npy", (5 * per_severity,))[rows]
    return Split(
        torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(),
        torch.from_numpy(labels.astype(np.int64)),
    )


def _load(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Open an array without reading all of it."""
    if not path.is_file():
        raise FileNotFoundError(
            f"Expected the file {path} of CIFAR-10-C, got none. Remedy: unpack its archive "
            f"(CIFAR-10-C.tar, Zenodo record 2535967) into {path.parent}."
        )
    array = np.load(path, mmap_mode="r")
    if array.shape != shape:
        raise ValueError(
            f"Expected {path} to have the shape {shape}, got {array.shape}. Remedy: unpack the "
            "archive again."
        )
    return array


def _check_severity(severity: int) -> None:
    """Raise for a severity that does not exist."""
    if severity not in SEVERITIES:
        raise ValueError(
            f"Expected a severity in {SEVERITIES}, got {severity}. Remedy: choose one of these."
        )
