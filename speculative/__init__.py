"""The engine: token ids in, token ids out, with lossless speculative decoding."""
