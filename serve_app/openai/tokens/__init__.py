"""Token ids over HTTP: generation from token ids, /tokenize and /detokenize."""
