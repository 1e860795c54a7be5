"""LoRA adapters of a BERT-like classifier: fit and sweep against laplace-torch, within one run.

A 6-layer, 256-wide BERT from a config with adapters of rank 8 at queries and values, and its head:
fit on 200 sentences of 32 tokens, then validation NLL at 14 prior precisions on 200 others.
laplace-torch's side is its own default backend (``CurvlinopsGGN``) and grid search, whose cost per
grid point does not depend on the point: by default ``--points`` of them are run, and the sweep is
14 times their mean. It needs a wrapper around the model. Its Jacobians cost batch size squared, so
the batch size matters: by default each side has the one that is its fastest of those tried, and
``--batch-size`` gives the same loaders to both. Seconds are the process's own (CPU seconds), on one
thread, so that other work on the machine does not count. JSON goes to ``outputs/bench_lora.json``.

    python -m examples.benchmarks.lora
    python -m examples.benchmarks.lora --batch-size 16    # the same loaders for both
    python -m examples.benchmarks.lora --points 14    # every grid point of laplace-torch's
    python -m examples.benchmarks.lora --small        # seconds: two narrow layers, few data
"""

# %% Imports
from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from laplace import Laplace as UpstreamLaplace
from laplace.baselaplace import KronLaplace
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

from laplace_debias import Laplace, linearized_predictive, sweep_prior_precision

warnings.filterwarnings("ignore", category=FutureWarning)
GRID = torch.logspace(-2, 3, 14)
VOCABULARY, LENGTH = 1000, 32


# %% The model and its data
def adapted_bert(small: bool = False) -> nn.Module:
    """A raw BERT with adapters whose second factors are not zero, as after training."""
    torch.manual_seed(0)
    wide, deep = (16, 2) if small else (256, 6)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=wide, num_hidden_layers=deep, num_attention_heads=4,
        intermediate_size=4 * wide, max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    net = BertForSequenceClassification(config)
    options = {"r": 8, "lora_alpha": 16, "target_modules": ["query", "value"]}
    net = get_peft_model(net, LoraConfig(task_type="SEQ_CLS", **options))
    for name, p in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return net.eval()


def sentences(n: int, seed: int) -> BatchEncoding:
    """Random tokens with attention masks and labels."""
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(LENGTH) < torch.randint(8, LENGTH + 1, (n, 1), generator=g)).long()
    ids = torch.randint(1, VOCABULARY, (n, LENGTH), generator=g) * mask
    labels = torch.randint(2, (n,), generator=g)
    return BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels})


def loader(data: BatchEncoding, size: int) -> DataLoader:
    """Mini-batches as a data collator makes them."""
    rows = [{key: data[key][i] for key in data} for i in range(len(data["labels"]))]

    def collate(some: list[dict[str, Tensor]]) -> BatchEncoding:
        return BatchEncoding({key: torch.stack([row[key] for row in some]) for key in some[0]})

    return DataLoader(rows, size, collate_fn=collate)


class Wrapped(nn.Module):
    """What laplace-torch needs around a model of transformers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: BatchEncoding) -> Tensor:
        """Logits."""
        return self.net(batch["input_ids"], attention_mask=batch["attention_mask"]).logits


# %% What is timed
def timed(call: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def theirs(
    train: BatchEncoding, val: BatchEncoding, small: bool, points: int, batch: int | None = None
) -> tuple:
    """laplace-torch: a fitted approximation, and seconds of its fit and of its sweep."""
    sizes = [batch] if batch else [4, 8] if small else [1, 2, 4, 8]
    la = UpstreamLaplace(Wrapped(adapted_bert(small)), "classification", "all", "kron")
    assert isinstance(la, KronLaplace)
    few = {n: BatchEncoding({key: value[:n] for key, value in val.items()}) for n in sizes}
    fits = {}
    for n in [batch] if batch else (20, len(train["labels"])):
        own = UpstreamLaplace(la.model, "classification", "all", "kron")
        fits[n] = timed(lambda n=n, own=own: own.fit(loader(train, n), progress_bar=False))
    la.fit(loader(train, min(fits, key=fits.get)), progress_bar=False)
    la(few[sizes[0]])
    per_datum = {n: timed(lambda n=n: la(few[n])) / n for n in sizes}
    size = min(per_datum, key=per_datum.get)
    kept = la.prior_precision
    sweep = timed(
        lambda: la.optimize_prior_precision(
            pred_type="glm",
            method="gridsearch",
            val_loader=loader(val, size),
            prior_structure="scalar",
            log_prior_prec_min=-2,
            log_prior_prec_max=3,
            grid_size=points,
            link_approx="probit",
        )  # fmt: skip
    )
    la.prior_precision = kept
    return la, {"fit": min(fits.values()), "sweep": sweep * len(GRID) / points, "batch": size}


def ours(train: BatchEncoding, val: BatchEncoding, small: bool, batch: int = 50) -> tuple:
    """This package: the same on the raw model."""
    la = Laplace(adapted_bert(small), "classification", "all", "kron", debias="single")
    fit = timed(lambda: la.fit(loader(train, batch)))
    sweep = timed(lambda: sweep_prior_precision(la, loader(val, batch), GRID))
    return la, {"fit": fit, "sweep": sweep, "batch": batch}


def run(n: int, small: bool, points: int, batch: int | None = None) -> dict:
    """Both sides on the same data, and how far their variances are apart."""
    train, val = sentences(n, 1), sentences(n, 2)
    ours(sentences(8, 3), sentences(8, 4), small)  # warms up
    our_la, our_seconds = ours(train, val, small, batch or 50)
    their_la, their_seconds = theirs(train, val, small, points, batch)
    x = BatchEncoding({key: value[:8] for key, value in val.items()})
    J, _ = their_la.backend.jacobians(x)
    expected = their_la.functional_variance(J)
    got = linearized_predictive(our_la, x, float(their_la.prior_precision)).covariance
    apart = float(((got - expected).abs() / expected.abs().amax((1, 2), keepdim=True)).max())
    totals = [s["fit"] + s["sweep"] for s in (our_seconds, their_seconds)]
    return {
        "n": n,
        "parameters": sum(p.numel() for p in our_la.params),
        "ours": our_seconds,
        "laplace-torch": their_seconds,
        "points run": points,
        "times faster": totals[1] / totals[0],
        "relative difference of variances": apart,
    }


def main(argv: list[str] | None = None) -> dict:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=int, default=200)
    parser.add_argument("--points", type=int, default=2, help="grid points of laplace-torch's")
    parser.add_argument("--batch-size", type=int, help="of both sides; by default each its best")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = run(24 if args.small else args.data, args.small, args.points, args.batch_size)
    for side in ("ours", "laplace-torch"):
        print(
            f"{side:<14} fit {result[side]['fit']:8.2f} s, sweep {result[side]['sweep']:9.2f} s, "
            f"mini-batches of {result[side]['batch']}"
        )
    print(
        f"{result['times faster']:.0f} times faster; variances differ by "
        f"{result['relative difference of variances']:.1e} at most"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bench_lora.json").write_text(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    main()
