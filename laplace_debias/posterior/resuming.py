"""Fits that go on after an interruption: which can, and what a checkpoint of theirs is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from laplace_debias.data.map_style import is_map_style
from laplace_debias.data.processes import processes
from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.checkpoint import Checkpoint
from laplace_debias.debias.options import AUTO, CROSSFIT, SINGLE, TWO_BATCH, CrossfitOptions
from laplace_debias.debias.packing import generators_of
from laplace_debias.kfac.interface import EngineInterface, FactorEngine
from laplace_debias.storage.fingerprints import model_hash, plain_options

__all__ = ["check_resumable", "fit_checkpoint"]

_FORMAT = 2
"""Of what a fit has done so far; files of another one are refused."""
_OPTIONS = ("debias", "kfac_approx", "fisher", "sampler", "objective")
_RESUMED = (SINGLE, TWO_BATCH, CROSSFIT, AUTO)
_SHARED = (SINGLE, TWO_BATCH)
"""Methods whose processes exchange nothing within a role, so that each goes on by itself."""


def check_resumable(debias: str, *, override: bool) -> None:
    """Raise unless a fit can be interrupted and go on.

    Args:
        debias: The method.
        override: Whether earlier fits are forgotten.

    Raises:
        ValueError: For other methods, and for fits that add to others.

    Example:
        >>> check_resumable("two-batch", override=True)
    """
    group = processes()
    several = group is not None and group.size > 1
    allowed = _SHARED if several else _RESUMED
    if debias not in allowed or not override:
        raise ValueError(
            f"Expected `checkpoint` with override=True and debias in {_RESUMED}, in several "
            f"processes {_SHARED}, got override={override} and debias={debias!r} in "
            f"{group.size if group is not None else 1} process(es). Remedy: leave `checkpoint` out."
        )


def fit_checkpoint(
    la: Any,
    path: str | Path,
    data: TrainingData,
    engine: FactorEngine,
    seconds: float,
    memory_budget: float | None = None,
) -> Checkpoint:
    """The checkpoint of a fit, with what an earlier call has left in it.

    Args:
        la: The posterior to be fitted.
        path: The file; each of several processes adds ``.rank0``, ``.rank1``, ... to it.
        data: Its data; of those only the loaders' generators and N are looked at here.
        engine: What makes its factors.
        seconds: How often to write.
        memory_budget: Bytes of the fit, which decide the pieces that data are passed in.

    Returns:
        The checkpoint.

    Raises:
        ValueError: If the file belongs to another fit, or this one draws from a generator that is
            not kept.
    """
    if la.debias == TWO_BATCH and not isinstance(engine, EngineInterface):
        raise ValueError(
            f"Expected the backend HookGGN or HookEF for a two-batch fit with a checkpoint, got "
            f"{type(engine).__name__}. Remedy: leave `backend` or `checkpoint` out."
        )
    sampled = isinstance(la.options, CrossfitOptions) and la.options.sampling == "curvature"
    if sampled and not is_map_style(data.loader):
        raise ValueError(
            "Expected a DataLoader over a map-style dataset for sampling='curvature' with a "
            f"checkpoint, got {type(data.loader).__name__}, a stream. Remedy: sampling='uniform', "
            "or leave `checkpoint` out."
        )
    draws = la.fisher == "mc" or sampled or la.debias == AUTO
    if draws and la.generator is None and data.device.type != "cpu":
        raise ValueError(
            f"Expected a `generator` for random draws with a checkpoint on {data.device}, got "
            "none. Remedy: `Laplace(..., generator=torch.Generator(device))`."
        )
    options = {name: getattr(la, name) for name in _OPTIONS}
    if la.options is not None:  # of the method; generators are kept by their states
        options |= {name: getattr(la.options, name) for name in la.options.names()}
    if la.debias == AUTO:  # its eigenvalues are made for these
        options |= {name: getattr(la, name) for name in ("prior_precision", "sigma_noise")}
    about = {
        "format": _FORMAT,
        "model": model_hash(la.model),
        "class": type(la).__name__,
        "likelihood": str(la.likelihood),
        "n_data": data.n_data,
        "memory_budget": memory_budget,
        "backend": type(engine).__name__,
        "seed": getattr(engine, "draw_seed", None) if draws else None,
        **plain_options(options),
    }
    group = processes()
    if group is not None:
        about |= {"rank": group.rank, "world_size": group.size}
        path = f"{path}.rank{group.rank}"
    generators = generators_of(la.generator, data.loader, data.curvature_loader)
    return Checkpoint(path, about, generators, seconds)
