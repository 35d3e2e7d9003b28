"""Tool calls: read out of answers, in the formats of model families, and forced by a grammar."""
