"""Kinds of events that an audit reads; the ledger takes others, too."""

RUN_STARTED = "run_started"
"""A process begins or goes on. Detail: `dataset`, the state of the prompt stream."""
RUN_ENDED = "run_ended"
"""It leaves in order. Detail: `status` (done or stopped), `dataset`, and `outstanding`, groups that held a slot."""
RUN_FAILED = "run_failed"
"""It ends with an error. Detail: `error`, class and message; the last steps may lack their rollout log."""
DROPPED_STALE = "dropped_stale"
"""A group was too old and its prompt goes back. Detail: `prompt_id`."""
TRAINING_REBUILT = "training_rebuilt"
"""Training workers were lost and the run went back, after a rewind, to the step of the event. Detail: `error`,
`from_step`, `from_version`, `to_version`, `groups_in_flight` and `groups_kept` (numbers), `groups_lost` (prompts of
finished groups, sampled by versions that no longer exist), `seconds`."""
CHECKPOINT_FAILED = "checkpoint_failed"
"""A checkpoint could not be written; older ones are intact. Detail: `error`."""
MEMBER_LOST = "member_lost"
"""An actor died, fell silent or was quarantined. Detail: `member`, its name; `cause`, `decision`, `reason`."""
MEMBER_REMOVED = "member_removed"
"""An actor was taken out on purpose. Detail: `member` and `reason`. An engine without one of these two is expected to
acknowledge every version."""
STALLED = "stalled"
"""No step finished for `debug.stall_s`. Detail: `cause` and `report`, the file with all that was found."""
