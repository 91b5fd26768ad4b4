"""The fingerprint of a config, by which a run's folder knows the one that it was given."""

import hashlib


def digest_of(text: str) -> str:
    """Return a short fingerprint of a resolved config."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
