"""The worker of a rank: takes orders until told to leave."""

from __future__ import annotations

import traceback
from typing import Any

from mpihpo.comm.mailbox import Tag
from mpihpo.comm.waiting import wait_until
from mpihpo.errors import CoordinatorLost, InternalError
from mpihpo.records import Outcome
from mpihpo.runner.checkpoint import write_checkpoint
from mpihpo.runner.member import Equipment, Member
from mpihpo.runner.orders import Faulted, Forget, Leave, Train, WriteCheckpoint, Written
from mpihpo.runner.recorder import CHECKPOINTS
from mpihpo.runner.saved_state import read_state, state_path


class Worker:
    """Carries out the orders of one rank."""

    def __init__(self, equipment: Equipment) -> None:
        self._equipment = equipment
        self._world, self._mailbox = equipment.world, equipment.world.mailbox
        self._keeper, self._directory = equipment.keeper, equipment.directory

    def run(self) -> Leave:
        """Take orders until told to leave; local, but for what the orders ask.

        A fault of the runtime on this rank is told to the dispatcher, which tells every rank to
        leave, this one too: so none waits for another one that is gone.

        Raises:
            CoordinatorLost: Nobody will tell to leave any more.
        """
        try:
            return self._take_orders()
        except CoordinatorLost:
            raise
        except BaseException:
            event = Faulted(self._world.rank, traceback.format_exc())
            self._mailbox.post(event, 0, Tag.EVENT)
            while not isinstance(order := self._next_order(), Leave):
                continue
            return order

    def _take_orders(self) -> Leave:
        while True:
            order = self._next_order()
            if isinstance(order, Train):
                self._world.serve()  # raises where the others have left the job
                Member(self._equipment, order.allocation).take_part()
            elif isinstance(order, Forget):
                self._keeper.forget(order.trial_id, before=order.before, epoch=order.epoch)
            elif isinstance(order, WriteCheckpoint):
                self._write(order.outcome)
            elif isinstance(order, Leave):
                return order
            else:
                raise InternalError(f"rank {self._world.rank} was given {order!r}")

    def _next_order(self) -> object:
        found: list[Any] = []

        def arrived() -> bool:
            mail = self._mailbox.take(Tag.ORDER)
            if mail is not None:
                found.append(mail[1])
            return mail is not None

        wait_until(arrived, check=self._world.serve)
        return found[0]

    def _write(self, outcome: Outcome) -> None:
        evaluation = outcome.allocation.evaluation
        event = Written(None)
        if self._directory is not None:
            folder = self._directory / CHECKPOINTS
            try:
                state = self._keeper.get(evaluation.trial.id, evaluation.stop)
                name = evaluation.trial.id, evaluation.stop
                if state is None and state_path(folder, *name).exists():  # of an earlier job
                    state = read_state(folder, *name)
                if state is not None and state.parts:
                    event = Written(str(write_checkpoint(folder, state, outcome)))
            except Exception as error:  # a full disk must not lose the results
                event = Written(None, f"{type(error).__name__}: {error}")
        self._mailbox.post(event, 0, Tag.EVENT)
