"""YAML file and `section.key=value` overrides to a validated section, with errors that name field, value and fix."""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rayrl.errors import ConfigError
from rayrl.utils.nearest import did_you_mean

SectionT = TypeVar("SectionT", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, which plain YAML accepts in silence; reads `1e-5` as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise ConfigError(f"{key!r} cannot be a key, line {key_node.start_mark.line + 1}")
            if key in seen:
                raise ConfigError(f"key {key!r} is given twice, line {key_node.start_mark.line + 1}")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def load_section(section: type[SectionT], path: str | Path, overrides: Sequence[str] = ()) -> SectionT:
    """Return the section that a YAML file and overrides describe. Raises ConfigError for anything that is wrong."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read config {str(file)!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config {str(file)!r} is not UTF-8 text") from error
    data = _parse_yaml(text, f"config {str(file)!r}")
    if not isinstance(data, dict):
        raise ConfigError(f"config {str(file)!r} must be a mapping of sections, got {type(data).__name__}")
    for override in overrides:
        apply_override(data, override)
    return parse_section(section, data, source=str(file), overrides=overrides)


def parse_section(
    section: type[SectionT], data: Mapping[str, Any], source: str = "config", overrides: Sequence[str] = ()
) -> SectionT:
    """Validate plain data; one ConfigError lists every fault, and which of the overrides in the data it comes from."""
    lines = [
        f"{name}: got {value}: Input should not be true or false" for name, value in _wrong_truths([section], data)
    ]
    try:
        parsed = section.model_validate(data)
    except ValidationError as error:
        lines += [_describe(section, detail) for detail in error.errors()]
    if lines:
        lines = [f"{line}{_origin(line, overrides)}" for line in lines]
        raise ConfigError(f"{source}: " + ("\n  " if len(lines) > 1 else "") + "\n  ".join(lines))
    return parsed


def _origin(fault: str, overrides: Sequence[str]) -> str:
    """Return a remark on the last override that set the field of the fault or a part it names; "" if none did."""
    name = fault.partition(":")[0]
    for override in reversed(overrides):
        path = override.partition("=")[0].strip()
        # Of a rule over several fields only those that it names, of an unknown section all.
        is_named = re.search(rf"\b{re.escape(path.rpartition('.')[2])}\b", fault) or "unknown key" in fault
        is_part = path.startswith(f"{name}.") and is_named
        if path == name or is_part or name.startswith(f"{path}."):
            return f" (given by the override of {path})"
    return ""


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in place; the value is read as YAML."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    target: Any = data
    for key in keys[:-1]:
        if isinstance(target, dict) and (key not in target or target[key] is None):
            target[key] = {}
        target = _child(target, key, override)
    if isinstance(target, list):
        target[_index(target, keys[-1], override)] = _parse_yaml(text, f"override {override!r}")
    elif isinstance(target, dict):
        target[keys[-1]] = _parse_yaml(text, f"override {override!r}")
    else:
        raise ConfigError(f"override {override!r}: {'.'.join(keys[:-1])} is a value, not a section")


def _child(target: Any, key: str, override: str) -> Any:
    if isinstance(target, list):
        return target[_index(target, key, override)]
    if isinstance(target, dict):
        return target[key]
    raise ConfigError(f"override {override!r}: nothing lies below a plain value at {key!r}")


def _index(target: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(target):
        raise ConfigError(f"override {override!r}: {key!r} is no index of a list of {len(target)}")
    return int(key)


def _parse_yaml(text: str, what: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        place = f", line {at.line + 1}, column {at.column + 1}" if at is not None else ""
        raise ConfigError(f"{what} is not valid YAML: {error.problem or error.context}{place}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not valid YAML: {error}") from error


def _describe(section: type[BaseModel], detail: ErrorDetails) -> str:
    extra = detail["type"] == "extra_forbidden"
    known = detail["loc"][:-1] if extra else detail["loc"]
    _, tags = _walk(section, known)
    parts = [str(part) for position, part in enumerate(known) if position not in tags]
    name = ".".join([*parts, str(detail["loc"][-1])] if extra else parts)
    if extra:
        valid = _fields_at(section, detail["loc"][:-1])
        hint = did_you_mean(str(detail["loc"][-1]), valid)
        return f"{name}: unknown key{hint}; valid keys here: {', '.join(sorted(valid))}"
    if detail["type"] == "missing":
        return f"{name}: required, but not given"
    if detail["type"] == "union_tag_invalid":
        context = detail.get("ctx", {})
        hint = did_you_mean(str(context.get("tag")), str(context.get("expected_tags", "")).replace("'", "").split(", "))
        return f"{name}.type: {context.get('tag')!r} is not one of {context.get('expected_tags')}{hint}"
    if detail["type"] == "union_tag_not_found":
        return f"{name}.type: required, but not given"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error" and not name:
        return message
    if detail["type"] == "value_error" and isinstance(detail["input"], Mapping):
        # A rule over several fields: the whole section would hide those that the rule is about.
        given = {
            key: value
            for key, value in detail["input"].items()
            if re.search(rf"(?<!\w){re.escape(str(key))}\b", message)
        }
        return f"{name}: got {given}: {message}" if given else f"{name}: {message}"
    return f"{name}: got {detail['input']!r}: {message}"


def _wrong_truths(models: Sequence[type[BaseModel]], data: Any, path: str = "") -> Iterator[tuple[str, bool]]:
    """Yield path and value where true or false stands for a number: pydantic would take it for 1 or 0."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from _wrong_truths(models, item, f"{path}{index}.")
    if not isinstance(data, Mapping):
        return
    for key, value in data.items():
        annotations = [model.model_fields[key].annotation for model in models if key in model.model_fields]
        if not isinstance(value, bool):
            inner = [model for annotation in annotations for model in _models_in(annotation)]
            yield from _wrong_truths(inner, value, f"{path}{key}.")
        elif any({int, float} & {annotation, *get_args(annotation)} for annotation in annotations):
            yield f"{path}{key}", value


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes inside an annotation: unions, optionals, tuples and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple, list):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    return []


def _tag(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("type")
    arguments = get_args(field.annotation) if field is not None else ()
    return arguments[0] if len(arguments) == 1 else None


def _walk(section: type[BaseModel], location: Sequence[int | str]) -> tuple[list[type[BaseModel]], list[int]]:
    """Return the models at a pydantic location, and which parts of it are tags of a union rather than names."""
    models = [section]
    tags: list[int] = []
    for position, part in enumerate(location):
        if isinstance(part, int):
            continue
        by_field = [model for model in models if part in model.model_fields]
        if by_field and not (len(models) > 1 and part in {_tag(model) for model in models}):
            models = [found for model in by_field for found in _models_in(model.model_fields[part].annotation)]
        else:
            tags.append(position)
            models = [model for model in models if _tag(model) == part] or models
    return models, tags


def _fields_at(section: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    models, _ = _walk(section, location)
    return sorted({name for model in models for name in model.model_fields})
