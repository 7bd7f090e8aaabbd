"""Keys of the files around a tokenizer, as transformers reads them, and their use here.

`USED` keys mean here what they mean there. A `REFUSED` key changes what is drawn, in a
way that is not built here: it is refused by name when the makers' sampling is used,
unless its value is one that changes nothing. A `NOTED` key is said in a line, unless
its value is the one given here. `CARRIED` keys change neither tokens nor what is drawn:
they are written as they were read.
"""

from collections.abc import Mapping
from typing import Any

NONE = (None,)

GENERATION_USED = (
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
)
#: Key -> values that change nothing.
GENERATION_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "typical_p": (None, 1),
    "top_h": NONE,
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None, []),
    "force_words_ids": (None, []),
    "constraints": (None, []),
    "forced_bos_token_id": NONE,
    "forced_eos_token_id": NONE,
    "exponential_decay_length_penalty": NONE,
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}),
    "token_healing": (None, False),
    "guidance_scale": (None, 1),
    "watermarking_config": NONE,
    "penalty_alpha": (None, 0),
    "dola_layers": NONE,
}
#: How long an answer is, and how many, is the caller's to say.
GENERATION_NOTED: dict[str, tuple[Any, ...]] = {
    "max_time": NONE,
    "stop_strings": (None, []),
    "num_return_sequences": (None, 1),
}
GENERATION_CARRIED = (
    *("max_length", "max_new_tokens", "decoder_start_token_id"),
    # Of NaN and infinite logits, which are an error here.
    *("renormalize_logits", "remove_invalid_values"),
    # How the program runs.
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len"),
    *("compile_config", "disable_compile", "continuous_batching_config", "low_memory"),
    *("prefill_chunk_size", "use_mtp"),
    # What transformers' `generate` returns.
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    "return_dict_in_generate",
    # Drafts, which leave the distribution as it is.
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
    *("target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
    *("transformers_version", "_from_model_config", "_commit_hash"),
)

#: Names of tokens, which a template may use; and any other key that ends in "_token".
SPECIAL_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
TOKENIZER_USED = (
    *SPECIAL_TOKENS,
    *("chat_template", "extra_special_tokens", "added_tokens_decoder"),
)
TOKENIZER_NOTED: dict[str, tuple[Any, ...]] = {
    "split_special_tokens": (None, False),
    "fix_mistral_regex": (None, False),
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": (
        *(None, False),
    ),
    "auto_map": NONE,
}
TOKENIZER_CARRIED = (
    # Of batches, which are padded and cut by whom they are made.
    *("padding_side", "truncation_side", "model_max_length", "max_length", "max_len"),
    *("pad_token_type_id", "pad_to_multiple_of", "model_input_names"),
    *("stride", "truncation", "truncation_strategy"),
    # transformers 5 takes them from tokenizer.json, where there is one.
    *("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"),
    # transformers 5 leaves it out for BPE.
    "clean_up_tokenization_spaces",
    *("tokenizer_class", "processor_class", "tokenizer_file", "vocab_file"),
    *("name_or_path", "is_local", "local_files_only", "files_loaded", "backend"),
    *("verbose", "init_inputs", "init_kwargs", "deprecation_warnings"),
    *("additional_special_tokens", "model_specific_special_tokens"),
    # What is made of an answer's text, and of the names of tools.
    *("response_template", "response_schema", "chat_control_tokens"),
    *("use_default_system_prompt", "sp_model_kwargs", "spaces_between_special_tokens"),
)
#: Of tokenizer.json, all read by the library tokenizers. Cutting and padding are for
#: batches, and left out; a dropout of BPE is left out and noted.
TOKENIZER_JSON = (
    *("version", "truncation", "padding", "added_tokens", "normalizer"),
    *("pre_tokenizer", "post_processor", "decoder", "model"),
)


def effective(
    record: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The entries of a file whose values are none of those that change nothing."""
    return {
        name: record[name]
        for name, values in neutral.items()
        if name in record and record[name] not in values
    }
