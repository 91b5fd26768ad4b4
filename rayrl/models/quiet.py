"""No progress bars from transformers: in actors they fill the logs with one line per update."""


def silence_progress_bars() -> None:
    """Turn the bars of loading and saving off for this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
