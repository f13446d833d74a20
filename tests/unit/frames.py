"""Functions whose frames say that they are of a file of one's choice, for what reads stacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpihpo

PACKAGE = Path(mpihpo.__file__).parent
COMM = str(PACKAGE / "comm" / "interruptible.py")
MEMBER = str(PACKAGE / "runner" / "member.py")
TRIAL = str(PACKAGE / "runner" / "trial.py")
STATE = str(PACKAGE / "runner" / "state.py")
TORCH = "/opt/lib/torch"
DISTRIBUTED = f"{TORCH}/distributed/distributed_c10d.py"
DDP = f"{TORCH}/nn/parallel/distributed.py"
USERS = "/home/someone/train.py"
EXAMPLE = str(PACKAGE / "examples" / "digits.py")
TRAIN = (USERS, "train")


def function(file: str, name: str, body: str, **names: Any) -> Callable[..., Any]:
    """A function whose frames say that they are of this file; its body stands in line 2."""
    source = f"def {name}(*args, func=None):\n " + body.replace("\n", "\n ")
    namespace = dict(names)
    exec(compile(source, file, "exec"), namespace)
    made: Callable[..., Any] = namespace[name]
    return made


def chain(*links: tuple[str, str], last: Callable[[], Any]) -> Callable[..., Any]:
    """Functions, the outermost first, each of which calls the next one in its line 2."""
    called: Callable[..., Any] = last
    for file, name in reversed(links):
        called = function(file, name, "return called()", called=called)
    return called
