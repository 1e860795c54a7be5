"""The LoRA benchmark runs at a small size, and both sides have the same variances."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from examples.benchmarks import lora


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_lora_benchmark(tmp_path, capsys):
    found = lora.main(["--small", "--points", "1", "--out", str(tmp_path)])
    assert found["relative difference of variances"] < 1e-4
    assert "times faster" in capsys.readouterr().out
    assert (tmp_path / "bench_lora.json").exists()
