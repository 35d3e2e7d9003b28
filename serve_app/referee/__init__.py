"""Answers are computed again and judged; books of replicas, incidents and receipts. No Ray and no HTTP.

Each folder imports those before it: `judge`, `wire`, `records`, `book`. What other rooms may use stands in theirs.
"""
