"""Generative scoring: POST /v1/score."""
