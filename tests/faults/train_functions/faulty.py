"""What training functions raise and attach, with and without torch."""

from __future__ import annotations

import numpy as np


class Chosen(Exception):
    pass


class Unsaveable:
    """Has a state that can be shared at first and not be kept in the end."""

    def __init__(self, fails) -> None:
        self.fails, self.is_trained = fails, False

    def state_dict(self):
        if self.is_trained:
            self.fails("in state_dict")
        return {"weight": np.zeros(3)}

    def load_state_dict(self, state) -> None:
        assert state["weight"].shape == (3,)
