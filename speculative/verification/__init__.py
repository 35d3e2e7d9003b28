"""Verifiers: which drafts survive, and which token follows them."""
