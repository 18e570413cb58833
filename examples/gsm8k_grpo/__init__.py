"""GRPO on GSM8K with a live vLLM server that follows the trainer: what `sparrowrl demo` runs."""
