"""Experiments that ship with mpihpo: each a training function, its YAML and, if small, its data."""
