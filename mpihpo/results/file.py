"""Writes ``results.h5``: readable at any moment, replaced as a whole."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np

from mpihpo.errors import ResultsError
from mpihpo.results.layout import Snapshot, Table
from mpihpo.results.tables import ResultTables

_COMPRESS_FROM_BYTES = 4096


def write_results(path: str | os.PathLike[str], tables: ResultTables) -> None:
    """Put the tables as they are now in the place of the file at ``path``.

    Raises:
        ResultsError: The file system refused; what was at ``path`` is still there.
    """
    target = Path(path)
    image = _image(tables.snapshot())
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            stream.write(image)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ResultsError(f"{target}: cannot be written: {error.strerror}") from error


def group_name(metric: str) -> str:
    """The name of a metric's table in ``/curves``: HDF5 gives ``/`` and ``.`` a meaning."""
    name = metric.replace("%", "%25").replace("/", "%2F")
    return name if name.strip(".") else name.replace(".", "%2E") or "%"


def _image(snapshot: Snapshot) -> bytes:
    """The file's bytes, built in memory: a full disk cannot break HDF5 half-way."""
    with h5py.File("results.h5", "w", driver="core", backing_store=False) as file:
        for name, value in snapshot.attributes.items():
            file.attrs[name] = value
        for table_name in ("trials", "evaluations", "evaluation_ranks", "ranks", "ladder"):
            _write_table(file, table_name, getattr(snapshot, table_name))
        curves = file.create_group("curves")
        for metric, curve in snapshot.curves.items():
            _write_table(curves, group_name(metric), curve).attrs["metric"] = metric
        file.flush()
        image: bytes = file.id.get_file_image()
        return image


def _write_table(group: h5py.Group, name: str, table: Table) -> h5py.Dataset:
    rows = table.view(_file_dtype(table.dtype))
    if rows.nbytes < _COMPRESS_FROM_BYTES:
        return group.create_dataset(name, data=rows)
    return group.create_dataset(name, data=rows, chunks=True, compression="gzip", shuffle=True)


def _file_dtype(dtype: np.dtype[np.void]) -> np.dtype[np.void]:
    """The same columns, their text marked as UTF-8."""
    assert dtype.names is not None
    columns = []
    for name in dtype.names:
        column = dtype[name]
        is_text = column.kind == "S"
        columns.append((name, h5py.string_dtype("utf-8", column.itemsize) if is_text else column))
    return np.dtype(columns)
