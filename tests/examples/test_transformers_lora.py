"""Adapters get a posterior that helps; a model folder and TSV files go in as they are."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

from examples import transformers_lora

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_made_sentences(tmp_path, capsys):
    result = transformers_lora.main(["--small", "--out", str(tmp_path)])  # asserts its claims
    assert "of the parameters are Bayesian" in capsys.readouterr().out
    assert result.laplace.n_data == 300 and 0 < result.share < 0.5
    assert (tmp_path / "transformers_lora.png").stat().st_size > 0


def test_a_model_folder_and_files(tmp_path, capsys):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=16,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    lines = ["sentence\tlabel", *["a good film\t1", 'bad "film\t0', "a bad bad film\t0"] * 4]
    (tmp_path / "data.tsv").write_text("\n".join(lines))
    data = str(tmp_path / "data.tsv")
    arguments = ["--model", str(tmp_path / "model"), "--out", str(tmp_path), "--epochs", "1"]
    result = transformers_lora.main(
        [*arguments, "--train", data, "--validation", data, "--test", data]
    )
    assert result.laplace.n_data == 12
    with pytest.raises(SystemExit):
        transformers_lora.main(arguments)
    assert "--model needs --train" in capsys.readouterr().err
