"""OpenRLHF's sync backend. Not written yet."""
