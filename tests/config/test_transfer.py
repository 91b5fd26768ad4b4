"""What `transfer.lora` goes with."""

from pathlib import Path

import pytest

from rayrl import RunConfig
from rayrl.errors import ConfigError

_ADAPTERS = ["transfer.lora=adapters", "training.lora={r: 4}"]


def test_adapters_alone_are_sent_when_they_are_what_is_trained(repo_root: Path) -> None:
    config = RunConfig.load(repo_root / "configs" / "smollm2_chain_sum.yaml", _ADAPTERS)

    assert config.transfer.lora == "adapters"
    assert RunConfig.load(repo_root / "configs" / "smollm2_chain_sum.yaml").transfer.lora == "merged"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (_ADAPTERS[:1], r"transfer\.lora=adapters sends the adapters of training\.lora, which is not set"),
        ([*_ADAPTERS, "transfer.backend=disk"], r"does not go with transfer\.backend=disk.* set transfer\.lora=merged"),
        ([*_ADAPTERS, "inference.engine={type: scripted}"], r"needs an engine with weights"),
    ],
)
def test_adapters_are_refused_where_they_cannot_work(repo_root: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.load(repo_root / "configs" / "smollm2_chain_sum.yaml", overrides)
