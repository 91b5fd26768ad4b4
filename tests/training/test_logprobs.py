"""Chunked logprobs against the plain way, values and gradients; peak memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayrl.training.logprobs import HeadSettings, token_logprobs

_NUM, _WIDTH, _VOCAB = 23, 12, 40


def _inputs(bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(_NUM, _WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(_VOCAB, _WIDTH, generator=generator).requires_grad_()
    offset = torch.randn(_VOCAB, generator=generator).requires_grad_() if bias else None
    return hidden, weight, offset, torch.randint(0, _VOCAB, (_NUM,), generator=generator)


def _plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: HeadSettings) -> Any:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logs = torch.log_softmax(logits * head.multiplier / head.temperature, dim=-1)
    return logs.gather(1, targets[:, None]).squeeze(1), -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 100])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"softcap": 3.0, "temperature": 1.3}, {"multiplier": 0.25}],
    ids=["plain", "temperature", "softcap", "multiplier"],
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_are_those_of_log_softmax(
    chunk_tokens: int, options: dict[str, float], bias: bool, with_entropy: bool
) -> None:
    head = HeadSettings(**({"temperature": 1.0} | options), chunk_tokens=chunk_tokens)
    inputs = _inputs(bias)
    scale = torch.linspace(-2, 2, _NUM)

    logprobs, entropy = token_logprobs(*inputs, head, with_entropy)
    loss = (logprobs * scale).sum() + (0 if entropy is None else (entropy * scale.flip(0)).sum())
    leaves = [tensor for tensor in inputs[:3] if tensor is not None]
    ours = torch.autograd.grad(loss, leaves)
    expected_logprobs, expected_entropy = _plain(*inputs, head)
    expected = (expected_logprobs * scale).sum()
    if with_entropy:
        expected = expected + (expected_entropy * scale.flip(0)).sum()
    theirs = torch.autograd.grad(expected, leaves)

    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
    if entropy is not None:
        torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5)


def test_bfloat16_products_leave_the_values_exact_and_the_gradients_close() -> None:
    inputs = _inputs(bias=False)
    head = HeadSettings(temperature=1.0, product_dtype=torch.bfloat16)

    logprobs, _ = token_logprobs(*inputs, head)
    ours = torch.autograd.grad(logprobs.mean(), inputs[:2])
    expected, _ = _plain(*inputs, head)
    theirs = torch.autograd.grad(expected.mean(), inputs[:2])

    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=5e-3)


class _LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                self.num_elements = max(self.num_elements, item.numel())
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
def test_logits_of_more_than_a_chunk_never_exist(with_entropy: bool) -> None:
    vocab, chunk, num = 5000, 4, 64
    hidden, weight = torch.randn(num, 8).requires_grad_(), torch.randn(vocab, 8).requires_grad_()
    head = HeadSettings(temperature=1.0, chunk_tokens=chunk)

    with _LargestTensor() as largest:
        logprobs, entropy = token_logprobs(hidden, weight, None, torch.zeros(num, dtype=torch.long), head, with_entropy)
        (logprobs.sum() + (0 if entropy is None else entropy.sum())).backward()

    assert largest.num_elements <= max(chunk * vocab, weight.numel())
