"""No progress bars from transformers: in actors they fill the logs with one line per update. And no false alarm."""

import os


def silence_progress_bars() -> None:
    """Turn the bars of loading and saving off for this process.

    transformers loads DeepSpeed to save a model, where it is installed; without a GPU that warns of its choice unless
    the choice is made already.
    """
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
