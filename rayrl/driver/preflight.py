"""Checks that need files but start nothing: every fault of the user that can be known beforehand is known here."""

from pathlib import Path

from rayrl.checkpoint.mirror import CheckpointMirror
from rayrl.config.dataset import DatasetConfig
from rayrl.config.reward import reward_models
from rayrl.config.rollout import SingleTurnWorkflow
from rayrl.config.run import RunConfig
from rayrl.config.supervised import PairRunConfig, SFTRunConfig, SupervisedRunConfig
from rayrl.datasets.prompt_stream import PromptStream
from rayrl.datasets.registry import load_source
from rayrl.driver.group_filter import GroupFilter
from rayrl.errors import ConfigError, ModelError
from rayrl.inference.vllm_api import fault_of_installation
from rayrl.models.context import context_limit
from rayrl.models.folder import check_model_folder
from rayrl.models.shape import read_model_shape
from rayrl.rollout.pair_examples import PairEncoding, encode_pair
from rayrl.rollout.registry import make_workflow
from rayrl.rollout.settings import sampling_params
from rayrl.rollout.sft_examples import encode_example
from rayrl.rollout.single_turn import PromptTooLong, check_fits, encode_prompt
from rayrl.tracking.registry import check_sinks
from rayrl.training.engine_check import check_engine
from rayrl.training.layout_check import check_layout
from rayrl.types.protocols import Tokenizer

_PROMPTS_LOOKED_AT = 256


def check_run(config: RunConfig) -> list[str]:
    """Return one line for each thing that was checked. ConfigError (or a kind of it) for the first that is wrong."""
    from rayrl.rewards.registry import check_reward

    notes = _check_model(config.model.path, _needs_template(config))
    notes.append(f"layout: {check_layout(config.training, read_model_shape(config.model.path))}")
    notes.append(f"training engine: {check_engine(config.model, config.training)}")
    notes += _check_inference(config)
    limit = context_limit(config.model)
    make_workflow(config.rollout.workflow)
    GroupFilter(config.algorithm.shaping)
    check_reward(config.reward)
    notes.append(f"reward {config.reward.type}: can be made")
    notes += _check_frozen(config)
    notes.append(_check_dataset(config, config.dataset, "dataset", config.rollout.sampling.max_new_tokens, limit))
    if config.evaluation is not None:
        if config.evaluation.reward is not None:
            check_reward(config.evaluation.reward)
        new_tokens = sampling_params(config.evaluation.sampling).max_new_tokens
        notes.append(_check_dataset(config, config.evaluation.dataset, "evaluation.dataset", new_tokens, limit))
    if config.checkpoint.copy_to is not None:
        # Opens nothing but the protocol: what cannot work at all should not wait for the first checkpoint.
        CheckpointMirror(config.checkpoint.copy_to)
        notes.append(f"checkpoint copies: {config.checkpoint.copy_to}")
    notes += _check_sinks(config)
    return notes


def check_sft_run(config: SFTRunConfig) -> list[str]:
    """As `check_run`, for supervised runs."""
    notes = _check_model(config.model.path, config.sft.prompt_format == "chat")
    notes.append(f"layout: {check_layout(config.training, read_model_shape(config.model.path))}")
    notes.append(f"training engine: {check_engine(config.model, config.training)}")
    notes.append(_check_examples(config, context_limit(config.model)))
    notes += _check_sinks(config)
    return notes


def check_pair_run(config: PairRunConfig, encoding: PairEncoding) -> list[str]:
    """As `check_run`, for runs on pairs."""
    notes = _check_model(config.model.path, config.loop.prompt_format == "chat")
    notes.append(f"layout: {check_layout(config.training, read_model_shape(config.model.path))}")
    limit = context_limit(config.model)
    notes.append(_check_pairs(config, config.dataset, "dataset", encoding, limit))
    if config.evaluation is not None:
        notes.append(_check_pairs(config, config.evaluation.dataset, "evaluation.dataset", encoding, limit))
    notes += _check_sinks(config)
    return notes


def _check_inference(config: RunConfig) -> list[str]:
    """ConfigError if the engines would run in this environment and it lacks what they need; a note if they may not."""
    fault = fault_of_installation() if config.inference.engine.type == "vllm" else None
    if fault is None:
        return []
    from rayrl.infra.cluster import would_join

    if not would_join():
        raise ConfigError(fault)
    return [f"inference engine: {fault}; that matters only if the nodes of the Ray cluster do not have it either"]


def _check_frozen(config: RunConfig) -> list[str]:
    """Look at the folders of reward models, teacher and critic; ModelError, or ConfigError for another vocabulary."""
    evaluation = None if config.evaluation is None else config.evaluation.reward
    notes: list[str] = []
    for model in reward_models(config.reward, evaluation):
        notes += _check_model(model.path, model.prompt_format == "chat")
    teacher, critic = config.teacher, config.algorithm.critic
    same_tokens = {
        "teacher.path": None if teacher is None else teacher.path,
        "algorithm.critic.path": None if critic is None else critic.path,
    }
    own = check_model_folder(config.model.path).vocab_size
    for setting, path in same_tokens.items():
        if path is None:
            continue
        notes += _check_model(path, False)
        vocab = check_model_folder(path).vocab_size
        if vocab != own:
            raise ConfigError(
                f"{setting}={path!r} has {vocab} tokens and the trained model {own}: it must have the same tokenizer"
            )
    return notes


def _needs_template(config: RunConfig) -> bool:
    workflow = config.rollout.workflow
    return isinstance(workflow, SingleTurnWorkflow) and workflow.prompt_format == "chat"


def _check_model(path: str, needs_template: bool) -> list[str]:
    info = check_model_folder(path)
    if not info.has_weights:
        raise ModelError(f"model folder {path!r} has no weights (*.safetensors); import or copy it again")
    if needs_template and not info.has_chat_template:
        raise ModelError(
            f"model {path!r} has no chat template, which prompt_format: chat needs; use a model with one, or set "
            f"prompt_format: text (rollout.workflow, or sft)"
        )
    return [f"model {path}: {info.model_type}, context {info.max_context}"]


def _check_dataset(config: RunConfig, dataset: DatasetConfig, section: str, max_new_tokens: int, limit: int) -> str:
    source = load_source(dataset)
    workflow = config.rollout.workflow
    longest = 0
    if isinstance(workflow, SingleTurnWorkflow):
        from rayrl.models.tokenizer import load_tokenizer

        tokenizer: Tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        stream = PromptStream(source, seed=config.run.seed, shuffle=True)
        for _ in range(min(len(source), _PROMPTS_LOOKED_AT)):
            prompt = stream.next_prompt()
            length = len(encode_prompt(prompt, tokenizer, workflow.prompt_format, workflow.system_prompt))
            longest = max(longest, length)
            try:
                check_fits(prompt, length, max_new_tokens, limit)
            except PromptTooLong as error:
                raise ConfigError(f"{section}: {error}") from None
    return f"{section} {source.name}: {len(source)} prompts, longest of those looked at {longest} tokens"


def _check_examples(config: SFTRunConfig, limit: int) -> str:
    from rayrl.models.tokenizer import load_tokenizer

    source = load_source(config.dataset)
    tokenizer: Tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    stream = PromptStream(source, seed=config.run.seed, shuffle=True)
    longest = 0
    for _ in range(min(len(source), _PROMPTS_LOOKED_AT)):
        try:
            example = encode_example(
                stream.next_prompt(),
                tokenizer,
                prompt_format=config.sft.prompt_format,
                system_prompt=config.sft.system_prompt,
                max_context=limit,
            )
        except PromptTooLong as error:
            raise ConfigError(f"dataset: {error}") from None
        longest = max(longest, len(example.tokens))
    return f"dataset {source.name}: {len(source)} examples, longest of those looked at {longest} tokens"


def _check_pairs(
    config: PairRunConfig, dataset: DatasetConfig, section: str, encoding: PairEncoding, limit: int
) -> str:
    from rayrl.models.tokenizer import load_tokenizer

    source = load_source(dataset)
    tokenizer: Tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    stream = PromptStream(source, seed=config.run.seed, shuffle=True)
    longest = 0
    for _ in range(min(len(source), _PROMPTS_LOOKED_AT)):
        try:
            pair = encode_pair(stream.next_prompt(), tokenizer, encoding, limit)
        except PromptTooLong as error:
            raise ConfigError(f"{section}: {error}") from None
        longest = max(longest, *(len(example.tokens) for example in pair))
    return f"{section} {source.name}: {len(source)} pairs, longest answer of those looked at ends at token {longest}"


def _check_sinks(config: RunConfig | SupervisedRunConfig) -> list[str]:
    check_sinks(config.tracking)
    root = Path(config.run.output_root)
    if root.is_file():
        raise ConfigError(f"run.output_root={config.run.output_root!r} is a file, not a folder")
    return []
