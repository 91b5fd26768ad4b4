"""YAML and overrides to a config: what is accepted, and what each refusal says."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from rayrl.config.loader import load_section, parse_section
from rayrl.config.run import RunConfig, SFTRunConfig
from rayrl.errors import ConfigError

MINIMAL = """
run: {name: small}
model: {path: models/small}
dataset: {type: arithmetic}
reward: {type: exact_match}
rollout:
  workflow: {type: single_turn}
  group_size: 4
  sampling: {max_new_tokens: 8}
driver: {groups_per_step: 2, num_steps: 3}
training: {optimizer: {lr: 1e-5}}
inference: {engine: {type: scripted}}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A valid file with the required fields only."""
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


def test_defaults_fill_the_rest_when_required_fields_are_given(config_file: Path) -> None:
    config = RunConfig.load(config_file)

    assert config.run_dir == Path("runs/small")
    assert config.samples_per_step == 8
    assert config.driver.on_stale == "mask"
    assert config.algorithm.clip_high == 0.28


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "1E-5", "0.00001"])
def test_exponent_is_a_number_when_it_has_no_point(config_file: Path, text: str) -> None:
    config = RunConfig.load(config_file, [f"training.optimizer.lr={text}"])

    assert config.training.optimizer.lr == pytest.approx(1e-5, rel=1e-12)


@pytest.mark.parametrize("text", ["1e5x", "e5", "1-5"])
def test_text_stays_text_when_it_only_resembles_a_number(config_file: Path, text: str) -> None:
    config = RunConfig.load(config_file, [f"run.name={text}"])

    assert config.run.name == text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drivr.num_steps=3", ["drivr: unknown key", "did you mean 'driver'?"]),
        ("driver.num_step=3", ["driver.num_step: unknown key", "did you mean 'num_steps'?"]),
        ("rollout.sampling.temprature=1", ["rollout.sampling.temprature", "did you mean 'temperature'?"]),
        ("dataset.num_operand=3", ["dataset.num_operand: unknown key", "did you mean 'num_operands'?"]),
        ("inference.engine.reply_token=[1]", ["inference.engine.reply_token", "did you mean 'reply_tokens'?"]),
        ("driver.deadlines.step=1", ["driver.deadlines.step", "did you mean 'step_s'?"]),
        ("driver.num_steps=many", ["driver.num_steps", "'many'", "integer"]),
        ("driver.num_steps=0", ["driver.num_steps", "got 0", "greater than 0"]),
        ("driver.num_steps=null", ["driver.num_steps", "got None"]),
        ("driver.on_stale=forget", ["driver.on_stale", "'forget'", "'mask', 'drop' or 'keep'"]),
        ("dataset.type=arithmetik", ["dataset.type", "'arithmetik'", "did you mean 'arithmetic'?"]),
        ("reward={}", ["reward.type: required"]),
        ("run.name=a/b", ["run.name", "'a/b'"]),
        ("run.name=..", ["run.name", "'..'"]),
        ("driver.num_steps=true", ["driver.num_steps", "True"]),
        ("training.optimizer.lr=false", ["training.optimizer.lr", "False"]),
        ("model.max_context=true", ["model.max_context", "True"]),
        ("training.optimizer.lr=.inf", ["training.optimizer.lr"]),
        ("model={}", ["model.path: required, but not given"]),
    ],
)
def test_refusal_names_field_value_and_constraint_when_a_value_is_wrong(
    config_file: Path, override: str, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(config_file, [override])

    assert [part for part in said if part not in str(caught.value)] == []
    assert str(config_file) in str(caught.value)
    assert f"(given by the override of {override.partition('=')[0]})" in str(caught.value)


def test_refusal_names_an_override_when_it_is_what_set_the_value_alone(config_file: Path) -> None:
    text = config_file.read_text(encoding="utf-8")
    config_file.write_text(text.replace("num_steps: ", "num_steps: -"), encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        RunConfig.load(config_file, ["training.optimizer.lr=1", "training.optimizer.lr=-1", "run.seed=2"])

    of_file, of_override = str(caught.value).splitlines()[1:]
    assert "num_steps" in of_file
    assert "override" not in of_file
    assert of_override.endswith("(given by the override of training.optimizer.lr)")


def test_nested_union_names_the_field_when_a_term_of_a_sum_has_an_unknown_key(config_file: Path) -> None:
    reward = "{type: weighted_sum, terms: [{name: a, reward: {type: regex, patern: x}}]}"

    with pytest.raises(ConfigError) as caught:
        RunConfig.load(config_file, [f"reward={reward}"])

    assert "did you mean 'pattern'?" in str(caught.value)
    assert "patern: unknown key" in str(caught.value)


def test_every_fault_is_listed_when_there_are_several(config_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(config_file, ["driver.num_steps=0", "rollout.group_size=0", "drivr={}"])

    assert all(name in str(caught.value) for name in ("driver.num_steps", "rollout.group_size", "drivr"))


@pytest.mark.parametrize("override", ["driver.num_steps", "=3", "driver.=3", ".num_steps=3", ""])
def test_override_is_refused_when_it_is_not_key_equals_value(config_file: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"not of the form section\.key=value"):
        RunConfig.load(config_file, [override])


def test_override_makes_the_section_when_the_file_lacks_it(config_file: Path) -> None:
    config = RunConfig.load(config_file, ["checkpoint.every=5", "algorithm.kl.coef=0.1"])

    assert config.checkpoint.every == 5
    assert config.algorithm.kl.coef == 0.1


def test_override_takes_lists_and_mappings_when_they_are_yaml(config_file: Path) -> None:
    config = RunConfig.load(config_file, ["tracking.sinks=[jsonl]", "dataset={type: jsonl, path: a=b.jsonl}"])

    assert config.tracking.sinks == ("jsonl",)
    assert config.dataset.type == "jsonl"
    assert config.dataset.path == "a=b.jsonl"


def test_override_reaches_into_a_list_when_the_key_is_an_index(config_file: Path) -> None:
    first = "reward={type: weighted_sum, terms: [{name: a, reward: {type: exact_match}}]}"

    config = RunConfig.load(config_file, [first, "reward.terms.0.weight=0.5"])

    assert config.reward.type == "weighted_sum"
    assert config.reward.terms[0].weight == 0.5


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run.name.first=x"], "is a value, not a section"),
        (["run.name.first.second=x"], "nothing lies below a plain value"),
        (["tracking.sinks=[jsonl]", "tracking.sinks.3=console"], "no index of a list of 1"),
        (["driver=[1,2"], "is not valid YAML: expected ',' or ']', but got '<stream end>', line 1, column 5"),
    ],
)
def test_override_is_refused_when_its_path_leads_nowhere(config_file: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RunConfig.load(config_file, overrides)


def test_last_override_wins_when_a_key_is_given_twice(config_file: Path) -> None:
    assert RunConfig.load(config_file, ["run.seed=2", "run.seed=3"]).run.seed == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"run: {name: a}\nrun: {name: b}\n", "key 'run' is given twice, line 2"),
        (b"run: {name: a, name: b}\n", "key 'name' is given twice"),
        (b"? [1, 2]\n: 3\n", r"\[1, 2\] cannot be a key, line 1"),
        (b"- a\n- b\n", "must be a mapping of sections, got list"),
        (b"", "must be a mapping of sections, got NoneType"),
        (b"run: {name: a\n", "not valid YAML"),
        (b"run: \xff\xfe\n", "not UTF-8"),
        (b"run: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_file_is_refused_when_it_is_no_plain_mapping(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=said):
        RunConfig.load(path)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_file_is_refused_when_it_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read config"):
        RunConfig.load(tmp_path / name)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["driver.groups_per_step=3", "driver.minibatches=2"], "groups_per_step=3 is not divisible by"),
        (["training.parallel.data=16"], "training.parallel.data=16 workers"),
        (["rollout.sampling.top_p=0.9"], "top_p=0.9 would give logprobs that training cannot reproduce"),
        (["rollout.sampling.top_k=5"], "top_k=5"),
        (["rollout.sampling.min_new_tokens=2"], "min_new_tokens=2"),
        (["rollout.sampling.temperature=0"], "set it above 0"),
        (["model.max_context=8"], "leaves no room for a prompt"),
        (["placement.mode=colocated", "inference.num_engines=2"], "placement.mode=colocated"),
        (["run.deterministic=true", "driver.max_staleness=1"], "run.deterministic needs driver.max_staleness=0"),
        (
            ["run.deterministic=true", "driver.max_staleness=0", "inference.engine={type: vllm}"],
            "run.deterministic needs inference.engine.type=transformers",
        ),
        (["supervision.max_engines=1", "inference.num_engines=3"], "raise the first to at least 3 or leave it empty"),
        (["supervision.min_engines=9"], "start with more engines (inference.num_engines)"),
    ],
)
def test_sections_are_refused_when_they_contradict_each_other(
    config_file: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(config_file, overrides)

    assert said in str(caught.value)


def test_rule_over_a_section_shows_only_the_fields_that_it_is_about(config_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(config_file, ["supervision={silence_s: 1.0, heartbeat_s: 2.0, window_s: 77.0}"])

    text = str(caught.value)
    assert "supervision: got {'silence_s': 1.0, 'heartbeat_s': 2.0}: supervision.silence_s=1.0 is shorter" in text
    assert "77" not in text


def test_preset_gives_way_when_a_field_is_given(config_file: Path) -> None:
    config = RunConfig.load(config_file, ["algorithm.preset=dr_grpo", "algorithm.clip_high=0.4"])

    assert config.algorithm.advantage_scale == "none"
    assert config.algorithm.clip_high == 0.4


def test_values_cannot_be_changed_when_the_config_is_loaded(config_file: Path) -> None:
    config = RunConfig.load(config_file)

    with pytest.raises(ValidationError, match="frozen"):
        config.driver.num_steps = 5  # type: ignore[misc]


def test_error_is_a_value_error_when_plain_data_is_parsed() -> None:
    with pytest.raises(ValueError, match="run: required, but not given"):
        parse_section(SFTRunConfig, {})


def test_config_survives_its_own_dump_when_it_is_loaded_again(config_file: Path, tmp_path: Path) -> None:
    config = RunConfig.load(config_file, ["algorithm.preset=gspo"])
    again = tmp_path / "again.json"
    again.write_text(config.model_dump_json(), encoding="utf-8")

    assert load_section(RunConfig, again) == config


def test_reward_of_reasoning_gym_is_refused_for_other_datasets_also_as_a_term(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.type=reasoning_gym scores problems of dataset\.type=reasoning_gym"):
        RunConfig.load(
            config_file,
            [
                "dataset={type: arithmetic}",
                "reward={type: weighted_sum, terms: [{name: a, reward: {type: reasoning_gym}}]}",
            ],
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["transfer.backend=nccl"], r"nccl needs GPUs on both sides.*use auto or gloo"),
        (["inference.engine={type: vllm, sleep_mode: true}"], r"sleep_mode=true needs GPUs"),
        (
            ["evaluation={dataset: {type: arithmetic}, sampling: {max_new_tokens: 4, guided: {regex: a}}}"],
            r"evaluation\.sampling\.guided is set, which inference\.engine\.type=scripted does not do",
        ),
        (
            ["evaluation={dataset: {type: arithmetic}, sampling: {max_new_tokens: 4, presence_penalty: 0.5}}"],
            r"presence_penalty is set.*use inference\.engine\.type=vllm",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_it_starts(
    config_file: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.load(config_file, overrides)
