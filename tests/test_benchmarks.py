from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_performance_page_says_what_the_results_say():
    script = Path(__file__).parents[1] / "benchmarks" / "tables.py"
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
