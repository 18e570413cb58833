"""verl's checkpoint-engine backend. Not written yet."""
