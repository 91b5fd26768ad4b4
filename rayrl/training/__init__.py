"""Training workers: from Arrow batches to one optimizer step, the same step for every layout.

Arrow batches ─batch─> TrainBatch ─rows─> rows ─micro_batches─> plan ─collate─> micro-batches of this rank
─policy_model─> logprobs ─losses─> loss ─fsdp_engine─> one optimizer step ─weight_source─> weights to publish
"""
