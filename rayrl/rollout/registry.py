"""Workflows by the `type` of their config."""

from collections.abc import Callable
from typing import Any

from rayrl.config.rollout import FunctionWorkflow, SingleTurnWorkflow, WorkflowConfig
from rayrl.errors import ConfigError
from rayrl.rollout.single_turn import SingleTurn
from rayrl.types.protocols import Workflow
from rayrl.utils.module_path import load_attribute


def _single_turn(config: SingleTurnWorkflow) -> Workflow:
    return SingleTurn(config.prompt_format, config.system_prompt)


def _custom(config: FunctionWorkflow) -> Workflow:
    try:
        workflow = load_attribute(config.path)
        made: Workflow = workflow(**config.params)
    except Exception as error:  # importing and making it run the user's code, which may raise anything
        cause = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"rollout.workflow.path={config.path!r}: {cause}") from error
    return made


WORKFLOWS: dict[type, Callable[[Any], Workflow]] = {
    SingleTurnWorkflow: _single_turn,
    FunctionWorkflow: _custom,
}


def make_workflow(config: WorkflowConfig) -> Workflow:
    """Return the workflow that a config describes. ConfigError if user code cannot be imported or called."""
    return WORKFLOWS[type(config)](config)
