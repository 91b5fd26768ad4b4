"""The page, the tables and the public names say the same; importing the package is light."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rayrl.algorithms as algorithms
from rayrl.config.algorithm import AlgorithmConfig
from rayrl.config.kl import KLConfig
from rayrl.config.presets import PRESETS
from rayrl.config.shaping import ShapingConfig

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def rows_of(section: str) -> list[str]:
    """Return the names in the headings of a section of the page."""
    text = PAGE.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^### `(\w+)`$", text, re.MULTILINE)


@pytest.mark.parametrize(("section", "table"), [("Advantages", "ADVANTAGES"), ("Objectives", "OBJECTIVES")])
def test_page_and_table_have_the_same_rows(section: str, table: str) -> None:
    assert rows_of(section) == list(getattr(algorithms, table))


@pytest.mark.parametrize("name", dir(algorithms))
def test_public_name_is_in_the_page(name: str) -> None:
    assert re.search(rf"`{name}\b", PAGE)


@pytest.mark.parametrize("name", [name for name in dir(algorithms) if inspect.isfunction(getattr(algorithms, name))])
def test_page_shows_the_signature_of_the_function(name: str) -> None:
    shown = []
    for parameter in inspect.signature(getattr(algorithms, name)).parameters.values():
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        stars = "**" if parameter.kind is inspect.Parameter.VAR_KEYWORD else ""
        shown.append(f"{stars}{parameter.name}{default}")

    assert f"`{name}({', '.join(shown)})`" in PAGE


@pytest.mark.parametrize("table", ["ADVANTAGES", "OBJECTIVES"])
def test_functions_of_the_tables_are_public_and_documented_with_a_source(table: str) -> None:
    for function in getattr(algorithms, table).values():
        assert function.__name__ in dir(algorithms)
        assert re.search(r"Sources?:", sys.modules[function.__module__].__doc__ or "")


def test_no_file_hides_a_public_name() -> None:
    files = {path.stem for path in Path(algorithms.__file__).parent.glob("*.py")}

    assert files.isdisjoint(dir(algorithms))


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, rayrl.algorithms; print('torch' in sys.modules)"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert result.stdout.strip() == "False"


def test_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'ppo_loss'.*grpo_advantages"):
        _ = algorithms.ppo_loss  # type: ignore[attr-defined]


def test_page_names_every_preset_and_only_settings_that_exist() -> None:
    section = PAGE.split("## In a run\n", 1)[1].split("\n## ", 1)[0]
    config = AlgorithmConfig()
    parts = {"shaping": ShapingConfig, "kl": KLConfig}

    named = re.findall(r"`(shaping|kl)\.(\w+)", section)

    assert set(PRESETS) <= set(re.findall(r"`(\w+)`", section))
    assert {f"{part}.{name}" for part, name in named if name not in parts[part].model_fields} == set()
    # Every setting of a preset is a setting of the section, so that its expansion can be printed.
    assert {name for values in PRESETS.values() for name in values} <= set(type(config).model_fields)


def test_page_names_every_setting_of_rewards_and_kl() -> None:
    settings = {f"shaping.{name}" for name in ShapingConfig.model_fields} | {
        f"kl.{name}" for name in KLConfig.model_fields
    }

    assert {name for name in settings if name not in PAGE} == set()
