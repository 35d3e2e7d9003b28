"""Answers are computed again and judged; books of replicas, incidents and receipts. No Ray and no HTTP."""
