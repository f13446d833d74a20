"""Every Python process of a test's job imports this: SIGQUIT makes it write where it stands."""

from __future__ import annotations

import faulthandler
import signal

faulthandler.register(signal.SIGQUIT, all_threads=True)
