"""Finds the training function that an experiment names.

A file is loaded under its own name and its folder joins ``sys.path``, as if it had been imported:
the name is the same on all ranks, and a loader's worker processes can unpickle what it defines.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mpihpo.errors import ExperimentError
from mpihpo.settings import show

TrainFunction = Callable[[Any, Any], object]

TRAIN_FORM = "module:function or path/to/file.py:function"

_loaded_files: dict[str, Path] = {}
"""Names in ``sys.modules`` that are ours, and the files behind them."""


def load_train(train: str | None, directory: Path) -> TrainFunction:
    """The function that ``train`` names; local to each rank.

    Args:
        train: ``module:function``, or ``path/to/file.py:function`` with a path relative to
            ``directory`` or else to the working directory.
        directory: The folder of the experiment's file; modules are looked for there too.

    Raises:
        ExperimentError: ``where`` is ``train``; it cannot be imported, or is not a function of
            ``(config, trial)``.
    """
    if train is None:
        raise ExperimentError("train", f"missing; expected {TRAIN_FORM}")
    source, colon, name = train.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise ExperimentError("train", f"{show(train)} is not possible; expected {TRAIN_FORM}")
    module = _load_file(train, source, directory) if source.endswith(".py") else None
    if module is None:
        module = _import(train, source, directory)
    try:
        function = getattr(module, name)
    except AttributeError:
        raise ExperimentError("train", f"{train!r}: {source} has no {name}") from None
    if not callable(function):
        problem = f"{train!r} is {show(function)}, which cannot be called; expected a function"
        raise ExperimentError("train", problem)
    _check_signature(train, function)
    return function  # type: ignore[no-any-return]


def _check_signature(train: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a function in C that does not say
    try:
        signature.bind(None, None)
    except TypeError:
        problem = f"{train!r} takes {signature}; expected a function of (config, trial)"
        raise ExperimentError("train", problem) from None


def _import(train: str, module: str, directory: Path) -> ModuleType:
    find_modules_in(directory)
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise _import_error(train, error) from error


def _load_file(train: str, source: str, directory: Path) -> ModuleType:
    folders = dict.fromkeys((directory.resolve(), Path.cwd()))
    found = [path for path in (folder / source for folder in folders) if path.is_file()]
    if not found:
        looked = " or ".join(str(folder) for folder in folders)
        raise ExperimentError("train", f"{train!r}: there is no file {source} in {looked}")
    path = found[0].resolve()
    name = path.stem
    if name in sys.modules:
        if _loaded_files.get(name) == path or _file_of(sys.modules[name]) == path:
            return sys.modules[name]
        if name not in _loaded_files:
            problem = f"{train!r}: the module {name} exists already; expected another file name"
            raise ExperimentError("train", problem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or "." in name:
        raise ExperimentError("train", f"{train!r}: {path.name} is no name of a Python module")
    _extend_path(path.parent, first=True)
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise _import_error(train, error) from error
    _loaded_files[name] = path
    return module


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def find_modules_in(directory: Path) -> None:
    """Look for modules in an experiment's folder and the working directory too, last of all."""
    for folder in (directory, Path()):
        _extend_path(folder, first=False)


def _extend_path(folder: Path, *, first: bool) -> None:
    entry = str(folder.resolve())
    if entry not in sys.path:
        sys.path.insert(0 if first else len(sys.path), entry)


def _import_error(train: str, error: BaseException) -> ExperimentError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
    place = f" (line {own[-1].lineno} of {own[-1].filename})" if own else ""
    return ExperimentError("train", f"{train!r} cannot be imported: {reason}{place}")
