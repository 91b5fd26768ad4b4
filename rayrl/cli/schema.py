"""`rayrl schema`: the JSON schema of the configs, for editors and reviews."""

from rayrl.config.run import json_schema


def schema() -> None:
    """Print the JSON schema of all kinds of config files."""
    print(json_schema())
