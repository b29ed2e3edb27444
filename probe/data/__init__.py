"""Text to batches of tokens: texts and sources of documents, tokenizers, samples, batches."""
