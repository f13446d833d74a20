"""What moves: the world, sub-communicators, the store, process groups. Decides nothing.

The life of a group
===================

    coordinator            rank 2                     rank 5
        |--- order 17 ------->|                          |     orders name a serial and the members
        |--- order 17 -------------------------------->  |
        |                 Group.build()             Group.build()
        |                     |<-- Create_group(tag) --->|     collective over the two ranks only
        |                     |<-- keys of serial 17 --->|     store over MPI, no port, no host name
        |                     |<== process group =======>|     torch's default group on both
        |                 train(config, trial)      train(config, trial)
        |                 Group.free()              Group.free()         all went well: destroy
        |              or Group.abort() on both                          some rank failed: abort
        |<-- outcome 17 ------|                          |

Every message of the runtime travels on one private duplicate of the caller's communicator, so it
cannot meet a message of the caller or of a training function; groups are made from a second one.
What a training function sees as ``trial.comm`` is a communicator of its own.

Deaths
======

Where the launcher lets a job survive the death of a rank (`comm.deaths`), the mailbox notes who has
died and goes on. Waits of a group with a dead member end. A thread of every rank makes a new parent
without the dead (`comm.parent`), from which later groups are made.
"""
