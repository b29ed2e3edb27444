"""Families of models, as docs/models.md lists them: every command and the gate on a tiny random one of each."""
