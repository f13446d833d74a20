"""The files around the package say what they should, each thing in one place."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

import mpihpo

CLONE = Path(__file__).parents[2]
JOB_SCRIPTS = sorted([*(CLONE / "jobscripts").glob("*.sbatch"), CLONE / "jobscripts" / "pbs.sh"])


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(CLONE / "setup.cfg")
    return parser


def test_pyproject_has_only_what_setup_cfg_cannot_hold():
    text = (CLONE / "pyproject.toml").read_text()
    tables = re.findall(r"^\[+([^\]]+)\]", text, flags=re.MULTILINE)
    assert tables[:2] == ["build-system", "tool.ruff"]
    assert all(table.startswith("tool.ruff.") for table in tables[2:])


def test_version_has_one_home(setup_cfg):
    assert setup_cfg["metadata"]["version"] == "attr: mpihpo.__version__"
    source = (CLONE / "mpihpo" / "__init__.py").read_text()
    # A literal, so that building the package imports nothing.
    assert f'\n__version__ = "{mpihpo.__version__}"\n' in source


def test_constraints_name_only_packages_that_are_installed_by_name(setup_cfg):
    declared = setup_cfg["options"]["install_requires"]
    extras = setup_cfg["options.extras_require"]
    declared += "".join(extras.get(name, raw=True) for name in extras)
    names = re.findall(r"^([A-Za-z][\w-]*)", declared, flags=re.MULTILINE)
    constraints = (CLONE / "constraints.txt").read_text()
    constrained = re.findall(r"^([A-Za-z][\w-]*)", constraints, flags=re.MULTILINE)
    assert "torch" in constrained
    assert set(constrained) <= set(names) | set(extras)


def test_every_job_script_is_there():
    assert [script.name for script in JOB_SCRIPTS] == [
        "jupiter.sbatch",
        "juwels_booster.sbatch",
        "multi_node.sbatch",
        "pbs.sh",
        "single_node.sbatch",
    ]


@pytest.mark.parametrize("script", JOB_SCRIPTS, ids=lambda script: script.name)
class TestJobScript:
    def test_fits_one_screen(self, script):
        assert len(script.read_text().splitlines()) < 50

    def test_runs_the_same_command(self, script):
        lines = script.read_text().replace("\\\n", "").splitlines()
        (command,) = (line for line in lines if re.match("srun|mpiexec", line))
        assert re.search(
            r'python -m mpihpo run experiment\.yaml +--output "\$output" "\$\{resume\[@\]\}" ',
            command,
        )

    def test_requeues_in_the_same_way(self, script):
        def ending(path: Path) -> list[str]:
            lines = path.read_text().splitlines()
            begins = next(n for n, line in enumerate(lines) if line.startswith("output="))
            return [line for line in lines[begins:] if "sees all GPUs" not in line]

        if script.suffix == ".sbatch":
            assert ending(script) == ending(CLONE / "jobscripts" / "multi_node.sbatch")
            for option in ("--requeue", "--open-mode=append"):
                assert f"#SBATCH {option}\n" in script.read_text()

    def test_sets_threads_per_rank(self, script):
        assert re.search(r"^export OMP_NUM_THREADS=", script.read_text(), flags=re.MULTILINE)

    def test_stops_before_the_time_limit(self, script):
        text = script.read_text()
        if script.suffix == ".sbatch":
            assert re.search(r"^#SBATCH --signal=USR1@\d+$", text, flags=re.MULTILINE)
        else:
            hours, minutes = map(int, re.search(r"walltime=(\d\d):(\d\d):00", text).groups())
            limit = int(re.search(r"limits\.time=(\d+)m", text).group(1))
            assert limit == hours * 60 + minutes - 2

    def test_lets_each_rank_see_all_gpus(self, script):
        text = script.read_text()
        assert "gpus-per-task" not in text
        if script.suffix == ".sbatch":
            assert "#SBATCH --gres=gpu:4\n" in text
            assert "#SBATCH --ntasks-per-node=4\n" in text
            assert "srun --kill-on-bad-exit=1 --gpu-bind=none " in text

    def test_placeholders_and_modules_are_named_in_the_readme(self, script):
        readme = (CLONE / "jobscripts" / "README.md").read_text()
        assert f"`{script.name}`" in readme
        for line in re.findall(r"^#SBATCH (--[\w-]+)=[A-Z]+$", script.read_text(), re.MULTILINE):
            assert f"`{line}`" in readme or f"`{line}," in readme or f"`{line}`," in readme
