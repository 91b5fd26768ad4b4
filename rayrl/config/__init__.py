"""Configuration: frozen, closed pydantic models. Nothing here imports torch, ray or an engine."""
