"""Rewards: one file per type, made from the config by `rayrl.rewards.registry.make_reward`."""
