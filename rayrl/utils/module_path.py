"""Load `module:attribute`, as configs name user code."""

from importlib import import_module
from typing import Any


def load_attribute(path: str) -> Any:
    """Return the object that `module:attribute` names.

    Raises ValueError that says which half could not be found, also where the module fails while it is imported.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{path!r} is not of the form 'module:attribute'")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's module, which may raise anything
        cause = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot import module {module_name!r} of {path!r}: {cause}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        names = ", ".join(name for name in dir(module) if not name.startswith("_"))
        raise ValueError(f"module {module_name!r} has no {attribute!r}; it has {names}") from error
