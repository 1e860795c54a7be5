"""Models of transformers and peft as they come, against a dense float64 oracle.

The oracle passes one datum at a time through the network, forms the whole Jacobian and the
factors by loops over classes and positions, and solves with the dense precision.
"""

import os
import warnings
from functools import partial

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.pytorch_utils import Conv1D

from laplace_debias import (
    Laplace,
    check_model,
    evaluate,
    freeze_unsupported,
    linearized_predictive,
    sweep_prior_precision,
)
from tests.oracles_kfac import rows_of

N, C, T, V = 60, 3, 5, 20
BERT = {"vocab_size": V, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 6, "max_position_embeddings": 12, "num_labels": C}  # fmt: skip
pytestmark = [
    pytest.mark.filterwarnings("ignore:The best 'nll' lies on the edge:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**BERT))


def roberta() -> nn.Module:
    return RobertaForSequenceClassification(RobertaConfig(**BERT))


def distilbert() -> nn.Module:
    return DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=V,
            dim=4,
            n_layers=1,
            n_heads=2,
            hidden_dim=6,
            num_labels=C,
            max_position_embeddings=12,
        )  # fmt: skip
    )


def gpt2() -> nn.Module:
    return GPT2ForSequenceClassification(
        GPT2Config(
            vocab_size=V,
            n_positions=12,
            n_embd=4,
            n_layer=1,
            n_head=2,
            n_inner=6,
            num_labels=C,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )  # fmt: skip
    )


def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=4,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=6,
            image_size=4,
            patch_size=2,
            num_channels=2,
            num_labels=C,
        )  # fmt: skip
    )


def with_lora(base, targets) -> nn.Module:
    """The model with adapters whose second factors are not zero, as after training."""
    net = get_peft_model(base(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=targets))
    for name, p in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.5)
    return net


MODELS = {
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
    "gpt2": gpt2,
    "vit": vit,
    "bert + lora": partial(with_lora, bert, ["query", "value"]),
    "gpt2 + lora": partial(with_lora, gpt2, ["c_attn"]),
}


def model_of(name: str) -> nn.Module:
    """In float64, with weights large enough for outputs that differ, and dropout to be ignored."""
    torch.manual_seed(0)
    net = MODELS[name]().double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return net.train()


def batch(name: str, n: int, seed: int) -> BatchEncoding:
    """What a loader of tokenised texts (or images) yields, labels inside."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(C, (n,), generator=g)
    if name == "vit":
        pixels = torch.randn(n, 2, 4, 4, generator=g, dtype=torch.float64)
        return BatchEncoding({"pixel_values": pixels, "labels": labels})
    mask = (torch.arange(T) < torch.randint(2, T + 1, (n, 1), generator=g)).long()
    ids = torch.randint(3, V, (n, T), generator=g) * mask
    return BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels})


def frozen(net: nn.Module, capsys) -> nn.Module:
    """Without what K-FAC cannot represent."""
    freeze_unsupported(net)
    capsys.readouterr()
    return net


def one(data: BatchEncoding, i: int) -> dict[str, Tensor]:
    """One datum, as keywords."""
    return {key: value[i : i + 1] for key, value in data.items() if key != "labels"}


def jacobian(net: nn.Module, data: BatchEncoding) -> list[Tensor]:
    """``[n, C, *p.shape]`` for every trainable parameter, by one gradient after the other."""
    net.eval()
    params = [p for p in net.parameters() if p.requires_grad]
    rows = []
    for i in range(len(data["labels"])):
        f = net(**one(data, i)).logits[0]
        rows.append([torch.autograd.grad(f_c, params, retain_graph=True) for f_c in f])
    return [
        torch.stack([torch.stack([row[k] for row in datum]) for datum in rows])
        for k in range(len(params))
    ]


def output_hessians(net: nn.Module, data: BatchEncoding) -> Tensor:
    p = torch.stack([net(**one(data, i)).logits[0] for i in range(len(data["labels"]))])
    p = p.detach().softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def dense_blocks(net: nn.Module, data: BatchEncoding) -> list[Tensor]:
    """K-FAC (expand) of linear layers and convolutions, exact blocks of normalisations; dense."""
    net.eval()
    hessians, J = output_hessians(net, data), jacobian(net, data)
    layers = [m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d | Conv1D)]
    seen: dict[nn.Module, list] = {m: [] for m in layers}
    handles = [
        m.register_forward_hook(lambda m, x, out: seen[m].append((x[0].detach(), out)))
        for m in layers
    ]
    A = {m: [] for m in layers}
    B = {m: 0.0 for m in layers}
    for i, H in enumerate(hessians):
        for calls in seen.values():
            calls.clear()
        f = net(**one(data, i)).logits[0]
        for m in layers:
            for x, out in seen[m]:
                rows = rows_of(m, x)[0] if isinstance(m, nn.Conv2d) else x.flatten(0, -2)
                A[m].append(rows)
                if not out.requires_grad:
                    continue
                g = [
                    torch.autograd.grad(f_c, out, retain_graph=True, allow_unused=True)[0]
                    for f_c in f
                ]
                g = torch.stack([torch.zeros_like(out) if t is None else t for t in g])
                g = g.flatten(3).mT if isinstance(m, nn.Conv2d) else g
                g = g.reshape(C, -1, g.shape[-1])
                B[m] = B[m] + torch.einsum("cri,cd,drj->ij", g, H, g)
    for handle in handles:
        handle.remove()
    owner = {id(p): (m, role) for m in layers for role, p in m.named_parameters(recurse=False)}
    blocks = []
    for p, J_p in zip((p for p in net.parameters() if p.requires_grad), J, strict=True):
        if id(p) not in owner:  # a normalisation
            blocks.append(torch.einsum("nci,ncd,ndj->ij", J_p, hessians, J_p))
            continue
        m, role = owner[id(p)]
        rows = torch.cat(A[m])
        mean, B[m] = (rows.T @ rows / len(rows)).contiguous(), B[m].contiguous()
        weight = torch.kron(mean, B[m]) if isinstance(m, Conv1D) else torch.kron(B[m], mean)
        blocks.append(weight if role == "weight" else B[m])
    return blocks


def dense_covariance(net: nn.Module, data, x, delta: float) -> Tensor:
    """``J (N / M K-FAC + delta I)^{-1} J^T``, block by block."""
    scale, total = N / len(data["labels"]), 0.0
    for block, J in zip(dense_blocks(net, data), jacobian(net, x), strict=True):
        J = J.flatten(2)
        P = scale * block + delta * torch.eye(len(block), dtype=block.dtype)
        total = total + J @ torch.linalg.solve(P, J.mT)
    return total


@pytest.mark.parametrize("name", MODELS)
def test_variances_are_those_of_the_dense_oracle(name, capsys):
    net = frozen(model_of(name), capsys)
    data, x = batch(name, 6, 1), batch(name, 3, 2)
    la = Laplace(net, "classification", "all", "kron", debias="single")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no parameter takes the slow way
        la.fit(data, n_data=N)
        found = linearized_predictive(la, x, [0.3, 2.0]).covariance
    assert net.training
    for delta, covariance in zip((0.3, 2.0), found, strict=True):
        expected = dense_covariance(net, data, x, delta)
        torch.testing.assert_close(covariance, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_way_with_nothing_wrapped(name, capsys):
    net = frozen(model_of(name), capsys)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    train = [batch(name, 12, seed) for seed in (1, 2)]
    la = Laplace(net, "classification", "all", "kron", debias=True)
    la.fit(train, n_data=N)
    sweep = sweep_prior_precision(la, [batch(name, 9, 3)], [0.1, 1.0, 10.0, 100.0])
    la.prior_precision = sweep.best("nll")
    x = batch(name, 4, 4)
    probs = la(x)
    assert probs.shape == (4, C)
    torch.testing.assert_close(probs.sum(-1), torch.ones(4, dtype=probs.dtype))
    without = {key: value for key, value in x.items() if key != "labels"}
    torch.testing.assert_close(la(without), probs)
    assert evaluate(la, [x]).nll > 0
    for key, value in net.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in MODELS if "gpt2" not in name])
def test_last_layers_have_the_closed_form(name):
    """Its covariances are those of the same layer among all parameters."""
    net = model_of(name)
    data, x = batch(name, 12, 1), batch(name, 3, 2)
    last = Laplace(net, "classification", "last_layer", "kron", debias="single")
    last.fit(data, n_data=N)
    head = Laplace(net, "classification", "all", "kron", debias="single", parameters="head")
    head.fit(data, n_data=N)
    torch.testing.assert_close(
        linearized_predictive(last, x, 0.7).covariance,
        linearized_predictive(head, x, 0.7).covariance,
    )


def test_a_head_at_every_position_is_not_a_last_layer_but_a_head():
    """GPT-2 scores every token and picks the last: the error says what to write instead."""
    net, data = model_of("gpt2"), batch("gpt2", 12, 1)
    la = Laplace(net, "classification", "last_layer", "kron", debias="single")
    with pytest.raises(ValueError, match="parameters='head'"):
        la.fit(data, n_data=N)
    head = Laplace(net, "classification", "all", "kron", debias="single", parameters="head")
    head.fit(data, n_data=N)
    for name, p in net.named_parameters():
        p.requires_grad_(name == "score.weight")
    x = batch("gpt2", 3, 2)
    torch.testing.assert_close(
        linearized_predictive(head, x, 0.7).covariance, dense_covariance(net, data, x, 0.7)
    )


@pytest.mark.parametrize(
    ("name", "parameters", "n_blocks"),
    [
        ("bert + lora", "lora", 4),
        ("bert + lora", "head", 2),
        ("bert", "head", 2),
        ("bert", "*.query.*", 2),
        ("bert", ["bert.pooler", "classifier.weight"], 3),
        ("gpt2", "*.c_attn.*", 2),
    ],
)
def test_one_word_chooses_the_parameters(name, parameters, n_blocks):
    net = model_of(name)
    required = [p.requires_grad for p in net.parameters()]
    la = Laplace(net, "classification", "all", "kron", debias="single", parameters=parameters)
    data, x = batch(name, 6, 1), batch(name, 3, 2)
    la.fit(data, n_data=N)
    found = linearized_predictive(la, x, 2.0).covariance
    assert la(x).shape == (3, C) and len(la.H.eigenvalues) == n_blocks
    assert [p.requires_grad for p in net.parameters()] == required
    chosen = {id(p) for p in la.params}
    for p in net.parameters():
        p.requires_grad_(id(p) in chosen)
    torch.testing.assert_close(found, dense_covariance(net, data, x, 2.0), rtol=1e-9, atol=1e-11)


def test_what_is_not_supported_is_named_once_with_what_helps(capsys):
    net = model_of("bert")
    with pytest.raises(ValueError, match="word_embeddings.*freeze_unsupported") as raised:
        Laplace(net, "classification", "all", "kron", debias=True)
    assert "an embedding looks its rows up" in str(raised.value)
    check = check_model(model_of("bert"), batch("bert", 4, 1), "classification")
    assert not check.supported and "requires_grad_(False)" in str(check)
    capsys.readouterr()
    summary = freeze_unsupported(net)
    printed = capsys.readouterr().out.strip()
    assert printed == str(summary) and len(printed.splitlines()) == 2
    n_embedded = 4 * (V + 12 + 2)
    assert summary.kinds == {"Embedding": n_embedded}
    total = sum(p.numel() for p in net.parameters())
    assert summary.share == (total - n_embedded) / total
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        la = Laplace(net, "classification", "all", "kron", debias=True)
        la.fit([batch("bert", 6, 1), batch("bert", 6, 2)], n_data=N)
        la(batch("bert", 3, 3))
    assert len(found) <= 1


def test_packed_attention_projections_are_named_with_the_remedy():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, C)

        def forward(self, x):
            return self.head(self.attention(x, x, x)[0].mean(1))

    net, data = Attention(), (torch.randn(8, T, 4), torch.arange(8) % C)
    with pytest.raises(ValueError, match="'attention' .*nn.Linear for query, key, value"):
        Laplace(net, "classification", "all", "kron", debias="single")
    la = Laplace(net, "classification", "all", "kron", debias="single", parameters="head")
    la.fit(data, n_data=N)
    assert la(data[0]).shape == (8, C)
