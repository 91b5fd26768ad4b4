"""Rollout: workflows on prompts, routed to inference engines, scored and packed into groups."""
