"""The hook-based K-FAC as a laplace-torch backend: pass ``backend=HookGGN``."""

from __future__ import annotations

from typing import Any

import torch
from laplace.curvature import (
    CurvatureInterface,
    EFInterface,
    GGNInterface,
)
from laplace.curvature.asdl import AsdlInterface
from laplace.utils import Kron
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.network.features import outputs_and_features
from laplace_debias.network.ownership import kfac_layers, transposed_parameters
from laplace_debias.network.upstream import feature_extractor, kron_of, last_layer_of
from laplace_debias.network.vectors import Fisher

__all__ = ["HookEF", "HookGGN", "HookInterface", "choose_backend"]


class HookInterface(CurvatureInterface):
    """Shared by the two curvatures; all but ``kron`` is laplace-torch's own."""

    @property
    def fisher(self) -> Fisher:
        """Which curvature, as :func:`laplace_debias.kfac.engine.kfac_factors` names it."""
        raise NotImplementedError

    def kron(self, x: Inputs, y: Tensor, N: int, **kwargs: Any) -> tuple[Tensor, Kron]:
        """K-FAC factors of a mini-batch of m data, A scaled by ``m / N`` as laplace-torch expects.

        Args:
            x: Mini-batch, a tensor or a mapping.
            y: Its targets.
            N: Number of data over which the caller sums mini-batches.
            **kwargs: Passed to :func:`laplace_debias.kfac.engine.kfac_factors`, e.g. ``weights``.

        Returns:
            Sum of the losses, and one block per trainable parameter: ``[B, A m / N]`` or ``[B]``.
        """
        model = self.model
        if self.last_layer:
            with torch.no_grad():
                _, x = outputs_and_features(feature_extractor(model), x)
            model = last_layer_of(model)
        factors = kfac_factors(
            model,
            x,
            y,
            likelihood=self.likelihood,
            params=self.params,
            fisher=self.fisher,
            **kwargs,
        )
        blocks = [[block[0], *(A * (factors.n / N) for A in block[1:])] for block in factors.blocks]
        turned = transposed_parameters(model, map(model.get_parameter, factors.names))
        blocks = [b[::-1] if turn else b for b, turn in zip(blocks, turned, strict=True)]
        return factors.summed_loss, kron_of(blocks)


class HookGGN(HookInterface, GGNInterface):
    """GGN backend whose Kronecker factors come from ``laplace_debias.kfac.engine.kfac_factors``.

    It takes Linear, Conv1d, Conv2d and Conv3d layers with groups, dilation and any padding, frozen
    parameters, and a weight per datum. With ``stochastic=True`` one random vector per datum
    replaces the exact loss Hessian: one backward pass, whatever the number of classes. Everything
    but ``kron`` is laplace-torch's ``GGNInterface``.

    Example:
        >>> from laplace import Laplace
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.arange(8) % 2), batch_size=4)
        >>> la = Laplace(nn.Linear(3, 2), "classification", "all", "kron", backend=HookGGN)
        >>> la.fit(loader)
        >>> [len(block) for block in la.H_facs.kfacs]
        [2, 1]
    """

    @property
    def fisher(self) -> Fisher:
        """The exact GGN, or one random vector per datum."""
        return "mc" if self.stochastic else "exact"


class HookEF(HookInterface, EFInterface):
    """Empirical Fisher backend with Kronecker factors from ``kfac_factors``.

    Example:
        >>> from torch import nn
        >>> backend = HookEF(nn.Linear(3, 1), "regression")
        >>> loss, kron = backend.kron(torch.ones(4, 3), torch.zeros(4, 1), N=4)
        >>> [len(block) for block in kron.kfacs]
        [2, 1]
    """

    @property
    def fisher(self) -> Fisher:
        """The gradient of the loss."""
        return "empirical"


def choose_backend(
    backend: type[CurvatureInterface] | None, model: nn.Module
) -> type[CurvatureInterface]:
    """The backend to use: the user's choice, or this package's own.

    Args:
        backend: The user's choice, or ``None``.
        model: The network.

    Returns:
        A backend class.

    Raises:
        ValueError: If the user chose ASDL and the model has layers that ASDL refuses or, with
            groups, gets wrong in silence.

    Example:
        >>> choose_backend(None, nn.Linear(2, 1)).__name__
        'HookGGN'
    """
    if backend is None:
        return HookGGN
    if not issubclass(backend, AsdlInterface):
        return backend
    refused = [
        f"'{name}' (dilation={m.dilation}, groups={m.groups}, padding={m.padding!r})"
        for name, m in kfac_layers(model).items()
        if isinstance(m, nn.Conv2d)
        and (m.dilation != (1, 1) or m.groups != 1 or isinstance(m.padding, str))
    ]
    if refused:
        raise ValueError(
            "Expected convolutions without dilation, groups or named padding for "
            f"{backend.__name__}, got {', '.join(refused)}. Remedy: leave `backend` out, or pass "
            "`CurvlinopsGGN`."
        )
    return backend
