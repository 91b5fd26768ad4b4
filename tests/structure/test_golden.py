"""The config schema and the public API change only on purpose: `make golden` rewrites both files.

Run as a script, this file rewrites them.
"""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pydantic

import rayrl
from rayrl.config.run import json_schema

GOLDEN = Path(__file__).resolve().parent / "golden"
SCHEMA = GOLDEN / "config_schema.json"
PUBLIC_API = GOLDEN / "public_api.json"


def signature(function: Any) -> str:
    """Return a signature without the quotes of postponed annotations."""
    return str(inspect.signature(function)).replace("'", "")


def describe(value: Any) -> Any:
    """Return what a user can rely on of a public name: constructor, public methods, properties, fields."""
    if not inspect.isclass(value):
        return type(value).__name__
    own = {name: member for name, member in vars(value).items() if not name.startswith("_")}
    members = {
        name: signature(inspect.getattr_static(value, name).__func__ if isinstance(member, classmethod) else member)
        for name, member in own.items()
        if inspect.isfunction(member) or isinstance(member, classmethod)
    }
    described: dict[str, Any] = {"methods": dict(sorted(members.items()))}
    described["properties"] = sorted(name for name, member in own.items() if isinstance(member, property))
    if issubclass(value, pydantic.BaseModel):
        described["fields"] = "see config_schema.json"
        described["methods"] = {
            name: text for name, text in described["methods"].items() if not name.startswith("model_")
        }
    elif dataclasses.is_dataclass(value):
        described["fields"] = [f"{field.name}: {field.type}" for field in dataclasses.fields(value)]
    else:
        described["constructor"] = signature(value.__init__)
    return described


def public_api() -> str:
    """Return the public API as JSON."""
    return json.dumps({name: describe(getattr(rayrl, name)) for name in rayrl.__all__}, indent=1, sort_keys=True)


def test_config_schema_is_the_golden_one_when_no_change_was_meant() -> None:
    assert json.loads(json_schema()) == json.loads(SCHEMA.read_text(encoding="utf-8")), "if meant: make golden"


def test_public_api_is_the_golden_one_when_no_change_was_meant() -> None:
    assert json.loads(public_api()) == json.loads(PUBLIC_API.read_text(encoding="utf-8")), "if meant: make golden"


def test_every_config_field_has_a_description_when_the_schema_is_read() -> None:
    definitions = [
        (f"{root}.{name}", definition)
        for root, schema in json.loads(json_schema()).items()
        for name, definition in {root: schema, **schema["$defs"]}.items()
    ]

    without = [
        f"{path}.{field}"
        for path, definition in definitions
        for field, settings in definition.get("properties", {}).items()
        if field != "type" and not settings.get("description")
    ]

    assert without == []


def refresh() -> None:
    """Rewrite both files."""
    GOLDEN.mkdir(exist_ok=True)
    SCHEMA.write_text(json_schema() + "\n", encoding="utf-8")
    PUBLIC_API.write_text(public_api() + "\n", encoding="utf-8")


if __name__ == "__main__":
    refresh()
