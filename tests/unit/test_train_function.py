"""Finding the training function by name: modules, files, and one line for each mistake."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from mpihpo import train_function
from mpihpo.errors import ExperimentError
from mpihpo.experiment import load_train

FORM = "expected module:function or path/to/file.py:function"
SOURCE = """\
import neighbour_of_train

VALUE = 3

class Data:
    pass

def train(config, trial):
    return neighbour_of_train.NAME

def extra(config, trial, more):
    pass

def flexible(*arguments, **options):
    return arguments

def nothing():
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a training file; what loading it leaves behind is undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(train_function, "_loaded_files", {})
    (tmp_path / "my_train.py").write_text(SOURCE)
    (tmp_path / "neighbour_of_train.py").write_text("NAME = 'beside'\n")
    yield tmp_path
    for name in ("my_train", "neighbour_of_train", "broken_train"):
        sys.modules.pop(name, None)


def refused(train, folder):
    with pytest.raises(ExperimentError) as caught:
        load_train(train, folder)
    assert caught.value.where == "train"
    return caught.value.problem


def test_a_file_beside_the_experiment_with_its_neighbour(folder):
    function = load_train("my_train.py:train", folder)
    assert function({}, None) == "beside"
    assert function.__module__ == "my_train"
    assert load_train("my_train.py:train", folder) is function
    assert load_train(f"{folder}/my_train.py:train", folder / "elsewhere") is function
    assert load_train("my_train.py:flexible", folder)(1, 2) == (1, 2)


def test_a_file_in_the_working_directory_comes_second(folder, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    monkeypatch.chdir(folder)
    assert load_train("my_train.py:train", other)({}, None) == "beside"
    (other / "my_train.py").write_text("def train(config, trial): return 'the experiment folder'\n")
    assert load_train("my_train.py:train", other)({}, None) == "the experiment folder"


def test_what_the_file_defines_can_be_unpickled_by_a_worker_process(folder):
    load_train("my_train.py:train", folder)
    data = sys.modules["my_train"].Data()
    code = "import pickle, sys; print(type(pickle.load(sys.stdin.buffer)).__name__)"
    # Worker processes get the parent's sys.path; PYTHONPATH stands for it here.
    ran = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(data),
        capture_output=True,
        check=True,
        env={"PYTHONPATH": sys.path[0]},
    )
    assert ran.stdout == b"Data\n"


def test_a_module_by_name(folder):
    assert load_train("my_train:train", folder)({}, None) == "beside"


def test_mistakes_in_the_name(folder):
    assert refused(None, folder) == f"missing; {FORM}"
    assert refused("train", folder) == f"'train' is not possible; {FORM}"
    assert refused("my_train.py", folder) == f"'my_train.py' is not possible; {FORM}"
    assert refused("my_train.py:", folder) == f"'my_train.py:' is not possible; {FORM}"
    assert refused(":train", folder) == f"':train' is not possible; {FORM}"


def test_what_cannot_be_found(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert refused("none.py:train", folder) == (
        f"'none.py:train': there is no file none.py in {folder}"
    )
    assert refused("no_such_module:train", folder) == (
        "'no_such_module:train' cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert refused("my_train.py:tain", folder) == "'my_train.py:tain': my_train.py has no tain"
    assert refused("my_train:tain", folder) == "'my_train:tain': my_train has no tain"


def test_what_is_no_training_function(folder):
    assert refused("my_train.py:VALUE", folder) == (
        "'my_train.py:VALUE' is 3, which cannot be called; expected a function"
    )
    expected = "expected a function of (config, trial)"
    assert refused("my_train.py:extra", folder) == (
        f"'my_train.py:extra' takes (config, trial, more); {expected}"
    )
    assert refused("my_train.py:nothing", folder) == f"'my_train.py:nothing' takes (); {expected}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os\nimport no_such_one\n", "ModuleNotFoundError: No module named 'no_such_one'"),
        ("x = 1\nraise ValueError('two\\nlines')\n", "ValueError: two lines"),
        ("import sys\nsys.exit('bye')\n", "SystemExit: bye"),
    ],
)
def test_files_that_fail_name_the_line_and_leave_nothing(folder, text, reason):
    file = folder / "broken_train.py"
    file.write_text(text)
    assert refused("broken_train.py:train", folder) == (
        f"'broken_train.py:train' cannot be imported: {reason} (line 2 of {file})"
    )
    assert "broken_train" not in sys.modules
    file.write_text("def train(config, trial): return 'mended'\n")
    assert load_train("broken_train.py:train", folder)({}, None) == "mended"


def test_syntax_errors_are_one_line(folder):
    (folder / "broken_train.py").write_text("def train(:\n")
    problem = refused("broken_train.py:train", folder)
    assert problem.startswith("'broken_train.py:train' cannot be imported: SyntaxError: ")
    assert "\n" not in problem


def test_a_file_may_not_take_the_place_of_another_module(folder):
    (folder / "random.py").write_text("def train(config, trial): pass\n")
    assert refused("random.py:train", folder) == (
        "'random.py:train': the module random exists already; expected another file name"
    )
    (folder / "v1.2.py").write_text("def train(config, trial): pass\n")
    assert refused("v1.2.py:train", folder) == (
        "'v1.2.py:train': v1.2.py is no name of a Python module"
    )
