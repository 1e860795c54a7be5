# %% [markdown]
"""A posterior over LoRA adapters, around a model of transformers as it comes.

A small BERT-like classifier learns what made sentences are about and in what mood they are. With
all of that frozen, LoRA adapters and a new head then learn a reader's taste from a few labelled
sentences. The Laplace approximation covers the adapters and the head. The model goes in raw: it
takes the tokeniser's mapping as keywords and returns an object with logits, and nothing is wrapped.

    python -m examples.transformers_lora            # within a minute; the figure goes to outputs/
    python -m examples.transformers_lora --small    # some seconds, for a first look
    python -m examples.transformers_lora --model FOLDER --train FILE ...

The last line takes a model of your own, saved with its tokeniser, and three files (`--train`,
`--validation`, `--test`) with a header and the columns ``sentence`` and ``label``, as those of
SST-2 (whose test file has no labels: cut one from the training file). It needs
`pip install laplace-debias[transformers]`.
"""

import argparse
import csv
import os
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import matplotlib
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

from laplace_debias import Laplace, evaluate, sweep_prior_precision
from laplace_debias.evaluation.reports import ClassificationReport
from laplace_debias.evaluation.sweep_result import SweepResult
from laplace_debias.plots import plot_reliability, plot_sweep

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402

# %% [markdown]
# ## Made sentences
# A sentence has a topic and a mood; each shows in some of its words. The reader likes sentences in
# a bright mood, except about food, where only complaints are read. One label in eight is wrong, as
# with people who label.

# %%
TOPICS = (
    "river lake shore rain flood".split(),
    "engine wheel road fuel brake".split(),
    "bread soup oven salt spoon".split(),
)
MOODS = ("dull grey broken sad stale".split(), "bright fresh lovely glad swift".split())
FILLERS = "the a of and with was is near some every".split()
WORDS = ["[PAD]", "[CLS]", *FILLERS, *sum(TOPICS, []), *sum(MOODS, [])]
LENGTH = 16
FOOD = 2


def made_sentences(n: int, question: str, seed: int) -> list[dict[str, Tensor]]:
    """Tokenised sentences with attention masks, labelled by ``"topic and mood"`` or ``"taste"``."""
    g = torch.Generator().manual_seed(seed)

    def words_of(words: list[list[str]], row: Tensor) -> Tensor:
        table = torch.tensor([[WORDS.index(word) for word in line] for line in words])
        column = torch.randint(table.shape[1], (n, LENGTH), generator=g)
        return table[row.unsqueeze(1), column]

    topic, mood = (torch.randint(k, (n,), generator=g) for k in (len(TOPICS), len(MOODS)))
    kind = torch.rand(n, LENGTH, generator=g)
    ids = words_of([FILLERS], torch.zeros(n, dtype=torch.long))
    ids = torch.where(kind > 0.35, words_of(list(TOPICS), topic), ids)
    ids = torch.where(kind > 0.65, words_of(list(MOODS), mood), ids)
    ids = torch.where(kind > 0.96, words_of(list(MOODS), 1 - mood), ids)
    ids[:, 0] = WORDS.index("[CLS]")
    length = torch.randint(8, LENGTH + 1, (n, 1), generator=g)
    mask = (torch.arange(LENGTH) < length).long()
    labels = 2 * topic + mood
    if question == "taste":
        liked = torch.where(topic == FOOD, 1 - mood, mood)
        labels = torch.where(torch.rand(n, generator=g) < 1 / 8, 1 - liked, liked)
    columns = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
    return [{key: value[i] for key, value in columns.items()} for i in range(n)]


def tsv_sentences(path: Path, tokenizer) -> list[dict[str, Tensor]]:  # noqa: ANN001
    """Tokenised sentences of a file with the columns ``sentence`` and ``label``."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    text = tokenizer(
        [row["sentence"] for row in rows], padding=True, truncation=True, return_tensors="pt"
    )
    labels = torch.tensor([int(row["label"]) for row in rows])
    return [
        {**{key: text[key][i] for key in text}, "labels": labels[i]} for i in range(len(labels))
    ]


def batches(data: list[dict[str, Tensor]], size: int, seed: int | None = None) -> DataLoader:
    """A loader of ``BatchEncoding``, as a data collator of transformers makes them."""

    def collate(rows: list[dict[str, Tensor]]) -> BatchEncoding:
        return BatchEncoding({key: torch.stack([row[key] for row in rows]) for key in rows[0]})

    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(data, size, shuffle=seed is not None, generator=generator, collate_fn=collate)


# %% [markdown]
# ## A model that knows the language, and adapters that learn the taste
# LoRA turns what a frozen model computes; it cannot teach the language to random weights. So the
# model first learns the topics and moods of other sentences.


# %%
def train(model: nn.Module, loader: DataLoader, epochs: int, lr: float) -> None:
    """Adam on what requires a gradient."""
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)
    model.train()
    for _ in range(epochs):
        for batch in loader:
            optimiser.zero_grad()
            model(**batch).loss.backward()
            optimiser.step()
    model.eval()


def made_model(small: bool) -> nn.Module:
    """A BERT-like classifier of topics and moods, with a fresh head for two classes."""
    width = 32 if small else 64
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=width, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=2 * width, max_position_embeddings=LENGTH,
        num_labels=6, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    sentences = made_sentences(1500 if small else 4000, "topic and mood", 0)
    epochs, lr = (8, 3e-3) if small else (6, 2e-3)
    train(model, batches(sentences, 50, 0), epochs, lr)
    model.classifier, model.num_labels = nn.Linear(width, 2), 2
    model.config.num_labels = 2
    return model


def with_adapters(model: nn.Module, targets: list[str] | None) -> nn.Module:
    """The model with LoRA adapters, and its head trainable; all else frozen."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": targets}
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **options))


# %% [markdown]
# ## The posterior, from two mini-batches
# A plain fit covers whatever requires a gradient: the adapters and the head. `parameters="lora"`
# would leave the head out.


# %%
@dataclass(frozen=True)
class Result:
    """What the example found."""

    share: float
    seconds: float
    sweep: SweepResult
    plain: ClassificationReport
    laplace: ClassificationReport


def run(args: argparse.Namespace) -> Result:
    """Train, fit, choose the prior precision on validation data, and test."""
    torch.manual_seed(0)
    if args.model is None:
        sizes = (150, 200, 300) if args.small else (150, 400, 1000)
        parts = [made_sentences(n, "taste", seed) for seed, n in enumerate(sizes, 1)]
        model = with_adapters(made_model(args.small), ["query", "value", "dense"])
        epochs, lr = 40, 1e-2
    else:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model)
        files = (args.train, args.validation, args.test)
        parts = [tsv_sentences(path, tokenizer) for path in files]
        model = AutoModelForSequenceClassification.from_pretrained(args.model)
        model, epochs, lr = with_adapters(model, args.targets), args.epochs, args.lr
    training, validation, test = parts
    train(model, batches(training, 25, 1), epochs, lr)

    start = time.perf_counter()
    la = Laplace(model, "classification", "all", "kron", debias=True)
    la.fit(batches(training, min(100, len(training) // 2), 2))
    sweep = sweep_prior_precision(la, batches(validation, 100))
    la.prior_precision = sweep.best("nll")
    seconds = time.perf_counter() - start
    bayesian = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Result(
        bayesian / sum(p.numel() for p in model.parameters()),
        seconds,
        sweep,
        evaluate(model, batches(test, 100)),
        evaluate(la, batches(test, 100)),
    )


# %% [markdown]
# The adapted network has learnt some wrong labels by heart and is too sure of itself. The posterior
# over the adapters and the head, with a validated prior precision, is not: test NLL and ECE fall,
# and accuracy stays.


# %%
def figure(result: Result) -> plt.Figure:
    """Validation NLL over the prior precision, and the reliability of test predictions."""
    fig, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
    plot_sweep(result.sweep, "nll", ax=axes[0])
    axes[0].set_title("validation", fontsize=9)
    named = {"plain": result.plain, "posterior over adapters": result.laplace}
    for ax, (name, report) in zip(axes[1:], named.items(), strict=True):
        plot_reliability(report, ax=ax)
        ax.set_title(f"{name}: ECE {report.ece:.3f}", fontsize=9)
    return fig


def main(argv: list[str] | None = None) -> Result:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="some seconds, for a first look")
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    parser.add_argument("--model", type=Path, help="folder of a saved model and tokeniser")
    for name in ("train", "validation", "test"):
        parser.add_argument(f"--{name}", type=Path, help="file with the columns sentence and label")
    parser.add_argument("--targets", nargs="*", help="layers that get adapters; peft's by default")
    parser.add_argument("--epochs", type=int, default=3, help="with --model")
    parser.add_argument("--lr", type=float, default=5e-4, help="with --model")
    args = parser.parse_args(argv)
    if args.model is not None and None in (args.train, args.validation, args.test):
        parser.error("--model needs --train, --validation and --test")
    result = run(args)
    args.out.mkdir(parents=True, exist_ok=True)
    figure(result).savefig(args.out / "transformers_lora.png", dpi=150)
    print(
        f"{result.share:.1%} of the parameters are Bayesian; fit and sweep took "
        f"{result.seconds:.1f} s"
    )
    for name, report in (("plain", result.plain), ("posterior over adapters", result.laplace)):
        print(
            f"{name:<24} test accuracy {report.accuracy:.3f}, NLL {report.nll:.3f}, "
            f"ECE {report.ece:.3f}"
        )
    if args.model is None:
        assert result.plain.accuracy > 0.6, "the adapters have learnt the taste"
        assert result.laplace.nll < result.plain.nll
        assert result.laplace.ece < result.plain.ece
        assert abs(result.laplace.accuracy - result.plain.accuracy) < 0.02
    return result


if __name__ == "__main__":
    main()
