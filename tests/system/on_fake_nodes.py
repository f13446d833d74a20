"""Runs mpihpo with the ranks on pretended nodes: ``on_fake_nodes.py RANKS_PER_NODE ARGUMENTS``."""

from __future__ import annotations

import os
import runpy
import sys

_RANK = next(name for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)

os.environ["MPIHPO_NODE_NAME"] = f"node{int(os.environ[_RANK]) // int(sys.argv.pop(1))}"
runpy.run_module("mpihpo", run_name="__main__", alter_sys=True)
