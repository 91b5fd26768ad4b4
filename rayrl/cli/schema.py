"""`rayrl schema`: the JSON schema of the configs, for editors and reviews."""

from rayrl.config.run import json_schema


def schema() -> None:
    """Print the JSON schema of the configs of `train` and `sft`."""
    print(json_schema())
