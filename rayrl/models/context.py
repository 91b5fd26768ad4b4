"""How many tokens a model can hold, prompt and completion together."""

from rayrl.config.model import ModelConfig
from rayrl.errors import ModelError
from rayrl.models.folder import check_model_folder


def context_limit(config: ModelConfig) -> int:
    """Return `model.max_context`, or the model's own limit. ModelError if neither is known or the first is larger."""
    own = check_model_folder(config.path).max_context
    if config.max_context is None and own is None:
        raise ModelError(f"model {config.path!r} does not say how long its context is; set model.max_context")
    if config.max_context is not None and own is not None and config.max_context > own:
        raise ModelError(f"model.max_context={config.max_context} is more than the {own} of model {config.path!r}")
    limit = config.max_context or own
    assert limit is not None
    return limit
