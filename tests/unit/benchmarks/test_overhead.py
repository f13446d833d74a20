"""How `bench_overhead.py` compares two trees; what it measures are other benchmarks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import bench_overhead
import launcher
import pytest
from bench_overhead import Comparison, check_out, name, orders, run_pair, table

MOST = 1.10


def compared(before: list[float], after: list[float], title: str = "figure") -> Comparison:
    return Comparison(title=title, before=before, after=after)


def test_a_load_that_hits_whole_pairs_does_not_change_the_ratio() -> None:
    assert compared([1.0, 1.0, 3.0, 9.0], [1.05, 1.05, 3.15, 9.45]).ratio == pytest.approx(1.05)


def test_one_disturbed_pair_does_not_change_the_verdict() -> None:
    found = compared([1.0, 1.0, 1.0], [1.02, 5.0, 1.03])
    assert found.ratios == pytest.approx([1.02, 5.0, 1.03])
    assert found.is_within(MOST)


@pytest.mark.parametrize(("after", "within"), [(0.5, True), (1.10, True), (1.11, False)])
def test_verdict(after: float, within: bool) -> None:
    assert compared([1.0], [after]).is_within(MOST) is within


def test_measurements_without_a_partner_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        _ = compared([1.0, 1.0], [1.0]).ratio


def test_each_tree_is_first_in_every_other_pair() -> None:
    assert list(orders(4)) == [(True, False), (False, True)] * 2


def test_table_marks_only_what_has_grown_too_much() -> None:
    head, good, bad = table(
        [compared([0.001, 0.002], [0.001, 0.002], "re-split"), compared([0.1], [0.2], "dispatch")],
        MOST,
    )
    assert " ".join(head.split()) == "medians in ms before after ratio of the pairs"
    assert " ".join(good.split()) == "re-split 1.500 1.500 1.000 1.000 to 1.000"
    assert " ".join(bad.split()) == "dispatch 100.000 200.000 2.000 2.000 to 2.000 ABOVE 1.10"


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_a_pair_is_measured_in_order_and_told_apart(
    tmp_path: Path, order: tuple[bool, bool]
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    measured = []

    def measure(root: Path) -> tuple[dict[str, float], str]:
        measured.append(root)
        figures = {"one": 1.0, "ten": 10.0} if root == before else {"one": 2.0, "ten": 20.0}
        return figures, str((root / "mpihpo").resolve())

    assert run_pair(measure, before, after, order) == {"one": (1.0, 2.0), "ten": (10.0, 20.0)}
    assert measured == [before if is_before else after for is_before in order]


def test_figures_of_another_package_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the ranks imported /elsewhere/mpihpo instead of"):
        run_pair(lambda root: ({}, "/elsewhere/mpihpo"), tmp_path, tmp_path, (True, False))


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")
def test_the_package_of_an_earlier_revision_is_unpacked_beside_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone, folder = tmp_path / "clone", tmp_path / "folder"
    module = clone / "mpihpo" / "__init__.py"
    module.parent.mkdir(parents=True)
    git = ("git", "-C", str(clone), "-c", "user.name=A", "-c", "user.email=a@example.org")
    subprocess.run([*git, "init", "--quiet"], check=True)
    for text in ("first", "second"):
        module.write_text(text)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", f"The {text}"], check=True)
    monkeypatch.setattr(launcher, "ROOT", clone)

    check_out("HEAD~1", folder)

    assert (folder / "mpihpo" / "__init__.py").read_text() == "first"
    assert module.read_text() == "second"
    assert name("HEAD~1").endswith(" The first")
    with pytest.raises(SystemExit, match="nowhere"):
        name("nowhere")


def test_the_earlier_revision_must_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_overhead.py"])
    with pytest.raises(SystemExit) as ended:
        bench_overhead.main()
    assert ended.value.code == 2
    assert "--before" in capsys.readouterr().err
