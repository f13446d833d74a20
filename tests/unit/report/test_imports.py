"""What writes and shows results starts neither MPI nor torch."""

from __future__ import annotations

import subprocess
import sys


def test_no_mpi_and_no_torch() -> None:
    code = (
        "import sys, mpihpo.results.file, mpihpo.results.reader, mpihpo.results.journal\n"
        "import mpihpo.results.entries, mpihpo.report.progress, mpihpo.report.timeline\n"
        "print({'mpi4py', 'torch', 'matplotlib', 'rich'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
