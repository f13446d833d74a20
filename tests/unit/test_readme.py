"""What the README says about files, keys and members is so."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from mpihpo.allocation import AllocationSettings, build_policy
from mpihpo.experiment import BatchSettings, Experiment, Limits
from mpihpo.records import Evaluation, Objective, TrialRecord
from mpihpo.schedule import ScheduleSettings
from mpihpo.search import SearchSettings, build_searcher
from tests.readme import ROOT, blocks, files, links, table, write_files

SECTIONS = {
    "objective": Objective,
    "search": SearchSettings,
    "schedule": ScheduleSettings,
    "allocation": AllocationSettings,
    "batch": BatchSettings,
    "limits": Limits,
}


def experiment_keys() -> dict[str, object]:
    """Dotted keys with their defaults."""
    keys: dict[str, object] = {}
    for field in dataclasses.fields(Experiment):
        if field.name not in SECTIONS:
            keys[field.name] = field.default
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            keys[f"{section}.{field.name.replace('time_seconds', 'time')}"] = field.default
    return keys


def test_the_table_has_every_experiment_key_and_no_other() -> None:
    assert {row[0].strip("`") for row in table("The experiment")} == set(experiment_keys())


def test_the_defaults_in_the_table_are_right() -> None:
    keys = experiment_keys()
    for key, _, default in table("The experiment"):
        if default.startswith("`"):
            value = keys[key.strip("`")]
            value = int(value) if isinstance(value, float) and value.is_integer() else value
            assert str(value) == default.strip("`"), key
        elif default == "required" and key != "`train`":
            assert keys[key.strip("`")] is dataclasses.MISSING, key


def test_the_table_has_every_member_of_the_trial_and_no_other() -> None:
    source = (ROOT / "mpihpo" / "runner" / "trial.py").read_text(encoding="utf-8")
    body = source.split("\nclass Trial:\n")[1].split("\n\n\n")[0]
    members = set(re.findall(r"^    (?:def )?([a-z]\w*)[:(]", body, flags=re.MULTILINE))
    named = [re.findall(r"`(\w+)", row[0]) for row in table("The training function")]
    assert {name for names in named for name in names} == members


@pytest.mark.parametrize("target", sorted({each for each in links() if "://" not in each}))
def test_links_lead_to_files(target: str) -> None:
    assert (ROOT / target).exists()


def test_python_compiles() -> None:
    for text in blocks("python"):
        compile(text, "README.md", "exec")


def test_the_first_experiment_fits_one_screen() -> None:
    assert len(files()["train.py"].splitlines()) <= 30
    assert len(files()["experiment.yaml"].splitlines()) <= 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the README's own.py, which can be imported."""
    write_files(tmp_path, "own.py")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_yaml_is_valid(folder: Path) -> None:
    # A part of an experiment, such as a section alone, is one together with the first.
    whole = yaml.safe_load(files()["experiment.yaml"])
    for text in blocks("yaml"):
        Experiment.from_mapping({**whole, **yaml.safe_load(text)})


@pytest.mark.usefixtures("folder")
class TestExtending:
    @pytest.fixture
    def experiment(self) -> Experiment:
        return Experiment.from_mapping(yaml.safe_load(files()["own.yaml"]))

    def test_the_searcher_proposes_from_the_space(self, experiment: Experiment) -> None:
        searcher = build_searcher(experiment.search, seed=0, mode="max")
        configs = [searcher.ask(trial_id) for trial_id in range(7)]
        assert configs[6] is None
        for config in configs[:6]:
            assert config is not None
            assert 1e-3 <= config["lr"] <= 0.1  # type: ignore[operator]
            assert ("momentum" in config) == (config["optimizer"] == "sgd")
        assert len({config["lr"] for config in configs[:6] if config}) == 6
        assert {config["layers"] for config in configs[:6] if config} == {1, 2}

    def test_the_scheduler_has_even_rungs(self, experiment: Experiment) -> None:
        from own import EvenRungs  # type: ignore[import-not-found]

        ladder = EvenRungs.ladder(experiment.schedule, 6)
        assert [(plan.start, plan.stop, plan.trials) for plan in ladder] == [
            (0, 1, 6),
            (1, 2, 3),
            (2, 3, 1),
        ]

    def test_the_policy_gives_all_ranks_on_rung_2(self, experiment: Experiment) -> None:
        policy = build_policy(experiment.allocation, reduction_factor=2, world_size=5)
        trial = TrialRecord(id=0, config={}, seed=0)
        evaluations = [Evaluation(trial=trial, rung=k, start=k, stop=k + 1) for k in range(3)]
        assert [policy.width(evaluation) for evaluation in evaluations] == [1, 1, 5]
        assert policy.share(evaluations[:2], 5) == [1, 1]
