"""The experiment: what is refused with which line, and what comes back unchanged."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest

from mpihpo.errors import ExperimentError
from mpihpo.experiment import Experiment, Limits, load_experiment
from mpihpo.records import Objective, TrialRecord
from mpihpo.search import SearchSettings

YAML = """\
train: mpihpo.examples.digits:train
objective: {metric: val_loss, mode: min}
seed: 17
search:
  searcher: random
  trials: 32
  space:
    lr:        {lower: 1e-4, upper: 1.0, log: true}
    width:     {choices: [64, 128, 256]}
    layers:    {lower: 1, upper: 4, integer: true}
    optimizer: {choices: [sgd, adam]}
    momentum:  {lower: 0.5, upper: 0.99, when: {optimizer: sgd}}
schedule:
  scheduler: successive_halving
  reduction_factor: 2
  min_epochs: 1
  max_epochs: 8
allocation: {policy: doubling, ranks: 1, max_ranks: 64}
batch: {size: 256, on_resize: keep_per_rank, lr_scaling: sqrt}
limits: {time: 2h, trial_seconds: 1800}
process_group: gloo
coordinator: auto
output: runs/digits
arguments: {data: /scratch/digits.h5, tag: '1e-4', crop: [24, 24]}
"""

MINIMAL = {
    "objective": {"metric": "val_loss"},
    "search": {"trials": 4, "space": {"lr": {"lower": 1e-4, "upper": 1.0, "log": True}}},
    "schedule": {"max_epochs": 8},
}
TOP = (
    "train, objective, search, schedule, allocation, seed, batch, limits, process_group, "
    "coordinator, output, arguments"
)
WHOLE = "is not possible; expected a whole number of at least"
DURATION = "is not possible; expected seconds, or text such as 90s, 1h30m, 02:00:00 or 1-12:00:00"


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text(YAML)
    return file


def minimal(**changes):
    """The minimal experiment with changes by dotted key, dots written as double underscores."""
    mapping = copy.deepcopy(MINIMAL)
    for dotted, value in changes.items():
        target = mapping
        *sections, last = dotted.split("__")
        for name in sections:
            target = target.setdefault(name, {})
        target[last] = value
    return mapping


def refused(mapping):
    with pytest.raises(ExperimentError) as caught:
        Experiment.from_mapping(mapping)
    return str(caught.value)


def test_the_file_is_read_into_typed_settings(path):
    experiment = load_experiment(path)
    assert experiment.train == "mpihpo.examples.digits:train"
    assert experiment.objective == Objective(metric="val_loss", mode="min")
    assert experiment.search.trials == 32
    assert list(experiment.search.space) == ["lr", "width", "layers", "optimizer", "momentum"]
    assert experiment.search.space["lr"].lower == 1e-4
    assert experiment.schedule.max_epochs == 8
    assert experiment.allocation.max_ranks == 64
    assert experiment.batch.size == 256
    assert experiment.limits == Limits(time_seconds=7200.0, trial_seconds=1800.0)
    assert experiment.process_group == "gloo"
    assert experiment.arguments == {"data": "/scratch/digits.h5", "tag": "1e-4", "crop": [24, 24]}


def test_defaults():
    experiment = Experiment.from_mapping(MINIMAL)
    assert (experiment.seed, experiment.process_group, experiment.coordinator) == (
        0,
        "auto",
        "auto",
    )
    assert (experiment.train, experiment.output, experiment.arguments) == (None, None, {})
    assert (experiment.batch.size, experiment.batch.on_resize) == (32, "keep_global")
    assert experiment.limits == Limits()
    assert experiment == Experiment.from_mapping(
        minimal(limits=None, batch=None, arguments=None, allocation=None)
    )


def test_python_and_yaml_make_the_same_experiment():
    typed = Experiment(
        objective=Objective(metric="val_loss"),
        search=SearchSettings(trials=4, space=MINIMAL["search"]["space"]),
        schedule={"max_epochs": 8},
    )
    assert typed == Experiment(**MINIMAL) == Experiment.from_mapping(MINIMAL)


def test_the_effective_experiment_round_trips(path, tmp_path):
    for experiment in (load_experiment(path), Experiment.from_mapping(MINIMAL)):
        assert Experiment.from_mapping(experiment.to_mapping()) == experiment
        again = tmp_path / "effective.yaml"
        again.write_text(experiment.to_yaml())
        assert load_experiment(again) == experiment
        assert list(load_experiment(again).search.space) == list(experiment.search.space)
        assert load_experiment(again).to_yaml() == experiment.to_yaml()
    assert "limits" not in Experiment.from_mapping(MINIMAL).to_mapping()


def test_experiments_pickle_and_are_frozen(path):
    experiment = load_experiment(path)
    assert pickle.loads(pickle.dumps(experiment)) == experiment
    with pytest.raises(dataclasses.FrozenInstanceError):
        experiment.seed = 3


def test_configuration_hashes_are_equal_in_another_process(path):
    code = (
        "import sys; from mpihpo.experiment import load_experiment as load\n"
        "from mpihpo.records import TrialRecord\n"
        "space = load(sys.argv[1]).search.space\n"
        "print(*(TrialRecord(id=k, config=space.sample(17, k), seed=0).config_hash "
        "for k in range(4)))"
    )
    command = [sys.executable, "-c", code, str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    space = load_experiment(path).search.space
    hashes = [TrialRecord(id=k, config=space.sample(17, k), seed=0).config_hash for k in range(4)]
    assert ran.stdout.split() == hashes
    assert len(set(hashes)) == 4


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sheduler": 1}, f"sheduler: unknown key; did you mean schedule? known keys: {TOP}"),
        ({"x": 1}, f"x: unknown key; known keys: {TOP}"),
        (
            {"search__trial": 3},
            "search.trial: unknown key; did you mean trials? known keys: space, searcher, trials",
        ),
        (
            {"schedule__max_epoch": 3},
            "schedule.max_epoch: unknown key; did you mean max_epochs? known keys: "
            "scheduler, reduction_factor, min_epochs, max_epochs",
        ),
        (
            {"allocation__rank": 3},
            "allocation.rank: unknown key; did you mean ranks? "
            "known keys: policy, ranks, max_ranks",
        ),
        (
            {"batch__sise": 3},
            "batch.sise: unknown key; did you mean size? known keys: size, on_resize, lr_scaling",
        ),
        (
            {"limits__time_seconds": 3},
            "limits.time_seconds: unknown key; did you mean trial_seconds? "
            "known keys: time, trial_seconds, grace_seconds, heartbeat_seconds, retries, "
            "state_bytes",
        ),
        (
            {"objective__direction": "min"},
            "objective.direction: unknown key; known keys: metric, mode",
        ),
        ({"objective": "loss"}, "objective: 'loss' is not a section; expected keys: metric, mode"),
        ({"objective": {}}, "objective.metric: missing; it has no default"),
        (
            {"objective__metric": 3},
            "objective.metric: 3 is not possible; expected the name of a reported metric",
        ),
        (
            {"objective__mode": "minimum"},
            "objective.mode: 'minimum' is not possible; did you mean min? "
            "expected one of: min, max",
        ),
        ({"search": None}, "search.space: missing; it has no default"),
        (
            {"search": [1]},
            "search: [1] is not a section; expected keys: space, searcher, trials",
        ),
        (
            {"search__space__lr__lower": 2},
            "search.space.lr.lower: 2.0 is not below upper, which is 1.0",
        ),
        ({"schedule": {}}, "schedule.max_epochs: missing; it has no default"),
        ({"schedule__max_epochs": "8"}, f"schedule.max_epochs: '8' {WHOLE} 1"),
        ({"schedule__max_epochs": 2.5}, f"schedule.max_epochs: 2.5 {WHOLE} 1"),
        (
            {"schedule__min_epochs": 9},
            "schedule.min_epochs: 9 is more than schedule.max_epochs, which is 8",
        ),
        ({"schedule__reduction_factor": 1}, f"schedule.reduction_factor: 1 {WHOLE} 2"),
        (
            {"schedule__scheduler": "asha"},
            "schedule.scheduler: there is no 'asha'; available: none, successive_halving, "
            "or your own as package.module:Name",
        ),
        (
            {"allocation__policy": "balanced"},
            "allocation.policy: there is no 'balanced'; available: fixed, doubling, "
            "or your own as package.module:Name",
        ),
        (
            {"search__searcher": "tpe"},
            "search.searcher: there is no 'tpe'; available: random, grid, "
            "or your own as package.module:Name",
        ),
        ({"allocation__ranks": 0}, f"allocation.ranks: 0 {WHOLE} 1"),
        ({"batch__size": 0}, f"batch.size: 0 {WHOLE} 1"),
        ({"batch__size": True}, f"batch.size: True {WHOLE} 1"),
        (
            {"batch__on_resize": "keep"},
            "batch.on_resize: 'keep' is not possible; expected one of: keep_global, keep_per_rank",
        ),
        (
            {"batch__lr_scaling": "linear"},
            "batch.lr_scaling: 'linear' needs on_resize: keep_per_rank, where the batch grows",
        ),
        (
            {"batch__lr_scaling": None},
            "batch.lr_scaling: None is not possible; did you mean none? "
            "expected one of: none, linear, sqrt",
        ),
        ({"seed": -1}, f"seed: -1 {WHOLE} 0"),
        ({"seed": 2**63}, f"seed: 9223372036854775808 {WHOLE} 0"),
        ({"limits__time": "soon"}, f"limits.time: 'soon' {DURATION}"),
        (
            {"process_group": "mpi"},
            "process_group: 'mpi' is not possible; expected one of: auto, nccl, gloo, none",
        ),
        (
            {"coordinator": True},
            "coordinator: True is not possible; expected one of: auto, dedicated",
        ),
        ({"output": 3}, "output: 3 is not possible; expected a folder"),
        (
            {"train": 3},
            "train: 3 is not possible; expected module:function or path/to/file.py:function",
        ),
        ({"arguments": [1]}, "arguments: [1] is not a section; expected name: value"),
        (
            {"arguments": {"a": [{"b": {1, 2}}]}},
            "arguments.a.0.b: {1, 2} is not plain; "
            "expected text, numbers, true, false, null and lists",
        ),
        ({"arguments": {1: 2}}, "arguments: the name 1 is not a text; quote it"),
    ],
)
def test_wrong_experiments_are_refused_in_one_line(changes, line):
    assert refused(minimal(**changes)) == line


@pytest.mark.parametrize("name", ["objective", "search", "schedule"])
def test_sections_without_default_are_asked_for(name):
    mapping = minimal()
    del mapping[name]
    assert refused(mapping) == f"{name}: missing; it has no default"


def test_arguments_in_a_circle_are_refused():
    circle = []
    circle.append(circle)
    line = "arguments: nested too deeply, or in a circle"
    assert refused(minimal(arguments={"a": circle})) == line


@pytest.mark.parametrize(
    ("changes", "ranks", "line"),
    [
        (
            {"allocation": {"ranks": 5}},
            4,
            "allocation.ranks: 5 ranks per trial is more than the job's training ranks; "
            "expected at most 4",
        ),
        (
            {"allocation": {"ranks": 4}, "coordinator": "dedicated"},
            4,
            "allocation.ranks: 4 ranks per trial is more than the job's training ranks; "
            "expected at most 3",
        ),
        (
            {"coordinator": "dedicated"},
            1,
            "coordinator: 'dedicated' needs a rank more than those that train; the job has 1",
        ),
    ],
)
def test_worlds_that_are_too_small_are_refused(changes, ranks, line):
    experiment = Experiment.from_mapping(minimal(**changes))
    with pytest.raises(ExperimentError) as caught:
        experiment.check_world(ranks)
    assert str(caught.value) == line
    experiment.check_world(8)


def test_overrides_go_before_the_file(path):
    overrides = [
        "search.space.lr.lower=1e-5",
        "search.space.width={choices: [8, 16]}",
        "limits.time=1:30:00",
        "output=",
        "arguments.data=/other/a=b.h5",
        "arguments.new.deep=[1, 2]",
    ]
    experiment = load_experiment(path, overrides)
    assert experiment.search.space["lr"].lower == 1e-5
    assert experiment.search.space["width"].choices == (8, 16)
    assert experiment.limits.time_seconds == 5400
    assert experiment.output is None
    assert experiment.arguments["data"] == "/other/a=b.h5"
    assert experiment.arguments["new"] == {"deep": [1, 2]}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "serch.trials=3",
            f"serch: unknown key; did you mean search? known keys: {TOP}",
        ),
        (
            "batch.siz=3",
            "batch.siz: unknown key; did you mean size? known keys: size, on_resize, lr_scaling",
        ),
        ("batch.size=many", f"batch.size: 'many' {WHOLE} 1"),
        ("seed.low=3", "seed.low: cannot be set; seed is 17, which has no keys"),
        ("seed", "--set: 'seed' is not possible; expected key=value, such as seed=3"),
        ("a..b=3", "--set: 'a..b=3' is not possible; expected key=value, such as seed=3"),
        ("=3", "--set: '=3' is not possible; expected key=value, such as seed=3"),
        (
            "seed=[1",
            "--set seed:1: not valid YAML: while parsing a flow sequence "
            "expected ',' or ']', but got '<stream end>'",
        ),
    ],
)
def test_wrong_overrides_are_refused_in_one_line(path, override, line):
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path, [override])
    assert str(caught.value) == line
