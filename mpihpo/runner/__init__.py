"""The only seam: where what decides meets what moves, and the training function is called.

The life of an evaluation
=========================

    world rank 0                                     every member of the group
    ------------------------------------------       ------------------------------------------
    coordinator: Start(allocation)
    dispatcher:  order to each member         ---->  worker: build the group
                                                             hand over the state       (restore)
                                                             train(config, trial)      (train)
                                              <----          report per epoch          (leader)
                                                             keep the state            (keepers)
                                                             free the group
                                                     member: how it went, to the leader
                                              <----  leader: one outcome for all
    coordinator: tell(outcome) -> what is next

The dispatcher runs in a thread of world rank 0 beside that rank's training; each rank has an agent,
a thread that reads alerts while the rank trains: a member failed, stop at the next epoch, send the
state you keep. Where MPI allows one thread only, both are served from the waits and from
``trial.report``.
"""
