"""Kinds of events that an audit reads; the ledger takes others, too."""

RUN_STARTED = "run_started"
"""A process begins or goes on. Detail: `dataset`, the state of the prompt stream."""
RUN_ENDED = "run_ended"
"""It leaves in order. Detail: `status` (done or stopped), `dataset`, and `outstanding`, groups that held a slot."""
RUN_FAILED = "run_failed"
"""It ends with an error. Detail: `error`, class and message; the last steps may lack their rollout log."""
RUN_INTERRUPTED = "run_interrupted"
"""It leaves at once, at a second signal or stop: nothing more is saved. Without detail. Older ledgers have `RUN_FAILED`
with the error `CancelledError: ` instead."""
DROPPED_STALE = "dropped_stale"
"""A group was too old and its prompt goes back. Detail: `prompt_id`."""
TRAINING_REBUILT = "training_rebuilt"
"""Training workers were lost and the run went back, after a rewind, to the step of the event. Detail: `error`,
`from_step`, `from_version`, `to_version`, `groups_in_flight` and `groups_kept` (numbers), `groups_lost` (prompts of
finished groups, sampled by versions that no longer exist), `seconds`."""
CHECKPOINT_FAILED = "checkpoint_failed"
"""A checkpoint could not be written; older ones are intact. Detail: `error`."""
ENGINE_LOST = "engine_lost"
"""An engine died, fell silent or was quarantined. Detail: `engine`, its name; `cause`, `detail`, `decision`."""
ENGINE_REMOVED = "engine_removed"
"""An engine was taken out on purpose. Detail: `engine` and `reason`. An engine without one of these two is expected to
acknowledge every version."""
WORKER_LOST = "worker_lost"
"""A rollout worker died or fell silent. Detail as of `ENGINE_LOST`, with `worker`."""
ROLLOUT_LOG_LOST = "rollout_log_lost"
"""The rollout log of the step of the event could not be written; this process writes none from there on. Detail:
`error`."""
STALLED = "stalled"
"""No step finished for `debug.stall_s`. Detail: `cause` and `report`, the file with all that was found."""
