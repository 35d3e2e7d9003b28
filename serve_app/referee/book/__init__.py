"""Replays, and what is remembered of each replica.

Other rooms use `replay_checker`, `independent_checks` and `transformers_model` (who computes an answer
again), `controls` (whether a wrong answer would be found), `replica_book`, `incidents` and `dumps`.
"""
