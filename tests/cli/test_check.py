"""`rayrl check` and `rayrl schema` print what can be known without starting anything."""

import json
from pathlib import Path

import pytest

from rayrl.cli.check import algorithm_lines, batch_lines, sft_batch_lines
from rayrl.cli.config_file import config_kind
from rayrl.cli.main import main
from rayrl.config.algorithm import AlgorithmConfig
from rayrl.config.run import RunConfig, SFTRunConfig

SHIPPED = Path(__file__).resolve().parents[2] / "configs"


def test_batch_arithmetic_is_printed_when_a_run_is_checked() -> None:
    config = RunConfig.load(SHIPPED / "smollm2_chain_sum.yaml", ["driver.minibatches=2"])

    text = "\n".join(batch_lines(config))

    assert "samples per step = 128 (16 groups x 8)" in text
    assert "slots = 48 ((2 + 1) x 16 groups), at most 384 samples at once" in text
    assert "optimizer steps = 40 (20 steps x 2)" in text
    assert "samples per optimizer step = 64" in text
    assert "sampled tokens per step <= 2048" in text
    assert "tokens per step <= 32768 (128 x model.max_context 256)" in text


def test_batch_arithmetic_is_printed_when_an_sft_run_is_checked() -> None:
    config = SFTRunConfig.load(SHIPPED / "quickstart_sft.yaml", ["sft.num_steps=10", "sft.batch_size=4"])

    assert "examples in all = 40" in sft_batch_lines(config)


def test_preset_is_expanded_when_the_algorithm_is_printed() -> None:
    lines = algorithm_lines(AlgorithmConfig(preset="gspo", clip_high=0.5))

    assert {"preset = gspo", "objective = gspo", "clip_low = 0.0003", "clip_high = 0.5", "kl.coef = 0.0"} <= set(lines)


@pytest.mark.parametrize(("name", "kind"), [("quickstart_sft.yaml", "sft"), ("quickstart_grpo.yaml", "run")])
def test_kind_is_told_by_the_sft_section_when_a_file_is_read(name: str, kind: str) -> None:
    assert config_kind(SHIPPED / name) == kind


def test_schema_is_json_when_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["schema"])

    assert caught.value.code == 0
    assert set(json.loads(capsys.readouterr().out)) == {
        "RunConfig",
        "SFTRunConfig",
        "PreferenceRunConfig",
        "RewardModelRunConfig",
    }


def test_version_is_printed_when_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("rayrl 0.")
