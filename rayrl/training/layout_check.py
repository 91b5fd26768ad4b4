"""Whether a model can be laid out over the axes of `training.parallel`; decided before anything starts."""

from collections.abc import Mapping

from rayrl.config.training import ParallelConfig, TrainingConfig
from rayrl.errors import ConfigError
from rayrl.models.shape import ModelShape

_WHOLE_HEADS = "colwise_gather_output"
"""The style of projections whose output is put together again: every tensor rank then has all heads."""
_SPLIT_EXPERTS = ".experts.gate_up_proj"
"""The end of the name of a weight that is rows of gate and of up, if its style is `packed_colwise`."""


def check_layout(training: TrainingConfig, shape: ModelShape) -> str:
    """Return the layout in words. ConfigError, with the numbers and what to change, if the model does not fit it."""
    parallel = training.parallel
    plan = _tensor_plan(shape) if parallel.tensor > 1 else {}
    faults = [
        *_engine_faults(training),
        *_tensor_faults(parallel, shape, plan),
        *_context_faults(training, shape, plan),
        *_expert_faults(parallel, shape, plan),
    ]
    if faults:
        raise ConfigError("; ".join(faults))
    return describe_layout(parallel)


def describe_layout(parallel: ParallelConfig) -> str:
    """Return `4 workers = data 2 x tensor 2`."""
    axes = {name: value for name, value in parallel.model_dump().items() if value > 1}
    inside = {name: axes.pop(name) for name in ("expert", "expert_tensor") if name in axes}
    text = " x ".join(f"{name} {value}" for name, value in axes.items()) or "data 1"
    return f"{parallel.world_size} workers = {text}" + "".join(
        f", {name} {value} inside" for name, value in inside.items()
    )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number above 1."""
    return [value for value in range(2, number + 1) if number % value == 0]


def _engine_faults(training: TrainingConfig) -> list[str]:
    engine, parallel = training.engine, training.parallel
    if engine.type != "fsdp":
        others = {name: value for name, value in parallel.model_dump().items() if name != "data" and value > 1}
        named = ", ".join(f"{name}={value}" for name, value in others.items())
        fault = f"training.parallel: {engine.type} has the axis data only, not {named}; use type: fsdp"
        return [fault] if others else []
    if engine.cpu_offload and parallel.world_size == 1:
        return ["training.engine.cpu_offload=true needs two training workers (training.parallel); set it to false"]
    return []


def _tensor_faults(parallel: ParallelConfig, shape: ModelShape, plan: Mapping[str, str]) -> list[str]:
    tensor = parallel.tensor
    if tensor == 1:
        return []
    if not plan:
        return [
            f"training.parallel.tensor={tensor} needs a tensor parallel plan, which transformers does not have for "
            f"{shape.model_type}; set it to 1 and raise training.parallel.data"
        ]
    faults = []
    if not _has_whole_heads(plan):
        faults += _undivided("training.parallel.tensor", tensor, shape)
    # With `expert_tensor`, which is the same number then, it is that of experts.
    is_whole = parallel.expert_tensor == 1
    if is_whole and shape.intermediate_size is not None and shape.intermediate_size % tensor:
        faults.append(
            f"training.parallel.tensor={tensor} does not divide the intermediate size {shape.intermediate_size}; "
            f"set it to a divisor of it"
        )
    return faults


def _context_faults(training: TrainingConfig, shape: ModelShape, plan: Mapping[str, str]) -> list[str]:
    parallel, context = training.parallel, training.parallel.context
    if context == 1:
        return []
    faults = []
    if training.engine.attention == "eager":
        faults.append(
            f"training.parallel.context={context} exchanges heads around an attention kernel, which "
            f"training.engine.attention=eager does not have; set it to sdpa"
        )
    tensor = 1 if _has_whole_heads(plan) else parallel.tensor
    if all(number % tensor == 0 for number in (shape.num_heads, shape.num_kv_heads)):
        name = "training.parallel.context" + (f" ({context}) x tensor" if tensor > 1 else "")
        faults += _undivided(name, context * tensor, shape)
    return faults


def _expert_faults(parallel: ParallelConfig, shape: ModelShape, plan: Mapping[str, str]) -> list[str]:
    degrees = {"expert": parallel.expert, "expert_tensor": parallel.expert_tensor}
    asked = {axis: degree for axis, degree in degrees.items() if degree > 1}
    if shape.num_experts == 0:
        does = {"expert": "spreads", "expert_tensor": "splits"}
        return [
            f"training.parallel.{axis}={degree} {does[axis]} experts, but {shape.model_type} has none; set it to 1"
            for axis, degree in asked.items()
        ]
    faults = []
    if shape.num_experts % parallel.expert:
        faults.append(
            f"training.parallel.expert={parallel.expert} does not divide the {shape.num_experts} experts; "
            f"it can be {_either(divisors(shape.num_experts))}"
        )
    if "expert_tensor" in asked:
        faults += _split_expert_faults(parallel.expert_tensor, shape, plan)
    return faults


def _split_expert_faults(degree: int, shape: ModelShape, plan: Mapping[str, str]) -> list[str]:
    if not any(name.endswith(_SPLIT_EXPERTS) and style == "packed_colwise" for name, style in plan.items()):
        return [
            f"training.parallel.expert_tensor={degree} splits experts into rows of gate and up, which the plan of "
            f"transformers for {shape.model_type} does not do; set it to 1 and spread whole experts with "
            f"training.parallel.expert"
        ]
    if shape.intermediate_size is not None and shape.intermediate_size % degree:
        return [
            f"training.parallel.expert_tensor={degree} does not divide the width {shape.intermediate_size} of experts "
            f"(moe_intermediate_size, or intermediate_size without that); set it to 1 or, with tensor, to a divisor"
        ]
    return []


def _undivided(name: str, degree: int, shape: ModelShape) -> list[str]:
    if shape.num_heads % degree == 0 and shape.num_kv_heads % degree == 0:
        return []
    common = [number for number in divisors(shape.num_heads) if shape.num_kv_heads % number == 0]
    return [
        f"{name}={degree} must divide the {shape.num_heads} attention heads and the {shape.num_kv_heads} key-value "
        f"heads of the model; it can be {_either(common)}"
    ]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in [1, *numbers])


def _has_whole_heads(plan: Mapping[str, str]) -> bool:
    return any(style == _WHOLE_HEADS for name, style in plan.items() if ".self_attn." in name)


def _tensor_plan(shape: ModelShape) -> Mapping[str, str]:
    """Return the plan of the family in transformers, empty if it has none."""
    from transformers import CONFIG_MAPPING

    if shape.model_type not in CONFIG_MAPPING:
        return {}
    plan: Mapping[str, str] = CONFIG_MAPPING[shape.model_type].base_model_tp_plan or {}
    return plan
