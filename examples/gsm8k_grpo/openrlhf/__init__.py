"""GSM8K GRPO with OpenRLHF."""
