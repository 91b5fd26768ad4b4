"""What happens when inference engines and rollout workers fail."""

from typing import Self

from pydantic import Field, model_validator

from rayrl.config.base import Section


class SupervisionConfig(Section):
    """When a member counts as lost, how often it is replaced, and how many engines a run has."""

    restarts: int = Field(default=10, ge=0)
    """Replacements of one role (inference or rollout) within `window_s`; with one more the run goes on without that
    member, or ends if too few are left."""
    window_s: float = Field(default=3600.0, gt=0)
    """Time window of `restarts`, in seconds."""
    backoff_s: float = Field(default=1.0, ge=0)
    """Seconds before the second replacement within the window; doubled for each further one. The first is at once."""
    max_backoff_s: float = Field(default=60.0, ge=0)
    """Longest such pause, in seconds."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between two questions for load and progress. A dead process is noticed at once, whatever this is."""
    silence_s: float = Field(default=60.0, gt=0)
    """Seconds without an answer, after which a member is killed and replaced."""
    stall_s: float = Field(default=600.0, gt=0)
    """Seconds in which an engine has requests and samples nothing, after which it is killed and replaced."""
    min_engines: int = Field(default=1, gt=0)
    """Engines without which the run ends once `restarts` is used up."""
    max_engines: int | None = Field(default=None, gt=0)
    """Engines are added up to this number while the cluster has room for them; `inference.num_engines` when empty."""
    max_group_retries: int = Field(default=3, ge=0)
    """Times that a group is sampled again after an infrastructure fault (its worker died, no engine answered)."""
    max_lost_groups: int = Field(default=32, ge=0)
    """Groups in a row given up for infrastructure faults, after which the run stops; data faults are counted by
    `driver.max_failed_groups`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.silence_s < self.heartbeat_s:
            raise ValueError(
                f"supervision.silence_s={self.silence_s} is shorter than supervision.heartbeat_s={self.heartbeat_s}; "
                "no member could answer in time"
            )
        return self
