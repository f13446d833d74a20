"""The errors of mpihpo.

    MpihpoError                             base of all
    ├── ExperimentError(ValueError)         experiment.yaml is wrong; .where is the dotted key
    │   └── SpaceError                      an impossible domain in the search space
    ├── AllocationError(ValueError)         a policy asks for ranks that the job does not have
    ├── CommError(RuntimeError)             a communicator or process group could not be built
    │   └── TeardownError                   freeing failed; these ranks cannot be lent again
    ├── TrialError(RuntimeError)            one trial went wrong
    │   ├── MissingReportError              an epoch ended without report()
    │   ├── ObjectiveError                  the objective is NaN, infinite or not a number
    │   ├── StateError                      attached state does not fit what was kept
    │   ├── CheckpointError                 a state on disk is missing, damaged or of another trial
    │   ├── TrialTimeout                    it took longer than limits.trial_seconds, or was silent
    │   ├── CollectiveMismatch              its ranks wait for each other in different calls
    │   ├── Overdue                         it did not end its epoch when the job's time was over
    │   ├── LossElsewhere                   a rank outside of it has died that it needed just then
    │   └── RankLost                        a rank of it has died
    ├── CoordinatorLost(RuntimeError)       the coordinator's rank died or is silent: resume the run
    ├── ResultsError(OSError)               a results file is missing, broken or of another layout
    └── InternalError(RuntimeError)         a broken invariant of ours: please report it

    GroupAborted(BaseException)             raised inside train(): another rank of the trial failed

Every error crosses ranks, so every error survives pickling: constructors take positional arguments
and hand them to ``super().__init__`` unchanged.
"""

from __future__ import annotations


class MpihpoError(Exception):
    """Base of all errors that mpihpo raises on purpose."""


class ExperimentError(MpihpoError, ValueError):
    """The experiment is wrong: correct the key that the message starts with.

    Args:
        where: The dotted key, such as ``schedule.max_epochs``.
        problem: The value found and what would be right.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where = where
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}" if self.where else self.problem


class SpaceError(ExperimentError):
    """A domain of the search space is impossible: correct its bounds, choices or condition."""


class AllocationError(MpihpoError, ValueError):
    """A policy asked for ranks that the job does not have."""


class CommError(MpihpoError, RuntimeError):
    """A communicator or a process group could not be built in time or at all."""


class TeardownError(CommError):
    """Freeing a group failed: its ranks cannot be lent again."""


class TrialError(MpihpoError, RuntimeError):
    """One trial went wrong; the experiment goes on with the others."""


class MissingReportError(TrialError):
    """An epoch ended without ``trial.report(epoch, ...)`` of the objective on the leader."""


class ObjectiveError(TrialError):
    """The reported objective is NaN, infinite or not a number."""


class StateError(TrialError):
    """What ``trial.attach`` was given does not fit the state that was kept."""


class CheckpointError(TrialError):
    """A state on disk is missing, damaged, or of another trial or epoch."""


class TrialTimeout(TrialError):
    """The evaluation ran longer than ``limits.trial_seconds``, or a rank of it fell silent."""


class CollectiveMismatch(TrialError):
    """The ranks of a trial wait for each other in calls that cannot end."""


class Overdue(TrialError):
    """The job's time is over, and the trial has long not come to the end of its epoch."""


class LossElsewhere(TrialError):
    """A rank has died or was set aside that held the trial's state, or while its group was made."""


class RankLost(TrialError):
    """A rank of the trial has died."""


class CoordinatorLost(MpihpoError, RuntimeError):
    """The rank of the coordinator has died or gives no sign of life: the run can be resumed."""


class ResultsError(MpihpoError, OSError):
    """A results file is missing, broken or of another layout version."""


class InternalError(MpihpoError, RuntimeError):
    """A broken invariant of mpihpo itself: please report it with this text."""


class GroupAborted(BaseException):
    """Another rank of this trial failed, so this rank leaves the training function too.

    Outside ``Exception``, so that an ``except Exception`` in a training function cannot swallow it.
    """
