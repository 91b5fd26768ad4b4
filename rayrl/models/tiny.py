"""A very small random Llama with one token per character, for the quickstart and tests."""

from pathlib import Path
from typing import Any

from rayrl.errors import ModelError
from rayrl.models.quiet import silence_progress_bars
from rayrl.models.staging import staged_folder

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"


def create_tiny_model(
    folder: Path,
    *,
    alphabet: str,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    intermediate_size: int = 384,
    max_context: int = 64,
    seed: int = 0,
    replace: bool = False,
) -> Path:
    """Write an ordinary model folder with random weights and a character tokenizer, and return its path.

    The ids are 0 for padding, 1 for the end, then the characters of `alphabet` in order. There is no chat template.
    The same arguments give the same weights. The defaults have about 0.9 million parameters.

    Raises ModelError for an alphabet with repeated characters or a hidden size that the heads do not divide, and
    FileExistsError if `folder` exists and `replace` is off.
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ModelError(f"alphabet {alphabet!r} must name each character once, and at least one")
    if hidden_size % (2 * num_heads):
        raise ModelError(f"hidden_size {hidden_size} must be a multiple of 2 * num_heads = {2 * num_heads}")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(alphabet) + 2,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=max_context,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    silence_progress_bars()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with staged_folder(folder, replace=replace) as staging:
        model.save_pretrained(staging)
        _character_tokenizer(alphabet, max_context).save_pretrained(staging)
    return folder


def _character_tokenizer(alphabet: str, max_context: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((PAD_TOKEN, EOS_TOKEN, *alphabet))}
    # Without an unknown token a character outside the alphabet would vanish in silence.
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
    )
