"""Rows of the table: damaged files, and output folders that cannot be written."""

from __future__ import annotations

from tests.faults import acts
from tests.faults.rows import BOTH, FIRST, JobFault, Play

DAMAGED = "damaged files"
OUTPUT = "the output folder"

REFUSED = {"status": 2, "lines": 1}
FULL = {"0 1": "full disk on 0"}
LATER = {"2 3": "room again on 0"}


def damaged(
    name: str, before: object, *says: str, forgets: bool = False, mpis: tuple[str, ...] = FIRST
) -> JobFault:
    """What an interrupted job left is damaged, and the next one goes on all the same."""
    return JobFault(
        name=name,
        group=DAMAGED,
        after_interruption=True,
        plays=(Play(before=before, options=("--resume",), says=says),),
        outcome="the good part is used, the loss said",
        same=True,
        forgets=forgets,
        mpis=mpis,
    )


AGAIN = "its state after epoch 1 is lost; it trains again from epoch 1"

ROWS: tuple[JobFault, ...] = (
    damaged(
        "a torn last line of the journal",
        acts.run_file("journal.jsonl", acts.append(b'{"seq":99,"ki')),
        "entries lost: 1 (line ",
    ),
    damaged(
        "a flipped byte in the journal",
        acts.run_file("journal.jsonl", acts.flip_a_byte_of_an_outcome),
        "entries lost: 1 (line ",
        forgets=True,
    ),
    JobFault(
        name="no whole line in the journal",
        mpis=FIRST,
        group=DAMAGED,
        after_interruption=True,
        plays=(
            Play(
                before=acts.run_file("journal.jsonl", acts.break_every_line),
                options=("--resume",),
                says=("every entry is lost, so it cannot be resumed",),
                **REFUSED,
            ),
        ),
        outcome="refused: nothing of it can be used",
    ),
    damaged("results.h5 deleted", acts.remove("results.h5")),
    damaged("results.h5 overwritten", acts.run_file("results.h5", lambda whole: b"nonsense")),
    damaged("truncated states", acts.truncate_states, "is damaged", AGAIN, mpis=BOTH),
    damaged("flipped bytes in states", acts.flip_bytes_of_states, "is damaged", AGAIN),
    damaged("states of other trials", acts.exchange_states, "holds trial ", AGAIN),
    damaged(
        "states of another epoch",
        acts.put_old_states_for_new_ones,
        "after epoch 1, expected trial ",
    ),
    damaged("all states deleted", acts.remove("checkpoints"), "trains again from epoch 1"),
    *(
        JobFault(
            name=name,
            group=OUTPUT,
            sections={"output": output},
            plays=(Play(before=before, says=(f"output: {text}",), **REFUSED),),
            outcome="refused",
            mpis=BOTH if output.startswith("/dev") else FIRST,
        )
        for name, output, before, text in (
            ("below a file", "/dev/null/run", None, "/dev/null/run cannot be made: Not a dir"),
            ("where nobody may write", "/sys/run", None, "/sys/run cannot be made: "),
            ("a file", "run", acts.file_in_place_of_folder, "{folder}/run cannot be made: "),
        )
    ),
    JobFault(
        name="has a run already",
        mpis=FIRST,
        group=OUTPUT,
        after_interruption=True,
        plays=(
            Play(
                says=("holds a run already; expected another folder, or --resume",),
                **REFUSED,
            ),
        ),
        outcome="refused",
    ),
    JobFault(
        name="in use by another job",
        group=OUTPUT,
        sections={"arguments": {"faults": {"0 1": "nothing on 0"}, "seconds": 0.5}},
        plays=(Play(act=acts.second_job),),
        outcome="the second job is refused, the first goes on",
        same=True,
    ),
    JobFault(
        name="full for a while",
        mpis=FIRST,
        group=OUTPUT,
        sections={"arguments": {"faults": {**FULL, **LATER}}},
        plays=(Play(says=("the work goes on in memory until it can be written",)),),
        outcome="written when it could be",
        same=True,
    ),
    JobFault(
        name="full until the end",
        group=OUTPUT,
        sections={"arguments": {"faults": FULL}},
        plays=(
            Play(status=70, says=("the work goes on in memory until it can be written",)),
            Play(options=("--resume",)),
        ),
        outcome="what could be written is, the next job goes on",
        same=True,
    ),
    JobFault(
        name="gone while the job runs",
        mpis=FIRST,
        group=OUTPUT,
        sections={"arguments": {"faults": {"0 1": "folder gone on 0"}}},
        plays=(
            Play(status=70, says=("the work goes on in memory until it can be written",)),
            Play(before=acts.bring_back, options=("--resume",)),
        ),
        outcome="said, and the next job goes on where it is back",
        same=True,
    ),
)
