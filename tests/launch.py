"""Starts a program on the ranks of an MPI job, and says where each rank stood if it hangs.

Loads neither pytest nor MPI, so that a rank may import it. The fixture ``mpi`` is in
`tests.mpi_fixture`; a ``conftest.py`` makes it known by importing it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
ON_EVERY_RANK = Path(__file__).parent / "on_every_rank"
"""On the path of the ranks: makes SIGQUIT write where a rank stands."""
SURVIVE_DEATHS = ("--with-ft", "ulfm")
"""Options of Open MPI's mpiexec with which the job goes on when a rank dies; its status is 0."""
OPENMPI_PYTHON = "MPIHPO_TEST_OPENMPI_PYTHON"
"""Names the Python of a second environment, which has Open MPI."""

_MARK = "MPIHPO_TEST_LAUNCH"
_LAUNCHER_SECONDS = 15.0
_TAIL = 6000  # characters of each rank's output in a failure's message

# Output goes to a file for each rank: what mpiexec forwards is mixed up, and cut off by a kill.
_ON_RANK = (
    'rank="${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${SLURM_PROCID}}}}"; '
    'echo $$ >"$0/$rank.new" && mv "$0/$rank.new" "$0/$rank.pid"; '
    'exec "$@" >"$0/$rank.out" 2>"$0/$rank.err"'
)


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI and the Python that is built for it."""

    name: str
    python: str
    mpiexec: str | None
    problem: str = ""
    """Why no ranks can be started with it; empty if they can."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a job ended."""

    rc: int
    """Exit status of mpiexec."""
    outs: tuple[str, ...]
    """Standard output of each rank."""
    errs: tuple[str, ...]
    """Standard error of each rank."""
    launcher: str
    """What mpiexec itself printed."""
    seconds: float

    @property
    def stdout(self) -> str:
        """Standard output of all ranks, rank by rank."""
        return "".join(self.outs)

    @property
    def stderr(self) -> str:
        """Standard error of all ranks, rank by rank."""
        return "".join(self.errs)

    def describe(self) -> str:
        """Everything that was printed, by rank."""
        parts = [f"exit status {self.rc} after {self.seconds:.1f} s"]
        for kind, texts in (("stdout", self.outs), ("stderr", self.errs)):
            parts += [
                f"--- rank {rank} {kind} ---\n{text[-_TAIL:].rstrip()}"
                for rank, text in enumerate(texts)
                if text.strip()
            ]
        if self.launcher.strip():
            parts.append(f"--- mpiexec ---\n{self.launcher[-_TAIL:].rstrip()}")
        return "\n".join(parts)


def _own_mpi() -> Mpi:
    """The MPI of this very environment, or else the one on the path."""
    names = [name for name in ("mpich", "openmpi") if _is_installed(name)]
    name = names[0] if names else "mpiexec"
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    problem = "" if mpiexec else f"no mpiexec beside {sys.executable} and none on the path"
    return Mpi(name, sys.executable, mpiexec, problem)


def _second_mpi() -> Mpi:
    python = os.environ.get(OPENMPI_PYTHON, "")
    mpiexec = Path(python).parent / "mpiexec"
    problem = ""
    if not python:
        problem = f"{OPENMPI_PYTHON} names no Python with Open MPI; jobscripts/test.sh sets it"
    elif not mpiexec.exists():
        problem = f"{OPENMPI_PYTHON} is {python}, which has no mpiexec beside it"
    return Mpi("openmpi", python, str(mpiexec), problem)


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


MPIS: tuple[Mpi, ...] = (_own_mpi(), _second_mpi())
"""Those that tests are run under, whether they are there or not."""


class LauncherHung(Exception):
    """Every rank has ended, but mpiexec did not return: nothing can be said of the job's status.

    Open MPI's mpiexec (PRRTE) does so once in some dozen jobs that end with another status than 0.
    """


class Job:
    """A running MPI job; made by `start_ranks`."""

    def __init__(
        self,
        mpi: Mpi,
        ranks: int,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        options: Sequence[str] = (),
    ) -> None:
        assert mpi.mpiexec is not None
        self.ranks = ranks
        self.folder = folder
        """Holds ``RANK.out``, ``RANK.err`` and ``RANK.pid``."""
        self.arguments = tuple(arguments)
        self._mark = uuid.uuid4().hex
        self._began = time.monotonic()
        on_rank = ["/bin/sh", "-c", _ON_RANK, str(folder), mpi.python, *arguments]
        with (folder / "mpiexec").open("wb") as output:
            self.mpiexec = subprocess.Popen(
                [mpi.mpiexec, *options, "-n", str(ranks), *on_rank],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Open MPI's sessions share a folder, and the end of one breaks another's start.
                env={**environment, _MARK: self._mark, "PRTE_MCA_prte_tmpdir_base": str(folder)},
                cwd=cwd,
                start_new_session=True,
            )

    def pid(self, rank: int, timeout: float = 20.0) -> int:
        """Process id of a rank, waiting until it has one."""
        file = self.folder / f"{rank}.pid"
        end = time.monotonic() + timeout
        while not file.exists():
            if time.monotonic() > end or self.mpiexec.poll() is not None:
                raise AssertionError(f"rank {rank} was never started\n{self._result().describe()}")
            time.sleep(0.01)
        return int(file.read_text())

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        os.kill(self.pid(rank), number)

    def out(self, rank: int) -> str:
        """What a rank has printed so far."""
        return _text(self.folder / f"{rank}.out")

    def wait(self, timeout: float) -> Result:
        """Wait for the end.

        Raises:
            AssertionError: The time is over; tells where each rank stood.
            LauncherHung: Only mpiexec is left.
        """
        try:
            self._wait_for_launcher(timeout)
        except subprocess.TimeoutExpired:
            # Each rank writes the stacks of all its threads to its standard error.
            self._signal_ranks(signal.SIGQUIT)
            self._wait_for_stacks()
            self.kill()
            command = " ".join(self.arguments)
            raise AssertionError(
                f"{self.ranks} ranks of `python {command}` hang: no end after {timeout:.0f} s\n"
                f"{self._result().describe()}"
            ) from None
        return self._result()

    def _wait_for_launcher(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        all_ended_at: float | None = None
        while True:
            try:
                self.mpiexec.wait(0.2)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if now > end:
                    raise
                if not self._all_ranks_ended():
                    all_ended_at = None
                elif all_ended_at is None:
                    all_ended_at = now
                elif now - all_ended_at > _LAUNCHER_SECONDS:
                    text = f"mpiexec did not return {_LAUNCHER_SECONDS:.0f} s after its last rank"
                    raise LauncherHung(text) from None
            else:
                return

    def _all_ranks_ended(self) -> bool:
        files = [self.folder / f"{rank}.pid" for rank in range(self.ranks)]
        return all(file.exists() and not self._is_ours(int(file.read_text())) for file in files)

    def kill(self) -> None:
        """End every process of the job; harmless when it is over."""
        self._signal_ranks(signal.SIGKILL)
        try:
            self.mpiexec.wait(3)
        except subprocess.TimeoutExpired:
            os.killpg(self.mpiexec.pid, signal.SIGKILL)
            self.mpiexec.wait()

    def processes(self) -> list[int]:
        """Process ids of everything that the job has started and that is still there."""
        found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        # A rank that is being killed has no environment any more by which to know it.
        ranks = [int(file.read_text()) for file in self.folder.glob("*.pid")]
        return [pid for pid in found if self._is_ours(pid) or (pid in ranks and _is_running(pid))]

    def _wait_for_stacks(self, seconds: float = 5.0) -> None:
        """Give the ranks time to write; a busy machine has not scheduled them at once."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(
            "most recent call first" in _text(self.folder / f"{rank}.err")
            for rank in range(self.ranks)
        ):
            time.sleep(0.1)
        time.sleep(0.2)

    def _signal_ranks(self, number: int) -> None:
        for rank in range(self.ranks):
            file = self.folder / f"{rank}.pid"
            if file.exists() and self._is_ours(pid := int(file.read_text())):
                os.kill(pid, number)

    def _is_ours(self, pid: int) -> bool:
        """Whether the process is still there and is the one that we started."""
        try:
            os.kill(pid, 0)
            return self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except FileNotFoundError:  # a system without /proc
            return not Path("/proc/self").exists()
        except OSError:
            return False

    def _result(self) -> Result:
        return Result(
            rc=-1 if self.mpiexec.returncode is None else self.mpiexec.returncode,
            outs=tuple(_text(self.folder / f"{rank}.out") for rank in range(self.ranks)),
            errs=tuple(_text(self.folder / f"{rank}.err") for rank in range(self.ranks)),
            launcher=_text(self.folder / "mpiexec"),
            seconds=time.monotonic() - self._began,
        )


@contextmanager
def start_ranks(
    mpi: Mpi,
    ranks: int,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[Job]:
    """Start ``python *arguments`` on so many ranks; nothing of it is left after the block.

    Args:
        mpi: The MPI.
        ranks: How many.
        arguments: For the Python of this MPI, such as ``["-m", "mpihpo", "run", "x.yaml"]``.
        env: More environment variables; None as a value takes one away.
        cwd: Working directory of the ranks.
        options: For mpiexec.
    """
    with tempfile.TemporaryDirectory(prefix="mpihpo-ranks-") as folder:
        job = Job(mpi, ranks, arguments, Path(folder), environment(env or {}), cwd, options)
        try:
            yield job
        finally:
            job.kill()


def run_ranks(
    mpi: Mpi,
    ranks: int,
    arguments: Sequence[str],
    *,
    timeout: float = 120.0,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    options: Sequence[str] = (),
    rc: int | None = 0,
) -> Result:
    """Run ``python *arguments`` on so many ranks to its end; the rest as in `start_ranks`.

    Args:
        timeout: Seconds until it counts as hanging.
        rc: The exit status that is right; None: any.

    Raises:
        AssertionError: It hangs, or ended with another status; tells what each rank printed.
    """
    with start_ranks(mpi, ranks, arguments, env=env, cwd=cwd, options=options) as job:
        result = job.wait(timeout)
    if rc is not None and result.rc != rc:
        command = " ".join(arguments)
        raise AssertionError(f"{ranks} ranks of `python {command}`: {result.describe()}")
    return result


def run_programs(
    mpi: Mpi,
    ranks: int,
    module: str,
    *functions: str,
    timeout: float = 120.0,
    env: Mapping[str, str | None] | None = None,
    options: Sequence[str] = (),
) -> Result:
    """Call functions of a module of `tests.mpi.programs` on so many ranks, one after the other.

    An error on any rank ends the job and fails the test with that rank's traceback.

    Args:
        module: Name below ``tests.mpi.programs``.
        functions: ``name`` or ``name:argument``; arguments are text.
    """
    arguments = ["-m", "tests.rank_program", f"tests.mpi.programs.{module}", *functions]
    return run_ranks(mpi, ranks, arguments, timeout=timeout, env=env, options=options)


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment that the ranks are started with; None as a value takes one away."""
    variables = dict(os.environ)
    path = [str(ROOT), str(ON_EVERY_RANK), *filter(None, [variables.get("PYTHONPATH")])]
    variables |= {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",  # where there is no name service
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    for name, value in changes.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    return variables


def _is_running(pid: int) -> bool:
    """Whether a process is there and not dead already, waiting for its parent to take notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
