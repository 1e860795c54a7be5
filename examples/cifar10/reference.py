"""K-FAC factors of very many training images, accumulated in a file that survives interruptions.

The training images are taken in one random order, decided by the seed. The file therefore serves a
large-batch reference of any size: asking for more later goes on where it stopped, up to the whole
training set.
"""

import copy
import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from tqdm import tqdm

from examples.cifar10.data import Split, normalise
from examples.cifar10.train import save_atomically
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.kfac.factors import Factors
from laplace_debias.storage.fingerprints import model_hash


@dataclass(frozen=True)
class Curvature:
    """Which K-FAC: how positions are summed, and which vectors are propagated back.

    Attributes:
        kfac_approx: ``"expand"``, ``"reduce"`` or ``"backpack"``, see
            ``laplace_debias.kfac.grams``.
        fisher: ``"exact"``, or ``"mc"`` for one random vector per image.
        sampler: How the random vectors are drawn: ``"trace"``, or ``"label"`` as in BackPACK.
        seed: Decides the random vectors, together with the images themselves.
    """

    kfac_approx: str = "expand"
    fisher: str = "exact"
    sampler: str = "trace"
    seed: int = 0

    @property
    def settings(self) -> dict[str, str]:
        """What decides the factors, for files and cells; nothing for the default."""
        sampled = self.fisher == "mc"
        return {
            **({"kfac_approx": self.kfac_approx} if self.kfac_approx != "expand" else {}),
            **({"fisher": self.fisher, "sampler": self.sampler} if sampled else {}),
        }


def factors_of(
    model: nn.Module,
    split: Split,
    rows: Tensor,
    chunk: int = 64,
    curvature: Curvature = Curvature(),  # noqa: B008
) -> Factors:
    """K-FAC factors of some images, a few at a time, in the model's dtype.

    Args:
        model: The network; parameters without gradients get no block.
        split: All images.
        rows: Which of them.
        chunk: Images per pass.
        curvature: Which factors. Random vectors depend on the seed and the pass's first image, so
            that an interrupted run goes on with the same ones.

    Returns:
        Their factors: B a sum, A a mean over the images.
    """
    dtype, total = next(model.parameters()).dtype, None
    for part in rows.split(chunk):
        X, y = normalise(split.images[part], dtype), split.labels[part]
        new = kfac_factors(
            model,
            X,
            y,
            likelihood="classification",
            kfac_approx=curvature.kfac_approx,
            fisher=curvature.fisher,
            sampler=curvature.sampler,
            generator=torch.Generator().manual_seed(curvature.seed * 1_000_003 + int(part[0])),
        )
        total = new if total is None else total + new
    return total


def reference_factors(
    model: nn.Module,
    split: Split,
    size: int,
    path: Path,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    chunk: int = 64,
    save_every: int = 1024,
    max_images: int | None = None,
    progress_bar: bool = False,
    curvature: Curvature = Curvature(),  # noqa: B008
) -> Factors:
    """Return the factors of ``size`` random training images, from the file as far as it goes.

    Args:
        model: The network, biases frozen. It is left as it was.
        split: The training images.
        size: How many of them, at most all.
        path: The file; written after every ``save_every`` images and at the end.
        dtype: Precision of all passes and sums.
        seed: Decides the order of the images.
        chunk: Images per pass.
        save_every: Images between two writes of the file.
        max_images: Stop after that many more; the same call goes on later.
        progress_bar: Show one, in images.
        curvature: Which factors.

    Returns:
        The factors; ``n`` is less than ``size`` only if ``max_images`` stopped them.

    Raises:
        ValueError: If the file is of another model, data or setting, or holds more images already.
    """
    if not 1 <= size <= len(split):
        raise ValueError(f"Expected a size between 1 and {len(split)}, got {size}.")
    config = {
        "model": model_hash(model),
        "data": sha256(split.images.numpy()).hexdigest()[:16],
        "n_data": len(split),
        "dtype": str(dtype),
        "seed": seed,
        **curvature.settings,
    }
    total, seconds = _read(path, config, size)
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[:size]
    done = 0 if total is None else total.n
    stop = size if max_images is None else min(size, done + max_images)
    computing = copy.deepcopy(model).to(dtype)
    with tqdm(total=stop, initial=done, unit="image", disable=not progress_bar) as bar:
        while done < stop:
            start, goal = perf_counter(), min(done + save_every, stop)
            while done < goal:
                rows = order[done : min(done + chunk, goal)]
                new = factors_of(computing, split, rows, chunk, curvature)
                total = new if total is None else total + new
                done += len(rows)
                bar.update(len(rows))
            seconds += perf_counter() - start
            _write(path, config, total, seconds)
    return total


def _read(path: Path, config: dict, size: int) -> tuple[Factors | None, float]:
    """What the file holds so far, and the seconds it took."""
    if not path.exists():
        return None, 0.0
    state = torch.load(path, weights_only=True)
    theirs = json.loads(state["config"])
    differing = {
        key: (theirs.get(key), config[key]) for key in config if theirs.get(key) != config[key]
    }
    if differing:
        raise ValueError(
            f"Expected factors of this model, data and settings in {path}, got others (key: there, "
            f"now): {differing}. Remedy: use another file, or delete this one."
        )
    if state["n"] > size:
        raise ValueError(
            f"Expected factors of at most {size} images in {path}, got {state['n']}. Remedy: ask "
            "for at least as many, or use another file."
        )
    parts = (state["names"], state["blocks"], state["n"], state["n_outputs"], state["loss"])
    return Factors.from_blocks(*parts), state["seconds"]


def _write(path: Path, config: dict, total: Factors, seconds: float) -> None:
    """Keep the sum so far; an interruption leaves the previous file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"config": json.dumps(config), "blocks": total.blocks, "n": total.n}
    state |= {"names": list(total.names)}
    state |= {"loss": total.loss, "n_outputs": total.n_outputs, "seconds": seconds}
    save_atomically(state, path)
