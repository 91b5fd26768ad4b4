"""What an engine says about the weights that it holds."""

from types import SimpleNamespace

import torch

from rayrl.inference.vllm_worker import WeightChecksums
from rayrl.infra.weight_manifest import checksum_of


def specs_of(weights):
    return [(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in weights.items()]


def test_checksum_is_that_of_the_values_in_row_major_order():
    tensor = torch.arange(12.0).reshape(3, 4)

    assert checksum_of(tensor) == checksum_of(tensor.t().contiguous().t())
    assert checksum_of(tensor) != checksum_of(tensor.t())
    assert checksum_of(tensor) != checksum_of(tensor + 0.0001)


class Runner:
    """Two layers as vLLM holds them: fused projections, norms as they are."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.weights = {
            "model.layers.0.self_attn.q_proj.weight": torch.randn(8, 4, generator=generator),
            "model.layers.0.self_attn.k_proj.weight": torch.randn(2, 4, generator=generator),
            "model.layers.0.self_attn.v_proj.weight": torch.randn(2, 4, generator=generator),
            "model.norm.weight": torch.randn(4, generator=generator),
            "lm_head.weight": torch.randn(5, 4, generator=generator),
        }
        q, k, v, norm, _ = self.weights.values()
        held = {
            "model.layers.0.self_attn.qkv_proj.weight": torch.cat((q, k, v)),
            "model.norm.weight": norm,
            "lm_head.weight": torch.zeros(0),
        }
        self.model = SimpleNamespace(
            named_parameters=lambda: held.items(),
            get_submodule=lambda name: SimpleNamespace(output_partition_sizes=[8, 2, 2]),
        )


def test_vllm_worker_finds_fused_weights_by_their_parts_and_leaves_out_packed_ones():
    runner = Runner()
    worker = WeightChecksums()
    worker.model_runner = runner

    found = worker.rayrl_weight_checksums([(name, list(s), d) for name, s, d in specs_of(runner.weights)])

    expected = {name: checksum_of(tensor) for name, tensor in runner.weights.items() if name != "lm_head.weight"}
    assert found == expected
