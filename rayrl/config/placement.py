"""How worker groups share the cluster."""

from typing import Literal

from pydantic import Field

from rayrl.config.base import Section


class PlacementConfig(Section):
    """How worker groups share the cluster."""

    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """Training and inference in bundles of their own, or engine i in the bundle of training worker i."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK"] = "PACK"
    """Ray's placement strategy of each group."""
    rollout_cpus: float = Field(default=0.0, ge=0)
    """Logical CPUs of one rollout worker; 0, since it mostly waits and must not starve what it coordinates."""
