"""The version, in a module that imports nothing, so that `probe --version` is instant."""

VERSION = "0.1.0"
