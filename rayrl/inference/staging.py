"""Weights of the next version, beside those in use: the engine's side of a publication, as a state machine.

IDLE ──prepare──> PREPARED ──receive──> RECEIVING ──arrived──> STAGED ──commit──> IDLE
  ^                  │                      │                     │
  └──────discard─────┴──────────────────────┴─────────────────────┘
"""

from enum import Enum
from typing import TYPE_CHECKING

from rayrl.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from rayrl.infra.weight_transfer import WeightManifest


class StagingState(Enum):
    """Where the next version stands on this engine."""

    IDLE = "no version is on its way"
    PREPARED = "a manifest was checked against the model and nothing has arrived yet"
    RECEIVING = "tensors are arriving; the weights in use are not touched"
    STAGED = "all tensors are here and wait for commit or discard"


class Staging:
    """At most one version on its way. Each call names its version; a call out of order raises EngineError."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = StagingState.IDLE
        self._manifest: WeightManifest | None = None
        self._tensors: dict[str, Tensor] = {}

    @property
    def state(self) -> StagingState:
        """Where the next version stands."""
        return self._state

    @property
    def version(self) -> int | None:
        """The version on its way; None when idle."""
        return None if self._manifest is None else self._manifest.version

    def prepare(self, manifest: "WeightManifest") -> None:
        """Expect the version of a manifest that was checked."""
        self._expect("prepare", manifest.version, StagingState.IDLE)
        self._manifest = manifest
        self._state = StagingState.PREPARED

    def begin(self, manifest: "WeightManifest") -> None:
        """Start to receive what was prepared."""
        self._expect("receive", manifest.version, StagingState.PREPARED)
        if manifest != self._manifest:
            raise EngineError(f"engine {self._name} was prepared for another manifest of version {self.version}")
        self._manifest = manifest  # this very object tells `arrived` and `failed` whose call they belong to
        self._state = StagingState.RECEIVING

    def arrived(self, manifest: "WeightManifest", tensors: "dict[str, Tensor]") -> None:
        """Hold what has arrived. EngineError if it was discarded meanwhile."""
        if manifest is not self._manifest:
            raise EngineError(f"engine {self._name} was told to discard version {manifest.version} while it arrived")
        self._tensors = tensors
        self._state = StagingState.STAGED

    def failed(self, manifest: "WeightManifest") -> None:
        """Forget a version that did not arrive, unless another one is on its way by now."""
        if manifest is self._manifest:
            self._reset()

    def staged(self, version: int) -> "dict[str, Tensor]":
        """Return the tensors to commit."""
        self._expect("commit", version, StagingState.STAGED)
        return self._tensors

    def committed(self) -> None:
        """The staged version is in use."""
        self._reset()

    def discard(self, version: int) -> None:
        """Forget a version in whatever state it is; without it nothing happens, so that an abort may be repeated."""
        if self.version == version:
            self._reset()

    def _reset(self) -> None:
        self._state = StagingState.IDLE
        self._manifest = None
        self._tensors = {}

    def _expect(self, call: str, version: int, state: StagingState) -> None:
        if self._state is state and (state is StagingState.IDLE or self.version == version):
            return
        current = f"{self._state.name} ({self._state.value})"
        of_version = "" if self.version is None else f" with version {self.version}"
        raise EngineError(
            f"engine {self._name} cannot {call} version {version}: it is {current}{of_version} and would have to be "
            f"{state.name}"
        )
