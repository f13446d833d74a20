"""The whole table."""

from __future__ import annotations

from tests.faults import in_folders, in_jobs, in_trials
from tests.faults.rows import JobFault, Row, TrialFault, TrialJob

TRIAL_JOBS: dict[str, TrialJob] = in_trials.JOBS
TRIAL_FAULTS: tuple[TrialFault, ...] = in_trials.ROWS
JOB_FAULTS: tuple[JobFault, ...] = (*in_jobs.ROWS, *in_folders.ROWS)
ROWS: tuple[Row, ...] = (*TRIAL_FAULTS, *JOB_FAULTS)
