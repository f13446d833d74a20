"""What ``import mpihpo`` and ``python -m mpihpo --help`` take over Python's own start.

    python benchmarks/bench_import.py [--times 20]

The three kinds of start take turns, so that a busy moment of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import launcher
import machine

HEAVY = ("mpi4py", "torch", "h5py", "numpy", "yaml", "matplotlib", "rich")
STARTS = {
    "python": ["-c", "pass"],
    "import mpihpo": ["-c", "import mpihpo"],
    "python -m mpihpo --help": ["-m", "mpihpo", "--help"],
}
LIST_HEAVY = f"""
import sys
{{}}
sys.stderr.write(" ".join(name for name in {HEAVY} if name in sys.modules))
"""
PREPARATIONS = {
    "import mpihpo": "import mpihpo",
    "python -m mpihpo --help": "from mpihpo.cli import main; main(['--help'])",
}


def start(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Start a Python that finds this repository's package, and wait for its end."""
    path = os.pathsep.join(filter(None, (str(launcher.ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )


def seconds(arguments: list[str]) -> float:
    """How long one start takes."""
    began = time.perf_counter()
    start(arguments)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print; status 1 if a heavy module was loaded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args()
    print(machine.header("What importing costs"))
    for arguments in STARTS.values():
        start(arguments)  # compiles, and fills the file cache
    found: dict[str, list[float]] = {name: [] for name in STARTS}
    for _ in range(options.times):
        for name, arguments in STARTS.items():
            found[name].append(seconds(arguments))
    base = statistics.median(found["python"])
    print(f"median of {options.times}, in ms")
    for name, values in found.items():
        median = statistics.median(values)
        print(f"  {name:24} {1e3 * median:7.1f}   over Python's start {1e3 * (median - base):7.1f}")
    loaded_any = False
    for name, preparation in PREPARATIONS.items():
        loaded = start(["-c", LIST_HEAVY.format(preparation)]).stderr.strip()
        loaded_any = loaded_any or bool(loaded)
        print(f"heavy modules loaded by {name}: {loaded or 'none'}")
    raise SystemExit(1 if loaded_any else 0)


if __name__ == "__main__":
    main()
