"""Which answers are checked, and what is kept of them until then.

Other rooms use `replay_selection` (which), `records` (the engine's trace), `tapped_reply` (the bytes), `own_reader`
(trace and bytes as an answer), `coverage` (what never came), `receipts` and `signatures`.
"""
