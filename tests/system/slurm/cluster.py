"""A real Slurm of four nodes on the loopback of one machine."""

from __future__ import annotations

import json
import os
import platform
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.launch import ROOT, environment

NODES = ("n1", "n2", "n3", "n4")
KILL_WAIT_SECONDS = 6
"""Between SIGTERM and SIGKILL when Slurm ends a job."""
JOB_SCRIPTS = ROOT / "jobscripts"

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo")
_KEEPER = Path(__file__).with_name("keeper.py")
_EPILOG = Path(__file__).with_name("epilog.py")
_START_SECONDS = 30.0
_PORTS = range(20000, 32000)  # below those that outgoing connections take
_GPUS = 32  # of each node; none of them real
_UP = frozenset({"idle", "mixed", "allocated", "completing"})
_TAIL = 15  # lines of each log in a message
_OF_SLURM = re.compile(r"(SLURM|SBATCH|SALLOC|SQUEUE|SINFO|SCANCEL|PMI|HYDRA)_?")

# Each node takes what any of the job scripts asks for, with their names of partitions. A job
# that is requeued waits until its first credential has expired. Numbers of jobs differ from those
# of other sessions, which may have been killed (see epilog.py).
_CONFIGURATION = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=pmi2
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=6
MessageTimeout=5
KillWait={kill_wait}
Epilog={folder}/epilog
FirstJobId={first_job}
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=512 Gres=gpu:{gpus}
PartitionName=PARTITION Nodes=ALL Default=YES
PartitionName=booster Nodes=ALL
"""


class CannotStart(Exception):
    """There is no Slurm, or it does not come up; says why."""


class Cluster:
    """A running Slurm; everything that it is and was lies in a folder of its own.

    Raises:
        CannotStart: Programs are missing, or the daemons do not come up.
    """

    def __init__(self) -> None:
        # Debian has the daemons where only root looks.
        self._path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
        missing = [name for name in _PROGRAMS if shutil.which(name, path=self._path) is None]
        if missing:
            raise CannotStart(f"Slurm is not installed: no {', '.join(missing)}")
        # Short, because of the socket in it.
        self.folder = Path(tempfile.mkdtemp(prefix="mpihpo-slurm-", dir="/tmp"))
        self._slurmds: dict[str, int] = {}
        self._write_files()
        self._keeper = subprocess.Popen(
            [sys.executable, str(_KEEPER), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment({}),
            start_new_session=True,  # Ctrl-C is for pytest, whose end it then sees
        )
        try:
            self._start_daemons()
        except BaseException:
            self.stop()
            raise

    def environment(self, changes: Mapping[str, str]) -> dict[str, str]:
        """For a command of this Slurm; of another, in which the tests may run, nothing is left."""
        kept = {name: None for name in os.environ if _OF_SLURM.match(name)}
        variables = {"PATH": self._path, "SLURM_CONF": str(self.folder / "slurm.conf")}
        return environment({**kept, **variables, **changes})

    def run(
        self,
        *command: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        rc: int | None = 0,
    ) -> str:
        """Standard output of one of Slurm's commands, which ends with the test session.

        Raises:
            AssertionError: It takes too long, or ends with another status than ``rc``.
        """
        process = subprocess.Popen(
            # Else an srun whose Slurm is gone would try to reach it for minutes.
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(env or {}),
            cwd=cwd,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            text = f"{' '.join(command)} takes longer than {timeout:.0f} s"
            raise AssertionError(f"{text}\n{out}\n{err}\n{self.logs()}") from None
        if rc is not None and process.returncode != rc:
            text = f"{' '.join(command)}: exit status {process.returncode}"
            raise AssertionError(f"{text}\n{out}\n{err}\n{self.logs()}")
        return out

    def submit(
        self,
        script: str,
        cwd: Path,
        *options: str,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """Submit a script of ``jobscripts/`` as it is, by a user who has what it expects."""
        home = self.folder / "home"
        variables = {"HOME": str(home), "BASH_FUNC_module%%": '() { echo "module $*"; }'}
        command = ["sbatch", "--parsable", *options, str(JOB_SCRIPTS / script), *arguments]
        number = self.run(*command, cwd=cwd, env={**variables, **(env or {})}).strip()
        return Job(self, number, cwd / f"mpihpo-{number}.log")

    def lose(self, node: str) -> None:
        """Kill all of a node at once: its daemon, and what runs there of any job."""
        pids = [
            self._slurmds.pop(node),
            *(
                pid
                for pid, variables in processes(self)
                if variables.get("SLURMD_NODENAME") == node
            ),
        ]
        # The daemons of its steps are the parents of what runs there.
        parents = {parent for pid in pids[1:] if (parent := parent_of(pid)) in step_daemons()}
        for pid in (*parents, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def restore(self) -> None:
        """Bring back the nodes that were lost."""
        for node in NODES:
            if node not in self._slurmds:
                self._slurmds[node] = self._start_slurmd(node)
        self._wait_for("all nodes", self._is_up)

    def stop(self) -> None:
        """End every process of it; nothing is left, of the folder neither."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(30)
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()

    def logs(self) -> str:
        """The last lines of all daemons' logs."""
        parts = []
        for output in sorted(self.folder.glob("*.out")):
            # One that comes so far has a log, with times.
            log = output.with_suffix(".log")
            if not (log.exists() and log.stat().st_size):
                log = output
            lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
            parts += [f"--- {log.name} ---", *lines]
        return "\n".join(parts)

    def _write_files(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(random.randbytes(128))
        port, *ports = free_ports(1 + len(NODES))
        text = _CONFIGURATION.format(
            host=platform.node().partition(".")[0],
            user=pwd.getpwuid(os.geteuid()).pw_name,
            folder=self.folder,
            port=port,
            ports=",".join(map(str, ports)),
            gpus=_GPUS,
            first_job=random.Random().randrange(1000, 60_000_000),
            kill_wait=KILL_WAIT_SECONDS,
        )
        (self.folder / "slurm.conf").write_text(text)
        devices = [self.folder / f"gpu{number}" for number in range(_GPUS)]
        files = f"{self.folder}/gpu[0-{_GPUS - 1}]"
        (self.folder / "gres.conf").write_text(f"NodeName=n[1-4] Name=gpu File={files}\n")
        for device in devices:
            device.symlink_to(os.devnull)
        epilog = self.folder / "epilog"
        epilog.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{_EPILOG}" "{self.folder}"\n')
        epilog.chmod(0o755)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        bin_folder = self.folder / "home" / "venv-mpihpo" / "bin"
        bin_folder.mkdir(parents=True)
        (bin_folder / "activate").write_text(f'PATH="{bin_folder}:$PATH"\n')
        python = bin_folder / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)

    def _start_daemons(self) -> None:
        of_munge = {
            "--key-file": "munge.key",
            "--socket": "munge.socket",
            "--pid-file": "munged.pid",
            "--seed-file": "munged.seed",
        }
        files = [f"{option}={self.folder / name}" for option, name in of_munge.items()]
        self._start("munged", "munged", "--foreground", "--force", *files)
        self._wait_for("munged", (self.folder / "munge.socket").exists)
        self._start("slurmctld", "slurmctld", "-D")
        self._slurmds = {node: self._start_slurmd(node) for node in NODES}
        self._wait_for("all nodes", self._is_up)

    def _start_slurmd(self, node: str) -> int:
        return self._start(f"slurmd-{node}", "slurmd", "-D", "-N", node)

    def _start(self, name: str, *command: str) -> int:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        output = self.folder / f"{name}.out"
        self._keeper.stdin.write(json.dumps([str(output), command]) + "\n")
        self._keeper.stdin.flush()
        answer = self._keeper.stdout.readline().strip()
        if not answer:
            raise CannotStart(f"{name} cannot be started\n{self.logs()}")
        return int(answer)

    def _is_up(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-p", "booster", "-o", "%T", rc=None).split()
        return len(states) == len(NODES) and set(states) <= _UP

    def _wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        end = time.monotonic() + _START_SECONDS
        while not is_there():
            if time.monotonic() > end:
                text = f"{what} of Slurm not ready after {_START_SECONDS:.0f} s"
                raise CannotStart(f"{text}\n{self.logs()}")
            time.sleep(0.05)


class Job:
    """A batch job; made by `Cluster.submit`."""

    def __init__(self, cluster: Cluster, number: str, log: Path) -> None:
        self._cluster = cluster
        self.number = number
        self.log = log

    def facts(self) -> dict[str, str]:
        """What Slurm knows of it: ``JobState``, ``Restarts``, ``ExitCode``, ``NodeList``, ..."""
        text = self._cluster.run("scontrol", "show", "job", self.number)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait_for(
        self, what: str, is_so: Callable[[dict[str, str]], bool], seconds: float
    ) -> dict[str, str]:
        """Ask until it is so.

        Raises:
            AssertionError: It takes too long.
        """
        end = time.monotonic() + seconds
        while not is_so(facts := self.facts()):
            if time.monotonic() > end:
                text = f"job {self.number} not {what} after {seconds:.0f} s: {facts}"
                raise AssertionError(f"{text}\n{self.describe()}")
            time.sleep(0.1)
        return facts

    def wait(self, state: str, seconds: float) -> dict[str, str]:
        """Wait for the end, which must be this state."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        facts = self.wait_for("over", lambda facts: facts["JobState"] in ended, seconds)
        assert facts["JobState"] == state, f"{facts}\n{self.describe()}"
        return facts

    def processes(self) -> list[int]:
        """Ids of its ranks' processes."""
        return [
            pid
            for pid, variables in processes(self._cluster)
            if variables.get("SLURM_JOB_ID") == self.number and "PMI_RANK" in variables
        ]

    def printed(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def describe(self) -> str:
        """Everything that may tell what went wrong."""
        return f"--- {self.log.name} ---\n{self.printed()}\n{self._cluster.logs()}"


def processes(cluster: Cluster) -> list[tuple[int, dict[str, str]]]:
    """What runs in jobs of the cluster, and its environment variables."""
    found = []
    mark = f"SLURM_CONF={cluster.folder}/".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            content = file.read_bytes()
            if mark in content and b"SLURM_JOB_ID=" in content:
                pairs = (
                    item.partition("=") for item in content.decode(errors="replace").split("\0")
                )
                found.append((int(file.parent.name), {name: value for name, _, value in pairs}))
    return found


def parent_of(pid: int) -> int:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(text.rpartition(")")[2].split()[1])
    return 0


def step_daemons() -> set[int]:
    found = set()
    for file in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if file.read_text().strip() == "slurmstepd":
                found.add(int(file.parent.name))
    return found


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now."""
    found: list[int] = []
    for port in random.Random().sample(_PORTS, len(_PORTS)):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            found.append(port)
        if len(found) == number:
            return found
    raise CannotStart(f"no {number} free ports in {_PORTS}")
