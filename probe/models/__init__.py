"""The embedded models, and loading of them and of real ones."""
