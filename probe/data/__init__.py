"""Text and tokens.

texts     what comes with the package, and .txt files
sources   names of data: hub datasets, files of the user's own, the builtin text -> documents
samples   documents -> samples of at most `seq_len` tokens, chosen with a seed
batches   windows of running text -> batches, and the fingerprint of batches
"""

from probe.data.batches import token_batches, token_fingerprint
from probe.data.texts import TEXTS, text_of

__all__ = ["TEXTS", "text_of", "token_batches", "token_fingerprint"]
