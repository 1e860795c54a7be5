"""Kronecker factors of one mini-batch from laplace-torch's backends, in this package's conventions.

What differs between the backends is evened out here (see :mod:`laplace_debias.kfac.factors` for the
conventions): ASDL's input factor of a linear layer sums over positions, its blocks of one-element
weights sum over data; every backend returns a bias block for a frozen bias. BackPACK's blocks of
convolutions follow another approximation (positions are summed before the outer product), so they
are on another scale; they are passed on as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

from laplace.curvature import (
    BackPackGGN,
    BackPackInterface,
    CurvatureInterface,
    EFInterface,
)
from laplace.curvature.asdl import AsdlInterface
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs
from laplace_debias.data.targets import check_targets, check_unweighted
from laplace_debias.kfac.counts import FitCost
from laplace_debias.kfac.factors import Block, Factors
from laplace_debias.network.calling import wants_keywords
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.ownership import kfac_layers
from laplace_debias.network.recorder import Recorder
from laplace_debias.network.upstream import last_layer_of

__all__ = ["BackendEngine", "supported_types"]


class BackendEngine:
    """One of laplace-torch's backends, behind the interface of this package's engine.

    The model is changed while it computes (whole layers become trainable, hooks and attributes
    are left behind): use it inside :func:`laplace_debias.network.preserve.computing_model`.

    Args:
        backend: A backend class of laplace-torch.
        model: The network, for ``last_layer`` a ``FeatureExtractor`` that knows its last layer.
        likelihood: ``"classification"`` or ``"regression"``.
        last_layer: Whether only the last layer is Bayesian.
        backend_kwargs: For the backend's constructor.
        kron_kwargs: For the backend's ``kron``.

    Example:
        >>> import torch
        >>> from laplace.curvature import AsdlGGN
        >>> from laplace_debias.network.features import computing_model
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> with computing_model(net) as (model, _):
        ...     engine = BackendEngine(AsdlGGN, model, "classification")
        ...     factors = engine.factors(torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))
        >>> [[tuple(factor.shape) for factor in block] for block in factors.blocks]
        [[(4, 4), (3, 3)], [(4, 4)], [(2, 2), (4, 4)], [(2, 2)]]
    """

    def __init__(
        self,
        backend: type[CurvatureInterface],
        model: nn.Module,
        likelihood: str,
        *,
        last_layer: bool = False,
        backend_kwargs: dict[str, Any] | None = None,
        kron_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.likelihood = model, likelihood_name(likelihood)
        self.cost, self._kron_kwargs = FitCost(), kron_kwargs or {}
        root = last_layer_of(model) if last_layer else model
        self.names = tuple(
            name for name, p in root.named_parameters() if p.requires_grad or last_layer
        )
        self._layers = {"": root} if last_layer else kfac_layers(root, supported_types(backend))
        for layer in self._layers.values():  # the backends know whole layers only
            layer.requires_grad_(True)
        self._computed = [
            f"{prefix}.{name}".lstrip(".")
            for prefix, layer in self._layers.items()
            for name, _ in layer.named_parameters(recurse=False)
        ]
        self._backend = backend(model, self.likelihood, **(backend_kwargs or {}))
        self._asdl = issubclass(backend, AsdlInterface)
        self._backpack = issubclass(backend, BackPackInterface)

    def factors(self, X: Inputs, y: Tensor) -> Factors:
        """Factors of one mini-batch.

        Args:
            X: Inputs of n data.
            y: Their targets.

        Returns:
            The factors; passes are counted as the backends make them, one forward pass and, for the
            exact GGN, one backward pass per output.

        Raises:
            ValueError: If targets do not fit, a layer is never called, or blocks are missing.
        """
        if self._backpack and isinstance(X, MutableMapping):
            raise ValueError(
                f"Expected mini-batches `(X, y)` of tensors with {type(self._backend).__name__}, "
                "which extends modules that take a tensor, got a mapping. Remedy: leave `backend` "
                "out, or use an ASDL or curvlinops backend."
            )
        if not isinstance(X, (Tensor, MutableMapping)) or (
            isinstance(X, MutableMapping) and wants_keywords(self.model, X)
        ):
            raise ValueError(
                f"Expected a model of one argument with {type(self._backend).__name__}, got one "
                "of several positional or keyword arguments. Remedy: leave `backend` out."
            )
        check_unweighted(y, type(self._backend).__name__, "leave `backend` out")
        n = len(y)
        recorder = Recorder([self.model, *self._layers.values()], edges=False)
        with self.cost.stage("passes"), warnings.catch_warnings():
            # ASDL's hooks see all they need, and what it ignores is frozen here
            warnings.filterwarnings("ignore", message="Using a non-full backward hook")
            warnings.filterwarnings("ignore", message="BatchNorm unsupported for Kron")
            try:
                with recorder.recording():
                    loss, kron = self._backend.kron(X, y, N=n, **self._kron_kwargs)
            except Exception:
                self._check(recorder, y)  # a better message, if the targets are to blame
                raise
            C = self._check(recorder, y)
        if len(kron.kfacs) != len(self._computed):
            raise ValueError(
                f"Expected {type(self._backend).__name__} to return one block for each of "
                f"{self._computed}, got {len(kron.kfacs)} blocks. Remedy: use another backend, "
                "e.g. `backend=CurvlinopsGGN`."
            )
        kfacs: list[Block] = [list(block) for block in kron.kfacs]
        blocks = dict(zip(self._computed, kfacs, strict=True))
        if self._asdl:
            _to_convention(blocks, self._positions(recorder, n), n)
        sampled = isinstance(self._backend, EFInterface) or getattr(
            self._backend, "stochastic", False
        )
        n_vectors = 1 if sampled else C
        self.cost.forward += n
        self.cost.backward += n * n_vectors
        kept = [[factor.detach() for factor in blocks[name]] for name in self.names]
        factors = Factors.from_blocks(self.names, kept, n, C, loss.detach())
        return replace(factors, forward=n, backward=n * n_vectors)

    def _check(self, recorder: Recorder, y: Tensor) -> int:
        """Check outputs, targets and that every layer was called; return the number of outputs."""
        calls = recorder.calls[self.model]
        if not calls:
            return 0
        if len(calls[0].shape) > 2:
            raise ValueError(
                f"Expected outputs [n, C] with {type(self._backend).__name__}, got "
                f"{list(calls[0].shape)}: it knows no positions (tokens, pixels). Remedy: leave "
                "`backend` out."
            )
        check_targets(y, calls[0].shape, self.likelihood)
        silent = [name for name, layer in self._layers.items() if not recorder.calls[layer]]
        if silent:
            raise ValueError(
                "Expected the forward pass to call every trainable layer, got none for "
                f"{', '.join(map(repr, silent))}. Remedy: freeze what is not used, e.g. "
                f"`model.get_submodule({silent[0]!r}).requires_grad_(False)`."
            )
        return calls[0].shape[-1]

    def _positions(self, recorder: Recorder, n: int) -> dict[str, list[float]]:
        """Positions per datum in each call of each layer."""
        return {
            name: [
                call.shape[:-1].numel() / n if isinstance(layer, nn.Linear) else 1.0
                for call in recorder.calls[layer]
            ]
            for name, layer in self._layers.items()
        }


def _to_convention(blocks: dict[str, Block], positions: dict[str, list[float]], n: int) -> None:
    """Divide ASDL's sums over positions (linear) and over data (one-element weights)."""
    for layer, calls in positions.items():
        name = f"{layer}.weight".lstrip(".")
        if len(set(calls)) > 1:
            raise ValueError(
                f"Expected '{layer}' to see equally many positions in each of its calls, got "
                f"{calls}; ASDL adds them up. Remedy: pass `backend=CurvlinopsGGN`."
            )
        scale = 1 / calls[0] if len(blocks[name]) == 2 else 1 / (calls[0] * n)
        blocks[name][-1] = blocks[name][-1] * scale


def supported_types(backend: type[CurvatureInterface]) -> tuple[type[nn.Module], ...]:
    """Layer classes for which a backend has Kronecker factors.

    Args:
        backend: A backend class of laplace-torch.

    Returns:
        The layer classes.

    Example:
        >>> [t.__name__ for t in supported_types(BackPackGGN)]
        ['Linear', 'Conv2d', 'Conv1d']
    """
    common = (nn.Linear, nn.Conv2d)
    return (*common, nn.Conv1d) if issubclass(backend, BackPackGGN) else common
