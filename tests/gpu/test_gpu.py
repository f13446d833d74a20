from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(330)
def test_what_only_a_gpu_can_show() -> None:
    script = Path(__file__).with_name("check_gpu.py")
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
