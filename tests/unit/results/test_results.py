"""Tables, file and reader: the same results in memory and on disk."""

from __future__ import annotations

import math
import pickle
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpihpo.errors import InternalError, ResultsError
from mpihpo.records import Objective, RungResult, Status, TrialRecord, best_outcome
from mpihpo.results.file import group_name, write_results
from mpihpo.results.reader import Results
from mpihpo.results.tables import ResultTables

from .conftest import CONFIGS, OUTCOMES, make_outcome

SUMMARY = """\
3 trials (1 completed, 1 failed, 1 stopped) on 5 ranks in 7.0 s, 61 % busy: every rung is closed

rung  epochs  planned  trained  failed  promoted  best loss  closed at
   0       1        3        3       1         1        0.5      3.0 s
   1     2-3        1        1       0         0        0.7      6.0 s
   2     4-7        1        -       -         -          -          -

best: trial 0, loss 0.7 after 3 epochs, on 3 ranks
  lr         0.1
  width      64
  optimizer  sgd
  momentum   0.9
  id         true
  norm       null"""


@pytest.fixture(params=["memory", "file", "folder", "pickle"])
def results(request: pytest.FixtureRequest, tables: ResultTables, tmp_path: Path) -> Results:
    write_results(tmp_path / "results.h5", tables)
    if request.param == "memory":
        return Results.from_tables(tables)
    if request.param == "folder":
        return Results(tmp_path)
    results = Results(tmp_path / "results.h5")
    if request.param == "pickle":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pickled: Results = pickle.loads(pickle.dumps(results))
        return pickled
    return results


def test_best_agrees_with_the_records(results: Results) -> None:
    expected = best_outcome(OUTCOMES, Objective(metric="loss"))
    best = results.best
    assert best is not None
    assert expected is not None
    assert best.trial == expected.allocation.evaluation.trial.id == 0
    assert best.config == CONFIGS[0]
    assert [type(v) for v in best.config.values()] == [float, int, str, float, bool, type(None)]
    assert (best.objective, best.epochs, best.ranks) == (0.7, 3, 3)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_agrees_with_the_records_on_ties_and_both_modes(mode: str) -> None:
    objective = Objective(metric="loss", mode=mode)
    for values in [(0.5, 0.5, 0.5), (0.1, 0.9, 0.9), (0.9, 0.1, 0.1), (None, 0.3, 0.2)]:
        outcomes = [make_outcome(i, 0, (0,), values[i], 0, 1) for i in (2, 1, 0)]
        tables = ResultTables("", 0, objective, [], ["n"], {})
        for outcome in outcomes:
            tables.add(outcome)
        best = Results.from_tables(tables).best
        expected = best_outcome(outcomes, objective)
        assert best is not None
        assert expected is not None
        assert best.trial == expected.allocation.evaluation.trial.id


def test_trials(results: Results) -> None:
    trials = results.trials
    assert trials["id"].tolist() == [0, 1, 2]
    assert trials["status"].tolist() == ["completed", "stopped", "failed"]
    assert trials["rung"].tolist() == [1, 0, 0]
    assert trials["epochs"].tolist() == [3, 1, 0]
    assert trials["best"][:2] == pytest.approx([0.7, 0.5])
    assert math.isnan(trials["last"][2])
    assert trials["ranks"].tolist() == [3, 3, 1]
    assert trials["seconds"].tolist() == [5.0, 3.0, 1.0]
    assert trials["error"][0] == ""
    assert trials["error"][2] == "ValueError: bad " + 181 * "é" + "..."
    assert len(trials["error"][2]) == 200


def test_hyper_parameter_columns(results: Results) -> None:
    trials = results.trials
    assert trials["lr"].tolist() == [0.1, 1e-4, 0.03]
    assert trials["width"].tolist() == [64, 128, 64]
    assert trials["width"].dtype == np.int64
    assert trials["optimizer"].tolist() == ["sgd", "adam", "adäm"]
    assert trials["momentum"][0] == 0.9
    assert np.isnan(trials["momentum"][1:]).all()
    assert trials["config_id"].tolist() == [1, 0, 1]
    assert trials["norm"].tolist() == ["null", '"batch"', "3"]
    assert [results.config(trial) for trial in range(3)] == list(CONFIGS)
    with pytest.raises(ResultsError, match="trial 9: not among the 3"):
        results.config(9)


def test_curves(results: Results) -> None:
    assert results.metrics == ("loss", "val/acc")
    curve = results.curves()
    assert curve["trial"].tolist() == [0, 1, 0, 0]
    assert curve["epoch"].tolist() == [1, 1, 2, 3]
    assert curve["value"] == pytest.approx([0.9, 0.5, 1.7, 0.7])
    assert curve["seconds"].tolist() == [0.25, 0.25, 0.25, 0.5]
    assert results.curves("val/acc")["value"].tolist() == [0.5] * 4
    with pytest.raises(ResultsError, match=r"metric 'acc': reported were loss, val/acc"):
        results.curves("acc")


def test_evaluations_with_scattered_ranks(results: Results) -> None:
    rows = results.evaluations
    assert rows["trial"].tolist() == [0, 1, 2, 0]
    assert rows["first_rank"].tolist() == [0, 3, 0, 0]
    assert rows["ranks"].tolist() == [2, 3, 1, 3]
    assert rows["ending"].tolist() == ["finished", "finished", "failed", "finished"]
    assert rows["t_stop"].tolist() == [2.0, 3.0, 3.0, 6.0]
    assert results.evaluation_ranks.tolist() == [
        (0, 0, 2), (1, 3, 1), (1, 2, 1), (1, 4, 1), (2, 0, 1), (3, 0, 2), (3, 3, 1),
    ]  # fmt: skip


def test_rank_seconds_add_up(results: Results, tables: ResultTables) -> None:
    ranks = results.ranks
    assert ranks["node"].tolist() == ["n1", "n1", "n1", "n2", "n2"]
    assert ranks["busy"] == pytest.approx([5.4, 4.6, 2.8, 5.6, 2.8])
    assert ranks["resplit"] == pytest.approx([0.6, 0.4, 0.2, 0.4, 0.2])
    assert ranks["busy"] + ranks["resplit"] + ranks["idle"] == pytest.approx([7.0] * 5)
    assert tables.rank_seconds.idle == pytest.approx(ranks["idle"])
    assert results.utilisation == pytest.approx(21.2 / 35)


def test_ladder_planned_and_realised(results: Results) -> None:
    ladder = results.ladder
    assert ladder["planned"].tolist() == [3, 1, 1]
    assert ladder["evaluated"].tolist() == [3, 1, 0]
    assert ladder["failed"].tolist() == [1, 0, 0]
    assert ladder["promoted"].tolist() == [1, 0, 0]
    assert ladder["t_closed"][:2].tolist() == [3.0, 6.0]
    assert math.isnan(ladder["t_closed"][2])


def test_attributes_and_summary(results: Results) -> None:
    assert results.reason == "every rung is closed"
    assert results.seed == 17
    assert results.versions == {"mpihpo": "0.1.0"}
    assert results.experiment_text == "train: module:train\n"
    assert results.wall_seconds == 7.0
    assert results.summary() == SUMMARY


def test_checkpoint(tables: ResultTables, tmp_path: Path) -> None:
    results = Results.from_tables(tables, tmp_path)
    assert results.checkpoint is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.pt").write_bytes(b"x")
    assert results.checkpoint == tmp_path / "checkpoints" / "best.pt"
    assert results.summary().endswith("best.pt")
    assert Results.from_tables(tables).checkpoint is None


def test_nothing_yet(tmp_path: Path) -> None:
    tables = ResultTables("", 0, Objective(metric="loss"), ["lr"], ["n"], {})
    write_results(tmp_path / "results.h5", tables)
    results = Results(tmp_path)
    assert results.best is None
    assert len(results.curves()) == len(results.trials) == 0
    assert results.utilisation == 0.0
    assert results.summary().endswith("no trial finished an evaluation")


def test_pending_trials_and_statuses() -> None:
    tables = ResultTables("", 0, Objective(metric="loss"), ["lr"], ["n"], {})
    tables.add_trial(TrialRecord(id=4, config={"lr": 2}, seed=0))
    trials = Results.from_tables(tables).trials
    assert (trials["status"][0], trials["rung"][0], trials["lr"][0]) == ("pending", -1, 2)
    with pytest.raises(InternalError, match="trial 5"):
        tables.set_status(5, Status.RUNNING)


def test_a_rung_that_was_not_planned_gets_its_own_line() -> None:
    tables = ResultTables("", 0, Objective(metric="loss"), [], ["n"], {})
    result = RungResult(rung=0, start=0, stop=1, evaluated=2, failed=2, promoted=(), best=None)
    tables.add_rung(result)
    tables.add_rung(result)
    ladder = Results.from_tables(tables).ladder
    assert ladder["evaluated"].tolist() == [2, 2]
    assert np.isnan(ladder["best"]).all()


def test_many_rows_survive_growing() -> None:
    tables = ResultTables("", 0, Objective(metric="loss"), [], ["n"] * 5, {})
    for number in range(500):
        tables.add(make_outcome(0, 0, (number % 5,), float(number), number, number + 1))
    results = Results.from_tables(tables)
    assert results.evaluations["objective"].tolist() == list(map(float, range(500)))
    assert results.curves()["value"].tolist() == list(map(float, range(500)))


def test_file_has_plain_dtypes(tables: ResultTables, tmp_path: Path) -> None:
    write_results(tmp_path / "results.h5", tables)
    with h5py.File(tmp_path / "results.h5", "r") as file:
        assert set(file) == {
            "curves", "evaluation_ranks", "evaluations", "ladder", "ranks", "trials",
        }  # fmt: skip
        assert set(file["curves"]) == {"loss", "val%2Facc"}
        for name in ("trials", "evaluations", "ranks", "ladder", "curves/loss"):
            dtype = file[name].dtype
            assert {dtype[column].kind for column in dtype.names} <= {"i", "f", "S"}
        status = file["trials"].id.get_type().get_member_type(1)
        assert status.get_cset() == h5py.h5t.CSET_UTF8
        assert not status.is_variable_str()


def test_metric_names_are_distinct_groups() -> None:
    names = ["a", "a/b", "a%2Fb", ".", "..", "", "a.b"]
    groups = [group_name(name) for name in names]
    assert len(set(groups)) == len(names)
    assert all(group and "/" not in group and group.strip(".") for group in groups)


def test_a_failed_write_leaves_the_old_file(
    tables: ResultTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.h5"
    write_results(path, tables)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    tables.finish("later", 9.0)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(ResultsError, match=r"results\.h5: cannot be written: No space left"):
            write_results(path, tables)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    write_results(path, tables)
    assert Results(path).reason == "later"


def test_unreadable_files_are_one_line(tables: ResultTables, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"

    def problem() -> str:
        with pytest.raises(ResultsError) as caught:
            Results(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no such file" in problem()
    write_results(path, tables)
    whole = path.read_bytes()
    for length in (0, 10, 1000, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:length])
        assert "no readable results file" in problem()
    path.write_text("hello")
    assert "no readable results file" in problem()
    with h5py.File(path, "w") as file:
        file["x"] = 1
    assert "not one that mpihpo wrote" in problem()
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        del file["ladder"]
    assert "ladder" in problem()
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        file.attrs["layout"] = 99
    assert "has layout 99" in problem()
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        rows = file["ladder"][()]
        del file["ladder"]
        file["ladder"] = rows[["rung", "start"]]
    assert "/ladder lacks the columns best, evaluated" in problem()
