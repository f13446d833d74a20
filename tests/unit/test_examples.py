"""The shipped experiments: their YAML is valid and the shipped data are what they claim to be."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys

import pytest

from mpihpo.experiment import load_experiment

EXAMPLES = importlib.resources.files("mpihpo.examples")


@pytest.mark.parametrize("name", ["digits", "fashion_mnist"])
def test_yaml_is_a_valid_experiment_that_names_its_own_module(name):
    experiment = load_experiment(EXAMPLES / f"{name}.yaml")
    assert experiment.train == f"mpihpo.examples.{name}:train"
    assert experiment.objective.metric == "val_accuracy"


def test_digits_data_state_their_source_and_fit_their_use():
    # In a process of its own: unit tests load no HDF5.
    script = """
import h5py, numpy, sys
with h5py.File(sys.argv[1], "r") as file:
    assert file.attrs["licence"] == "CC BY 4.0", dict(file.attrs)
    assert "10.24432/C50P49" in file.attrs["source"]
    assert "Alpaydin" in file.attrs["citation"] and "Kaynak" in file.attrs["citation"]
    assert "split" in file.attrs["changes"]
    seen = []
    for name, samples in (("train", 1437), ("test", 360)):
        images, labels = file[name]["images"][:], file[name]["labels"][:]
        assert images.shape == (samples, 8, 8) and images.dtype == numpy.uint8
        assert labels.shape == (samples,) and labels.dtype == numpy.uint8
        assert images.max() == 16
        # Split by class: each digit has its tenth, within three percent of the samples.
        counts = numpy.bincount(labels, minlength=10)
        assert len(counts) == 10 and abs(counts - samples / 10).max() < 0.03 * samples
        seen.append({image.tobytes() for image in images})
    assert len(seen[0]) == 1437 and len(seen[1]) == 360
    assert not seen[0] & seen[1], "an image is in both parts"
"""
    with importlib.resources.as_file(EXAMPLES / "digits.h5") as path:
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert (EXAMPLES / "digits.h5").stat().st_size < 100_000
