# %% [markdown]
"""The prior that the marginal likelihood picks after training, against that of validation data.

Full-batch posteriors of the demo's networks on scikit-learn's digits; test NLL at the prior
precision of laplace-torch's ``optimize_prior_precision(method="marglik")``, at the one that a sweep
over validation data chooses, and of the plain network.

    python -m examples.research.marginal_likelihood                  # all four, some minutes
    python -m examples.research.marginal_likelihood --networks mlp --epochs 5
"""

import argparse

from torch.utils.data import DataLoader

from examples.demo import NETWORKS, digits, train_network
from laplace_debias import Laplace, evaluate, sweep_prior_precision


# %%
def compare_priors(network: str, epochs: int) -> dict[str, float]:
    """Prior precisions and NLLs of one network."""
    data = digits()
    _, model = train_network(data["train"], epochs, network)
    train, val, test = (DataLoader(data[name], 250) for name in ("train", "val", "test"))
    la = Laplace(model, "classification", "all", "kron", debias="single")
    la.fit(train)
    found = {"plain nll": evaluate(model, test).nll}
    la.prior_precision = sweep_prior_precision(la, val).best("nll")
    found |= {"swept prior": float(la.prior_precision), "swept nll": evaluate(la, test).nll}
    la.prior_precision = 1.0
    la.optimize_prior_precision(method="marglik", progress_bar=False)
    found |= {"marglik prior": float(la.prior_precision), "marglik nll": evaluate(la, test).nll}
    return found


# %%
def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args(argv)
    results = {}
    for network in args.networks:
        results[network] = compare_priors(network, args.epochs)
        values = ", ".join(f"{name} {value:.4g}" for name, value in results[network].items())
        print(f"{network}: {values}", flush=True)
    return results


if __name__ == "__main__":
    main()
