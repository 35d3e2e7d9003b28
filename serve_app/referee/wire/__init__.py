"""From the bytes of a request and of its reply to what the referee judges, for every vendor and for this service.

Other rooms use `exchange` (the bytes), `reply` (what is in them), `reader` (answers of any server) and `vendors`.
"""
