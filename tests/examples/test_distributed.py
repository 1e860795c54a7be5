"""The example of several processes, started as its docstring says."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ABORTED = "terminate called without an active exception"


def test_two_processes_by_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "examples.distributed", "--steps", "3"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150
        )
        # PyTorch's own threads were seen to abort a process that was leaving, after its last line
        if ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("2 processes, N = 2001") == 1  # rank 0 alone
