"""The whole table."""

from __future__ import annotations

from tests.faults import in_folders, in_jobs, in_trials, without_return
from tests.faults.rows import JobFault, Row, TrialFault, TrialJob

TRIAL_JOBS: dict[str, TrialJob] = {**in_trials.JOBS, **without_return.JOBS}
TRIAL_FAULTS: tuple[TrialFault, ...] = (*in_trials.ROWS, *without_return.TRIAL_ROWS)
JOB_FAULTS: tuple[JobFault, ...] = (*in_jobs.ROWS, *in_folders.ROWS, *without_return.JOB_ROWS)
ROWS: tuple[Row, ...] = (*TRIAL_FAULTS, *JOB_FAULTS)
