"""Inference engines: token ids in, token ids with logprobs and weight versions out."""
